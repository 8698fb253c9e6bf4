"""The memory of a rollout engine's ranks (vLLM): weights, the KV cache, the largest forward pass.

On CUDA an engine takes rollout.gpu_memory_utilization of its card, whatever it needs: what weights and a trial forward
pass leave of that is KV cache. `kv_cache` here is what its sequences need, all of them as long as they may be; with
less, fewer run together. On the CPU the cache has the size that rollout.cpu_kv_cache_mib says.
"""

from __future__ import annotations

from gkd.config import Config
from gkd.config_check import n_engines
from gkd.footprint.fsdp import Groups
from gkd.footprint.shapes import ModelShape
from gkd.footprint.types import RankFootprint

_FLOAT32 = 4
# Tokens that vLLM computes at once, by its own default where it is used offline; on CUDA that of the largest cards.
BATCHED_TOKENS = {True: 4096, False: 16384}  # on the CPU, on CUDA


def rollout_footprint(config: Config, shape: ModelShape, sizes: Groups, *, on_cpu: bool) -> RankFootprint:
    """Rank 0 of the first engine, which stands for all."""
    rollout, b = config.rollout, _FLOAT32 if config.model.dtype == "float32" else 2
    tp, longest = rollout.tp, config.data.max_prompt_length + config.data.max_response_length
    n_sequences = sequences_together(config)
    wanted = n_sequences * longest * kv_bytes_per_token(config, shape)
    n_tokens = min(BATCHED_TOKENS[on_cpu], n_sequences * longest)
    # Of one layer: its input, the residual and a norm's output; both halves of the MLP's projection and their product.
    widest = 3 * shape.hidden + 3 * max(shape.ffn, shape.q_columns) // tp
    logits = n_sequences * shape.vocab_size * _FLOAT32  # and as much for the sampler's work
    return RankFootprint(
        "rollout",
        0,
        {
            "weights": b * sizes.total // tp,
            "kv_cache": config.rollout.cpu_kv_cache_mib << 20 if on_cpu else wanted,
            "activations": n_tokens * widest * b,
            "logits": 2 * logits,
            "weight_sync": max(config.weight_sync.bucket_mib << 20, sizes.embedding * b),
        },
    )


def sequences_together(config: Config) -> int:
    """Sequences that an engine has to decode at one time, at most."""
    of_engine = -(-config.trainer.global_batch_size * config.rollout.n // n_engines(config))
    return min(config.rollout.max_num_seqs, of_engine)


def kv_bytes_per_token(config: Config, shape: ModelShape) -> int:
    """Of the KV cache, on one rank of an engine; key and value heads are repeated where there are fewer than ranks."""
    b = _FLOAT32 if config.model.dtype == "float32" else 2
    heads = max(1, shape.n_kv_heads // config.rollout.tp)
    return 2 * shape.n_layers * heads * shape.head_dim * b

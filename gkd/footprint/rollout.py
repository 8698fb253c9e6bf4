"""The memory of a rollout engine's ranks (vLLM): weights, the KV cache, the largest forward pass.

On CUDA an engine takes rollout.gpu_memory_utilization of its card, whatever it needs: what weights and a trial forward
pass leave of that is KV cache. `kv_cache` here is what its sequences need, all of them as long as they may be; with
less, fewer run together; `gkd.footprint.limits.on_card` puts the real size there. On the CPU the cache has the size
that rollout.cpu_kv_cache_mib says.
"""

from __future__ import annotations

from gkd.config.check_parallel import check_engine_split
from gkd.config.derived import derive
from gkd.config.schedulers import AHEAD, STREAM
from gkd.config.schema import Config
from gkd.footprint.fsdp import Groups
from gkd.footprint.types import RankFootprint
from gkd.hf.model_dims import ModelDims

_FLOAT32 = 4
# Tokens that vLLM computes at once, by its own default where it is used offline; on CUDA that of the largest cards, on
# the CPU for each rank.
BATCHED_TOKENS = {True: 4096, False: 16384}  # on the CPU, on CUDA


def rollout_footprint(config: Config, dims: ModelDims, sizes: Groups, *, on_cpu: bool) -> RankFootprint:
    """Rank 0 of the first engine, which stands for all.

    Raises:
        ConfigError: naming rollout.tp: an engine cannot cut the model so.
    """
    rollout, b = config.rollout, _FLOAT32 if config.model.dtype == "float32" else 2
    tp, longest = rollout.tp, derive(config).max_sequence_length
    check_engine_split(tp, (dims.n_heads,), (dims.n_kv_heads,), dims.mlp_columns)
    wanted = sequences_together(config) * longest * kv_bytes_per_token(config, dims)
    # The trial pass is as large as the engine's limits, however few sequences will come.
    n_tokens = min(BATCHED_TOKENS[on_cpu] * (tp if on_cpu else 1), rollout.max_num_seqs * longest)
    # Of one layer: its input, the residual and a norm's output; both halves of the MLP's projection and their product.
    widest = 3 * dims.hidden_size + 3 * max(dims.ffn_size, dims.q_columns) // tp
    logits = rollout.max_num_seqs * dims.vocab_size * _FLOAT32  # and as much for the sampler's work
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
    """Sequences that an engine has to decode at one time, at most.

    Schedulers that run ahead begin one batch at a time, a stream as many as its staleness allows. They go on while an
    evaluation has its prompts in the engines, too.
    """
    trainer, most = config.trainer, config.rollout.max_num_seqs
    n_batches = trainer.max_staleness + 1 if trainer.scheduler == STREAM else 1
    of_steps = n_batches * trainer.global_batch_size * config.rollout.n
    held_out, n_engines = 0, derive(config).n_engines
    if config.data.val_files:  # without a limit nobody knows how many prompts they have
        held_out = config.eval.max_prompts or most * n_engines
    goes_on = AHEAD.get(trainer.scheduler) != 0
    together = of_steps + held_out if goes_on else max(of_steps, held_out)
    return min(most, -(-together // n_engines))


def kv_bytes_per_token(config: Config, dims: ModelDims) -> int:
    """Of the KV cache, on one rank of an engine; key and value heads are repeated where there are fewer than ranks."""
    b = _FLOAT32 if config.model.dtype == "float32" else 2
    heads = max(1, dims.n_kv_heads // config.rollout.tp)
    return 2 * dims.n_layers * heads * dims.head_dim * b

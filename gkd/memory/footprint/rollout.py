"""Compute the memory of a rollout engine's ranks (vLLM): weights, KV cache, and the largest forward pass.

The KV cache has rollout.kv_cache_mib. If that is 0, an engine on CUDA takes rollout.gpu_memory_utilization of its GPU,
whatever it needs: what weights and a trial forward pass leave of that is KV cache. Without the GPU's size, `kv_cache`
is what all its sequences need at full length (with less, fewer run at a time); `with_engine_cache` replaces it by the
real size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gkd.config.schema import Config
from gkd.config.schema_rollout import LEAST_SEQUENCES
from gkd.config.schema_trainer import AHEAD, STREAM
from gkd.hf.model_dims import ModelDims, check_engine_split
from gkd.memory.footprint.adapters import adapter_params
from gkd.memory.footprint.fsdp import Groups
from gkd.memory.footprint.rank import RankFootprint, engine_of, sync_buffers

_FLOAT32 = 4
_MOST_SEQUENCES = 1024  # value for rollout.max_num_seqs 0: vLLM's own default on GPUs of this size
# Tokens of vLLM's largest batch, by its default for offline use: per rank on the CPU; on CUDA, for GPUs above 70 GiB.
BATCHED_TOKENS = {True: 4096, False: 16384}  # on the CPU, on CUDA


def rollout_footprint(config: Config, dims: ModelDims, sizes: Groups, *, on_cpu: bool) -> RankFootprint:
    """Return rank 0 of the first engine; all ranks of all engines are equal.

    Raises:
        ConfigError: naming rollout.tp: an engine cannot split the model so.
    """
    rollout, b = config.rollout, _FLOAT32 if config.model.dtype == "float32" else 2
    tp, longest = rollout.tp, config.derived.max_engine_length
    check_engine_split(tp, (dims.n_heads,), (dims.n_kv_heads,), dims.mlp_columns)
    given = rollout.kv_cache_bytes(on_cpu=on_cpu)
    wanted = max_sequences(config) * longest * kv_bytes_per_token(config, dims)
    # The trial pass is as large as the engine's limits, however few sequences the run has.
    n_tokens = min(BATCHED_TOKENS[on_cpu] * (tp if on_cpu else 1), rollout.sequence_limit * longest)
    # Of one layer: its input, the residual and a norm's output; both halves of the MLP's projection and their product.
    widest = 3 * dims.hidden_size + 3 * max(dims.ffn_size, dims.q_columns) // tp
    return RankFootprint(
        "rollout",
        0,
        {
            "weights": b * sizes.total // tp + _adapter_bytes(config, dims, b),
            "kv_cache": wanted if given is None else given,
            **({} if on_cpu or given is None else {"kv_max": wanted}),
            "activations": n_tokens * widest * b,
            "logits": rollout.sequence_limit * _logits_bytes(dims),
            "weight_sync": sync_buffers(config, sizes.embedding * b, sizes.total * b),
        },
    )


def _logits_bytes(dims: ModelDims) -> int:
    """Return the bytes of one sequence's logits, and of as many for the sampler."""
    return 2 * dims.vocab_size * _FLOAT32


def _adapter_bytes(config: Config, dims: ModelDims, b: int) -> int:
    """Return the bytes of the adapters that an engine holds, padded to its rank."""
    rank = config.derived.engine_adapter_rank
    if not rank:
        return 0
    n_params = adapter_params(config, dims, range(dims.n_layers), config.rollout.tp)
    return b * n_params // config.actor.lora.rank * rank


def with_engine_cache(
    footprints: Sequence[RankFootprint], gpu_bytes: int | None, config: Config
) -> list[RankFootprint]:
    """Return the footprints with the KV cache that engines allocate on such a GPU, and `kv_max` for all sequences."""
    if gpu_bytes is None or config.trainer.device == "cpu":
        return list(footprints)
    engine = engine_of(footprints)
    cache = {"kv_cache": max(0, kv_room_bytes(engine, gpu_bytes, config)), "kv_max": kv_max(engine)}
    return [replace(part, parts={**part.parts, **cache}) if part is engine else part for part in footprints]


def kv_room_bytes(part: RankFootprint, gpu_bytes: int, config: Config) -> int:
    """Return the bytes of the KV cache on a GPU; may be negative if rollout.gpu_memory_utilization leaves none."""
    if given := config.rollout.kv_cache_bytes(on_cpu=False):
        return given
    others = sum(part.parts.get(name, 0) for name in ("weights", "activations", "logits", "context"))
    return round(gpu_bytes * config.rollout.gpu_memory_utilization) - others


def kv_max(part: RankFootprint) -> int:
    """Return the bytes of a cache that holds all sequences of an engine at full length."""
    return part.parts.get("kv_max", part.parts["kv_cache"])


def max_sequences(config: Config) -> int:
    """Return the maximum number of sequences that an engine decodes at a time.

    Schedulers that run ahead start one batch at a time; a stream starts as many as its staleness allows. They continue
    during an evaluation, whose prompts are in the engines as well.
    """
    trainer, limit = config.trainer, config.rollout.sequence_limit
    n_batches = trainer.max_staleness + 1 if trainer.scheduler == STREAM else 1
    training = n_batches * trainer.global_batch_size * config.rollout.n
    validation, n_engines = 0, config.derived.n_engines
    if config.data.val_files:  # without eval.max_prompts the number of prompts is unknown
        validation = config.eval.max_prompts or limit * n_engines
    overlap = AHEAD.get(trainer.scheduler) != 0
    together = training + validation if overlap else max(training, validation)
    return min(limit, -(-together // n_engines))


def with_max_num_seqs(config: Config, engine: RankFootprint, dims: ModelDims, gpu_bytes: int | None) -> Config:
    """Return the settings with rollout.max_num_seqs 0 replaced.

    Sequences of a batch start together, so all of them may have full length at a time. More than the cache holds are
    preempted and computed again; fewer leave a GPU idle whose passes cost the same with more sequences. No more than
    the run has at a time: each takes a row of logits, and CUDA graphs are captured for each size of a batch.

    Args:
        engine: footprint with these settings.
        gpu_bytes: memory of a GPU; None: unknown, or the ranks compute on the CPU.
    """
    if config.rollout.max_num_seqs:
        return config
    limit = LEAST_SEQUENCES
    if gpu_bytes is not None:
        # Logits of more sequences leave less for the cache, unless its size is given.
        logits = 0 if config.rollout.kv_cache_mib else _logits_bytes(dims)
        room = kv_room_bytes(engine, gpu_bytes, config) + limit * logits
        each = config.derived.max_engine_length * kv_bytes_per_token(config, dims) + logits
        limit = max(limit, min(_MOST_SEQUENCES, room // each, max_sequences(_limited(config, _MOST_SEQUENCES))))
    return _limited(config, limit)


def _limited(config: Config, limit: int) -> Config:
    return replace(config, rollout=replace(config.rollout, max_num_seqs=limit))


def kv_bytes_per_token(config: Config, dims: ModelDims) -> int:
    """Return the bytes of the KV cache per token on one rank; with fewer KV heads than ranks, heads are repeated."""
    b = _FLOAT32 if config.model.dtype == "float32" else 2
    heads = max(1, dims.n_kv_heads // config.rollout.tp)
    return 2 * dims.n_layers * heads * dims.head_dim * b

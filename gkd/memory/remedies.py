"""The table of what to change when memory is short. Pure: no torch.

Rows are in the order in which they are applied: what costs the user least comes first. `gkd.memory.footprint.fit`
applies them until a run fits; `advice` names those that help in a phase that ran out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gkd.config.schema import Config
from gkd.config.schema_actor import BACKENDS
from gkd.config.schema_teacher import ACTOR
from gkd.spans import Phase

Changes: TypeAlias = Mapping[str, Any]  # next value by key; empty: the row does not apply
_LOSS = (Phase.TRAIN, Phase.EVALUATE)
_FORWARD = (*_LOSS, Phase.SCORE, Phase.REFERENCE)
_OTHER_MODELS = (Phase.SCORE, Phase.REFERENCE, Phase.SEND)
_ENGINE = (Phase.BUILD_ENGINE, Phase.GENERATE, Phase.RECEIVE, Phase.ONLOAD)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One row: a change of settings that needs less memory."""

    effect: str
    next: Callable[[Config], Changes]
    phases: tuple[Phase, ...] = ()  # phases in which it helps; empty: all of its role
    role: str = "actor"  # actor | rollout
    adds_gpus: bool = False

    def helps(self, config: Config, role: str, phase: Phase, *, on_cuda: bool = True) -> bool:
        """Return whether the row applies to these settings and helps a rank in this phase, on a GPU or the host."""
        in_phase = self.role == role and (not self.phases or phase in self.phases)
        on_host = role == "rollout" or (Phase.TRAIN in self.phases and not self.adds_gpus)
        return in_phase and (on_cuda or on_host) and bool(self.next(config))


def overrides(changes: Changes) -> list[str]:
    """Return the changes as `key=value`, as on the command line."""
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changes.items()]


def _set(key: str, value: object) -> Callable[[Config], Changes]:
    return lambda config: {} if config.value(key) == value else {key: value}


def _halve(key: str, low: int = 1) -> Callable[[Config], Changes]:
    return lambda config: {key: max(low, config.value(key) // 2)} if config.value(key) > low else {}


def _fewer_tokens(config: Config) -> Changes:
    budget = config.actor.max_tokens_per_micro_batch
    longest = config.derived.max_sequence_length
    if not budget:
        return _halve("actor.micro_batch_size")(config)
    return {"actor.max_tokens_per_micro_batch": max(longest, budget // 2)} if budget > longest else {}


def _sequence_parallel(config: Config) -> Changes:
    return _set("actor.sequence_parallel", True)(config) if config.actor.tp > 1 else {}


def _offload_frozen(config: Config) -> Changes:
    is_here = {"teacher": config.derived.teacher_pool == ACTOR, "reference": bool(config.derived.reference_folder)}
    keys = [f"{section}.fsdp_cpu_offload" for section in is_here if is_here[section]]
    return {key: True for key in keys if not config.value(key)}


def _offload_states(config: Config) -> Changes:
    if config.memory.strategy == "resident":
        return {"memory.strategy": "offload"}
    moves = config.derived.moves_states or config.actor.fsdp_cpu_offload
    return {} if moves else {"actor.offload_train": True}


def _cp(config: Config) -> Changes:
    """Return twice the ranks that share a sequence, if the settings allow it; see `check_strategy`."""
    whole = config.teacher.tokenizer or (config.actor.backend_name == "fsdp2" and not config.actor.packs)
    return {} if whole else {"actor.cp": 2 * config.actor.cp}


def _cp_within_pool(config: Config) -> Changes:
    return {} if config.derived.dp_size % 2 else _cp(config)


def _fsdp2(config: Config) -> Changes:
    """Return the change of the backend, with the keys that it does not support."""
    limits = BACKENDS["fsdp2"].limits.items()
    supported = {f"actor.{name}": of.values[-1] for name, of in limits if getattr(config.actor, name) not in of.values}
    return {} if config.actor.backend_name == "fsdp2" else {"actor.strategy": "fsdp2", **supported}


def _fsdp_cpu_offload(config: Config) -> Changes:
    return {} if config.actor.fsdp_cpu_offload else {**_fsdp2(config), "actor.fsdp_cpu_offload": True}


def _more_gpus(config: Config) -> Changes:
    pools = ("trainer", "rollout") if config.trainer.colocate else ("trainer",)  # colocated ones have the same size
    return {f"{pool}.n_gpus_per_node": 2 * config.trainer.n_gpus_per_node for pool in pools}


def _cp_on_more_gpus(config: Config) -> Changes:
    changes = _cp(config)
    return {**changes, **_more_gpus(config)} if changes else {}


def _split(config: Config, name: str) -> Changes:
    """Return twice actor.tp or actor.pp, and twice the GPUs, if the backend has it."""
    value = 2 * config.value(f"actor.{name}")
    return {f"actor.{name}": value, **_more_gpus(config)} if config.actor.backend.supports(name, value) else {}


def _cache(config: Config, factor: float, share: float) -> Changes:
    """Return another size of the KV cache, if it has a given one, or else another share of the engine's GPU."""
    cache_bytes = config.rollout.kv_cache_bytes(on_cpu=config.trainer.device == "cpu")
    if cache_bytes is not None:
        return {"rollout.kv_cache_mib": int(factor * cache_bytes) >> 20}
    utilization = round(config.rollout.gpu_memory_utilization + share, 2)
    return {"rollout.gpu_memory_utilization": utilization} if 0 < utilization < 1 else {}


TABLE = (
    Remedy("The logits never exist as a whole", _set("actor.fused_lm_head", True), _LOSS),
    Remedy("Fewer tokens are computed at a time", _fewer_tokens, _FORWARD),
    Remedy("Weights are sent in smaller pieces", _halve("weight_sync.bucket_mib", 16), (Phase.SEND,)),
    Remedy("Ranks share the activations between the matrices of a layer", _sequence_parallel, _LOSS),
    Remedy("Shards of the frozen models are in host memory", _offload_frozen),
    Remedy("The student's states are in host memory while others use the GPU", _offload_states, _OTHER_MODELS),
    Remedy("Activations are computed again in the backward pass", _set("actor.recompute", "full"), (Phase.TRAIN,)),
    Remedy("Each sequence is split over more of the actor's GPUs", _cp_within_pool, _LOSS),
    Remedy("All states are sharded over all ranks", _fsdp2),
    Remedy("States are in host memory, and AdamW runs on the CPU", _fsdp_cpu_offload),
    Remedy("Each sequence is split over more GPUs", _cp_on_more_gpus, _LOSS, adds_gpus=True),
    Remedy("Each rank has a smaller share of the sharded states", _more_gpus, adds_gpus=True),
    Remedy("Each layer is split over more GPUs", lambda c: _split(c, "tp"), adds_gpus=True),
    Remedy("Each GPU has fewer layers", lambda c: _split(c, "pp"), adds_gpus=True),
    Remedy("The KV cache is larger", lambda c: _cache(c, 2, 0.05), (Phase.CACHE,), "rollout"),
    Remedy("Weights are received in smaller pieces", _halve("weight_sync.bucket_mib", 16), (Phase.RECEIVE,), "rollout"),
    Remedy("The KV cache is smaller", lambda c: _cache(c, 0.5, -0.1), _ENGINE, "rollout"),
    Remedy("Fewer sequences are generated at a time", _halve("rollout.max_num_seqs"), _ENGINE, "rollout"),
    Remedy("Each engine is split over more GPUs", lambda c: {"rollout.tp": 2 * c.rollout.tp}, role="rollout"),
)


def advice(config: Config, role: str, phase: Phase, *, on_cuda: bool) -> list[str]:
    """Return `key=value: try key=NEXT. EFFECT.` for each row that helps a rank of this role in this phase.

    Args:
        on_cuda: the memory of a GPU is short, and not that of the host.
    """
    lines = []
    for row in TABLE:
        if row.helps(config, role, phase, on_cuda=on_cuda):
            changes = row.next(config)
            now = overrides({key: config.value(key) for key in changes})
            lines.append(f"{' '.join(now)}: try {' '.join(overrides(changes))}. {row.effect}.")
    tool = f"gkd memory --config {config.trainer.run_dir}/config.yaml"
    larger = f"{'a GPU' if on_cuda else 'a host'} with more memory"
    return [
        *lines,
        f"or use shorter sequences (data.max_response_length), or {larger}; a combination that fits: {tool}",
    ]

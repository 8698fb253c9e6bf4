"""The table of what to change when memory is short: keys, their next values, and the phases in which they help.

- `advice` prints the rows for the phase that ran out of memory, with the run's present and next values.
- `gkd.memory.footprint.combination` applies them in their order until a run fits.
- docs/memory.md has the table for users, with the next values in words; a test compares the two.

Rows are in the order of the advice: large effect for little cost first. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from gkd.config.schema import Config
from gkd.config.schema_actor import BACKENDS
from gkd.config.schema_rollout import ALLOCATOR_VARIABLES, EXPANDABLE, has_expandable_segments
from gkd.config.schema_teacher import ACTOR, ReferenceConfig
from gkd.spans import Phase

Changes: TypeAlias = Mapping[str, float | str]  # next value by key
MAX_UTILIZATION = 0.95  # share of a GPU that an engine may take
MIN_BUCKET_MIB = 16
_LOSS = (Phase.TRAIN, Phase.EVALUATE)
_FORWARD = (*_LOSS, Phase.SCORE, Phase.REFERENCE)
_OTHER_MODELS = (Phase.SCORE, Phase.REFERENCE, Phase.SEND)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One row: a change of settings that needs less memory."""

    keys: tuple[str, ...]
    effect: str
    next: Callable[[Config], Changes]  # empty: the row does not apply to these settings
    phases: tuple[Phase, ...] = ()  # phases in which it helps; empty means all
    not_in: tuple[Phase, ...] = ()  # phases in which it does not help
    device: str = ""  # cuda | cpu; empty: both
    is_tried: bool = True  # `gkd.memory.footprint.combination` tries it; False: training changes
    adds_gpus: bool = False

    def line(self, config: Config) -> str:
        """Return `key=value: try NEXT. EFFECT` for these settings, to which the row applies."""
        changes = self.next(config)
        now = ", ".join(f"{key}={config.value(key)}" for key in changes)
        return f"{now}: try {', '.join(as_yaml(value) for value in changes.values())}. {self.effect}."

    def helps(self, config: Config, phase: Phase | None, *, on_cuda: bool) -> bool:
        """Return whether the row applies to these settings and helps in this phase; None: one that no row names."""
        in_phase = (not self.phases or phase in self.phases) and phase not in self.not_in
        return in_phase and self.device in ("", "cuda" if on_cuda else "cpu") and bool(self.next(config))


def as_yaml(value: object) -> str:
    """Return a setting's value as it is written in YAML or on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def set_to(
    key: str,
    value: float | str,
    effect: str,
    phases: tuple[Phase, ...] = (),
    *,
    applies: Callable[[Config], bool] = lambda config: True,
    **others: Any,
) -> Remedy:
    """Return the row that gives `key` the value wherever it has another one and `applies`; `others` as in `Remedy`."""

    def changed(config: Config) -> Changes:
        return {key: value} if config.value(key) != value and applies(config) else {}

    return Remedy((key,), effect, changed, phases, **others)


def halve(
    key: str,
    effect: str,
    phases: tuple[Phase, ...] = (),
    *,
    low: int = 1,
    applies: Callable[[Config], bool] = lambda config: True,
    **others: Any,
) -> Remedy:
    """Return the row that halves `key` down to `low`, wherever it is larger and `applies`; arguments as `set_to`."""

    def halved(config: Config) -> Changes:
        now: int = config.value(key)
        return {key: max(low, now // 2)} if now > low and applies(config) else {}

    return Remedy((key,), effect, halved, phases, **others)


def split_further(key: str, effect: str) -> Remedy:
    """Return the row that doubles `key`, actor.tp or actor.pp, and the GPUs of the pool, if the backend has it."""

    def split(config: Config) -> Changes:
        value: int = config.value(key)
        supported = config.actor.backend.supports(key.removeprefix("actor."), 2 * value)
        return {key: 2 * value, **more_gpus(config)} if supported else {}

    return Remedy((key, "trainer.n_gpus_per_node"), effect, split, device="cuda", adds_gpus=True)


def token_budget(config: Config) -> Changes:
    """Return half of the tokens of a micro-batch, at least the longest sequence; only with a budget."""
    budget, longest = config.actor.max_tokens_per_micro_batch, config.derived.max_sequence_length
    return {"actor.max_tokens_per_micro_batch": max(longest, budget // 2)} if budget > longest else {}


def first_token_budget(config: Config) -> Changes:
    """Return a budget of as many tokens as a micro-batch has now; only without one."""
    budget, longest = config.actor.max_tokens_per_micro_batch, config.derived.max_sequence_length
    return {} if budget else {"actor.max_tokens_per_micro_batch": config.actor.micro_batch_size * longest}


def smaller_cache(config: Config) -> Changes:
    """Return half of the KV cache that has a given size, or its size on the CPU."""
    now = config.rollout.kv_cache_bytes(on_cpu=config.trainer.device == "cpu")
    return {"rollout.kv_cache_mib": now >> 21} if now and now >> 21 else {}


def less_utilization(config: Config) -> Changes:
    """Return a smaller share of the GPU for an engine, if its KV cache has no given size."""
    lower = round(config.rollout.gpu_memory_utilization - 0.1, 2)
    return {"rollout.gpu_memory_utilization": lower} if lower > 0 and not config.rollout.kv_cache_mib else {}


def more_utilization(config: Config) -> Changes:
    """Return a larger share of the GPU for an engine, up to `MAX_UTILIZATION`, if its KV cache has no given size."""
    now = config.rollout.gpu_memory_utilization
    higher = min(MAX_UTILIZATION, round(now + 0.05, 2))
    return {"rollout.gpu_memory_utilization": higher} if higher > now and not config.rollout.kv_cache_mib else {}


def to_fsdp2(config: Config) -> Changes:
    """Return the change of the backend, with the keys that it does not support."""
    if config.actor.strategy == "fsdp2":
        return {}
    changes: dict[str, Any] = {"actor.strategy": "fsdp2"}
    for name, limit in BACKENDS["fsdp2"].limits.items():
        if getattr(config.actor, name) not in limit.values:
            changes[f"actor.{name}"] = limit.values[-1]
    return changes


def more_gpus(config: Config) -> dict[str, float | str]:
    """Return the pools of twice as many GPUs; colocated pools have the same size."""
    doubled = 2 * config.trainer.n_gpus_per_node
    pools: dict[str, float | str] = {"trainer.n_gpus_per_node": doubled}
    return {**pools, "rollout.n_gpus_per_node": doubled} if config.trainer.colocate else pools


def more_cp(config: Config) -> Changes:
    """Return twice the ranks that share a sequence, if the settings allow it; see `check_strategy`."""
    whole = config.teacher.tokenizer or (config.actor.strategy == "fsdp2" and not config.actor.packing)
    return {} if whole else {"actor.cp": 2 * config.actor.cp}


FSDP_CPU_OFFLOAD = set_to(
    "actor.fsdp_cpu_offload",
    True,
    "States are in host memory, and a layer is on the GPU while it is computed",
    applies=lambda config: config.actor.backend.supports("fsdp_cpu_offload", True),
    device="cuda",
)
ENGINE_TP = Remedy(
    ("rollout.tp",),
    "Each engine is split over more GPUs",
    lambda config: {"rollout.tp": 2 * config.rollout.tp},
    device="cuda",
)

ACTOR_REMEDIES = (
    Remedy(
        ("actor.max_tokens_per_micro_batch",),
        "Fewer tokens are computed at a time",
        token_budget,
        _FORWARD,
    ),
    halve(
        "actor.micro_batch_size",
        "Fewer tokens are computed at a time",
        _FORWARD,
        applies=lambda config: not config.actor.max_tokens_per_micro_batch,
    ),
    set_to("actor.fused_lm_head", True, "The logits never exist as a whole", _LOSS),
    set_to("actor.recompute", "full", "Activations are computed again in the backward pass", (Phase.TRAIN,)),
    set_to(
        "actor.sequence_parallel",
        True,
        "Ranks of a tensor-parallel group share the activations between their matrices",
        _LOSS,
        applies=lambda config: config.actor.tp > 1,
    ),
    Remedy(
        ("actor.cp",),
        "Each sequence is split over more ranks, and there are fewer data-parallel groups",
        lambda config: {} if config.derived.dp_size % 2 else more_cp(config),
        _LOSS,
        device="cuda",
    ),
    halve("data.max_response_length", "Sequences are shorter", _LOSS, is_tried=False),
    halve("weight_sync.bucket_mib", "Weights are sent in smaller pieces", (Phase.SEND,), low=MIN_BUCKET_MIB),
    Remedy(
        ("actor.strategy",),
        "Weights, gradients and optimizer states are sharded over all ranks",
        to_fsdp2,
    ),
    FSDP_CPU_OFFLOAD,
    set_to(
        "actor.lora.rank",
        16,
        "Adapters are trained in place of all weights",
        # With adapters the reference is the actor, and settings of a second model are refused.
        applies=lambda config: not config.actor.lora.rank and config.reference == ReferenceConfig(),
        device="cuda",
        is_tried=False,
    ),
    set_to(
        "teacher.fsdp_cpu_offload",
        True,
        "The teacher's shards are in host memory",
        applies=lambda config: config.derived.teacher_pool == ACTOR,
        device="cuda",
    ),
    set_to(
        "reference.fsdp_cpu_offload",
        True,
        "The reference's shards are in host memory",
        applies=lambda config: bool(config.derived.reference_folder),
        device="cuda",
    ),
    set_to(
        "actor.offload_train",
        True,
        "The student's states are in host memory while other models use the GPU",
        _OTHER_MODELS,
        applies=lambda config: (
            not config.derived.moves_states
            and not config.actor.fsdp_cpu_offload
            and config.memory.strategy != "resident"
        ),
        device="cuda",
    ),
    set_to(
        "memory.strategy",
        "offload",
        "The student's states are in host memory while a local teacher or reference computes",
        _OTHER_MODELS,
        applies=lambda config: config.memory.strategy == "resident",
        device="cuda",
    ),
    Remedy(
        ("actor.cp", "trainer.n_gpus_per_node"),
        "Each sequence is split over more GPUs",
        lambda config: {**changes, **more_gpus(config)} if (changes := more_cp(config)) else {},
        device="cuda",
        adds_gpus=True,
    ),
    split_further("actor.tp", "Each layer is split over more GPUs"),
    split_further("actor.pp", "Each GPU has fewer layers"),
    Remedy(
        ("trainer.n_gpus_per_node",),
        "Each rank has a smaller share of the optimizer states; with fsdp2 of all states",
        more_gpus,
        device="cuda",
        adds_gpus=True,
    ),
    halve("trainer.n_gpus_per_node", "Fewer ranks share the memory of this host", device="cpu", is_tried=False),
)

ENGINE_REMEDIES = (
    Remedy(
        ("rollout.kv_cache_mib",),
        "The KV cache of each engine is smaller",
        smaller_cache,
        not_in=(Phase.CACHE,),
    ),
    Remedy(
        ("rollout.kv_cache_mib",),
        "The KV cache holds longer sequences",
        lambda config: {"rollout.kv_cache_mib": 2 * mib} if (mib := config.rollout.kv_cache_mib) else {},
        (Phase.CACHE,),
        device="cuda",
    ),
    halve("rollout.n_gpus_per_node", "Fewer engines share the memory of this host", device="cpu", is_tried=False),
    halve("weight_sync.bucket_mib", "Weights are received in smaller pieces", (Phase.RECEIVE,), low=MIN_BUCKET_MIB),
    Remedy(
        ("rollout.gpu_memory_utilization",),
        "The KV cache is smaller, and more of the GPU is left for weight sync and colocated ranks",
        less_utilization,
        not_in=(Phase.OFFLOAD, Phase.CACHE),
        device="cuda",
    ),
    Remedy(
        ("rollout.gpu_memory_utilization",),
        "More of the GPU is left for the KV cache",
        more_utilization,
        (Phase.CACHE,),
        device="cuda",
    ),
    halve("rollout.max_num_seqs", "Fewer sequences are generated at a time", not_in=(Phase.OFFLOAD,), device="cuda"),
    ENGINE_TP,
    Remedy(
        ("rollout.tp", "rollout.n_gpus_per_node"),
        "Each engine is split over more GPUs, and there are as many engines as before",
        lambda config: {
            "rollout.tp": 2 * config.rollout.tp,
            "rollout.n_gpus_per_node": 2 * config.rollout.n_gpus_per_node,
        },
        device="cuda",
        adds_gpus=True,
    ),
)

FRAGMENTATION_REMEDIES = (
    Remedy(
        ("actor.max_tokens_per_micro_batch",),
        "Micro-batches have more similar sizes",
        first_token_budget,
        _FORWARD,
        is_tried=False,
    ),
    set_to("actor.packing", True, "Micro-batches have more similar sizes", _FORWARD, is_tried=False),
    FSDP_CPU_OFFLOAD,
)


def fragmentation_hint() -> str:
    """Return what to do against fragmentation, in a sentence for a warning."""
    keys = ", ".join(key for row in FRAGMENTATION_REMEDIES for key in row.keys)
    return (
        f"If memory runs out: set {ALLOCATOR_VARIABLES[1]}={EXPANDABLE} in the trainer's environment, lower the tokens "
        f"of a micro-batch, or change {keys}."
    )


@dataclass(frozen=True, slots=True)
class Shortage:
    """The properties of an out-of-memory error that the advice depends on."""

    phase: Phase
    on_cuda: bool
    fragmented: bool


def advice(config: Config, shortage: Shortage, environ: Mapping[str, str]) -> list[str]:
    """Return `key=value: try NEXT. EFFECT` for an actor rank, most effective first; only keys that can still change."""
    lines = _lines(ACTOR_REMEDIES, config, shortage)
    if shortage.fragmented:
        lines = [*_expandable_segments(environ), *_lines(FRAGMENTATION_REMEDIES, config, shortage), *lines]
    return [*dict.fromkeys(lines), _larger(config, shortage)]


def engine_advice(config: Config, shortage: Shortage) -> list[str]:
    """Return the same for a rollout engine."""
    return [*_lines(ENGINE_REMEDIES, config, shortage), _larger(config, shortage)]


def _lines(rows: Sequence[Remedy], config: Config, shortage: Shortage) -> list[str]:
    return [row.line(config) for row in rows if row.helps(config, shortage.phase, on_cuda=shortage.on_cuda)]


def _larger(config: Config, shortage: Shortage) -> str:
    if not shortage.on_cuda:
        return "or use a host with more memory"
    tool = f"python -m gkd.tools.memory --config {config.trainer.run_dir}/config.yaml"
    return f"or use a GPU with more memory; for a combination of changes: {tool}"


def _expandable_segments(environ: Mapping[str, str]) -> list[str]:
    if has_expandable_segments(environ):
        return []
    return [
        f"{ALLOCATOR_VARIABLES[1]}={EXPANDABLE} in the environment that the trainer is started in (with "
        "cluster.ray_address: in that of `ray start` on each node). Free pieces can then be joined."
    ]

"""The table of what to change when memory is short: keys, their next values, and the phases in which they help.

- `advice` prints the rows for the phase that ran out of memory, with the run's present and next values.
- `gkd.footprint.combination` applies them in their order until a run fits.
- docs/memory.md has the table for users; a test compares the two.

Rows are in the order of the advice: large effect for little cost first. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gkd.config.schema import Config
from gkd.config.schema_rollout import ALLOCATOR_VARIABLES, EXPANDABLE, has_expandable_segments
from gkd.config.schema_teacher import ACTOR, ReferenceConfig
from gkd.memory.remedy import (
    MAX_UTILIZATION,
    Remedy,
    always,
    can_offload_shards,
    first_token_budget,
    halve,
    larger_cache,
    less_utilization,
    more_engine_gpus,
    more_gpus,
    more_utilization,
    set_to,
    smaller_cache,
    split_further,
    to_fsdp2,
    token_budget,
)
from gkd.spans import Phase

_LOSS = (Phase.TRAIN, Phase.EVALUATE)
_FORWARD = (*_LOSS, Phase.SCORE, Phase.REFERENCE)

_MIN_BUCKET_MIB = 16

FSDP_CPU_OFFLOAD = Remedy(
    ("actor.fsdp_cpu_offload",),
    "true, with actor.strategy=fsdp2",
    "States are in host memory, and a layer is on the GPU while it is computed",
    set_to("actor.fsdp_cpu_offload", True, can_offload_shards),
    device="cuda",
)
ENGINE_TP = Remedy(
    ("rollout.tp",),
    "twice as many",
    "Each engine is split over more GPUs",
    lambda config: {"rollout.tp": 2 * config.rollout.tp},
    device="cuda",
)

ACTOR_REMEDIES = (
    Remedy(
        ("actor.max_tokens_per_micro_batch",),
        "half, at least the longest sequence",
        "Fewer tokens are computed at a time",
        token_budget,
        _FORWARD,
    ),
    Remedy(
        ("actor.micro_batch_size",),
        "half, without a token budget",
        "Fewer tokens are computed at a time",
        halve("actor.micro_batch_size", 1, lambda config: not config.actor.max_tokens_per_micro_batch),
        _FORWARD,
    ),
    Remedy(
        ("actor.fused_lm_head",),
        "true",
        "The logits never exist as a whole",
        set_to("actor.fused_lm_head", True, always),
        _LOSS,
    ),
    Remedy(
        ("actor.recompute",),
        "full",
        "Activations are computed again in the backward pass",
        set_to("actor.recompute", "full", always),
        (Phase.TRAIN,),
    ),
    Remedy(
        ("actor.sequence_parallel",),
        "true, with actor.tp above 1",
        "Ranks of a tensor-parallel group share the activations between their matrices",
        set_to("actor.sequence_parallel", True, lambda config: config.actor.tp > 1),
        _LOSS,
    ),
    Remedy(
        ("data.max_response_length",),
        "half",
        "Sequences are shorter",
        halve("data.max_response_length", 1),
        _LOSS,
        is_tried=False,
    ),
    Remedy(
        ("weight_sync.bucket_mib",),
        f"half, at least {_MIN_BUCKET_MIB}",
        "Weights are sent in smaller pieces",
        halve("weight_sync.bucket_mib", _MIN_BUCKET_MIB),
        (Phase.SEND,),
    ),
    Remedy(
        ("actor.strategy",),
        "fsdp2; not on resume",
        "Weights, gradients and optimizer states are sharded over all ranks",
        to_fsdp2,
    ),
    FSDP_CPU_OFFLOAD,
    Remedy(
        ("actor.lora.rank",),
        "16",
        "Adapters are trained in place of all weights",
        # With adapters the reference is the actor, and settings of a second model are refused.
        set_to("actor.lora.rank", 16, lambda c: not c.actor.lora.rank and c.reference == ReferenceConfig()),
        device="cuda",
        is_tried=False,
    ),
    Remedy(
        ("teacher.fsdp_cpu_offload",),
        "true, with a local teacher",
        "The teacher's shards are in host memory",
        set_to("teacher.fsdp_cpu_offload", True, lambda config: config.derived.teacher_pool == ACTOR),
        device="cuda",
    ),
    Remedy(
        ("reference.fsdp_cpu_offload",),
        "true, with a reference",
        "The reference's shards are in host memory",
        set_to("reference.fsdp_cpu_offload", True, lambda config: bool(config.derived.reference_folder)),
        device="cuda",
    ),
    Remedy(
        ("actor.offload_train",),
        "true",
        "The student's states are in host memory while other models use the GPU",
        set_to(
            "actor.offload_train",
            True,
            lambda config: (
                not config.derived.moves_states
                and not config.actor.fsdp_cpu_offload
                and config.memory.strategy != "resident"
            ),
        ),
        (Phase.SCORE, Phase.REFERENCE, Phase.SEND),
        device="cuda",
    ),
    Remedy(
        ("memory.strategy",),
        "offload, if it is resident",
        "The student's states are in host memory while a local teacher or reference computes",
        set_to("memory.strategy", "offload", lambda config: config.memory.strategy == "resident"),
        (Phase.SCORE, Phase.REFERENCE, Phase.SEND),
        device="cuda",
    ),
    Remedy(
        ("actor.tp", "trainer.n_gpus_per_node"),
        "twice as many, with actor.strategy=megatron",
        "Each layer is split over more GPUs",
        split_further("actor.tp"),
        device="cuda",
        adds_gpus=True,
    ),
    Remedy(
        ("actor.pp", "trainer.n_gpus_per_node"),
        "twice as many, with actor.strategy=megatron",
        "Each GPU has fewer layers",
        split_further("actor.pp"),
        device="cuda",
        adds_gpus=True,
    ),
    Remedy(
        ("trainer.n_gpus_per_node",),
        "twice as many",
        "Each rank has a smaller share of the optimizer states; with fsdp2 of all states",
        more_gpus,
        device="cuda",
        adds_gpus=True,
    ),
    Remedy(
        ("trainer.n_gpus_per_node",),
        "half",
        "Fewer ranks share the memory of this host",
        halve("trainer.n_gpus_per_node", 1),
        device="cpu",
        is_tried=False,
    ),
)

ENGINE_REMEDIES = (
    Remedy(
        ("rollout.kv_cache_mib",),
        "half, on a GPU if it is set",
        "The KV cache of each engine is smaller",
        smaller_cache,
        not_in=(Phase.CACHE,),
    ),
    Remedy(
        ("rollout.kv_cache_mib",),
        "twice as much, if it is set",
        "The KV cache holds longer sequences",
        larger_cache,
        (Phase.CACHE,),
        device="cuda",
    ),
    Remedy(
        ("rollout.n_gpus_per_node",),
        "half",
        "Fewer engines share the memory of this host",
        halve("rollout.n_gpus_per_node", 1),
        device="cpu",
        is_tried=False,
    ),
    Remedy(
        ("weight_sync.bucket_mib",),
        f"half, at least {_MIN_BUCKET_MIB}",
        "Weights are received in smaller pieces",
        halve("weight_sync.bucket_mib", _MIN_BUCKET_MIB),
        (Phase.RECEIVE,),
    ),
    Remedy(
        ("rollout.gpu_memory_utilization",),
        "0.1 less",
        "The KV cache is smaller, and more of the GPU is left for weight sync and colocated ranks",
        less_utilization,
        not_in=(Phase.OFFLOAD, Phase.CACHE),
        device="cuda",
    ),
    Remedy(
        ("rollout.gpu_memory_utilization",),
        f"0.05 more, at most {MAX_UTILIZATION}",
        "More of the GPU is left for the KV cache",
        more_utilization,
        (Phase.CACHE,),
        device="cuda",
    ),
    Remedy(
        ("rollout.max_num_seqs",),
        "half",
        "Fewer sequences are generated at a time",
        halve("rollout.max_num_seqs", 1),
        not_in=(Phase.OFFLOAD,),
        device="cuda",
    ),
    ENGINE_TP,
    Remedy(
        ("rollout.tp", "rollout.n_gpus_per_node"),
        "twice as many",
        "Each engine is split over more GPUs, and there are as many engines as before",
        more_engine_gpus,
        device="cuda",
        adds_gpus=True,
    ),
)

FRAGMENTATION_REMEDIES = (
    Remedy(
        ("actor.max_tokens_per_micro_batch",),
        "as many tokens as now",
        "Micro-batches have more similar sizes",
        first_token_budget,
        _FORWARD,
        is_tried=False,
    ),
    Remedy(
        ("actor.packing",),
        "true",
        "Micro-batches have more similar sizes",
        set_to("actor.packing", True, always),
        _FORWARD,
        is_tried=False,
    ),
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

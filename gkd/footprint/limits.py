"""Does it fit? Footprints against a card: what is wrong, which keys change it, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

from gkd.config import Config
from gkd.footprint.rollout import sequences_together
from gkd.footprint.types import RankFootprint

_GIB = 1 << 30


def check(footprints: Sequence[RankFootprint], card_bytes: int, config: Config) -> list[str]:
    """Problems with their fixes, one line each; empty: it fits.

    Args:
        footprints: of `footprint`, and of `teacher_footprint` if the teacher's are to be checked, too.
        card_bytes: memory of one card; every rank has one to itself.

    Raises:
        ValueError: card_bytes is not positive.
    """
    if card_bytes <= 0:
        raise ValueError(f"a card of {card_bytes} bytes")
    problems = []
    for part in footprints:
        if part.role == "rollout":
            problems += _rollout(part, card_bytes, config)
        elif part.total_bytes > card_bytes:
            fixes = _actor_fixes(part, config) if part.role == "actor" else ["more cards for each teacher worker."]
            what = f"{part.role} rank {part.rank} needs {gib(part.total_bytes)} of a card of {gib(card_bytes)}"
            problems.append(f"{what}, {gib(part.total_bytes - card_bytes)} too much. Fix: {'; '.join(fixes)}")
    return problems


def state_fits(part: RankFootprint, card_bytes: int) -> bool:
    """Weights, gradients and optimizer state alone; where they do not fit, no smaller micro-batch helps."""
    return part.state_bytes <= card_bytes


def kv_room_bytes(part: RankFootprint, card_bytes: int, config: Config) -> int:
    """What rollout.gpu_memory_utilization leaves of a card for the KV cache; may be negative."""
    others = sum(part.parts.get(name, 0) for name in ("weights", "activations", "logits", "context"))
    return round(card_bytes * config.rollout.gpu_memory_utilization) - others


def gib(n_bytes: float) -> str:
    """1.5 GiB"""
    return f"{n_bytes / _GIB:.2f} GiB"


def _rollout(part: RankFootprint, card_bytes: int, config: Config) -> list[str]:
    """vLLM does not start without room in its cache for one sequence of full length."""
    rollout, data = config.rollout, config.data
    if config.trainer.device == "cpu":
        if part.total_bytes <= card_bytes:
            return []
        fix = f"rollout.cpu_kv_cache_mib ({rollout.cpu_kv_cache_mib}) down"
        return [f"rollout rank {part.rank} needs {gib(part.total_bytes)} of {gib(card_bytes)}. Fix: {fix}."]
    longest = data.max_prompt_length + data.max_response_length
    one = part.parts["kv_cache"] // sequences_together(config)
    room = kv_room_bytes(part, card_bytes, config)
    over = part.parts["weight_sync"] - round(card_bytes * (1 - rollout.gpu_memory_utilization))
    problems = []
    if room < one:
        short = f"{gib(one - room)} are missing for the KV cache of one sequence of {longest} tokens"
        fixes = [f"rollout.gpu_memory_utilization ({rollout.gpu_memory_utilization}) up"] * (
            rollout.gpu_memory_utilization < 0.9
        )
        fixes.append(f"rollout.tp {2 * rollout.tp}: saves {gib(part.parts['weights'] / 2)} of the weights")
        problems.append(f"rollout rank {part.rank}: {short}. Fix: {'; '.join(fixes)}.")
    if over > 0:
        less = max(0.0, rollout.gpu_memory_utilization - over / card_bytes)
        problems.append(
            f"rollout rank {part.rank}: rollout.gpu_memory_utilization {rollout.gpu_memory_utilization} leaves "
            f"{gib(over)} too little for a weight-sync bucket of {gib(part.parts['weight_sync'])}. Fix: "
            f"rollout.gpu_memory_utilization {less:.2f}; weight_sync.bucket_mib ({config.weight_sync.bucket_mib}) down."
        )
    return problems


def _actor_fixes(part: RankFootprint, config: Config) -> list[str]:
    """What helps, the largest saving first."""
    actor, parts = config.actor, part.parts
    savings: list[tuple[float, str]] = []
    activations = parts.get("activations", 0)
    if actor.recompute != "full":
        savings.append((0.8 * activations, "actor.recompute full"))
    momentary = activations + parts.get("logits", 0) + parts.get("passing", 0)
    if actor.max_tokens_per_micro_batch > config.data.max_prompt_length + config.data.max_response_length:
        savings.append((activations / 2, f"actor.max_tokens_per_micro_batch {actor.max_tokens_per_micro_batch // 2}"))
    elif actor.max_tokens_per_micro_batch == 0 and actor.micro_batch_size > 1:
        savings.append((activations / 2, f"actor.micro_batch_size {actor.micro_batch_size // 2}"))
    if not actor.fused_lm_head:
        savings.append((0.8 * parts.get("logits", 0), "actor.fused_lm_head true"))
    if actor.strategy == "fsdp2" and not actor.fsdp_cpu_offload:
        savings.append((part.state_bytes, "actor.fsdp_cpu_offload true"))
    sharded = parts.get("optimizer", 0) if actor.strategy == "megatron" else part.state_bytes
    savings.append((sharded / 2, f"twice the GPUs (trainer.n_gpus_per_node {2 * config.trainer.n_gpus_per_node})"))
    if actor.strategy == "megatron":
        whole = part.state_bytes + momentary
        savings.append((whole / 2, f"twice the GPUs and actor.tp {2 * actor.tp}"))
    ordered = sorted(savings, key=lambda saving: -saving[0])
    return [f"{what}: saves about {gib(saved)}" for saved, what in ordered if saved > 0]

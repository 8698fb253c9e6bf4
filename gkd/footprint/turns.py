"""A card that actor and engine share (`trainer.colocate`), turn by turn: who is on it with what.

generate                          the engine with its share | of the actor what never moves
training_step, teacher_pass, ...  the actor                 | of the engine what sleep leaves
weight_sync                       the actor's weights       | the engine's weights; on both sides a bucket
"""

from __future__ import annotations

from collections.abc import Sequence

from gkd.config.schema import Config
from gkd.footprint.types import MOVING, WEIGHT_SYNC, RankFootprint

GENERATE = "generate"


def turns(actor: RankFootprint, engine: RankFootprint, card_bytes: int | None, config: Config) -> dict[str, int]:
    """Bytes on one card by turn, of both together.

    Args:
        card_bytes: memory of the card, of which an engine takes its share; None: as much as its sequences want.
    """
    share = round(card_bytes * config.rollout.gpu_memory_utilization) if card_bytes else engine.total_bytes
    asleep = engine.parts.get("context", 0)  # sleep gives back neither it nor what NCCL has
    found = {GENERATE: share + resting_bytes(actor)}
    for moment, size in actor.moments().items():
        engines = sum(engine.parts.get(name, 0) for name in ("weights", WEIGHT_SYNC)) if moment == WEIGHT_SYNC else 0
        found[moment] = size + engines + asleep
    return found


def resting_bytes(actor: RankFootprint) -> int:
    """What a rank keeps on the card while its states are in host memory."""
    return actor.staying_bytes - sum(actor.parts.get(name, 0) for name in MOVING)


def turns_by_rank(
    footprints: Sequence[RankFootprint], card_bytes: int | None, config: Config
) -> dict[int, dict[str, int]]:
    """`turns` of each kind of actor rank; nothing without `trainer.colocate`."""
    if not config.trainer.colocate:
        return {}
    (engine,) = (part for part in footprints if part.role == "rollout")
    return {part.rank: turns(part, engine, card_bytes, config) for part in footprints if part.role == "actor"}


def turns_table(footprints: Sequence[RankFootprint], card_bytes: int | None, config: Config) -> str:
    """A line for each kind of actor rank, in GiB."""
    lines = []
    for rank, sizes in turns_by_rank(footprints, card_bytes, config).items():
        cells = ", ".join(f"{name} {size / (1 << 30):.2f}" for name, size in sizes.items())
        lines.append(f"GiB on the card of actor rank {rank} and its engine, by turn: {cells}")
    return "\n".join(lines)

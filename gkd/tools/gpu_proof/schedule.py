"""Choose which stage of gpu_proof starts next, and compute how long a run is expected to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gkd.tools.gpu_proof.stage import Stage

CORES_EACH = 4


@dataclass(frozen=True, slots=True)
class Room:
    """Limit what stages use at the same time: GPU memory, and four cores for each stage."""

    cores: int
    gib: float

    @property
    def width(self) -> int:
        return max(1, self.cores // CORES_EACH)


EXPECTED_ROOM = Room(16, 80.0)  # machine that `Stage.expected_s` is for


def in_order(stages: Sequence[Stage]) -> list[Stage]:
    """Return stages that run alone, then stages that share, the longest first."""
    alone = [stage for stage in stages if not stage.shares_gib]
    shared = [stage for stage in stages if stage.shares_gib]
    return [*alone, *sorted(shared, key=lambda stage: -stage.expected_s)]


def next_up(waiting: Sequence[Stage], running: Sequence[Stage], room: Room) -> Stage | None:
    """Return the stage that may use the GPU now, or None if one that runs has to end first."""
    if not running:
        return waiting[0] if waiting else None
    if len(running) >= room.width or not all(stage.shares_gib for stage in running):
        return None
    free = room.gib - sum(stage.shares_gib for stage in running)
    return next((stage for stage in waiting if 0 < stage.shares_gib < free), None)


def started_ahead(waiting: Sequence[Stage], room: Room) -> Stage | None:
    """Return the stage to start before its turn, or None if the next one does not wait or there is no core."""
    return waiting[0] if waiting and waiting[0].ahead_s and room.width > 1 else None


def expected_seconds(stages: Sequence[Stage], room: Room = EXPECTED_ROOM) -> float:
    """Return the time of a run in which each stage takes `expected_s`, also one that shares the GPU and the cores."""
    waiting, began, now = in_order(stages), dict[Stage, float](), 0.0  # `began` has the stages that run
    ahead_since = 0.0
    while waiting or began:
        while stage := next_up(waiting, list(began), room):
            done_s = min(stage.ahead_s, now - ahead_since) if stage is started_ahead(waiting, room) else 0.0
            waiting.remove(stage)
            began[stage] = now - done_s
            ahead_since = now
        now = min(start + one.expected_s for one, start in began.items())
        began = {one: start for one, start in began.items() if start + one.expected_s > now}
    return now

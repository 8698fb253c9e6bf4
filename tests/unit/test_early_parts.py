"""Training on the finished part of a streamed batch while the rest is generated; its recording and replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from gkd.actor.pool import ActorPool
from gkd.config.load import load_config
from gkd.errors import NumericsError
from gkd.metrics.writer import read_metrics
from gkd.types import RolloutChunk, ScoredChunk
from tests.refusals import refuses
from tests.rollout_chunks import chunk_of
from tests.unit.world import StreamWorld, make

SETTINGS = ("trainer.total_steps=3", "trainer.scheduler=stream", "trainer.global_batch_size=4")


class LateWorld(StreamWorld):
    """A world whose engines finish the late prompts only when the actor trains on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.late = frozenset({6, 7})  # due in the second step
        self.accumulated: list[list[int]] = []  # prompt ids of each part

    def accumulate(self, part: Sequence[ScoredChunk]) -> None:
        self.accumulated.append([chunk.rollouts.ref for chunk in part])
        for chunk in self.late_chunks:
            self.completed.put(chunk)


def test_a_step_begins_before_its_batch_is_complete(tmp_path: Path) -> None:
    """Fails if the actor waits for late responses with the others at hand, or a sequence of either part is missing in
    the training, the metrics or the recording.
    """
    world, again = LateWorld(), LateWorld()
    make(tmp_path, world, *SETTINGS, "trainer.record_batches=true").fit()
    (early,), (first, rest, last) = world.accumulated, world.trained
    rest_ids = [prompt_id for prompt_id, _ in rest]
    assert len(early) == len(rest_ids) == 2 and len(first) == len(last) == 4
    seen = early + [prompt_id for step in world.trained for prompt_id, _ in step]
    assert sorted(Counter(seen).values()) == [1, 1, 1, 1, 2, 2, 2, 2], "8 prompts, 12 sequences"
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss/total" in line]
    assert [line["rollout/response_tokens"] for line in lines] == [4 * 8] * 3
    assert [line["staleness/max"] for line in lines] == [0, 1, 1]

    batches = tmp_path / "run" / "batches"
    assert sorted(path.name for path in (batches / "step_00000002").iterdir()) == [
        "batch_group_0.npz",
        "early_0_group_0.npz",
        "manifest.json",
    ]
    make(tmp_path / "again", again, *SETTINGS, f"trainer.replay={batches}").fit()
    assert (again.accumulated, again.trained) == (world.accumulated, world.trained)
    whole = LateWorld()
    make(tmp_path / "whole", whole, *SETTINGS, f"trainer.replay={batches}", "actor.offload_train=true").fit()
    second = [prompt_id for prompt_id, _ in whole.trained[1]]
    assert (whole.accumulated, second) == ([], early + rest_ids), "settings that need whole batches get them"


def test_an_early_part_that_is_too_stale_is_not_trained_on(tmp_path: Path) -> None:
    """Fails if the bound is checked only for the part that completes the batch."""

    class Old(LateWorld):
        def submit(self, chunk: RolloutChunk):  # type: ignore[no-untyped-def]
            of_second_step = chunk.sample_index[0] in (4, 5)
            return super().submit(chunk_of(chunk.sample_index, version=-3, ref=chunk.ref) if of_second_step else chunk)

    world = Old()
    with pytest.raises(NumericsError):
        make(tmp_path, world, *SETTINGS).fit()
    assert world.accumulated == []


def test_a_part_of_a_batch_that_the_loss_needs_whole_is_refused() -> None:
    """Fails if a pipeline of one's own silently trains on another loss than the whole batch has."""
    pool = ActorPool([object()], load_config(None, ["distill.normalize=sequence"]))
    with refuses("distill.normalize", "sequence"):
        pool.accumulate([])

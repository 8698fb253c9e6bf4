"""Test the batches of the stream scheduler with fake engines whose completions the test controls, and early parts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gkd.actor.pool import ActorPool
from gkd.config.load import load_config
from gkd.data.sampler import PromptSampler
from gkd.errors import ClusterError, NumericsError
from gkd.metrics.writer import read_metrics
from gkd.pipeline.streaming import StreamedBatches
from gkd.run.checkpoints import TrainerState
from gkd.types import (
    FileDigest,
    GreedyReport,
    PendingScores,
    Prompt,
    Recording,
    RolloutChunk,
    RolloutUsage,
    ScoredChunk,
)
from tests.processes import wait_until
from tests.refusals import refuses
from tests.rollout_chunks import chunk_of
from tests.unit.world import StreamWorld
from tests.unit.world import make as make_run

PROMPTS = [Prompt(i, np.array([i], np.int32)) for i in range(10)]
N = 2


def chunk(position: int, version: int, *, on_policy: bool = True) -> RolloutChunk:
    """Return all samples of the prompt at one position."""
    index = np.arange(position * N, position * N + (N if on_policy else 1), dtype=np.int32)
    return chunk_of(index, version=version, ref=position, on_policy=on_policy)


class Engines:
    """RolloutRole, RolloutStream and ScoringRole. Prompts complete when the test calls `finish`."""

    def __init__(self) -> None:
        self.admitted: list[list[int]] = []
        self.prompts: dict[int, int] = {}  # position -> prompt id
        self.not_started: list[int] = []
        self.submitted: list[int] = []
        self.from_dataset: list[int] = []
        self.n_opened = self.n_closed = 0
        self.restorable: list[PendingScores] = []
        self._ready: list[RolloutChunk] = []
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def finish(self, *chunks: RolloutChunk) -> None:
        with self._changed:
            self._ready += chunks
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def open_stream(self, *, n: int, temperature: float, seed: int) -> Engines:
        assert (n, temperature, seed) == (N, 0.5, 10)
        self.n_opened += 1
        return self

    def admit(self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int]) -> None:
        self.admitted.append(list(prompt_indices))
        self.prompts |= {position: prompt.prompt_id for position, prompt in zip(prompt_indices, prompts, strict=True)}

    def finished(self, timeout_s: float | None = None) -> list[RolloutChunk]:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error, timeout_s)
            if self._error:
                raise self._error
            ready, self._ready = self._ready, []
            return ready

    def waiting(self) -> list[int]:
        return self.not_started

    def close(self) -> None:
        self.n_closed += 1

    def dataset(
        self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int], policy_version: int
    ) -> list[RolloutChunk]:
        self.from_dataset += prompt_indices
        return [chunk(position, policy_version, on_policy=False) for position in prompt_indices]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a stream does not generate batches")

    def greedy(self, prompts: Sequence[Prompt], *, n_samples: int) -> GreedyReport:
        raise AssertionError("no evaluation is due")

    def usage(self) -> RolloutUsage:
        raise AssertionError("the loop calls it, not the stream")

    def submit(self, chunk: RolloutChunk) -> PendingScores:
        self.submitted.append(chunk.ref)
        return PendingScores(chunk, None, None)

    def collect(self, pending: Sequence[PendingScores]) -> list[ScoredChunk]:
        raise AssertionError("the loop calls it, not the stream")

    def record(self, chunks: Any, folder: Path, label: str, *, scored: bool) -> Recording:
        raise AssertionError("the saver calls it, not the stream")

    def record_finished(self, recording: Recording, **_: Any) -> dict[str, FileDigest]:
        raise AssertionError("the saver calls it, not the stream")

    def restore(self, folder: Path, label: str) -> list[PendingScores]:
        assert label == "stream"
        return self.restorable


def make(engines: Engines, *overrides: str, total_steps: int = 9) -> StreamedBatches:
    settings = ["trainer.scheduler=stream", "trainer.global_batch_size=2", "rollout.temperature=0.5", "data.seed=10"]
    config = load_config(None, [*settings, f"rollout.n={N}", "trainer.stage_timeout_s=5", *overrides])
    return StreamedBatches(config, engines, engines, PromptSampler(PROMPTS, shuffle=False, seed=10), total_steps)


def indices(batch: Sequence[PendingScores]) -> list[int]:
    return [c.rollouts.ref for c in batch]


def batch_of(source: StreamedBatches, step: int) -> list[PendingScores]:
    """Return all parts of a batch."""
    batch: list[PendingScores] = []
    while early := source.early_part(step):
        batch += early
    return batch + source.next_batch(step)


def wait_for(condition: Callable[[], bool]) -> None:
    wait_until(condition, 30.0, "the stream")


def test_prompts_are_admitted_up_to_the_bound_and_taken_as_they_finish() -> None:
    """Fails if engines idle although the bound allows more prompts, a batch does not take the prompts that finished
    first, or scoring starts only when the batch is complete.
    """
    engines = Engines()
    source = make(engines)
    source.prefetch(0)
    assert engines.admitted == [[0, 1, 2, 3]] and engines.prompts == {i: i for i in range(4)}
    engines.finish(chunk(2, 0))
    wait_for(lambda: engines.submitted == [2])
    engines.finish(chunk(0, 0))
    assert indices(batch_of(source, 0)) == [2, 0]
    source.commit()
    source.wait_until_idle()
    source.prefetch(1)
    assert engines.admitted[1:] == [[4, 5]]
    engines.finish(chunk(5, 1), chunk(4, 1), chunk(3, 0), chunk(1, 0))
    assert sorted(indices(batch_of(source, 1))) == [1, 3], "due: started with version 0, and the bound is 1"
    source.commit()
    assert indices(batch_of(source, 2)) == [5, 4]
    source.close(wait=True)
    assert (engines.n_opened, engines.n_closed) == (1, 1)


def test_finished_prompts_do_not_wait_for_those_that_are_due() -> None:
    """Fails if the actor idles while the last responses of a batch are generated, a prompt is in no part of the batch
    or in both, or one that has not been started counts as due.
    """
    engines = Engines()
    source = make(engines, "trainer.global_batch_size=6")
    source.prefetch(0)  # 0 to 11
    engines.finish(*(chunk(position, 0) for position in range(6)))
    assert source.early_part(0) == [] and indices(source.next_batch(0)) == [0, 1, 2, 3, 4, 5], "all have finished"
    source.commit()
    engines.not_started = [11]
    source.prefetch(1)
    engines.finish(chunk(6, 0), chunk(12, 1), chunk(7, 0))
    assert sorted(indices(source.early_part(1))) == [6, 7, 12], "8, 9 and 10 are due, 11 is not"
    assert source.in_flight(1).unfinished == (8, 9, 10, 11, 13, 14, 15, 16, 17)
    engines.finish(chunk(13, 1), chunk(10, 0))
    threading.Timer(0.05, lambda: engines.finish(chunk(8, 0))).start()
    assert sorted(indices(source.early_part(1))) == [8, 10], "more than half of what is left"
    threading.Timer(0.05, lambda: engines.finish(chunk(9, 0))).start()
    assert source.early_part(1) == [] and indices(source.next_batch(1)) == [9]
    source.commit()
    assert [c.rollouts.ref for c in source.in_flight(2).chunks["stream"]] == [13]
    source.close(wait=True)


@pytest.mark.parametrize(
    "whole", ["distill.normalize=sequence", "reward.functions=[{path: f.py:g}]", "actor.offload_train=true"]
)
def test_what_needs_whole_batches_gets_them(whole: str) -> None:
    """Fails if a loss with a sum over the batch is computed on parts, or gradients are offloaded between two parts."""
    engines = Engines()
    source = make(engines, "trainer.global_batch_size=4", whole)
    source.prefetch(0)
    engines.finish(*(chunk(position, 0) for position in (1, 2, 4, 5)))
    assert sorted(indices(batch_of(source, 0))) == [1, 2, 4, 5]
    source.commit()
    source.prefetch(1)
    engines.finish(*(chunk(position, 0) for position in (0, 3, 6)))
    threading.Timer(0.05, lambda: engines.finish(chunk(7, 0))).start()
    assert source.early_part(1) == [] and sorted(indices(source.next_batch(1))) == [0, 3, 6, 7]
    source.close(wait=True)


def mixed(*samples: tuple[int, int], version: int = 0) -> RolloutChunk:
    """Return a chunk of these samples: (position, number of the sample)."""
    return chunk_of([position * N + j for position, j in samples], version=version, ref=object())


def samples_of(batch: Sequence[PendingScores]) -> list[int]:
    return sorted(i for c in batch for i in c.rollouts.sample_index.tolist())


def test_a_step_takes_the_finished_prompts_out_of_chunks() -> None:
    """Fails if a prompt is trained on before all its samples have finished, a sample is lost or trained on twice, or a
    checkpoint contains samples that are not in flight any more.
    """
    engines = Engines()
    source = make(engines)
    source.prefetch(0)  # 0 to 3
    first, second = mixed((0, 1), (2, 0), (1, 0), (0, 0)), mixed((2, 1), (3, 0))
    engines.finish(first, second, mixed((3, 1)))
    wait_for(lambda: len(engines.submitted) == 3)
    batch = batch_of(source, 0)
    assert samples_of(batch) == [0, 1, 4, 5], "positions 0 and 2"
    parts = {id(c.rollouts.ref): c.rollouts for c in batch}
    assert parts[id(first.ref)].sequence_indices.tolist() == [0, 1, 3]  # type: ignore[union-attr]
    assert parts[id(second.ref)].sequence_indices.tolist() == [0]  # type: ignore[union-attr]
    assert parts[id(first.ref)].n_response.tolist() == [1] * 3
    source.commit()
    state = source.in_flight(1)
    assert state.unfinished == (1,) and samples_of(state.chunks["stream"]) == [6, 7]
    source.prefetch(1)
    engines.finish(mixed((1, 1), (4, 0), version=1))
    assert samples_of(batch_of(source, 1)) == [2, 3, 6, 7]
    source.close(wait=True)

    again = Engines()
    again.restorable = [
        PendingScores(mixed((3, 0), (5, 1), version=1), 0, 0),
        PendingScores(mixed((5, 0), (3, 1)), 0, 0),
    ]
    resumed = make(again)
    resumed.restore(Path("x"), TrainerState(1, 8, ()))
    assert samples_of(batch_of(resumed, 1)) == [6, 7, 10, 11]
    assert resumed.in_flight(1).unfinished == ()
    resumed.close(wait=True)


def test_no_prompts_beyond_the_last_step_are_admitted() -> None:
    """Fails if prompts are generated that no step will train on."""
    engines = Engines()
    source = make(engines, "trainer.max_staleness=7", total_steps=2)
    source.prefetch(0)
    source.prefetch(1)
    source.prefetch(2)
    assert [p for positions in engines.admitted for p in positions] == [0, 1, 2, 3]
    source.close(wait=True)


def test_a_checkpoint_contains_finished_and_unfinished_prompts() -> None:
    """Fails if a resumed run loses a prompt of the stream or trains on it twice."""
    engines = Engines()
    source = make(engines, "trainer.max_staleness=2")
    source.prefetch(0)  # 0 to 5
    engines.finish(chunk(4, 0), chunk(1, 0), chunk(3, 0))
    wait_for(lambda: len(engines.submitted) == 3)
    assert indices(batch_of(source, 0)) == [4, 1]
    before = source.in_flight(0)
    assert [p.rollouts.ref for p in before.chunks["stream"]] == [4, 1, 3], "a batch is in flight until it is trained on"
    source.commit()
    state = source.in_flight(1)
    assert (state.position, state.unfinished) == (6, (0, 2, 5))
    assert [p.rollouts.ref for p in state.chunks["stream"]] == [3]
    source.close(wait=True)

    again = Engines()
    again.restorable = list(state.chunks["stream"])
    resumed = make(again, "trainer.max_staleness=2")
    resumed.restore(Path("x"), TrainerState(1, state.position, state.unfinished))
    kept = resumed.in_flight(1)
    assert (kept.position, set(kept.unfinished)) == (6, {0, 2, 5}), (
        "a save before the first batch keeps the restored prompts"
    )
    resumed.prefetch(1)
    assert again.admitted == [[0, 2, 5, 6, 7]] and again.prompts[7] == 7
    again.finish(chunk(7, 1))
    assert indices(batch_of(resumed, 1)) == [3, 7]
    resumed.close(wait=True)


def test_every_step_has_the_on_policy_share() -> None:
    """Fails if dataset responses, which are available at once, crowd out generated ones, or are lost."""
    engines = Engines()
    source = make(engines, "distill.on_policy_share=0.5", "trainer.global_batch_size=4", total_steps=3)
    seen: list[int] = []
    for step in range(3):
        source.prefetch(step)
        engines.finish(*(chunk(position, step) for position in engines.admitted[-1] if step != 2))
        batch = batch_of(source, step)
        source.commit()
        assert [c.rollouts.on_policy for c in batch] == [False] * 2 + [True] * 2
        assert all(step * 4 <= c.rollouts.ref < step * 4 + 4 for c in batch if not c.rollouts.on_policy)
        assert source.in_flight(step + 1).position == 4 * min(step + 2, 3)
        seen += indices(batch)
    assert sorted(seen) == list(range(12))
    source.close(wait=True)


def test_an_engine_error_ends_the_wait() -> None:
    """Fails if the loop waits forever for responses of a dead engine."""
    engines = Engines()
    source = make(engines)
    source.prefetch(0)
    engines.fail(ClusterError("rollout engine 1: the process died"))
    with pytest.raises(ClusterError, match="engine 1"):
        batch_of(source, 0)


def test_hung_engines_time_out() -> None:
    """Fails if the wait for hung engines exceeds trainer.stage_timeout_s, or the error omits the pending prompts."""
    engines = Engines()
    source = make(engines, "trainer.stage_timeout_s=0.2")
    source.prefetch(0)
    engines.finish(chunk(1, 0))
    with pytest.raises(ClusterError):
        batch_of(source, 0)
    source.close(wait=True)


def test_an_unexpected_response_is_an_error() -> None:
    """Fails if a duplicate or unknown response is trained on."""
    engines = Engines()
    source = make(engines)
    source.prefetch(0)
    engines.finish(chunk(1, 0), chunk(1, 0))
    with pytest.raises(ClusterError):
        batch_of(source, 0)


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
    make_run(tmp_path, world, *SETTINGS, "trainer.record_batches=true").fit()
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
    make_run(tmp_path / "again", again, *SETTINGS, f"trainer.replay={batches}").fit()
    assert (again.accumulated, again.trained) == (world.accumulated, world.trained)
    whole = LateWorld()
    make_run(tmp_path / "whole", whole, *SETTINGS, f"trainer.replay={batches}", "actor.offload_train=true").fit()
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
        make_run(tmp_path, world, *SETTINGS).fit()
    assert world.accumulated == []


def test_a_part_of_a_batch_that_the_loss_needs_whole_is_refused() -> None:
    """Fails if a pipeline of one's own silently trains on another loss than the whole batch has."""
    pool = ActorPool([object()], load_config(None, ["distill.normalize=sequence"]))
    with refuses("distill.normalize", "sequence"):
        pool.accumulate([])

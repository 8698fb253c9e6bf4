"""Provide fakes of the four roles that record their calls, for tests of the training loop.

The fake actor writes real files, and the real checkpoint store commits them.
"""

from __future__ import annotations

import pickle
import queue
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gkd.config.load import load_config
from gkd.errors import CheckpointError, ClusterError, ModelError, TeacherUnavailable
from gkd.metrics.writer import read_metrics
from gkd.roles import Computation, RolloutStream
from gkd.run.checkpoints import step_of
from gkd.run.manifest import digest_bytes
from gkd.run.open import open_run_folder
from gkd.spans import ProcessSpans, Span
from gkd.trainer import Roles, Trainer
from gkd.types import (
    EngineRestarts,
    EngineUsage,
    FileDigest,
    GreedyReport,
    PendingScores,
    Prompt,
    Recording,
    ResponseLimits,
    RolloutChunk,
    RolloutUsage,
    Sample,
    ScoredChunk,
    SyncReport,
    TrainStats,
)
from tests.rollout_chunks import chunk_of
from tests.unit.checkpoint_files import check_actor, write_actor

PROMPTS = [Prompt(i, np.array([i + 1], np.int32), "x") for i in range(8)]


def answers(
    prompt: Prompt, samples: Sequence[int], n_response: int, n_truncated: int, version: int, *, on_policy: bool = True
) -> RolloutChunk:
    """Return the chunk of one prompt's responses, with the prompt id as its handle."""
    return chunk_of(
        samples,
        n_response,
        n_truncated=n_truncated,
        version=version,
        n_repeated=1 if on_policy else 10,
        ref=prompt.prompt_id,
        on_policy=on_policy,
    )


class World:
    """All four roles. `events` lists the calls of the loop in order; `changes` are attributes with other values."""

    def __init__(self, **changes: Any) -> None:
        self.events: list[str] = []
        self.engine_version = -1
        self.lag = 0  # versions by which the engine's weights are stale
        self.teacher_dies_at: int | None = None
        self.has_distribution = True  # the teacher returns top-k and its mass, so there is a KL
        self.trained: list[list[tuple[int, bool]]] = []  # (prompt id, on-policy) of each batch's chunks
        self.prompt_indices: list[list[int]] = []  # of each call
        self.polls_per_save = 0  # polls that find the ranks still writing
        self.saves_blocking: list[bool] = []
        self.save_fails_at: int | None = None  # the step whose files cannot be written
        self.save_failures = 99  # number of attempts that fail
        self.rank_dies_at: int | None = None
        self.bug_at: int | None = None  # the version at which train_step raises an unexpected error
        self.export_fails = False
        self.save_hangs = False  # save_finished times out
        self.scores_fail: Exception | None = None  # error of a recording with scores
        self.polls_per_recording = 0  # polls that find a recording unfinished
        self.restarts = EngineRestarts()  # since the last `usage`
        self.n_memory_calls = 0
        self.limits: list[ResponseLimits | None] = []  # of each `generate`
        self.waits_s: list[float | None] = []  # time-out of each wait for a save
        self._saving: tuple[Path, int] | None = None
        self._polls_left = 0
        self._recording_left, self._recording_scored = 0, False
        assert changes.keys() <= vars(self).keys()
        vars(self).update(changes)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        prompt_indices: Sequence[int],
        n: int,
        temperature: float,
        seed: int,
        limits: ResponseLimits | None = None,
    ) -> Iterator[RolloutChunk]:
        self.limits.append(limits)
        self.events.append(f"generate n={n} seed={seed} v={self.engine_version}")
        self.prompt_indices.append(list(prompt_indices))
        for prompt, index in zip(prompts, prompt_indices, strict=True):
            self.events.append("chunk")
            yield answers(prompt, range(index * n, (index + 1) * n), 8, 0, self.engine_version - self.lag)

    def dataset(
        self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int], policy_version: int
    ) -> list[RolloutChunk]:
        self.events.append(f"dataset v={policy_version}")
        self.prompt_indices.append(list(prompt_indices))
        return [answers(prompt, [0], 13, 1, policy_version, on_policy=False) for prompt in prompts]

    def open_stream(self, *, n: int, temperature: float, seed: int) -> RolloutStream:
        raise NotImplementedError  # see tests/unit/test_streaming.py

    def greedy(self, prompts: Sequence[Prompt], *, n_samples: int) -> GreedyReport:
        self.events.append("greedy")
        return GreedyReport(0.5, [Sample(prompts[0].prompt_id, [1], [2], "text", "", True, "prompt")])

    def texts(self, chunks: Sequence[RolloutChunk], *, n: int, n_samples: int) -> list[Sample]:
        self.events.append(f"texts n={n}")
        return [
            Sample(chunk.ref, [1], [2], f"v{self.engine_version}", "", None, "p")
            for chunk in chunks
            if chunk.sample_index[0] % n == 0
        ][:n_samples]

    def usage(self) -> RolloutUsage:
        engines = [EngineUsage(0.0)]
        restarts, self.restarts = self.restarts, EngineRestarts()
        return RolloutUsage(engines, restarts=restarts)

    def submit(self, chunk: RolloutChunk) -> PendingScores:
        self.events.append("submit")
        return PendingScores(chunk, None, None)

    def collect(self, pending: Sequence[PendingScores]) -> list[ScoredChunk]:
        self.events.append("collect")
        if self.teacher_dies_at == self.engine_version:
            raise TeacherUnavailable("gone")
        mass = 0.9 if self.has_distribution else None  # of each token
        return [ScoredChunk(p.rollouts, None, mass and mass * float(p.rollouts.n_response.sum()), 10) for p in pending]

    def record(
        self, chunks: Sequence[PendingScores | ScoredChunk], folder: Path, label: str, *, scored: bool
    ) -> Recording:
        """Write real files that hold each chunk as the loop sees it: its sizes and its handle (the prompt id)."""
        self.events.append(f"record {label} {'scored' if scored else 'unscored'}")
        self._recording_left, self._recording_scored = self.polls_per_recording, scored
        data = pickle.dumps([c.rollouts for c in chunks])
        (folder / f"{label}_group_0.npz").write_bytes(data)
        return Recording({f"{label}_group_0.npz": digest_bytes(data)})

    def record_finished(
        self, recording: Recording, *, wait: bool, timeout_s: float | None = None
    ) -> dict[str, FileDigest] | None:
        if self._recording_scored and self.scores_fail:  # raise a copy: a raised error keeps the frames of the run
            raise type(self.scores_fail)(str(self.scores_fail))
        self._recording_left -= 1
        return None if self._recording_left >= 0 and not wait else recording.refs

    def restore(self, folder: Path, label: str) -> list[PendingScores]:
        self.events.append(f"restore {label}")
        files = sorted(folder.glob(f"{label}_group_*.npz"))
        return [PendingScores(c, None, None) for file in files for c in pickle.loads(file.read_bytes())]

    def accumulate(self, part: Sequence[ScoredChunk]) -> None:
        raise AssertionError("no part of a batch is trained on before the rest has finished")

    def train_step(self, batch: Sequence[ScoredChunk]) -> TrainStats:
        if self.rank_dies_at == self.engine_version:
            raise ClusterError("actor rank 1: the process died")
        if self.bug_at == self.engine_version:
            raise RuntimeError("list index out of range")
        self.events.append("train")
        self.trained.append([(chunk.rollouts.ref, chunk.rollouts.on_policy) for chunk in batch])
        return TrainStats(1.0, 4, 0.1, 0.01)

    def evaluate(self, batch: Sequence[ScoredChunk], *, keep_tokens: int = 0) -> TrainStats:
        self.events.append("evaluate")
        extra = {"loss/token_kl": 0.3} if self.has_distribution else {"loss/sampled_reverse_kl": 0.2}
        return TrainStats(0.7, 4, extra=extra)

    def save(self, folder: Path, *, blocking: bool = False) -> None:
        assert self._saving is None, "one save at a time"
        assert folder.parent.is_dir() and not folder.exists()
        self.events.append("save")
        self.saves_blocking.append(blocking)
        self._saving, self._polls_left = (folder, self.engine_version), self.polls_per_save

    def save_finished(self, *, wait: bool, timeout_s: float | None = None) -> dict[str, FileDigest] | None:
        if wait:
            self.waits_s.append(timeout_s)
        (folder, step), self._polls_left = self._saving, self._polls_left - 1
        if self._polls_left >= 0 and not wait:
            return None
        self._saving = None
        if self.save_hangs:
            raise ClusterError("save_finished: no answer from: actor rank 1")
        written = write_actor(folder, step)
        if step == self.save_fails_at and self.save_failures:
            self.save_failures -= 1
            raise CheckpointError(f"actor rank 0: {folder} cannot be written: No space left on device")
        self.events.append(f"saved {step}")
        return written

    def load(self, folder: Path) -> None:
        check_actor(folder, step_of(folder.parent) or 0)
        self.events.append("load")

    def export_hf(self, folder: Path) -> None:
        if self.export_fails:
            folder.with_name(f"{folder.name}.partial").mkdir()
            raise ModelError(f"{folder} cannot be written: No space left on device")
        folder.mkdir()
        (folder / "of_version").write_text(f"{self.engine_version}")
        self.events.append("export")

    def memory_numbers(self) -> dict[str, float]:
        self.n_memory_calls += 1
        return {"memory/training_step/peak_gib": 1.5}

    def take_spans(self) -> list[ProcessSpans]:
        now_s = time.time()
        return [ProcessSpans("actor 0", "h", [Span("train", now_s - 1e-3, 5e-4), Span("sync", now_s - 4e-4, 1e-4)])]

    def take_computations(self, *, wait: bool) -> dict[str, list[Computation]]:
        return {"scoring 0": [Computation("w", time.time(), 0.0, 1e-4, 1)]}

    def push(self, policy_version: int) -> SyncReport:
        self.events.append(f"push {policy_version}")
        self.engine_version = policy_version
        return SyncReport(8, 0)


class StreamWorld(World):
    """A world whose stream completes every prompt immediately, but those at the `late` positions."""

    def __init__(self) -> None:
        super().__init__()
        self.late: frozenset[int] = frozenset()
        self.late_chunks: list[RolloutChunk] = []
        self.completed: queue.SimpleQueue[RolloutChunk | None] = queue.SimpleQueue()  # None: closed

    def open_stream(self, *, n: int, temperature: float, seed: int) -> StreamWorld:
        return self

    def admit(self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int]) -> None:
        for prompt, index in zip(prompts, prompt_indices, strict=True):
            chunk = answers(prompt, [index], 8, 0, self.engine_version)
            if index in self.late:
                self.late_chunks.append(chunk)
            else:
                self.completed.put(chunk)

    def waiting(self) -> list[int]:
        return []

    def finished(self, timeout_s: float | None = None) -> list[RolloutChunk]:
        chunk = self.completed.get()
        return [] if chunk is None else [chunk]

    def close(self) -> None:
        self.completed.put(None)

    def usage(self) -> RolloutUsage:
        self.events.append("usage")
        return super().usage()


def make(tmp_path: Path, world: World, *overrides: str, val: Sequence[Prompt] = ()) -> Trainer:
    base = ["data.train_files=[a]", "model.path=m", f"trainer.run_dir={tmp_path / 'run'}", "data.seed=10"]
    config = load_config(None, [*base, "trainer.global_batch_size=2", "eval.metric=exact_match", *overrides])
    roles = Roles(actor=world, rollout=world, scoring=world, weight_sync=world)
    folder = open_run_folder(config, {"name": "t", "fingerprint": "f"})
    return Trainer(config, roles, PROMPTS, val, folder, total_steps=config.trainer.total_steps)


def staleness(tmp_path: Path) -> list[float]:
    return [line["staleness/max"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss/total" in line]


def checkpoints(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())

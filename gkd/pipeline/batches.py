"""The sources of the loop's batches: their interface, what they share, and the source of whole batches.

`gkd.pipeline.streaming` and `gkd.pipeline.replay` have the others.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from gkd.config.schema import Config
from gkd.config.schema_sections import AHEAD
from gkd.data.sampler import PromptSampler, on_policy_indices
from gkd.errors import EngineFailed
from gkd.roles import RolloutRole, ScoringRole
from gkd.run.checkpoints import TrainerState
from gkd.spans import driver
from gkd.types import InFlight, PendingScores, Prompt, ResponseLimits

T = TypeVar("T")


class BatchSource(ABC):
    """One batch per step; each is in flight until it has been trained on. The methods here that return None do nothing.

    Attributes:
        max_staleness: the scheduler's bound, in steps; None for replays, whose batches have the age at their recording.
        generates: batches need the rollout engines; False for replays.
    """

    max_staleness: int | None
    generates = True

    @property
    def is_streaming(self) -> bool:
        """True if the engines keep generating between two calls."""
        return False

    def restore(self, folder: Path, state: TrainerState) -> None:
        """Restore what was in flight at a checkpoint; call it before the first batch.

        Args:
            folder: files of the rollouts in flight; absent if there were none.
        """

    def prefetch(self, step: int) -> None:
        """Start all rollouts that may start now that the engines hold the weights of `step`; returns at once."""

    def early_part(self, step: int) -> list[PendingScores]:
        """Return the next part of this step's batch, if training on it need not wait for the rest; else nothing.

        Waits until there is one, or the rest has finished. Raises ClusterError.
        """
        return []

    @abstractmethod
    def next_batch(self, step: int) -> list[PendingScores]:
        """Wait for the rollouts of this step's batch; the teacher is already scoring them. Raises ClusterError.

        Returns:
            All but the parts that `early_part` has returned.
        """

    def commit(self) -> None:
        """Record that the batch of the last `next_batch`, with its early parts, has been trained on."""

    def wait_until_idle(self) -> None:
        """Block until the engines can receive new weights; a stream returns at once. Raises ClusterError."""

    @abstractmethod
    def in_flight(self, step: int) -> InFlight:
        """Return what a run that resumes from `step` could not generate again identically."""

    def close(self, *, wait: bool) -> None:
        """Start no more rollouts. May be called twice.

        Args:
            wait: also stop the running ones, and wait until they have stopped. Raises ClusterError.
        """


def generate_and_score(
    rollout: RolloutRole,
    scoring: ScoringRole,
    prompts: Sequence[Prompt],
    on_policy: Sequence[int],
    *,
    n: int,
    temperature: float,
    seed: int,
    policy_version: int,
    limits: ResponseLimits | None = None,
) -> list[PendingScores]:
    """Generate all responses of a batch and submit them to the teacher; blocks until the last one is generated.

    Each chunk is submitted as soon as it is finished; those of the dataset's responses, which exist already, first.

    Args:
        on_policy: indices of the prompts that the student responds to, ascending. The others take the dataset's
            response.
        n: samples per on-policy prompt.
        policy_version: of the weights that the engines hold.
        limits: of the responses; None: those of the settings.
    """
    pending: list[PendingScores] = []
    if from_dataset := sorted(set(range(len(prompts))) - set(on_policy)):
        chosen = [prompts[i] for i in from_dataset]
        chunks = rollout.dataset(chosen, prompt_indices=from_dataset, policy_version=policy_version)
        pending += [scoring.submit(chunk) for chunk in chunks]
    if on_policy:
        chosen = [prompts[i] for i in on_policy]
        generated = rollout.generate(
            chosen, prompt_indices=on_policy, n=n, temperature=temperature, seed=seed, limits=limits
        )
        n_done = 0
        with driver.doing("generating", n * len(on_policy)):
            for chunk in generated:
                pending.append(scoring.submit(chunk))
                driver.done(n_done := n_done + chunk.n_sequences)
    return pending


class Background:
    """Runs jobs in order in a daemon thread.

    Unlike the threads of a `ThreadPoolExecutor`, it does not delay the exit of an interrupted run.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._closed = False
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def start(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; returns at once."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Cancel the jobs that have not started; does not wait for the running one."""
        self._closed = True
        self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            if self._closed:
                future.cancel()
                continue
            try:
                future.set_result(job())
            except BaseException as error:  # `result` raises it
                future.set_exception(error)
                # During its shutdown Ray ends threads that call it with SystemExit: no further job may start.
                self._closed = self._closed or not isinstance(error, Exception)


@dataclass(frozen=True, slots=True)
class _Batch:
    number: int  # step that trains on it
    version: int  # version of the weights that generate it
    pending: Callable[[], list[PendingScores]] = field(repr=False)  # waits for the rollouts, or generates them


class PrefetchedBatches(BatchSource):
    """Whole batches; steps s to s + ahead are generated before step s trains.

    Schedulers sync, one_step_off, two_step_off: whole batches, in order, each generated by one version of the
    weights.

        sync          generate s | train s | push | generate s+1 | train s+1 | push
        one_step_off  generate s+1 while training s | push | generate s+2 while training s+1 | push

    A push waits until the engines are idle, so a batch does not depend on timing: a resumed run generates the same
    batches, and those generated before the checkpoint are part of it.

    It has no early parts: which part finishes first depends on timing, and these batches do not.
    """

    def __init__(
        self, config: Config, rollout: RolloutRole, scoring: ScoringRole, sampler: PromptSampler, total_steps: int
    ) -> None:
        self._config = config
        self._rollout = rollout
        self._scoring = scoring
        self._sampler = sampler
        self._total_steps = total_steps
        self._ahead = self.max_staleness = AHEAD[config.trainer.scheduler]
        self._background = Background("generate") if self._ahead else None
        self._queue: deque[_Batch] = deque()

    def restore(self, folder: Path, state: TrainerState) -> None:
        for number in range(state.step, state.step + self._ahead):
            pending = self._scoring.restore(folder, _label(number))
            if not pending:  # total_steps ended before it, and is larger now
                break
            self._queue.append(_Batch(number, state.step - 1, partial(list, pending)))

    def prefetch(self, step: int) -> None:
        last = min(step + self._ahead, self._total_steps - 1)
        for number in range(self._queue[-1].number + 1 if self._queue else step, last + 1):
            job = partial(self._generate, number, step)
            pending = self._background.start(job).result if self._background else functools.cache(job)
            self._queue.append(_Batch(number, step, pending))

    def next_batch(self, step: int) -> list[PendingScores]:
        batch = self._queue[0]
        assert batch.number == step, f"step {step} would train on batch {batch.number}"
        return batch.pending()

    def commit(self) -> None:
        self._queue.popleft()

    def wait_until_idle(self) -> None:
        for batch in self._queue:
            _is_complete(batch)  # `next_batch` raises the error of a batch that cannot be completed

    def in_flight(self, step: int) -> InFlight:
        """Return the batches that older weights generated; the current weights can generate theirs again.

        A batch that an engine failed to complete is not part of it: a resumed run generates it with newer weights.
        """
        older = list(takewhile(lambda batch: batch.version < step and _is_complete(batch), self._queue))
        chunks = {_label(batch.number): batch.pending() for batch in older}
        return InFlight((step + len(older)) * self._config.trainer.global_batch_size, chunks=chunks)

    def close(self, *, wait: bool) -> None:
        del wait  # a running batch finishes soon, or ends with the engines
        if self._background is not None:
            self._background.close()

    def _generate(self, number: int, version: int) -> list[PendingScores]:
        """Generate and submit one batch. The result depends on its number, not on when this runs."""
        size = self._config.trainer.global_batch_size
        seed = self._config.data.seed
        config = self._config.at(number)
        prompts = self._sampler.take(number * size, size)
        return generate_and_score(
            self._rollout,
            self._scoring,
            prompts,
            on_policy_indices(number, size, self._config.distill.on_policy_share, seed),
            n=self._config.rollout.n,
            temperature=config.rollout.temperature,
            seed=seed + number,
            policy_version=version,
            limits=ResponseLimits(config.data.max_response_length, config.rollout.max_turns),
        )


def _is_complete(batch: _Batch) -> bool:
    try:
        batch.pending()
    except EngineFailed:  # the engines are idle for good
        return False
    return True


def _label(number: int) -> str:
    return f"batch_{number:08d}"

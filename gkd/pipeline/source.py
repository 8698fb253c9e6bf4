"""Define the interface of the loop's sources of batches, and what they share: generation, a thread that runs jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from gkd.roles import RolloutRole, ScoringRole
from gkd.run.checkpoints import TrainerState
from gkd.spans import driver
from gkd.types import InFlight, PendingScores, Prompt, ResponseLimits

T = TypeVar("T")


class BatchSource:
    """One batch per step; each is in flight until it has been trained on. The methods here that return do nothing.

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

    def next_batch(self, step: int) -> list[PendingScores]:
        """Wait for the rollouts of this step's batch; the teacher is already scoring them. Raises ClusterError.

        Returns:
            All but the parts that `early_part` has returned.
        """
        raise NotImplementedError

    def commit(self) -> None:
        """Record that the batch of the last `next_batch`, with its early parts, has been trained on."""

    def wait_until_idle(self) -> None:
        """Block until the engines can receive new weights; a stream returns at once. Raises ClusterError."""

    def in_flight(self, step: int) -> InFlight:
        """Return what a run that resumes from `step` could not generate again identically."""
        raise NotImplementedError

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

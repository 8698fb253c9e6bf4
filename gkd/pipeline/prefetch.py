"""sync, one_step_off, two_step_off: whole batches, in order, each answered by one version of the weights.

    sync          answer s | train s | push | answer s+1 | train s+1 | push
    one_step_off  answer s+1 beside train s | push | answer s+2 beside train s+1 | push

A push waits until nothing is being answered, so what a batch is does not depend on timing: a resumed run makes the
same ones, and those that were answered before the checkpoint are in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gkd.config.schedulers import AHEAD
from gkd.config.schema import Config
from gkd.data.mixing import on_policy_indices
from gkd.data.sampler import PromptSampler
from gkd.handles import InFlight, PendingScores
from gkd.metrics.writer import StageTimers
from gkd.pipeline.background import Background, Foreground, Result
from gkd.pipeline.generate import Generation
from gkd.roles import ScoringRole
from gkd.run.checkpoints import TrainerState


@dataclass(frozen=True, slots=True)
class _Batch:
    number: int  # of the step that trains on it
    version: int  # of the weights that answer it
    answered: Result[list[PendingScores]] = field(repr=False)


class PrefetchedBatches:
    """Implements `gkd.pipeline.source.BatchSource`; steps s to s + ahead are begun before step s trains."""

    def __init__(
        self, config: Config, answering: Generation, scoring: ScoringRole, sampler: PromptSampler, total_steps: int
    ) -> None:
        self._config, self._answering, self._scoring, self._sampler = config, answering, scoring, sampler
        self._total_steps = total_steps
        self._ahead = self.max_staleness = AHEAD[config.trainer.scheduler]
        self._beside = Background("answers") if self._ahead else None
        self._queue: deque[_Batch] = deque()

    def restore(self, folder: Path, state: TrainerState) -> None:
        for number in range(state.step, state.step + self._ahead):
            pending = self._scoring.restore(folder, _label(number), per_prompt=False)
            if not pending:  # the run was to end before it, and now goes on
                break
            self._queue.append(_Batch(number, state.step - 1, Foreground(partial(list, pending))))

    def begin(self, step: int) -> None:
        last = min(step + self._ahead, self._total_steps - 1)
        for number in range(self._queue[-1].number + 1 if self._queue else step, last + 1):
            job = partial(self._answer, number, step)
            start: Callable[..., Result[list[PendingScores]]] = self._beside.start if self._beside else Foreground
            self._queue.append(_Batch(number, step, start(job)))

    def next(self, step: int) -> list[PendingScores]:
        batch = self._queue[0]
        assert batch.number == step, f"step {step} would train on batch {batch.number}"
        return batch.answered.result()

    def trained(self) -> None:
        self._queue.popleft()

    def settle(self, timers: StageTimers) -> None:
        with timers("rollout"):
            for batch in self._queue:
                batch.answered.result()

    def in_flight(self, step: int) -> InFlight:
        """Those batches that earlier weights answered; what these weights began, they can answer again."""
        older = [batch for batch in self._queue if batch.version < step]
        chunks = {_label(batch.number): batch.answered.result() for batch in older}
        return InFlight((step + len(older)) * self._config.trainer.global_batch_size, chunks=chunks)

    def close(self, *, wait: bool) -> None:
        del wait  # a batch that is being answered is whole soon, or ends with the engines
        if self._beside is not None:
            self._beside.close()

    def _answer(self, number: int, version: int) -> list[PendingScores]:
        """Everything that depends on which batch it is, and nothing on when it is answered."""
        size, seed = self._config.trainer.global_batch_size, self._config.data.seed
        prompts = self._sampler.take(number * size, size)
        on_policy = on_policy_indices(number, size, self._config.distill.on_policy_share, seed)
        return self._answering.submitted(
            prompts, on_policy, n=self._config.rollout.n, seed=seed + number, policy_version=version
        )


def _label(number: int) -> str:
    return f"batch_{number:08d}"

"""stream: prompts go to the engines one by one, and a step takes what is finished (`StreamScheduler`).

    begin    admit what the bound on staleness allows
    next     wait for enough finished prompts, and for those that must not get older; the dataset's responses of this
             step, if it takes any, come along
    push     in the middle of responses; the engines go on with the new weights

A thread takes what finishes and asks the teacher about it at once. Which prompts make a batch depends on timing;
`trainer.record_batches` keeps them, and `trainer.replay` trains on them again.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gkd.config.schedulers import staleness_bound
from gkd.config.schema import Config
from gkd.data.mixing import on_policy_indices
from gkd.data.sampler import PromptSampler
from gkd.errors import ClusterError, RankTimeout
from gkd.handles import InFlight, PendingScores, RolloutChunk
from gkd.metrics.writer import StageTimers
from gkd.pipeline.staleness import StreamScheduler
from gkd.roles import RolloutRole, RolloutStream, ScoringRole
from gkd.run.checkpoints import TrainerState
from gkd.types import Prompt

LABEL = "stream"
_WAIT_S = 0.5  # of the thread, before it looks whether it is to end


class StreamedBatches:
    """Implements `gkd.pipeline.source.BatchSource` over one `RolloutStream`."""

    def __init__(
        self, config: Config, rollout: RolloutRole, scoring: ScoringRole, sampler: PromptSampler, total_steps: int
    ) -> None:
        self._config, self._rollout, self._scoring, self._sampler = config, rollout, scoring, sampler
        self._size = config.trainer.global_batch_size
        self.max_staleness = staleness_bound(config.trainer)
        self._on_policy = functools.lru_cache(4 * (self.max_staleness + 2))(self._places_of_the_student)
        self._ledger = StreamScheduler(self._on_policy, self.max_staleness, total_steps)
        self._pending: dict[int, PendingScores] = {}  # finished prompts, by position
        self._taken: list[int] = []  # the batch that is being trained on
        self._changed = threading.Condition()  # guards all of the above
        self._stream: RolloutStream | None = None
        self._error: Exception | None = None
        self._again: list[int] = []  # positions that were being answered at the checkpoint
        self._closed = False

    def restore(self, folder: Path, state: TrainerState) -> None:
        self._ledger.next_batch = state.sampler_position // self._size
        self._again = list(state.unfinished)
        for pending in self._scoring.restore(folder, LABEL, per_prompt=True):
            position, version = self._position(pending.rollouts), pending.rollouts.policy_version
            self._ledger.admit([position], version)
            self._ledger.finish(position, version)
            self._pending[position] = pending

    def begin(self, step: int) -> None:
        if self._stream is None:
            settings = self._config.rollout
            self._stream = self._rollout.open_stream(
                n=settings.n, temperature=settings.temperature, seed=self._config.data.seed
            )
            threading.Thread(target=self._take_what_finishes, args=(self._stream,), name="answers", daemon=True).start()
        with self._changed:
            again, self._again = self._again, []
            self._ledger.admit(again, step)
            positions = [*again, *self._ledger.begin(step)]
        if positions:
            self._stream.admit(self._prompts(positions), prompt_indices=positions)

    def next(self, step: int) -> list[PendingScores]:
        from_dataset = [self._scoring.submit(chunk) for chunk in self._dataset(step)]
        self._taken = self._wait_for(step)
        return [*from_dataset, *(self._pending[position] for position in self._taken)]

    def trained(self) -> None:
        with self._changed:
            self._ledger.trained(self._taken)
            for position in self._taken:
                del self._pending[position]
            self._taken = []

    def settle(self, timers: StageTimers) -> None:
        del timers  # the engines take new weights at any time

    def in_flight(self, step: int) -> InFlight:
        del step
        with self._changed:
            chunks = list(self._pending.values())
            unfinished = (*self._ledger.unfinished, *self._again)
            position = self._ledger.next_batch * self._size
            return InFlight(position, unfinished, {LABEL: chunks} if chunks else {})

    def close(self, *, wait: bool) -> None:
        self._closed = True
        if wait and self._stream is not None:
            self._stream.close()

    def _places_of_the_student(self, batch: int) -> list[int]:
        """Positions of the prompts that it answers, in the batch of the sampler's order with this number."""
        places = on_policy_indices(batch, self._size, self._config.distill.on_policy_share, self._config.data.seed)
        return [batch * self._size + place for place in places]

    def _dataset(self, step: int) -> list[RolloutChunk]:
        """The dataset's responses of this step, so that each step has its share of both kinds."""
        batch = range(step * self._size, (step + 1) * self._size)
        places = sorted(set(batch) - set(self._on_policy(step)))
        return (
            self._rollout.dataset(self._prompts(places), prompt_indices=places, policy_version=step) if places else []
        )

    def _prompts(self, positions: Sequence[int]) -> list[Prompt]:
        return [prompt for position in positions for prompt in self._sampler.take(position, 1)]

    def _wait_for(self, step: int) -> list[int]:
        """The positions of this step's batch, as soon as they are finished.

        Raises:
            ClusterError: an engine died. RankTimeout: nothing has finished for trainer.stage_timeout_s.
        """
        timeout_s = self._config.trainer.stage_timeout_s
        with self._changed:
            heard, n_finished = time.monotonic(), -1
            while (chosen := self._ledger.choose(step)) is None:
                if self._error is not None:
                    raise self._error
                if len(self._pending) != n_finished:
                    heard, n_finished = time.monotonic(), len(self._pending)
                if not self._changed.wait(timeout=max(0.0, heard + timeout_s - time.monotonic())):
                    waiting = self._ledger.unfinished
                    raise RankTimeout(
                        f"rollout: no prompt of the {len(waiting)} in the stream finished within {timeout_s:.0f} s; "
                        f"the first ones are {waiting[:5]} of the order"
                    )
            return chosen

    def _take_what_finishes(self, stream: RolloutStream) -> None:
        """The thread: from the engines to the teacher."""
        try:
            while not self._closed:
                for chunk in stream.finished(_WAIT_S):
                    self._finish(chunk, chunk.policy_version)
        except Exception as error:  # whoever waits for the batch raises it
            if not self._closed:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()

    def _finish(self, chunk: RolloutChunk, version: int) -> None:
        pending, position = self._scoring.submit(chunk), self._position(chunk)
        with self._changed:
            try:
                self._ledger.finish(position, version)
            except KeyError as error:
                text = (
                    f"rollout: an answer to the prompt at position {position} of the order came, which nobody waits for"
                )
                raise ClusterError(text) from error
            self._pending[position] = pending
            self._changed.notify_all()

    def _position(self, chunk: RolloutChunk) -> int:
        return int(chunk.sample_index[0]) // self._config.rollout.n

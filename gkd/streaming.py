"""stream: prompts go to the engines one by one, and a step takes what is finished. See `gkd.schedule.StreamLedger`.

    begin    admit what the bound on staleness allows
    next     wait for enough finished prompts, and for those that must not get older
    push     in the middle of responses; the engines go on with the new weights

A thread takes what finishes and asks the teacher about it at once. Which prompts make a batch depends on timing;
`trainer.record_batches` keeps them, and `trainer.replay` trains on them again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gkd.checkpoints import TrainerState
from gkd.config import Config
from gkd.errors import ClusterError
from gkd.metrics import StageTimers
from gkd.mixing import on_policy_places
from gkd.roles import PendingScores, RolloutChunk, RolloutRole, RolloutStream, ScoredChunk, ScoringRole
from gkd.sampler import PromptSampler
from gkd.schedule import StreamLedger
from gkd.sources import InFlight
from gkd.types import Prompt

LABEL = "stream"
_WAIT_S = 0.5  # of the thread, before it looks whether it is to end


class Streaming:
    """Implements `gkd.sources.BatchSource` over one `RolloutStream`."""

    def __init__(
        self, config: Config, rollout: RolloutRole, scoring: ScoringRole, sampler: PromptSampler, total_steps: int
    ) -> None:
        self._config, self._rollout, self._scoring, self._sampler = config, rollout, scoring, sampler
        self._size = config.trainer.global_batch_size
        self._ledger = StreamLedger(self._size, config.trainer.max_staleness, total_steps * self._size)
        self._pending: dict[int, PendingScores] = {}  # finished prompts, by position
        self._taken: list[int] = []  # the batch that is being trained on
        self._changed = threading.Condition()  # guards all of the above
        self._stream: RolloutStream | None = None
        self._error: Exception | None = None
        self._again: list[int] = []  # positions that were being answered at the checkpoint
        self._closed = False

    def restore(self, folder: Path, state: TrainerState) -> None:
        self._ledger.position = state.sampler_position
        self._again = list(state.unfinished)
        for pending in self._scoring.restore(folder, LABEL, per_prompt=True):
            position = self._position(pending.rollouts)
            # The dataset's responses have no version, and never get too old.
            version = pending.rollouts.policy_version if pending.rollouts.on_policy else state.step
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
            positions = [*self._again, *self._ledger.room(step)]
            self._again = []
            self._ledger.admit(positions, step)
        self._admit(self._stream, positions, step)

    def next(self, step: int, timers: StageTimers) -> list[ScoredChunk]:
        with timers("rollout"):
            self._taken = self._wait_for(step)
        with timers("teacher"):
            return self._scoring.collect([self._pending[position] for position in self._taken])

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
            return InFlight(self._ledger.position, unfinished, {LABEL: chunks} if chunks else {})

    def close(self) -> None:
        self._closed = True
        if self._stream is not None:
            self._stream.close()

    def _admit(self, stream: RolloutStream, positions: Sequence[int], step: int) -> None:
        """To the engines, or answered at once by the dataset where it is its turn."""
        share, seed = self._config.distill.on_policy_share, self._config.data.seed
        batches = {position // self._size for position in positions}
        places = {batch: set(on_policy_places(batch, self._size, share, seed)) for batch in batches}
        on_policy = [p for p in positions if p % self._size in places[p // self._size]]
        from_dataset = sorted(set(positions) - set(on_policy))
        if on_policy:
            stream.admit(self._prompts(on_policy), places=on_policy)
        for position in from_dataset:
            for chunk in self._rollout.dataset(self._prompts([position]), places=[position], policy_version=step):
                self._finish(chunk, step)

    def _prompts(self, positions: Sequence[int]) -> list[Prompt]:
        return [prompt for position in positions for prompt in self._sampler.take(position, 1)]

    def _wait_for(self, step: int) -> list[int]:
        """The positions of this step's batch, as soon as they are finished.

        Raises:
            ClusterError: an engine died, or nothing has finished for trainer.stage_timeout_s.
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
                    raise ClusterError(
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

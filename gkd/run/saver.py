"""Save asynchronously: the loop waits for a copy of the student in host memory; the files are written during training.

If nothing trains during a save, the ranks write their states without a copy (`blocking`).

    save      wait for the previous save -> every rank copies its state -> return; the hosts that hold the rollouts in
              flight write them
    poll      at each later step: commit if all ranks have finished writing
    finish    wait until they have, and commit: before the next save and before the run ends

One save at a time, so at most one copy in host memory. A save that fails stops the run at the next of these calls. An
uncommitted save is not usable, so every end of the run calls `finish`, unless a second interrupt stops it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gkd.config.check_values import save_interval
from gkd.config.load import yaml_values
from gkd.config.schema_sections import TrainerConfig
from gkd.errors import GkdError, TeacherError, TeacherUnavailable
from gkd.log import get_logger
from gkd.roles import ActorRole, ScoringRole
from gkd.run.checkpoints import ACTOR, IN_FLIGHT, Best, BestStep, TrainerState, step_folder
from gkd.run.disk import naming
from gkd.run.folder import RunFolder
from gkd.types import FileDigest, InFlight, PendingScores, Recording

log = get_logger("saver")

# Keys that a resumed run may change, and that the numbers of its evaluations depend on.
_OF_EVALUATION = ("eval.max_prompts", "eval.metric", "eval.answer_marker")


@dataclass(frozen=True, slots=True)
class _Save:
    """A pending save."""

    state: TrainerState
    began_s: float
    folder: Path  # folder of the rollouts in flight
    in_flight: Mapping[str, Sequence[PendingScores]]  # label -> pending scores
    recordings: dict[str, Recording]


class Saver:
    """Decide when a save is due, start it and commit it, for one run.

    Attributes:
        committed_step: step of the newest checkpoint.
    """

    def __init__(
        self,
        config: TrainerConfig,
        folder: RunFolder,
        actor: ActorRole,
        scoring: ScoringRole,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._actor = actor
        self._scoring = scoring
        self._interval = save_interval(config.save_every)
        self._clock = clock
        self._began_s = clock()  # start of the last save; before the first one, of this process
        self._pending: _Save | None = None
        self._best = BestStep(config)
        self.committed_step = 0  # step of the newest checkpoint; step 0 needs none

    def resume(self) -> TrainerState | None:
        """Load the checkpoint to resume from. Return None if the run starts at step 0. Raises CheckpointError."""
        state = self._folder.resume(self._actor.load)
        if state is not None and self._folder.resumes_own_checkpoint():  # a branch has no checkpoint yet
            self.committed_step = state.step
            self._best.restore(self._comparable(self._folder.store.best()), state.step)
        return state

    def _comparable(self, best: Best | None) -> Best | None:
        """Return the best step; None if it was evaluated with other settings, so that new numbers are not compared."""
        if best is None:
            return None
        before = yaml_values(self._folder.store.root / step_folder(best.step) / "config.yaml")
        now = self._folder.config
        changed = [key for key in _OF_EVALUATION if before.get(key, now.value(key)) != now.value(key)]
        if changed:
            text = "step %d, the best so far, had another %s: trainer.keep_best compares from now on and may delete it"
            log.warning(text, best.step, " and ".join(changed))
        return None if changed else best

    def evaluated(self, step: int, numbers: Mapping[str, float]) -> None:
        """Note the numbers of an evaluation, for trainer.keep_best.

        Raises:
            ConfigError: it is not one of them.
            CheckpointError: `checkpoints/best` cannot be written.
        """
        self._best.add(step, numbers)
        best = self._best.best
        if best is not None and best.step == step == self.committed_step:  # saved before its evaluation had finished
            self._folder.prune_checkpoints(best)

    def is_due(self, step: int) -> bool:
        """Return whether to save this finished step, as trainer.save_every demands."""
        if self._best.best is not None and step == self._best.best.step and not self.has(step):
            return True
        if self._interval.seconds:
            return self._clock() - self._began_s >= self._interval.seconds
        return self._interval.steps > 0 and step % self._interval.steps == 0

    def has(self, step: int) -> bool:
        """Return whether this step is saved or being saved."""
        return step == self.committed_step or (self._pending is not None and step == self._pending.state.step)

    def save(self, step: int, in_flight: InFlight, *, scored: bool = True, blocking: bool = False) -> dict[str, float]:
        """Start to save this step, unless it is saved or being saved; blocks for the copy and for a pending save.

        Args:
            scored: include the teacher's scores of rollouts in flight. False: a resumed run requests them again.
            blocking: make no copy, and block until the ranks have written. `finish` commits the save.

        Returns:
            Numbers of a save that finished in this call.

        Raises:
            CheckpointError: this save or the pending one failed; its files are removed.
        """
        if self.has(step):
            return {}
        numbers = self.finish()
        self._began_s = began_s = self._clock()
        try:
            folder = self._folder.store.begin(step)
            self._actor.save(folder / ACTOR, blocking=blocking)
            try:
                recordings = self._record(in_flight, folder / IN_FLIGHT, scored)
            except Exception:
                self._wait_for_ranks(None)
                raise
        except Exception:
            self._discard()
            raise
        state = TrainerState(step, in_flight.position, in_flight.unfinished)
        self._pending = _Save(state, began_s, folder / IN_FLIGHT, in_flight.chunks, recordings)
        return numbers

    def poll(self) -> dict[str, float]:
        """Commit the pending save if all ranks have written it, and return its numbers. Raises CheckpointError."""
        return self._commit(wait=False)

    def finish(self, timeout_s: float | None = None) -> dict[str, float]:
        """Wait for the pending save, if any, commit it, and return its numbers.

        Args:
            timeout_s: None means trainer.stage_timeout_s.

        Raises:
            CheckpointError: it failed.
            ClusterError: a rank died, or did not finish in time.
        """
        return self._commit(wait=True, timeout_s=timeout_s)

    def _commit(self, *, wait: bool, timeout_s: float | None = None) -> dict[str, float]:
        save = self._pending
        if save is None:
            return {}
        try:
            written = self._written(save, wait, timeout_s)
            if written is None:
                return {}
            manifest = self._folder.commit_checkpoint(save.state, written, best=self._best.best)
        except Exception:
            self._discard()
            raise
        self._pending = None
        self.committed_step = save.state.step
        seconds = self._clock() - save.began_s
        log.info("checkpoint of step %d: %d bytes in %.1f s", save.state.step, manifest.n_bytes, seconds)
        return {"perf/checkpoint_write_s": seconds, "perf/checkpoint_bytes": float(manifest.n_bytes)}

    def _record(self, in_flight: InFlight, folder: Path, scored: bool) -> dict[str, Recording]:
        if not in_flight.chunks:
            return {}
        with naming(folder):
            folder.mkdir()
        return {
            label: self._scoring.record(chunks, folder, label, scored=scored)
            for label, chunks in in_flight.chunks.items()
        }

    def _written(self, save: _Save, wait: bool, timeout_s: float | None) -> dict[str, FileDigest] | None:
        """Return all files of the save, relative to its folder, or None if some are still being written."""
        began_s = self._clock()

        def left_s() -> float | None:
            return None if timeout_s is None else max(0.0, began_s + timeout_s - self._clock())

        files: dict[str, FileDigest] = {}
        try:
            for label in save.recordings:
                recorded = self._recorded(save, label, wait, left_s())
                if recorded is None:
                    return None
                files |= {f"{IN_FLIGHT}/{name}": digest for name, digest in recorded.items()}
        except Exception:
            self._wait_for_ranks(left_s())
            raise
        actor = self._actor.save_finished(wait=wait, timeout_s=left_s())  # last: it can be read only once
        return None if actor is None else files | {f"{ACTOR}/{name}": digest for name, digest in actor.items()}

    def _recorded(self, save: _Save, label: str, wait: bool, timeout_s: float | None) -> dict[str, FileDigest] | None:
        """Record rollouts without scores if the teacher is lost; a resumed run requests the scores."""
        try:
            return self._scoring.record_finished(save.recordings[label], wait=wait, timeout_s=timeout_s)
        except (TeacherError, TeacherUnavailable) as error:
            log.warning("step %d is saved without the scores of %s: %s", save.state.step, label, str(error))
            save.recordings[label] = self._scoring.record(save.in_flight[label], save.folder, label, scored=False)
            return self._scoring.record_finished(save.recordings[label], wait=wait, timeout_s=timeout_s)

    def _wait_for_ranks(self, timeout_s: float | None) -> None:
        """Wait until the ranks have written, before their files are removed: they accept no save while writing."""
        try:
            self._actor.save_finished(wait=True, timeout_s=timeout_s)
        except GkdError as error:
            log.error("the student's part of the failed save failed, too: %s", str(error))

    def _discard(self) -> None:
        self._pending = None
        self._folder.store.remove_leftovers()

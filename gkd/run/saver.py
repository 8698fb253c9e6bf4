"""Saves beside the training: the loop waits for a copy of the student in host memory, the files follow.

    save      wait for the save before -> every rank copies its state -> back to training; the rollouts in flight are
              written by the hosts that have them
    poll      at each later step: have all ranks written? Then commit
    finish    the same, waiting: before the next save and before the run ends

One save at a time, so no more than one copy in host memory. A save that fails stops the run at the next of these calls.
A save is of no use to anybody before its commit, so whatever ends the run but an interrupt waits for it by `finish`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gkd.errors import GkdError, TeacherError, TeacherUnavailable
from gkd.handles import FileDigest, InFlight, PendingScores, Recording
from gkd.log import get_logger
from gkd.roles import ActorRole, ScoringRole
from gkd.run.checkpoints import ACTOR, IN_FLIGHT, TrainerState
from gkd.run.disk import naming
from gkd.run.folder import RunFolder

log = get_logger("saver")


@dataclass(frozen=True, slots=True)
class _Save:
    """A save under way."""

    state: TrainerState
    began_s: float
    folder: Path  # of the rollouts in flight
    in_flight: Mapping[str, Sequence[PendingScores]]  # by label
    recordings: dict[str, Recording]


class Saver:
    """Begins, watches and commits the saves of one run.

    Args:
        in_background: False: `save` returns when the checkpoint is committed.
    """

    def __init__(
        self,
        folder: RunFolder,
        actor: ActorRole,
        scoring: ScoringRole,
        *,
        in_background: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._actor, self._scoring = folder, actor, scoring
        self._in_background, self._clock = in_background, clock
        self._under_way: _Save | None = None
        self.committed_step = 0  # of the newest checkpoint; step 0 needs none

    def resume(self) -> TrainerState | None:
        """Load what the run goes on from; None: it begins at step 0. Raises CheckpointError."""
        state = self._folder.resume(self._actor.load)
        if state is not None and self._folder.starts_from_its_own():  # a branch has nothing of its own yet
            self.committed_step = state.step
        return state

    def save(self, step: int, in_flight: InFlight, *, scored: bool = True) -> dict[str, float]:
        """Begin to save this step, unless it is saved already or about to be; blocks for the copy, and for an earlier
        save still under way.

        Args:
            scored: with the teacher's scores of what is in flight, once they are there. False: it is scored again.

        Returns:
            The numbers of a save that came to its end in here.

        Raises:
            CheckpointError: this save or the one under way failed; what it wrote is removed.
        """
        if step == self.committed_step or (self._under_way and step == self._under_way.state.step):
            return {}
        numbers = self.finish()
        began_s = self._clock()
        try:
            folder = self._folder.store.begin(step)
            self._actor.save(folder / ACTOR)
            try:
                recordings = self._record(in_flight, folder / IN_FLIGHT, scored)
            except Exception:
                self._let_the_ranks_finish(None)
                raise
        except Exception:
            self._give_up()
            raise
        state = TrainerState(step, in_flight.position, in_flight.unfinished)
        self._under_way = _Save(state, began_s, folder / IN_FLIGHT, in_flight.chunks, recordings)
        return numbers if self._in_background else numbers | self.finish()

    def poll(self) -> dict[str, float]:
        """Commit the save under way if all ranks have written it; its numbers if so. Raises CheckpointError."""
        return self._commit(wait=False)

    def finish(self, timeout_s: float | None = None) -> dict[str, float]:
        """Wait for the save under way, if there is one, and commit it; its numbers.

        Args:
            timeout_s: how long to wait; None: trainer.stage_timeout_s.

        Raises:
            CheckpointError: it failed.
            ClusterError: a rank died, or has not written its files by then.
        """
        return self._commit(wait=True, timeout_s=timeout_s)

    def _commit(self, *, wait: bool, timeout_s: float | None = None) -> dict[str, float]:
        save = self._under_way
        if save is None:
            return {}
        try:
            written = self._written(save, wait, timeout_s)
            if written is None:
                return {}
            manifest = self._folder.commit_checkpoint(save.state, written)
        except Exception:
            self._give_up()
            raise
        self._under_way, self.committed_step = None, save.state.step
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
        """All files of the save, relative to its folder; None: some are still being written."""
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
            self._let_the_ranks_finish(left_s())
            raise
        actor = self._actor.save_finished(wait=wait, timeout_s=left_s())  # last: it answers once
        return None if actor is None else files | {f"{ACTOR}/{name}": digest for name, digest in actor.items()}

    def _recorded(self, save: _Save, label: str, wait: bool, timeout_s: float | None) -> dict[str, FileDigest] | None:
        """A teacher that is gone costs no save: what it owes scores of is recorded without, to be scored on resume."""
        try:
            return self._scoring.record_finished(save.recordings[label], wait=wait, timeout_s=timeout_s)
        except (TeacherError, TeacherUnavailable) as error:
            log.warning("step %d is saved without the scores of %s: %s", save.state.step, label, str(error))
            save.recordings[label] = self._scoring.record(save.in_flight[label], save.folder, label, scored=False)
            return self._scoring.record_finished(save.recordings[label], wait=wait, timeout_s=timeout_s)

    def _let_the_ranks_finish(self, timeout_s: float | None) -> None:
        """Before their files are given up: they take no other save while they write one."""
        try:
            self._actor.save_finished(wait=True, timeout_s=timeout_s)
        except GkdError as error:
            log.error("the student's part of a save that failed anyhow failed, too: %s", str(error))

    def _give_up(self) -> None:
        self._under_way = None
        self._folder.store.remove_leftovers()

"""How a run ends: the failure policy of the training loop, the last save and export; and how it starts again by itself.

After a rank failed in the training loop the same command starts from the newest checkpoint: the process replaces itself
(execve) after all others have ended, so no state but the run folder survives.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from gkd.config.schema import Config
from gkd.errors import (
    CheckpointError,
    ClusterError,
    EngineFailed,
    GkdError,
    RankFailed,
    RankTimeout,
    TeacherUnavailable,
)
from gkd.log import get_logger
from gkd.run import interrupts
from gkd.run.checkpoints import CheckpointStore
from gkd.run.folder import CHECKPOINTS
from gkd.run.saver import Saver

log = get_logger("run")

LAST_SAVE_WAIT_S = 60.0  # time for a pending save after a rank has died or hangs


class SaveNow(Protocol):
    def __call__(self, *, scored: bool) -> None: ...


class CloseSource(Protocol):
    def __call__(self, *, wait: bool) -> None: ...


@contextmanager
def run_ending(
    saver: Saver, save_now: SaveNow, close_source: CloseSource, diagnose_hang: Callable[[RankTimeout], RankTimeout]
) -> Iterator[None]:
    """Save what can be saved if the block fails, stop the rollouts, and raise its error.

    - Every error but KeyboardInterrupt is raised after the pending save has finished (ClusterError: after at most
      `LAST_SAVE_WAIT_S`, since the ranks may hang).
    - KeyboardInterrupt: the last finished step is saved, within `interrupts.LIMIT_S` of the first signal, if the
      interrupt came between steps (`gkd.run.interrupts`); otherwise nothing is.
    - TeacherUnavailable: the last finished step is saved, without the scores that the teacher still owes.
    - EngineFailed: the last finished step is saved, because the actor is well.
    - RankTimeout: `diagnose_hang` runs before anything else, while the ranks still hang.
    Errors on the way are logged, so that the user gets the one that ended the run.
    """
    with interrupts.training_loop():
        try:
            yield
        except KeyboardInterrupt:
            _end_interrupted(saver, save_now)
            raise
        except RankTimeout as timeout:
            error = diagnose_hang(timeout)
            _save_what_can_be_saved(error, saver, save_now, close_source)
            raise error from None
        except Exception as error:
            _save_what_can_be_saved(error, saver, save_now, close_source)
            raise
        finally:
            close_source(wait=False)  # no thread may start anything more, even after an interrupt


def save_and_export(save_now: Callable[[], None], export: Callable[[], None]) -> None:
    """Save the last step, then export; export even if the save fails, not after an interrupt.

    Raises CheckpointError: the save failed.
    """
    try:
        save_now()
    except CheckpointError as error:
        log.error("the last checkpoint failed: %s; exporting the student anyway", str(error))
        attempt("the export", export)
        raise
    with interrupts.interruptible():
        export()


def attempt(what: str, action: Callable[[], object]) -> bool:
    """Run `action`, log an error in it, and return whether it succeeded."""
    try:
        action()
    except Exception as error:
        log.error("%s failed, too: %s: %s", what, type(error).__name__, str(error))
        return False
    return True


def _end_interrupted(saver: Saver, save_now: SaveNow) -> None:
    if interrupts.came_between_steps():
        try:
            attempt("the pending save", saver.finish)
            attempt("the last save", lambda: save_now(scored=False))
        except KeyboardInterrupt:
            log.warning("the last save is not finished, and discarded")
    interrupts.ignore_signals()
    newest = f"step {saver.committed_step}; trainer.resume=auto continues there" if saver.committed_step else "none"
    log.warning("interrupted; newest checkpoint: %s", newest)


def _save_what_can_be_saved(error: Exception, saver: Saver, save_now: SaveNow, close_source: CloseSource) -> None:
    # A log record would keep the error's frames, so its text is logged. One line suffices: the program prints the whole
    # message at its end.
    log.error("the run ends: %s: %s", type(error).__name__, str(error).partition("\n")[0])
    wait_s = LAST_SAVE_WAIT_S if isinstance(error, ClusterError) else None
    attempt("the pending save", lambda: saver.finish(wait_s))
    if isinstance(error, TeacherUnavailable) and attempt("the last save", lambda: save_now(scored=False)):
        log.error(
            "stopped after step %d (checkpoint saved). Restart the teacher, then the trainer with trainer.resume=auto",
            saver.committed_step,
        )
    if isinstance(error, EngineFailed) and attempt("the last save", lambda: save_now(scored=False)):
        log.error("stopped; newest checkpoint: step %s", saver.committed_step or "none")
    if not isinstance(error, ClusterError):  # otherwise the engines hang or are gone, and end with the run
        attempt("stopping the rollouts", lambda: close_source(wait=True))


_COUNT = "GKD_RUN_RESTARTS"  # environment variable: how often this run has started again by itself
_SETTING = "trainer.resume"


def may_start_again(error: GkdError, config: Config) -> bool:
    """Return whether the run should start again after this error of its training loop.

    Only a failed or hanging process is a reason: other errors would come again. A branch of another run
    (trainer.resume: a folder) needs a checkpoint of its own.
    """
    if not isinstance(error, RankFailed | RankTimeout) or interrupts.requested():
        return False
    store = CheckpointStore(Path(config.trainer.run_dir) / CHECKPOINTS)
    if config.trainer.resume not in ("never", "auto") and not store.committed():
        return False
    return n_restarts() < config.trainer.max_restarts


def n_restarts() -> int:
    """Return how often this run has started again by itself."""
    return int(os.environ.get(_COUNT, "0"))


def start_again(environment: Mapping[str, str], more: Sequence[str] = ()) -> None:
    """Replace this process by a new one that resumes the run; does not return.

    Args:
        environment: of this process when it started.
        more: words that its command lacks.
    """
    print(f"trainer.max_restarts: the run starts again, restart {n_restarts() + 1}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [word for word in sys.orig_argv[1:] if not word.startswith(f"{_SETTING}=")]
    command = [sys.executable, *kept, *more, f"{_SETTING}=auto"]
    os.execve(sys.executable, command, {**environment, _COUNT: str(n_restarts() + 1)})

"""Start a run again after a rank failed in the training loop: the same command, from the newest checkpoint.

The process replaces itself (execve) after all others have ended, so no state but the run folder survives.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from gkd.config.schema import Config
from gkd.errors import GkdError, RankFailed, RankTimeout
from gkd.run import interrupts
from gkd.run.checkpoints import CheckpointStore
from gkd.run.folder import CHECKPOINTS

_COUNT = "GKD_RUN_RESTARTS"  # environment variable: how often this run has started again by itself
_SETTING = "trainer.resume"


def may_start_again(error: GkdError, config: Config) -> bool:
    """Return whether the run should start again after this error of its training loop.

    Only a failed or hanging process is a reason: other errors would come again. A branch of another run
    (trainer.resume: a folder) needs a checkpoint of its own.
    """
    if not isinstance(error, RankFailed | RankTimeout) or interrupts.requested():
        return False
    if config.trainer.resume not in ("never", "auto") and not _has_checkpoint(config):
        return False
    return n_restarts() < config.trainer.max_restarts


def n_restarts() -> int:
    """Return how often this run has started again by itself."""
    return int(os.environ.get(_COUNT, "0"))


def start_again(environment: Mapping[str, str]) -> None:
    """Replace this process by a new one that resumes the run; does not return.

    Args:
        environment: of this process when it started.
    """
    print(f"trainer.max_restarts: the run starts again, restart {n_restarts() + 1}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command(), {**environment, _COUNT: str(n_restarts() + 1)})


def command() -> list[str]:
    """Return the words of this process's command, with trainer.resume=auto."""
    kept = [word for word in sys.orig_argv[1:] if not word.startswith(f"{_SETTING}=")]
    return [sys.executable, *kept, f"{_SETTING}=auto"]


def _has_checkpoint(config: Config) -> bool:
    return bool(CheckpointStore(Path(config.trainer.run_dir) / CHECKPOINTS).committed())

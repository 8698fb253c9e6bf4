"""Run child processes that never outlive their parent.

The parent becomes the reaper of its descendants (Linux: PR_SET_CHILD_SUBREAPER). It adopts orphans, such as Ray's
daemons, so `process_family` stops them. A child receives SIGTERM when the parent dies (PR_SET_PDEATHSIG), so even
`kill -9` of the parent leaves no process.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from gkd.errors import ClusterError, GkdError
from gkd.start.own_teacher import own_teacher

ON_CPU = ("--device", "cpu", "--dtype", "float32")  # flags of a teacher server
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@contextmanager
def process_family(grace_s: float = 15.0) -> Iterator[None]:
    """Adopt the orphans among the descendants of this process, and at the end stop whatever was started in the block.

    Args:
        grace_s: from SIGTERM to SIGKILL. SIGKILL also ends the descendants of processes that have ended before.
    """
    me = psutil.Process()
    earlier = me.children()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        # A second signal must not interrupt the cleanup.
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            left = [child for child in me.children() if child not in earlier]
            for process in [*left] if number == signal.SIGKILL else []:
                with suppress(psutil.NoSuchProcess):  # it has ended, and its children are ours
                    left += process.children(recursive=True)
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            psutil.wait_procs(left, timeout=patience_s)
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def run_parts(parts: Callable[[], None]) -> int:
    """Run a function that starts processes; stop them at its end, on an error and on Ctrl-C. Return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):  # SIGINT, too: a shell that starts it in the background ignores it.
        signal.signal(number, _as_interrupt)
    try:
        with process_family():
            parts()
    except (GkdError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; all started processes are stopped", file=sys.stderr)
        return 130
    return 0


def start(
    command: Sequence[str], *, log: Path | None = None, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a child in its own session, so that Ctrl-C reaches only the parent, which stops it.

    Args:
        log: file for its output; None means this terminal.
        cwd: its folder; None means the one of this process.
        env: its whole environment; None means the one of this process.
    """
    output = None if log is None else log.open("wb")
    try:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdout=output,
            stderr=output and subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    finally:
        if output is not None:
            output.close()


def run(command: Sequence[str], what: str) -> None:
    """Run a child until it ends.

    Raises:
        ClusterError: it failed; its own message is on the terminal.
    """
    code = start(command).wait()
    if code:
        raise ClusterError(f"{what} ended with exit code {code} (see its message above)")


def train(
    config: Path, run_dir: Path, teacher: Path, overrides: Sequence[str] = (), flags: Sequence[str] = ON_CPU
) -> None:
    """Run the trainer with a teacher server until it ends.

    Args:
        flags: of the server; its log is RUN_DIR.teacher.log.

    Raises:
        GkdError: the server does not start, or the trainer failed.
    """
    with own_teacher(str(teacher), flags, Path(f"{run_dir}.teacher.log")) as port:
        command = [sys.executable, "-m", "gkd.cli", "train", "--config", str(config), *overrides]
        # What the examples rely on comes last, so no override changes it.
        run([*command, f"trainer.run_dir={run_dir}", f"teacher.server_port={port}"], "training")


def _as_interrupt(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise KeyboardInterrupt


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")

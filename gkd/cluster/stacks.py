"""Collect the Python stacks of processes that hang, from outside. Uses /proc and a signal.

Every process of a job calls `listen`. On a signal, a C handler writes the stacks of all threads to a file in memory,
even while a call that never returns holds the interpreter. Any process that may read /proc/PID/fd can read the file.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import time
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path

from gkd.cluster.host import process_info

RANK_ENV = "GKD_RANK"  # set for a rank's process and its children: RUN/RANK

_SIGNAL = signal.SIGUSR2
_FILE = "gkd_stacks"
_DUMP_S = 3.0  # a running process writes its stacks at once
_POLL_S = 0.05
_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "inside a disk or driver call",
}
_PACKAGES, _STDLIB = "/site-packages/", "/lib/python3"
_FRAME = re.compile(r'  File "(.+)", line (\d+|\?+) in (.+)')

_file: BufferedRandom | None = None  # open until the process ends


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{_short(self.file)} line {self.line} ({self.function})"

    @property
    def is_ours(self) -> bool:
        """Return whether the file is part of this package. A checkout folder named gkd may contain libraries, too."""
        _, installed, inside = self.file.rpartition(_PACKAGES)
        return inside.startswith("gkd/") if installed else "/gkd/" in self.file and _STDLIB not in self.file

    @property
    def is_stdlib(self) -> bool:
        """Return whether the file is part of Python's standard library."""
        return self.is_importlib or (_STDLIB in self.file and _PACKAGES not in self.file)

    @property
    def is_importlib(self) -> bool:
        return self.file.startswith("<frozen importlib")


@dataclass(frozen=True, slots=True)
class RankStack:
    """One process of a rank: the rank's own, or a child of it."""

    rank: str
    host: str
    pid: int
    command: str
    text: str  # output of faulthandler; empty if there is none
    problem: str = ""  # reason for an empty or incomplete text
    is_child: bool = False  # a child of the rank's own process

    @property
    def threads(self) -> list[list[Frame]]:
        """Return the threads that run this project's code, else the main thread; innermost frame first."""
        threads = [
            [Frame(*match.groups()) for match in map(_FRAME.match, block.splitlines()) if match]
            for block in self.text.split("\n\n")
        ]
        threads = [frames for frames in threads if frames]
        return [frames for frames in threads if any(f.is_ours for f in frames)] or threads[-1:]

    def shown(self) -> str:
        """Format `threads`, outermost frame last."""
        kept = ([frame for frame in frames if not frame.is_importlib] for frames in self.threads)
        return "\n".join("".join(f"   {frame}\n" for frame in frames) for frames in kept)

    @property
    def in_collective(self) -> bool:
        """Return whether all relevant threads are inside a collective or a rendezvous."""
        return bool(self.threads) and all(_collective(frames) is not None for frames in self.threads)

    @property
    def is_idle(self) -> bool:
        """Return whether the process waits for its next Ray call."""
        threads = self.threads
        return bool(threads) and all(f.function == "main_loop" and "/ray/" in f.file for f, *_ in threads)

    def where(self) -> str:
        """Describe in one line where the process is in the code."""
        if self.is_idle:
            return "idle"
        if not self.threads:
            return self.problem or "runs no Python code"
        return "; ".join(_where(frames) for frames in self.threads)


def rank_env(run: str, rank: str) -> dict[str, str]:
    """Return the environment variable that identifies the processes of a rank.

    Args:
        run: unique id of the run.
    """
    return {RANK_ENV: f"{run}/{rank}"}


def listen() -> None:
    """Make this process write its stacks on the signal. Repeated calls have no effect."""
    global _file
    if _file is None:
        # The file name identifies the rank: a process that changes its title overwrites its readable environment.
        _file = os.fdopen(os.memfd_create(f"{_FILE}:{os.environ.get(RANK_ENV, '')}"), "w+b")
        faulthandler.register(_SIGNAL, file=_file, all_threads=True, chain=False)


def stacks_here(run: str, rank: str = "") -> list[RankStack]:
    """Return the stacks of this run's processes on this machine, each rank before its children. Takes seconds.

    Args:
        rank: the only rank to collect; empty means all.
    """
    found = {pid: owner for pid, owner in ranks_here(run).items() if rank in ("", owner)}
    requests = [(pid, rank, *_request_stacks(pid)) for pid, rank in found.items()]
    deadline = time.monotonic() + _DUMP_S
    stacks = []
    for pid, rank, file, size, problem in requests:
        process = process_info(pid)
        is_child = process is not None and found.get(process.parent) == rank
        stacks.append(_read_stack(pid, rank, file, size, problem, deadline, is_child))
    return sorted(stacks, key=lambda stack: (stack.rank, stack.is_child, stack.pid))


def ranks_here(run: str) -> dict[int, str]:
    """Return {pid: rank} of the run's processes on this machine."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        owner = _owner(folder)
        if owner.startswith(f"{run}/"):
            found[int(folder.name)] = owner.removeprefix(f"{run}/")
    return found


def _owner(folder: Path) -> str:
    """Return RUN/RANK of a process; empty if it belongs to no rank, has ended, or has another user."""
    try:
        for link in (folder / "fd").iterdir():
            _, marked, name = os.readlink(link).partition(f"memfd:{_FILE}:")
            if marked:
                return name.removesuffix(" (deleted)")
        variables = (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    mark = f"{RANK_ENV}=".encode()
    return next((os.fsdecode(v.removeprefix(mark)) for v in variables if v.startswith(mark)), "")


def _request_stacks(pid: int) -> tuple[Path | None, int, str]:
    """Send the signal. Return (file with the stacks, its size before, reason if there is no file)."""
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if f"memfd:{_FILE}:" in os.readlink(link):
                size = link.stat().st_size
                os.kill(pid, _SIGNAL)
                return link, size, ""
    except OSError as error:
        return None, 0, f"stacks not accessible: {error.strerror}"
    # The signal would end a process that has not called `listen`.
    return None, 0, "no stack handler: still starting, or runs none of this project's code"


def _read_stack(
    pid: int, rank: str, file: Path | None, size: int, problem: str, deadline: float, is_child: bool
) -> RankStack:
    text = ""
    while file is not None and not problem:
        now = _read(file, size)
        if now and now == text:  # complete
            break
        text = now
        if time.monotonic() > deadline:
            problem = f"no stacks received: {_state(pid)}"
        time.sleep(_POLL_S)
    return RankStack(rank, socket.gethostname(), pid, _command(pid), text, problem, is_child)


def _read(file: Path, start: int) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            return stream.read().decode(errors="replace")
    except OSError:  # the process has ended
        return ""


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return "ended"
    return " ".join(words).strip()[:80]


def _state(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "has ended"
    return _STATES.get(state, f"state {state}")


def _collective(frames: list[Frame]) -> Frame | None:
    """Return this project's innermost frame if it is inside a collective, else None."""
    for frame in frames:
        if frame.is_ours:
            return None
        if "/torch/distributed/" in frame.file:
            break
    else:
        return None
    return next((frame for frame in frames if frame.is_ours), frames[-1])


def _where(frames: list[Frame]) -> str:
    caller = _collective(frames)
    if caller is not None:
        return f"in a collective, called at {caller}"
    # Skip the standard library: its innermost frames are the same for all callers.
    inner = next((frame for frame in frames if not frame.is_stdlib), frames[0])
    ours = next((frame for frame in frames if frame.is_ours), None)
    return f"at {inner}" if ours is None or ours is inner else f"at {inner}, called at {ours}"


def _short(file: str) -> str:
    """Return the path from the package on: `gkd/actor/worker.py`, `torch/cuda/__init__.py`."""
    for parent in (_PACKAGES, _STDLIB):
        if parent in file:
            return file.rpartition(parent)[2].lstrip(".0123456789/")
    return "gkd/" + file.rpartition("/gkd/")[2] if "/gkd/" in file else file

"""Where does a process stand that hangs? Its Python stacks, taken from outside of it. Pure but for /proc.

Every process of a job `listen`s: on a signal, a handler in C writes the stacks of all threads into a file in memory,
also while the interpreter is held by a call that never returns. Whoever may read /proc/PID/fd reads that file.
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

from gkd.cluster.processes import process_info

RANK_ENV = "GKD_RANK"  # of a rank's process and its children: which run's it is, and what it is called

_SIGNAL = signal.SIGUSR2
_FILE = "gkd_stacks"
_ANSWER_S = 3.0  # a process that runs writes its stacks at once
_POLL_S = 0.05
_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "inside a disk or driver call",
}
_PACKAGES, _STDLIB = "/site-packages/", "/lib/python3"
_FRAME = re.compile(r'  File "(.+)", line (\d+|\?+) in (.+)')

_file: BufferedRandom | None = None  # open for as long as the process lives


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{_short(self.file)} line {self.line} ({self.function})"

    @property
    def is_ours(self) -> bool:
        """Of this package; the folder of a checkout may be called gkd, too, and hold the libraries as well."""
        _, installed, inside = self.file.rpartition(_PACKAGES)
        return inside.startswith("gkd/") if installed else "/gkd/" in self.file and _STDLIB not in self.file

    @property
    def is_stdlib(self) -> bool:
        """Of Python's own library."""
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
    text: str  # as faulthandler writes it; empty: it did not answer
    problem: str = ""  # why not
    is_child: bool = False  # of the rank's own process

    @property
    def threads(self) -> list[list[Frame]]:
        """Those worth a look, innermost frame first: all that run this project's code, else the main thread."""
        threads = [
            [Frame(*match.groups()) for match in map(_FRAME.match, block.splitlines()) if match]
            for block in self.text.split("\n\n")
        ]
        threads = [frames for frames in threads if frames]
        return [frames for frames in threads if any(f.is_ours for f in frames)] or threads[-1:]

    def shown(self) -> str:
        """`threads`, outermost frame last."""
        kept = ([frame for frame in frames if not frame.is_importlib] for frames in self.threads)
        return "\n".join("".join(f"   {frame}\n" for frame in frames) for frames in kept)

    @property
    def in_collective(self) -> bool:
        """Is every thread that counts inside of a collective, or at a rendezvous?"""
        return bool(self.threads) and all(_collective(frames) is not None for frames in self.threads)

    @property
    def is_idle(self) -> bool:
        """Has it nothing to do but to wait for its next call?"""
        threads = self.threads
        return bool(threads) and all(f.function == "main_loop" and "/ray/" in f.file for f, *_ in threads)

    def where(self) -> str:
        """One line for people."""
        if self.is_idle:
            return "waits for its next call"
        if not self.threads:
            return self.problem or "it runs no Python code"
        return "; ".join(_where(frames) for frames in self.threads)


def rank_env(run: str, rank: str) -> dict[str, str]:
    """The environment by which a rank's processes are known.

    Args:
        run: a word that no other run has.
    """
    return {RANK_ENV: f"{run}/{rank}"}


def listen() -> None:
    """Have this process write its stacks when it is asked; a second call changes nothing."""
    global _file
    if _file is None:
        # Its name says whose it is: the environment that others can read is lost where a process changes its title.
        _file = os.fdopen(os.memfd_create(f"{_FILE}:{os.environ.get(RANK_ENV, '')}"), "w+b")
        faulthandler.register(_SIGNAL, file=_file, all_threads=True, chain=False)


def stacks_here(run: str) -> list[RankStack]:
    """Of all processes of this run's ranks on this machine, a rank's own before its children; takes seconds at most."""
    found = _ranks_of(run)
    asked = [(pid, rank, *_ask(pid)) for pid, rank in found.items()]
    deadline = time.monotonic() + _ANSWER_S
    stacks = []
    for pid, rank, file, size, problem in asked:
        process = process_info(pid)
        is_child = process is not None and found.get(process.parent) == rank
        stacks.append(_answer(pid, rank, file, size, problem, deadline, is_child))
    return sorted(stacks, key=lambda stack: (stack.rank, stack.is_child, stack.pid))


def _ranks_of(run: str) -> dict[int, str]:
    """pid -> rank."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        whose = _whose(folder)
        if whose.startswith(f"{run}/"):
            found[int(folder.name)] = whose.removeprefix(f"{run}/")
    return found


def _whose(folder: Path) -> str:
    """What `rank_env` says of this process; empty: it is none of a rank, has ended, or is another user's."""
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


def _ask(pid: int) -> tuple[Path | None, int, str]:
    """(the file that it writes into, how much is in it now, why it can't be asked)."""
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if f"memfd:{_FILE}:" in os.readlink(link):
                size = link.stat().st_size
                os.kill(pid, _SIGNAL)
                return link, size, ""
    except OSError as error:
        return None, 0, f"it can't be asked: {error.strerror}"
    # To a process that does not listen the signal would be the end.
    return None, 0, "it takes no questions: it has not come that far, or runs none of this project's code"


def _answer(
    pid: int, rank: str, file: Path | None, size: int, problem: str, deadline: float, is_child: bool
) -> RankStack:
    text = ""
    while file is not None and not problem:
        now = _read(file, size)
        if now and now == text:  # nothing more has come
            break
        text = now
        if time.monotonic() > deadline:
            problem = f"it does not answer: {_state(pid)}"
        time.sleep(_POLL_S)
    return RankStack(rank, socket.gethostname(), pid, _command(pid), text, problem, is_child)


def _read(file: Path, start: int) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            return stream.read().decode(errors="replace")
    except OSError:  # it has ended
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
        return "it has ended"
    return _STATES.get(state, f"state {state}")


def _collective(frames: list[Frame]) -> Frame | None:
    """The innermost frame of this project, if what it called waits for other ranks."""
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
        return f"waits for other ranks in a collective, called at {caller}"
    # Not in Python's own library, whose innermost calls look alike whoever makes them.
    inner = next((frame for frame in frames if not frame.is_stdlib), frames[0])
    ours = next((frame for frame in frames if frame.is_ours), None)
    return f"at {inner}" if ours is None or ours is inner else f"at {inner}, called at {ours}"


def _short(file: str) -> str:
    """From the package on: `gkd/actor/worker.py`, `torch/cuda/__init__.py`."""
    for border in (_PACKAGES, _STDLIB):
        if border in file:
            return file.rpartition(border)[2].lstrip(".0123456789/")
    return "gkd/" + file.rpartition("/gkd/")[2] if "/gkd/" in file else file

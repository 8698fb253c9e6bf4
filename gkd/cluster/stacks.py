"""Collect the Python stacks of processes that hang, from outside, and report the ranks. Uses /proc and a signal.

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
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

from gkd.cluster.host import process_info
from gkd.spans import Progress
from gkd.user_code import EXEC_S

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
_PACKAGES = "/site-packages/"
_STDLIB = "/lib/python3"
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
    """Make this process write its stacks on the signal, and one of a rank ignore what stops a run. May be repeated."""
    global _file
    if _file is None:
        if RANK_ENV in os.environ:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the driver saves, and ends this process
                signal.signal(number, signal.SIG_IGN)
        # The file name identifies the rank: a process that changes its title overwrites its readable environment.
        _file = os.fdopen(os.memfd_create(f"{_FILE}:{os.environ.get(RANK_ENV, '')}"), "w+b")
        faulthandler.register(_SIGNAL, file=_file, all_threads=True, chain=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (_SIGNAL,))  # Ray's processes block it


def stacks_here(run: str, rank: str = "") -> list[RankStack]:
    """Return the stacks of this run's processes on this machine, each rank before its children. Takes seconds.

    Args:
        rank: the only rank to collect; empty means all.
    """
    ranks = {pid: owner for pid, owner in ranks_here(run).items() if rank in ("", owner)}
    requests = [(pid, rank, *_request_stacks(pid)) for pid, rank in ranks.items()]
    deadline = time.monotonic() + _DUMP_S
    stacks = []
    for pid, rank, file, size, problem in requests:
        process = process_info(pid)
        is_child = process is not None and ranks.get(process.parent) == rank
        stacks.append(_read_stack(pid, rank, file, size, problem, deadline, is_child))
    return sorted(stacks, key=lambda stack: (stack.rank, stack.is_child, stack.pid))


def ranks_here(run: str) -> dict[int, str]:
    """Return {pid: rank} of the run's processes on this machine. Waits for processes that are being started."""
    ranks: dict[int, str] = {}
    unknown = list(Path("/proc").glob("[0-9]*"))
    deadline = time.monotonic() + EXEC_S
    while unknown:
        owners = {folder: _owner(folder) for folder in unknown}
        for folder, owner in owners.items():
            if owner is not None and owner.startswith(f"{run}/"):
                ranks[int(folder.name)] = owner.removeprefix(f"{run}/")
        unknown = [folder for folder, owner in owners.items() if owner is None and time.monotonic() < deadline]
    return ranks


def _owner(folder: Path) -> str | None:
    """Return RUN/RANK of a process; empty if it belongs to no rank, has ended, or has another user.

    None while it is being started, and Linux shows no environment yet.
    """
    try:
        for link in (folder / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                _, marked, name = os.readlink(link).partition(f"memfd:{_FILE}:")
                if marked:
                    return name.removesuffix(" (deleted)")
        environment = (folder / "environ").read_bytes()
        if not environment:
            os.readlink(folder / "exe")  # OSError: a thread of the kernel, or a process that has ended
            return None
    except OSError:
        return ""
    mark = f"{RANK_ENV}=".encode()
    return next((os.fsdecode(v.removeprefix(mark)) for v in environment.split(b"\0") if v.startswith(mark)), "")


def _request_stacks(pid: int) -> tuple[Path | None, int, str]:
    """Send the signal. Return (file with the stacks, its size before, reason if there is no file)."""
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
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


# Diagnose a hang: collect the stacks of all ranks, and separate waiting ranks from the ranks that they wait for.


_NODES_S = 30.0  # includes the start of a process on each node
_NAMED = 8  # ranks that are listed one by one


@dataclass(frozen=True, slots=True)
class HangReport:
    """The ranks that hang, with their stacks."""

    lines: list[str]  # human-readable: the ranks that others wait for, and their location in the code
    excerpt: str  # stacks of the first few of these ranks
    stacks: str  # complete stacks of all ranks


def hang_report(run: str, names: Sequence[str], progress: Mapping[str, Progress], late: Sequence[str]) -> HangReport:
    """Collect the stacks of all ranks of this run, and describe them as `describe` does.

    Takes seconds, at most `_NODES_S`.

    Args:
        run: see `stacks.rank_env`.
    """
    stacks, silent = _all_stacks(run)
    return describe(names, progress, late, stacks, silent)


def describe(
    names: Sequence[str],
    progress: Mapping[str, Progress],
    late: Sequence[str],
    stacks: Sequence[RankStack],
    silent: Sequence[str] = (),
) -> HangReport:
    """Make the report.

    Args:
        names: of all expected ranks, as in `stacks.RANK_ENV`.
        progress: of the ranks that have reported it.
        late: names of the ranks or calls without a reply, see `RankTimeout`.
        silent: nodes that did not reply.
    """
    with_stack = {stack.rank for stack in stacks}
    late_stacks = [stack for stack in stacks if _is_late(stack.rank, late, with_stack | set(names))]
    # A child without a stack, such as a helper process of a library, does not show what its rank does.
    candidates = [stack for stack in late_stacks if stack.text or not stack.is_child]
    waiting = [stack for stack in candidates if stack.in_collective]
    idle = [stack for stack in candidates if stack.is_idle]
    groups = _groups([stack for stack in candidates if not stack.in_collective and not stack.is_idle], progress)
    not_late = [stack for stack in stacks if stack not in late_stacks]
    lines = [f"node {node}: no stacks received" for node in silent]
    # Ranks without a stack may be on a silent node.
    missing = [name for name in names if name not in with_stack] if not silent else []
    lines += _limited([f"{name}: no process (not started by Ray)" for name in missing])
    lines += _limited([_group_line(group, progress) for group in groups])
    if waiting:
        lines.append(f"waiting in a collective: {_counted(waiting)}; first: {_line(waiting[0], progress)}")
    if idle:
        lines.append(f"idle: {_counted(idle)}")
    if not_late:
        lines.append(f"not late: {_counted(not_late)}")
    firsts = [group[0] for group in groups] or waiting[:1]
    shown = [_head(stack, progress) + stack.shown() for stack in firsts[:_NAMED]]
    return HangReport(lines, "\n".join(shown), "\n".join(_head(s, progress) + s.text for s in stacks))


def _is_late(rank: str, late: Sequence[str], ranks: Collection[str]) -> bool:
    """Return whether the rank may be late; true for all ranks if a late name matches no rank."""
    in_words = [{word for word in ranks if re.search(rf"\b{re.escape(word)}\b", name)} for name in late]
    return not all(in_words) or not late or any(rank in words for words in in_words)


def _groups(stacks: Sequence[RankStack], progress: Mapping[str, Progress]) -> list[list[RankStack]]:
    """Group stacks by location in the code: processes without a stack first, then the smallest groups.

    Many ranks at one location probably wait for the few that are elsewhere.
    """
    groups: dict[str, list[RankStack]] = defaultdict(list)
    for stack in sorted(stacks, key=lambda stack: -progress[stack.rank].for_s if stack.rank in progress else 0.0):
        groups[stack.where()].append(stack)
    return sorted(groups.values(), key=lambda group: (not group[0].problem, len(group)))


def _group_line(group: Sequence[RankStack], progress: Mapping[str, Progress]) -> str:
    first = _line(group[0], progress)
    return first if len(group) == 1 else f"{_counted(group)}; first: {first}"


def _line(stack: RankStack, progress: Mapping[str, Progress]) -> str:
    reported = progress.get(stack.rank)
    phase = f"{reported.phase} for {reported.for_s:.0f} s" if reported is not None else "no progress reported"
    return f"{stack.rank} ({stack.host}, pid {stack.pid}): {phase}; {stack.where()}"


def _counted(stacks: Sequence[RankStack]) -> str:
    names = sorted({stack.rank for stack in stacks})
    return f"{len(names)} ({', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''})"


def _head(stack: RankStack, progress: Mapping[str, Progress]) -> str:
    return f"== {_line(stack, progress)}\n   {stack.command}\n"


def _limited(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _NAMED else [*lines[:_NAMED], f"... and {len(lines) - _NAMED} more"]


def _all_stacks(run: str) -> tuple[list[RankStack], list[str]]:
    """Return (stacks, addresses of nodes that did not reply)."""
    import ray  # lazily: processes without Ray listen, too
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote(num_cpus=0, max_retries=0)(stacks_here)
    refs = {
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(run): node
        for node in ray.nodes()
        if node["Alive"]
    }
    done, late = ray.wait(list(refs), num_returns=len(refs), timeout=_NODES_S)
    stacks: list[RankStack] = []
    silent = [refs[ref]["NodeManagerAddress"] for ref in late]
    for ref in done:
        try:
            stacks += ray.get(ref)
        except RayError as error:
            silent.append(f"{refs[ref]['NodeManagerAddress']} ({error})")
    return stacks, silent

"""Remove what vLLM leaves on a host, however its processes end.

vLLM removes its files when it is shut down, but that takes 5 s, and a killed process does not do it; its sockets it
never removes. So each engine keeps its files in a folder, with links to its names in /dev/shm, and any process of the
host can remove them: the engine at the end of the run, the next process of its slot, the driver.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import psutil

from gkd.cluster.stacks import RANK_ENV
from gkd.cluster.temporary import temporary_folder

_SHARED_MEMORY = Path("/dev/shm")
# Messages between vLLM's processes, their semaphores, and collectives on a CPU.
_NAMES = ("psm_*", "sem.mp-*", "vllm_dist_*")
_BYTES = len("/gkd_vllm_12345678_9999/00000000-0000-0000-0000-000000000000")  # the path of a socket of vLLM


def engine_folder(owner: str = "") -> Path:
    """Return the folder of an engine, the same for all processes of a slot of a run.

    Args:
        owner: RUN/RANK; RUN/*: a pattern of all engines of a run; empty means this process.
    """
    run, _, rank = (owner or os.environ.get(RANK_ENV, str(os.getpid()))).partition("/")
    return temporary_folder(_BYTES) / f"gkd_vllm_{run[:8]}_{rank.rpartition(' ')[2]}"


def link_shared_memory(folder: Path) -> None:
    """Link in `folder` the names in /dev/shm that this process and its children have mapped."""
    mapped = set[str]()  # inodes: a semaphore is mapped under another name
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(OSError):  # it has ended
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            mapped |= {line.split()[4] for line in lines if f" {_SHARED_MEMORY}/" in line}
    for path in (path for pattern in _NAMES for path in _SHARED_MEMORY.glob(pattern)):
        with suppress(OSError):  # it, or the folder, has been removed; or it is linked already
            if str(path.stat().st_ino) in mapped:
                (folder / path.name).symlink_to(path)


def remove_files(pattern: Path) -> None:
    """Remove these folders, and what they link to in /dev/shm. The engines have ended, or are about to be killed."""
    for folder in pattern.parent.glob(pattern.name):
        for path in folder.glob("*"):
            with suppress(OSError):  # the path is not a link, or another process has removed it
                path.readlink().unlink()
        shutil.rmtree(folder, ignore_errors=True)

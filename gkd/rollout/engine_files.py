"""Remove what vLLM leaves on a host, however its processes end.

vLLM removes its files when it is shut down, but that takes 5 s, and a killed process does not do it; its sockets it
never removes. So each engine keeps its files in a folder, with links to its names in /dev/shm, and any process of the
host can remove them: the engine at the end of the run, the next process of its slot, the driver.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import psutil

from gkd.cluster.stacks import RANK_ENV

_SHARED_MEMORY = Path("/dev/shm")
# Messages between vLLM's processes, their semaphores, and collectives on a CPU.
_NAMES = ("psm_*", "sem.mp-*", "vllm_dist_*")
_RUN_DIGITS = 8  # of the run's id: the path of a socket has at most 107 characters


def engine_folder() -> Path:
    """Return the folder of this process's engine. All processes of a slot of a run have the same one."""
    run, _, rank = os.environ.get(RANK_ENV, str(os.getpid())).partition("/")
    return _folder(run, rank.rpartition(" ")[2])


def keep_files_in(folder: Path) -> None:
    """Make the vLLM engine that this process starts next keep its files in `folder`."""
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    remove_files(folder)  # of a process that was killed
    folder.mkdir()
    atexit.register(remove_files, folder)
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    for executor in (multiproc_executor, uniproc_executor):
        executor.get_file_store_init_method = lambda: f"file://{folder}/vllm_dist_{uuid4().hex}"


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


def remove_files(folder: Path) -> None:
    """Remove the folder and what it links to in /dev/shm, if they exist."""
    for path in folder.glob("*"):
        with suppress(OSError):  # it is no link, or another process removes it, too
            path.readlink().unlink()
    shutil.rmtree(folder, ignore_errors=True)


def remove_files_of(run: str) -> None:
    """Remove the files of all engines of a run on this host. Call it when their processes have ended."""
    pattern = _folder(run, "*")
    for folder in pattern.parent.glob(pattern.name):
        remove_files(folder)


def _folder(run: str, engine: str) -> Path:
    return Path(tempfile.gettempdir(), f"gkd_vllm_{run[:_RUN_DIGITS]}_{engine}")

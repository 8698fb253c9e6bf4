"""Files of a vLLM engine that was killed: its folder, and its names in /dev/shm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from gkd.cluster.stacks import rank_env
from gkd.rollout.vllm.start import engine_folder, link_shared_memory, remove_files

RUN = "0123456789abcdef"
SHARED_MEMORY = Path("/dev/shm")
# An engine with one child. Both map memory, and the child has a semaphore that its sibling could open by name.
CHILD = """
import multiprocessing, threading
from multiprocessing.shared_memory import SharedMemory
memory, lock = SharedMemory(create=True, size=64), multiprocessing.get_context("spawn").Lock()
print(memory.name, "sem." + lock._semlock.name.strip("/"), flush=True)
threading.Event().wait()
"""
ENGINE = f"""
import subprocess, sys, threading
from multiprocessing.shared_memory import SharedMemory
from gkd.rollout.vllm.start import engine_folder, link_shared_memory
memory = SharedMemory(create=True, size=64)
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
names = child.stdout.readline()
engine_folder().mkdir()
(engine_folder() / "socket").touch()
link_shared_memory(engine_folder())
link_shared_memory(engine_folder())  # as at the end of a run
print(memory.name, names, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def killed_engine(
    tmp_path: Path, temporary_is: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Path]]:
    """Kill all processes of an engine, and yield the names in /dev/shm that they have left."""
    temporary_is(tmp_path)
    for name, value in rank_env(RUN, "rollout engine 3").items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-c", ENGINE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as engine:
        assert engine.stdout is not None
        left = [SHARED_MEMORY / name for name in engine.stdout.readline().split()]
        os.killpg(engine.pid, signal.SIGKILL)  # with multiprocessing's trackers, which would remove the names
    assert len(left) == 3 and all(path.exists() for path in left)
    yield left
    for path in left:
        path.unlink(missing_ok=True)


def test_the_driver_removes_what_a_killed_engine_has_left(killed_engine: list[Path], tmp_path: Path) -> None:
    """If it fails, each engine that is killed keeps memory until the host is booted, or the end of a run removes the
    files of another run.
    """
    other = SharedMemory(create=True, size=64)
    try:
        others = tmp_path / engine_folder().name.replace(RUN[:8], "76543210")
        others.mkdir()
        link_shared_memory(others)  # this process has not mapped what the engine has left
        linked = {path.name for path in others.iterdir()}
        assert other.name in linked and linked.isdisjoint(path.name for path in killed_engine)
        remove_files(engine_folder(f"{RUN}/*"))
        assert not any(path.exists() for path in killed_engine)
        assert not engine_folder().exists()
        assert list(tmp_path.iterdir()) == [others] and (SHARED_MEMORY / other.name).exists()
    finally:
        other.close()
        other.unlink()


def test_the_next_process_of_the_slot_removes_what_a_killed_engine_has_left(killed_engine: list[Path]) -> None:
    """If it fails, an engine that is started again cannot start, or its predecessors fill /dev/shm during the run."""
    killed_engine[0].unlink()  # part of it may be gone
    remove_files(engine_folder())
    assert not engine_folder().exists() and not any(path.exists() for path in killed_engine)
    remove_files(engine_folder())  # and all of it

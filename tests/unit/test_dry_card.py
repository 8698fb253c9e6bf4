"""Test the library that stands in for CUDA cards: memory, IPC, streams, forks. Needs g++ and CUDA's headers.

Training and collectives on the cards: `python -m tests.gpu.matrix --dry`, and tests/dist with tests/dry_card/run.sh.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dry_card.environment import HERE, build_cards, remove_segments

# A program begins with it: `cuda` is the library, and new() allocates n bytes on the current card.
PROGRAM = """
import ctypes, os, sys
from ctypes import byref, c_char_p, c_int, c_long, c_void_p
cuda = ctypes.CDLL(os.environ["LIBRARY"])
def new(n):
    p = c_void_p()
    assert cuda.cudaMalloc(byref(p), c_long(n)) == 0
    return p
def used(card):
    memory = (c_long * 3)()
    cuda.nvmlDeviceGetMemoryInfo(c_void_p(card + 1), memory)
    return memory[2] >> 20
def copy(to, source, stream):
    assert cuda.cudaMemcpyAsync(to, c_char_p(source), c_long(len(source)), 1, stream) == 0
"""
Start = Callable[..., "subprocess.Popen[str]"]


def headers() -> Path | None:
    """Return the folder of cuda.h, or None."""
    sites = [Path(sysconfig.get_path("purelib")), *HERE.parents[1].glob(".venv-gpu/lib/python3.*/site-packages")]
    folders = [folder for site in sites for folder in site.glob("nvidia/*/include")]
    folders += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include", Path("/usr/local/cuda/include")]
    return next((folder for folder in folders if (folder / "cuda.h").exists()), None)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library of the cards."""
    if "DRY_CARD_BUILD" in os.environ:
        return Path(os.environ["DRY_CARD_BUILD"]) / "libcards.so"
    folder = headers()
    if folder is None or not shutil.which("g++") or not shutil.which("nm"):
        pytest.skip("needs g++, nm and CUDA's headers (pip install nvidia-cuda-runtime)")
    return build_cards(tmp_path_factory.mktemp("cards"), folder)


@pytest.fixture
def start(library: Path) -> Iterator[Start]:
    """Return a function that starts a program on a machine with two cards of 1 GiB."""
    machine = {"DRY_CARD_MACHINE": uuid.uuid4().hex, "DRY_CARD_COUNT": "2", "DRY_CARD_GIB": "1"}
    started: list[subprocess.Popen[str]] = []

    def start(program: str, **variables: str) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES")}
        env |= {**machine, "LIBRARY": str(library), **variables}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", PROGRAM + program], env=env, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    remove_segments(machine)


def output(process: subprocess.Popen[str], text: str = "") -> str:
    """Return the output of a program that has to succeed."""
    out = process.communicate(text, timeout=60)[0]
    assert process.returncode == 0
    return out.strip()


def test_memory_is_charged_to_its_card(start: Start) -> None:
    """Fails if free memory, which admission and memory reports read, does not follow the allocations of a card."""
    program = """
assert cuda.cudaSetDevice(1) == 0
context = used(1)
p = new(64 << 20)
print(context, used(0), used(1), cuda.cudaMalloc(byref(c_void_p()), c_long(1 << 30)), cuda.cudaFree(p), used(1))
"""
    assert output(start(program)) == "500 0 564 2 0 500"


def test_a_late_copy_is_visible_after_a_wait_for_it(start: Start) -> None:
    """Fails if DRY_CARD_LATE hides a missing wait, or if a correct wait is not enough."""
    program = """
p, stream, event = new(100), c_void_p(), c_void_p()
cuda.cudaStreamCreate(byref(stream)), cuda.cudaEventCreate(byref(event))
def now(): return ctypes.string_at(p, 1).decode().replace(chr(0), "-")
copy(p, b"a", stream), cuda.cudaEventRecord(event, stream), copy(p, b"b", stream)
seen = now()
seen += str(cuda.cudaEventQuery(event)) + now()
cuda.cudaStreamWaitEvent(None, event, 0)
seen += now()
cuda.cudaStreamSynchronize(stream)
print(seen + now())
"""
    assert output(start(program, DRY_CARD_LATE="1")) == "-600-ab"
    assert output(start(program)) == "b0bbb"


def test_a_fork_after_the_first_call_cannot_use_cuda(start: Start) -> None:
    """Fails if a process that forks after its first CUDA call passes, which stops with an error on a card."""
    program = """
new(100)
pid = os.fork()
if not pid: os._exit(cuda.cudaMalloc(byref(c_void_p()), c_long(100)))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert output(start(program)) == "3"

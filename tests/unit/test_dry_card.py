"""Test the stand-in for CUDA cards. `bash tests/dry_card/run.sh` runs this file in the GPU environment.

Elsewhere the tests of torch are skipped, and the others need g++ and CUDA's headers (nvidia-cuda-runtime).
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

on_cards = pytest.mark.skipif("DRY_CARD_BUILD" not in os.environ, reason="run it with bash tests/dry_card/run.sh")
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


def test_another_process_reads_memory_over_ipc(start: Start) -> None:
    """Fails if weights that go over CUDA IPC do not arrive, or if a process could open its own handle."""
    owner = start("""
p, handle = new(100), ctypes.create_string_buffer(64)
copy(p, b"weights", None)
cuda.cudaIpcGetMemHandle(handle, p)
print(handle.raw.hex(), flush=True)
class Handle(ctypes.Structure): _fields_ = [("bytes", ctypes.c_char * 64)]
own = cuda.cudaIpcOpenMemHandle(byref(c_void_p()), Handle.from_buffer(handle), 1)
print(own, used(0), sys.stdin.readline())
""")
    handle = owner.stdout.readline().strip()
    reader = f"""
class Handle(ctypes.Structure): _fields_ = [("bytes", ctypes.c_char * 64)]
p = c_void_p()
assert cuda.cudaIpcOpenMemHandle(byref(p), Handle.from_buffer_copy(bytes.fromhex("{handle}")), 1) == 0
print(ctypes.string_at(p, 7).decode(), cuda.cudaIpcCloseMemHandle(p))
"""
    assert output(start(reader)) == "weights 0"
    assert output(owner, "end\n").split()[0] != "0"


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


def test_a_uuid_chooses_the_card(start: Start) -> None:
    """Fails if a process that gets its card by UUID, as from Ray or MIG, finds another one."""
    names = "t = ctypes.create_string_buffer(96); cuda.nvmlDeviceGetUUID(c_void_p(2), t, 96); print(t.value.decode())"
    card = output(start(names))
    program = """
n, bus = c_int(), ctypes.create_string_buffer(32)
print(cuda.cudaGetDeviceCount(byref(n)), n.value, cuda.cudaDeviceGetPCIBusId(bus, 32, 0), bus.value.decode())
"""
    assert output(start(program, CUDA_VISIBLE_DEVICES=card)) == "0 1 0 0000:11:00.0"
    assert output(start(program, CUDA_VISIBLE_DEVICES="0,7,1")).startswith("0 1 0 0000:10")


def test_the_driver_describes_a_card(start: Start) -> None:
    """Fails if Triton, which asks the driver and not the runtime, finds no shared memory and refuses each kernel."""
    program = "n = c_int(); print(cuda.cuDeviceGetAttribute(byref(n), 97, 0), n.value)"
    assert output(start(program)) == "0 232448"


def test_a_fork_after_the_first_call_cannot_use_cuda(start: Start) -> None:
    """Fails if a process that forks after its first CUDA call passes, which stops with an error on a card."""
    program = """
new(100)
pid = os.fork()
if not pid: os._exit(cuda.cudaMalloc(byref(c_void_p()), c_long(100)))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert output(start(program)) == "3"


@on_cards
def test_a_training_step_has_the_values_of_the_cpu() -> None:
    """Fails if tests on stand-in cards compare wrong numbers."""
    import torch
    from torch.nn import functional

    def step(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, w = torch.randn(64, 32).to(device), torch.randn(48, 32).to(device).requires_grad_()
        loss = functional.cross_entropy(x @ w.T, torch.arange(64, device=device) % 48)
        loss.backward()
        torch.optim.AdamW([w], lr=0.1, fused=True).step()
        return [loss, w.grad, w, x[x[:, 0] > 0], x.sort(-1)[1], x.bfloat16() @ x.T.bfloat16()]

    for expected, found in zip(step("cpu"), step("cuda"), strict=True):
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), expected)


def _rank(rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    x, y = torch.arange(1000.0, device="cuda") * (rank + 1), torch.full((10,), float(rank), device="cuda")
    dist.all_reduce(x)
    dist.broadcast(y, 1)
    part = torch.empty(500, device="cuda", dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(part, x.bfloat16(), op=dist.ReduceOp.AVG)
    other = torch.empty_like(y)
    for done in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, y + rank, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
    ):
        done.wait()
    sent, gathered = torch.arange(3.0, device="cuda") + 10 * rank, torch.empty(2 + 2 * rank, device="cuda")
    dist.all_to_all_single(gathered, sent, [1 + rank] * 2, [1, 2])  # also to itself
    assert gathered.tolist() == ([1, 2, 11, 12] if rank else [0, 10])
    assert x.tolist() == [3.0 * i for i in range(1000)] and y.tolist() == [1.0] * 10
    assert torch.equal(part, x.bfloat16().chunk(2)[rank]) and other.tolist() == [2.0 - rank] * 10
    dist.destroy_process_group()


@on_cards
@pytest.mark.skipif(os.environ.get("DRY_CARD_COUNT") == "1", reason="needs two cards")
def test_two_ranks_exchange_tensors_over_nccl(tmp_path: Path) -> None:
    """Fails if the stand-in for NCCL gives a rank wrong data."""
    import torch.multiprocessing as mp

    mp.spawn(_rank, (str(tmp_path / "store"),), nprocs=2)

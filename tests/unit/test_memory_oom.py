"""Memory reports: out of memory in torch's words and for real, and the fragmentation ratio."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from gkd.errors import ClusterError, OutOfMemory
from gkd.memory.fragmentation import fragmentation, warn_of_fragmentation
from gkd.memory.oom import diagnosed, is_out_of_memory
from gkd.spans import Phase

GIB, MIB = 1 << 30, 1 << 20
CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
# As torch 2.11 and 2.13 write it.
PLAIN = (
    "CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.50 GiB of which 12.75 GiB is "
    "free. Process 4711 has 2.50 GiB memory in use. Of the allocated memory 9.00 GiB is allocated by PyTorch, and 9.50 "
    "GiB is reserved by PyTorch but unallocated."
)


def keys(on_cuda: bool) -> list[str]:
    return [f"a.key=1: lower it on {'the GPU' if on_cuda else 'the host'}"]


@pytest.mark.parametrize(
    ("stuck", "reserved", "warns"),
    [(300, 1000, True), (200, 1000, False), (300, 500, False)],  # MiB; the last is too small to matter
)
def test_a_warning_of_fragmentation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stuck: int, reserved: int, warns: bool
) -> None:
    """Fails if a healthy cache is warned of, memory that lies in pieces is not, or the warning has no remedy."""
    names = {"inactive_split_bytes.all.current": stuck * MIB, "reserved_bytes.all.current": reserved * MIB}
    monkeypatch.setattr("torch.cuda.memory_stats", lambda device: names)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: reserved * MIB)
    assert warn_of_fragmentation(CARD, logging.getLogger("test_memory_fragmentation")) == stuck / reserved
    assert len(caplog.messages) == warns
    assert fragmentation(CPU) == 0.0, "it has no such allocator"
    assert not warns or all(word in caplog.text for word in ("30%", "expandable_segments:True", "max_tokens_per_micro"))


def test_which_errors_are_of_memory() -> None:
    """Fails if an error of memory is passed on unexplained, or another one is called that."""
    texts = [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error: unhandled cuda error; Last error:\nCuda failure 2 'out of memory'",
        "Triton Error [CUDA]: out of memory",
    ]
    assert all(is_out_of_memory(RuntimeError(text)) for text in texts)
    assert is_out_of_memory(torch.OutOfMemoryError(PLAIN)) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(RuntimeError("the queue is out of memory slots"))
    assert not is_out_of_memory(ClusterError(texts[0])), "it is explained already"


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_real_failure_of_the_host_is_explained(tmp_path: Path, kind: str) -> None:
    """Fails if the report lacks the request, the rank's states or the keys to change."""

    def too_much() -> object:
        return torch.empty(2**50) if kind == "torch" else np.ones(2**50)

    states = {"params": 3 * GIB, "optimizer": 6 * GIB}
    with (
        pytest.raises(OutOfMemory) as raised,
        diagnosed(tmp_path, device=CPU, who="actor rank 1", phase=Phase.TRAIN, advice=keys, states=lambda: states),
    ):
        too_much()
    text = str(raised.value)
    assert text.startswith("actor rank 1 ran out of memory of the host (training step): ")
    assert "allocate" in text and "params: 3.00 GiB" in text and "optimizer: 6.00 GiB" in text
    assert "host RSS" in text and text.endswith("  a.key=1: lower it on the host")


@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces torch's snapshot of a GPU, which is real here")
@pytest.mark.parametrize("can_write", [True, False])
def test_an_error_of_a_gpu_keeps_torchs_message_and_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_write: bool
) -> None:
    """Fails if the report loses torch's numbers of other processes, names no snapshot, or a full disk hides it."""

    def dump(file: str) -> None:
        if not can_write:
            raise OSError("No space left on device")
        Path(file).write_text("blocks")

    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", dump)
    monkeypatch.setattr("torch.cuda.memory_stats", lambda device: {})
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (GIB, 2 * GIB))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device: GIB)
    with (
        pytest.raises(OutOfMemory) as raised,
        diagnosed(tmp_path / "memory", device=CARD, who="actor rank 0", phase=Phase.EXPORT, advice=keys),
    ):
        raise torch.OutOfMemoryError(PLAIN)
    text = str(raised.value)
    assert text.startswith(f"actor rank 0 ran out of memory of cuda:0 (export): {PLAIN}")
    assert "expandable_segments:True" in text and "lower it on the GPU" in text
    files = list((tmp_path / "memory").iterdir())
    assert [file.name.endswith("_actor_rank_0_export.pickle") for file in files] == [True] * can_write
    assert (f"saved: {files[0]}" if can_write else "No space left") in text


def test_other_errors_pass_untouched(tmp_path: Path) -> None:
    """Fails if a bug is reported as a lack of memory, or a report is reported again by the block around it."""
    for error in (RuntimeError("shapes"), ValueError("x"), OutOfMemory("told"), KeyboardInterrupt()):
        with (
            pytest.raises(type(error)) as raised,
            diagnosed(tmp_path, device=CPU, who="actor rank 0", phase=Phase.EXPORT, advice=keys),
        ):
            raise error
        assert raised.value is error
    assert not list(tmp_path.iterdir())

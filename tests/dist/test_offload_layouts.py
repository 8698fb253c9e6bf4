"""Compare students on several ranks that offload their states after every call with students that never do.

The calls reload what `gkd.actor.worker` reloads: a sync is of some ranks alone, an evaluation needs the weights. Real
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gkd.actor.common.shard_writer import write
from gkd.actor.offload import OffloadController
from gkd.memory.states import GRADS, KINDS, OPTIMIZER, PARAMS
from gkd.types import MicroBatch
from tests.device import host, rank_device
from tests.dist.helpers import run_ranks
from tests.dist.megatron_reference import VOCAB, make_hf_folder, make_micro_batches
from tests.dist.student_cases import build_student, share, weights, with_hidden

pytestmark = pytest.mark.dist

N_RANKS, N_STEPS, N_CYCLES, TEACHER_WIDTH = 2, 2, 200, 5
FLOAT32 = ("tp2",)  # cases; the others are in bfloat16, where the optimizer has main weights
# name -> (backend, model, Megatron's layout, teacher signal)
CASES: dict[str, tuple[str, str, dict[str, int], str]] = {
    "ep2": ("megatron", "qwen3_moe", {"ep": 2}, "topk"),
    "tp2": ("megatron", "qwen3", {"tp": 2}, "hidden"),
    "pp2_tied": ("megatron", "qwen2_tied", {"pp": 2}, "hidden"),
    "fsdp2": ("fsdp2", "qwen3", {}, "hidden"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("layouts")
    for _, kind, _, _ in CASES.values():
        if not (root / kind).exists():
            make_hf_folder(root / kind, kind)
    return run_ranks(_measure_all, N_RANKS, root, timeout_s=200.0)


def _measure_all(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Runs in a rank: return by case the results of the calls, without and with offloading."""
    from megatron.core import parallel_state

    measured = {}
    for name in CASES:
        measured[name] = [_Run(root, name, rank, world_size, offload).calls() for offload in (False, True)]
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
    return measured


class _Run:
    """One rank's calls, and the bytes on its device within and after each."""

    def __init__(self, root: Path, name: str, rank: int, world_size: int, offload: bool) -> None:
        backend, self.kind, layout, self.signal = CASES[name]
        self.root, self.rank, self.folder = root, rank, root / f"{name}_{offload}"
        self.folder.mkdir(exist_ok=True)
        self.model = root / self.kind
        dtype = torch.float32 if name in FLOAT32 else torch.bfloat16
        self.student = build_student(
            backend, self.model, rank, world_size, dtype=dtype, signals=(self.signal,), **layout
        )
        self.is_split = {"tp", "pp"} & layout.keys()
        self.exports = backend == "fsdp2" or self.student.layout.exports
        self.controller = OffloadController(self.student, rank_device(), automatic=offload, timeout_s=60)
        self.within: list[tuple[str, dict[str, int]]] = []
        self.after: list[dict[str, int]] = []
        if offload:
            self.controller.offload_states()

    @contextmanager
    def call(self, infix: str, include: list[str] | None = None, *, alone: bool = False) -> Iterator[None]:
        with self.controller.states_on_device(infix, include, alone=alone):
            self.within.append((infix, _on_device(self.student)))
            yield
        self.after.append(_on_device(self.student))

    def calls(self) -> dict[str, Any]:
        """Make the calls of a run."""
        student, numbers = self.student, list[float]()
        if self.signal == "hidden":
            with self.call("teacher_head", [PARAMS], alone=True):
                student.set_teacher_head(np.random.default_rng(8).normal(size=(VOCAB, TEACHER_WIDTH)))
        for step in range(N_STEPS):
            with self.call("train"):
                stats = student.train_step(self.batches(step))
            numbers += [stats.loss, stats.grad_norm]
            with self.call("evaluate", [PARAMS]):
                numbers.append(student.evaluate(self.batches(step)).loss)
            sent = self.sync()
        with self.call("save", [PARAMS, OPTIMIZER]):
            snapshot = student.snapshot()
        write(self.folder / "checkpoint", self.rank, snapshot)
        dist.barrier()
        with self.call("load"):
            student.load_checkpoint(self.folder / "checkpoint")
        with self.call("train"):
            numbers.append(student.train_step(self.batches(N_STEPS)).loss)
        with self.call("export", [PARAMS]):
            student.save_hf(self.folder / "hf", self.model)
        dist.barrier()
        files = sorted(file for file in self.folder.rglob("*.safetensors"))
        sent |= self.sync()
        return {
            "numbers": numbers,
            "sent": {name: host(tensor.view(torch.int16)) for name, tensor in sent.items()},
            "files": {str(file.relative_to(self.folder)): file.read_bytes() for file in files},
            "within": self.within,
            "after": self.after,
            "cycles": self.cycles(),
        }

    def cycles(self) -> list[tuple[dict[str, int], dict[str, int]]]:
        """Return the bytes on the device and on the host before and after many moves."""
        states, found = self.student.states, []
        for n in (1, N_CYCLES):
            for _ in range(n):
                states.offload_states()
                states.reload_states()
            found.append((states.device_bytes(), states.host_bytes()))
        return found

    def sync(self) -> dict[str, torch.Tensor]:
        """Return the weights that this rank sends; ranks that send none are not called."""
        if not self.exports:
            return {}
        with self.call("sync", [PARAMS], alone=True):
            return weights(self.student)

    def batches(self, step: int) -> list[MicroBatch]:
        batches = make_micro_batches(step)
        if self.signal == "hidden":
            batches = [with_hidden(batch, TEACHER_WIDTH) for batch in batches]
        return batches if self.is_split else share(batches, self.rank, N_RANKS)


def _on_device(student: Any) -> dict[str, int]:
    """Return the bytes by kind, counted without `States`, which skips tensors that cannot be moved."""
    live, seen = student.live_states(), set[int]()
    sizes = dict.fromkeys(KINDS, 0)
    for kind in KINDS:
        for tensor in live[kind]:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            if storage.data_ptr() not in seen:
                sizes[kind] += storage.nbytes()
                seen.add(storage.data_ptr())
    return sizes


@pytest.mark.parametrize("name", CASES)
def test_offloading_after_every_call_changes_no_result(ranks: list[dict[str, Any]], name: str) -> None:
    """Fails if a layout has states that are not restored: a number, a sent weight, or a byte of a checkpoint or of the
    exported model differs.
    """
    for rank in ranks:
        kept, offloaded = rank[name]
        assert offloaded["numbers"] == kept["numbers"] and all(np.isfinite(kept["numbers"]))
        assert offloaded["sent"].keys() == kept["sent"].keys()
        assert all(np.array_equal(offloaded["sent"][key], kept["sent"][key]) for key in kept["sent"])
        assert offloaded["files"] == kept["files"] and len(kept["files"]) >= N_RANKS + 1
    assert any(rank[name][0]["sent"] for rank in ranks)


@pytest.mark.parametrize("name", CASES)
def test_a_call_reloads_what_it_needs_and_leaves_nothing(ranks: list[dict[str, Any]], name: str) -> None:
    """Fails if a part of a student of this layout, or its teacher's LM head, is not offloaded, a call reloads more
    than it needs, or a move leaks memory.
    """
    for rank in ranks:
        kept, offloaded = rank[name]
        assert not any(any(sizes.values()) for sizes in offloaded["after"])
        assert offloaded["cycles"][0] == offloaded["cycles"][1]
        whole = kept["after"][-1]
        for infix, sizes in offloaded["within"]:
            assert sizes[PARAMS] > 0, infix
            if infix in ("evaluate", "sync", "export", "teacher_head"):
                assert sizes[GRADS] == sizes[OPTIMIZER] == 0, infix
            elif infix != "train":
                assert sizes[OPTIMIZER] == whole[OPTIMIZER] > 0, infix

"""Compare training that offloads the states around every call with training that never does. Real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gkd.actor.common.shard_writer import write
from gkd.memory.states import KINDS, OPTIMIZER, PARAMS
from tests.device import n_cards, on_cuda
from tests.dist.helpers import run_ranks
from tests.dist.megatron_reference import make_hf_folder, make_micro_batches
from tests.dist.student_cases import build_student, changed_by_a_move, same_weights, share, weights

pytestmark = pytest.mark.dist

# States of fsdp2 are float32 with both dtypes.
CASES = (("megatron", torch.float32), ("megatron", torch.bfloat16), ("fsdp2", torch.bfloat16))
N_STEPS, N_CYCLES = 3, 200
N_RANKS = min(2, n_cards()) if on_cuda() else 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    root = tmp_path_factory.mktemp("offloaded")
    make_hf_folder(root / "model", "qwen3")
    return run_ranks(_measure_all, N_RANKS, root, timeout_s=250.0)


def _measure_all(rank: int, world_size: int, root: Path) -> dict[Any, Any]:
    """Runs in a rank: return the results by backend and dtype."""
    from megatron.core import parallel_state

    measured = {}
    for backend, dtype in CASES:
        measured[backend, dtype] = _measure(backend, dtype, rank, world_size, root)
        parallel_state.destroy_model_parallel()
    return measured


def _measure(backend: str, dtype: torch.dtype, rank: int, world_size: int, root: Path) -> dict[str, Any]:
    def batches(step: int) -> Any:
        return share(make_micro_batches(step), rank, world_size)

    def run(offloads: bool) -> tuple[Any, list[Any], dict[str, torch.Tensor], Path]:
        student = build_student(backend, root / "model", rank, world_size, dtype=dtype)
        numbers: list[Any] = []

        def call(work: Any, *args: Any) -> Any:
            if offloads:
                student.states.reload_states()
            result = work(*args)
            if offloads:
                student.states.offload_states()
            return result

        for step in range(N_STEPS):
            stats = call(student.train_step, batches(step))
            numbers += [stats.loss, stats.grad_norm, call(student.evaluate, batches(step)).loss]
        folder = root / f"{backend}_{dtype}_{offloads}"
        call(lambda: write(folder, rank, student.snapshot(copies=not offloads)))
        dist.barrier()
        call(student.load_checkpoint, folder)
        call(student.save_hf, root / f"hf_{backend}_{dtype}_{offloads}", root / "model")
        exported = call(weights, student)
        if offloads:
            student.states.reload_states()
        return student, numbers, exported, folder

    plain, numbers, exported, saved = run(False)
    offloaded, offloaded_numbers, offloaded_exported, offloaded_saved = run(True)
    result: dict[str, Any] = {"numbers": (numbers, offloaded_numbers)}
    result["exported"] = same_weights(exported, offloaded_exported)
    files = [
        sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
        for folder in (saved, offloaded_saved)
    ]
    shards = [name for name in files[0] if name.suffix == ".safetensors"]
    result["saved"] = bool(shards) and all(
        (saved / name).read_bytes() == (offloaded_saved / name).read_bytes() for name in shards
    )
    states = offloaded.states
    sizes = states.device_bytes()
    n_tensors = sum(tensor.numel() for tensor in exported.values())
    result["sizes"], result["n_tensors"] = sizes, n_tensors
    states.offload_states()
    result["left"], result["away"] = states.device_bytes(), states.away()
    states.reload_states()
    host = states.host_bytes()
    for _ in range(N_CYCLES):
        states.offload_states()
        states.reload_states()
    result["cycles"] = (
        states.device_bytes() == sizes,
        states.host_bytes() == host,
        same_weights(exported, weights(offloaded)),
    )
    # One more step, after all these cycles.
    result["after"] = (offloaded.train_step(batches(N_STEPS)).loss, plain.train_step(batches(N_STEPS)).loss)
    result["changed"] = changed_by_a_move(offloaded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gkd.memory.states._KEPT", (PARAMS,))
        result["detected"] = {name.partition("[")[0] for name in changed_by_a_move(offloaded)}
    return result


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_training_is_bitwise_identical(ranks: list[dict[Any, Any]], backend: str, dtype: torch.dtype) -> None:
    """Fails if offloading changes a loss, a gradient, a weight, or a checkpoint."""
    for rank in ranks:
        result = rank[backend, dtype]
        assert result["numbers"][0] == result["numbers"][1]
        assert result["exported"] and result["saved"]
        assert result["changed"] == [] and result["detected"] == {OPTIMIZER}


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_all_states_are_offloaded_without_a_leak(ranks: list[dict[Any, Any]], backend: str, dtype: torch.dtype) -> None:
    """Fails if a part of the student stays on the device, or a cycle leaks memory."""
    for rank in ranks:
        result = rank[backend, dtype]
        assert not any(result["left"].values()) and result["cycles"] == (True, True, True)
        assert result["after"][0] == result["after"][1]
        assert set(result["away"]) <= set(KINDS)
    sizes = [rank[backend, dtype]["sizes"] for rank in ranks]
    n = ranks[0][backend, dtype]["n_tensors"]
    weight_bytes = 4 if backend == "fsdp2" else torch.empty((), dtype=dtype).itemsize
    copies = 1 if backend == "fsdp2" else N_RANKS  # each data-parallel rank of Megatron has all weights
    assert sum(s["params"] for s in sizes) == pytest.approx(copies * weight_bytes * n, rel=0.03)
    moments = 12 if weight_bytes == 2 else 8  # the optimizer has float32 copies of bfloat16 weights
    assert sum(s["optimizer"] for s in sizes) == pytest.approx(moments * n, rel=0.03)
    assert sum(s["grads"] for s in sizes) == pytest.approx((0 if backend == "fsdp2" else 4 * N_RANKS) * n, rel=0.03)

"""Test the whole loop with LoRA on both backends: Ray, vLLM, two actor ranks, a reference; on Megatron a local teacher.

tests/dist compares the trained adapters with peft's; test_local_teacher.py, run manually, every step with the server's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.quickstart.evaluate import count_equal
from tests.e2e.conftest import Lab
from tests.e2e.exactness import steps_of

pytestmark = pytest.mark.e2e

UNUSED_PORT = 15555  # the default; a local teacher does not use it

# Two pipeline stages, which both send; engines keep their weights while the actor has the GPUs, and all of the roles,
# also the local teacher, share two slots.
MEGATRON = ("actor.pp=2", "rollout.n_gpus_per_node=2", "trainer.colocate=true", "teacher.backend=local")
# Two data-parallel ranks, an engine of two workers.
FSDP2 = ("actor.strategy=fsdp2", "rollout.n_gpus_per_node=2", "rollout.tp=2")


def teacher_keys(line: dict[str, Any]) -> set[str]:
    return {name for name in line if name.startswith("teacher/")}


@pytest.mark.parametrize(
    "backend", [pytest.param(MEGATRON, id="megatron"), pytest.param(FSDP2, id="fsdp2", marks=pytest.mark.slow)]
)
def test_adapters_are_trained_and_synced(
    lab: Lab,
    teacher_port: int,
    shared_ray: str,
    base_run: Path,
    backend: tuple[str, ...],
    request: pytest.FixtureRequest,
) -> None:
    """If it fails, ranks do not export together, engines or the export do not hold the trained weights, or the actor
    without adapters is not the initial student. With a local teacher: its scores differ from those of the server, or
    are assigned to other sequences.
    """
    is_local = backend == MEGATRON
    run_dir = lab.root / f"lora_{request.node.callspec.id}"
    done = lab.train_run(
        run_dir,
        UNUSED_PORT if is_local else teacher_port,
        shared_ray,
        "actor.lora.rank=8",
        "trainer.n_gpus_per_node=2",
        "weight_sync.verify=always",
        "weight_sync.lora=adapters",
        "distill.reference_kl_weight=0.1",
        "trainer.total_steps=2",
        *backend,
        *((f"teacher.path={lab.teacher}",) if is_local else ()),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    base, export = (load_file(folder / "model.safetensors") for folder in (lab.student, run_dir / "export"))
    n_weights = sum(tensor.numel() for tensor in base.values())
    lines = steps_of(run_dir)
    assert sorted(lines) == [0, 1, 2]
    # Two factors of each of seven layers in two blocks.
    assert all(lines[step]["weight_sync/verified_tensors"] == 24 + 2 * 7 * 2 for step in (1, 2))
    assert all(lines[step]["weight_sync/bytes"] < 0.02 * 4 * n_weights for step in (1, 2))
    assert all(lines[step]["loss/importance_weight"] == pytest.approx(1.0, abs=1e-4) for step in (1, 2))
    assert abs(lines[1]["loss/reference_kl"]) <= 1e-6 < lines[2]["loss/reference_kl"]
    # No adapter has moved in the first step, so it is that of the run without adapters, with the teacher server.
    served = steps_of(base_run)
    assert lines[1]["loss/forward_kl"] == pytest.approx(served[1]["loss/total"], abs=1e-5)
    assert lines[0]["eval/kl"] == pytest.approx(served[0]["eval/kl"], abs=1e-5)
    assert teacher_keys(lines[1]) == teacher_keys(served[1]) >= {"teacher/topk_mass", "teacher/score_bytes"}
    assert all(lines[step]["time/reference_s"] > 0 for step in (1, 2))
    assert count_equal(run_dir / "export", run_dir / "samples" / "step_00000002.jsonl") == (50, 50)
    moved = {name for name in base if not torch.equal(base[name], export[name])}
    assert moved == {name for name in base if name.endswith("_proj.weight")}

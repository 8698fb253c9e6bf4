"""Test adapters, a mixture of losses and a reference through the whole loop: Ray, vLLM, two actor ranks.

tests/dist compares the trained adapters with peft's; test_local_teacher.py, run manually, every step with the server's.
In CI, test_own_pipeline.py has FSDP2.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.quickstart.evaluate import count_equal
from gkd.tools.report.page import page
from gkd.tools.report.read import read_runs
from gkd.tools.report.samples import browser
from tests.e2e.conftest import Lab
from tests.e2e.exactness import check_export, steps_of

pytestmark = pytest.mark.e2e

UNUSED_PORT = 15555  # the default; a local teacher does not use it
REFERENCE = 0.1

# Two pipeline stages, which both send; engines keep their weights while the actor has the GPUs, and all of the roles,
# also the local teacher, share two slots.
MEGATRON = ("actor.pp=2", "trainer.colocate=true", "teacher.backend=local")
# Two data-parallel ranks, an engine of two workers; the states are in host memory, so offload_train has no effect.
IN_HOST_MEMORY = ("actor.fsdp_cpu_offload=true", "actor.offload_train=true")
FSDP2 = ("actor.strategy=fsdp2", "rollout.tp=2", *IN_HOST_MEMORY, "teacher.mass=0.2")


def responses(samples: Path) -> list[list[int]]:
    return [json.loads(line)["response_ids"] for line in samples.read_text().splitlines()]


@pytest.mark.parametrize(
    "backend", [pytest.param(MEGATRON, id="megatron"), pytest.param(FSDP2, id="fsdp2", marks=pytest.mark.slow)]
)
def test_a_mixture_trains_adapters_on_student_and_dataset_responses(
    lab: Lab,
    teacher_port: int,
    shared_ray: str,
    base_run: Path,
    backend: tuple[str, ...],
    request: pytest.FixtureRequest,
) -> None:
    """If it fails, a term of a mixture, adaptive top-k, or GKD's lambda has no effect; ranks do not export
    together, engines or the export do not hold the trained weights, or the actor without adapters is not the initial
    student; a rank does not log its GPUs; or the export of a run is not the student of the next one. With a local
    teacher: its scores of an evaluation differ from those of the server.
    """
    is_local = backend == MEGATRON
    run_dir = lab.root / f"lora_{request.node.callspec.id}"
    student = base_run / "export"
    done = lab.finished_run(
        run_dir,
        UNUSED_PORT if is_local else teacher_port,
        shared_ray,
        f"model.path={student}",
        "actor.lora.rank=8",
        "trainer.n_gpus_per_node=2",
        "rollout.n_gpus_per_node=2",
        "weight_sync.verify=always",
        "weight_sync.lora=adapters",
        f"distill.reference_kl_weight={REFERENCE}",
        "distill.losses=[{name: reverse_kl, weight: 1.0}, {name: k3, weight: 0.5}, {name: sft, weight: 0.25}]",
        "distill.on_policy_share=0.5",
        "trainer.total_steps=2",
        *backend,
        *((f"teacher.path={lab.teacher}",) if is_local else ()),
    )
    assert is_local or "actor.offload_train" in done.stderr, "a setting without effect is named"
    ranks = {"actor worker 0", "actor worker 1", "rollout worker 0"} | ({"rollout worker 1"} if is_local else set())
    assert set(re.findall(r"(\w+ worker \d): CUDA_VISIBLE_DEVICES=\d", done.stderr)) == ranks
    before, after = base_run / "samples" / "step_00000004.jsonl", run_dir / "samples" / "step_00000000.jsonl"
    assert responses(before) == responses(after), "the export answers like the engine of its run"
    base, export = (load_file(folder / "model.safetensors") for folder in (student, run_dir / "export"))
    n_weights = sum(tensor.numel() for tensor in base.values())
    lines = steps_of(run_dir)
    assert sorted(lines) == [0, 1, 2]
    if is_local:  # the run before evaluated the same student, with the teacher server
        assert lines[0]["eval/kl"] == pytest.approx(steps_of(base_run)[4]["eval/kl"], abs=1e-5)
    kl = {step: lines[step]["loss/reference_kl"] for step in (1, 2)}
    assert abs(kl[1]) <= 1e-6 < kl[2], kl
    for step in (1, 2):
        m = lines[step]
        assert is_local or not [name for name in m if name.startswith("time/train/")], "host memory is not moved"
        # Two factors of each of seven layers in two blocks, compared by the digests of engine and actor.
        assert m["weight_sync/verified_tensors"] == 24 + 2 * 7 * 2
        assert m["weight_sync/bytes"] < 0.02 * 4 * n_weights
        # Three of six prompts have two student responses, the other three one dataset response.
        assert m["rollout/sequences"] == 9
        assert m["rollout/on_policy_sequences"] == 6
        assert 0 < m["teacher/topk_mass"] < (1.0 if is_local else 0.9)
        assert m["loss/importance_weight"] == pytest.approx(1.0, abs=1e-4), "actor and engine have the same weights"
        assert m["loss/importance_clipped"] == 0.0
        assert m["time/reference_s"] > 0
        assert m["loss/sft"] > 0 and m["loss/k3"] > 0 and m["loss/reverse_kl"] > 0
        terms = m["loss/reverse_kl"] + 0.5 * m["loss/k3"] + 0.25 * m["loss/sft"]
        assert m["loss/total"] < terms + REFERENCE * kl[step], (
            "k3 and sft cover a part of the tokens each, but are divided by all tokens"
        )
    assert count_equal(run_dir / "export", run_dir / "samples" / "step_00000002.jsonl") == (50, 50)
    check_export(run_dir, run_dir / "exported")
    moved = {name for name in base if not torch.equal(base[name], export[name])}
    assert moved == {name for name in base if name.endswith("_proj.weight")}
    kept = [json.loads(line) for line in (run_dir / "token_losses" / "step_00000002.jsonl").read_text().splitlines()]
    assert [record["sample_index"] for record in kept] == list(range(8)), "from all data-parallel groups, in order"
    for record in kept:
        n_tokens = len(record["response_ids"])
        assert record["prompt_ids"] and len(record["choices"]) == n_tokens
        for choices in record["choices"]:  # a list that reaches teacher.mass may be short
            teacher = [p for _, p, _ in choices]
            assert 1 <= len(choices) <= 5 and teacher == sorted(teacher, reverse=True) and sum(teacher) < 1 + 1e-5
            assert all(0 <= q <= 1 for *_, q in choices)
        assert {len(values) for values in record["values"].values()} == {n_tokens}
        reverse_kl, k3, total = (record["values"][name] for name in ("reverse_kl", "k3", "total"))
        assert total == pytest.approx([r + 0.5 * k for r, k in zip(reverse_kl, k3, strict=True)], rel=1e-5)
    (shown,) = read_runs([run_dir])
    assert browser(shown)["steps"] == [0, 2] and run_dir.name in page([shown])

"""Test the whole loop with expert parallelism on two actor ranks."""

from __future__ import annotations

import shutil

import pytest

from examples.quickstart.evaluate import count_equal
from tests.e2e.conftest import VOCAB, Lab
from tests.e2e.exactness import steps_of
from tests.e2e.test_rollout_experts import N_EXPERTS, save_experts

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
N_LAYERS = 2


def test_experts_of_two_ranks_reach_the_engine_and_the_export(lab: Lab, teacher_port: int) -> None:
    """Fails if actor.ep has no effect, an expert is not synced or exported, or a resume loads the wrong experts."""
    run_dir = lab.root / "experts_run"
    student = shutil.copytree(lab.student, lab.root / "experts")  # for the tokenizer
    like_the_dense = {"vocab_size": VOCAB, "tie_word_embeddings": True, "initializer_range": 0.35}
    save_experts(student, 2, **like_the_dense, mlp_only_layers=[])
    overrides = [f"model.path={student}", "trainer.n_gpus_per_node=2", "actor.ep=2", "weight_sync.verify=always"]
    for end in (["trainer.total_steps=3"], ["trainer.total_steps=4", "trainer.resume=auto"]):
        shutil.rmtree(run_dir / "export", ignore_errors=True)
        lab.finished_run(run_dir, teacher_port, *overrides, *end)
    lines = steps_of(run_dir)
    assert sorted(lines) == [0, 1, 2, 3, 4]
    n_tensors = 2 + N_LAYERS * (9 + 3 * N_EXPERTS)
    assert all(lines[step]["weight_sync/verified_tensors"] == n_tensors for step in (1, 2, 3, 4))
    assert lines[4]["eval/kl"] < lines[0]["eval/kl"]
    assert count_equal(run_dir / "export", run_dir / "samples" / "step_00000004.jsonl") == (50, 50)

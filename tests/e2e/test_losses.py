"""Other losses and other signals of the teacher, through the whole loop with every real part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gkd.metrics import read_metrics
from tests.e2e.conftest import Lab

pytestmark = pytest.mark.e2e


def steps_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {int(line["step"]): line for line in read_metrics(run_dir / "metrics.jsonl")}


def test_hidden_states_and_logits_train_the_same(lab: Lab, teacher_port: int) -> None:
    """If it fails, a signal's road (client, endpoint, LM head, chunks, TP) changes the teacher's distribution."""
    exact = ("distill.loss=jsd", "distill.beta=0.3", "trainer.total_steps=2", "eval.metric=none")
    runs = {
        "hidden": ("teacher.signal=hidden", "trainer.n_gpus_per_node=2", "actor.tp=2", "actor.logits_chunk_mib=1"),
        "logits": ("teacher.signal=logits", "actor.fused_lm_head=false"),
    }
    lines = {}
    for name, overrides in runs.items():
        done = lab.train_run(lab.root / f"run_{name}", teacher_port, *exact, *overrides)
        assert done.returncode == 0, done.stderr[-4000:]
        lines[name] = steps_of(lab.root / f"run_{name}")
    for step in (1, 2):
        hidden, logits = lines["hidden"][step], lines["logits"][step]
        assert hidden["loss/total"] == pytest.approx(hidden["loss/jsd"]) and hidden["loss/total"] > 0
        for key in ("loss/total", "loss/token_kl", "loss/overlap", "loss/student_entropy", "optim/grad_norm"):
            assert hidden[key] == pytest.approx(logits[key], rel=1e-4 if step == 1 else 1e-3), (step, key)
        assert "teacher/topk_mass" not in hidden
    assert lines["hidden"][2]["eval/kl"] < lines["hidden"][0]["eval/kl"], "JSD must bring the student closer"


def test_a_mixture_on_student_and_dataset_responses(lab: Lab, teacher_port: int) -> None:
    """If it fails, a term of a mixture, the adaptive top-k, or GKD's lambda is not what trains."""
    run_dir = lab.root / "run_mixture"
    done = lab.train_run(
        run_dir,
        teacher_port,
        "distill.losses=[{name: reverse_kl, weight: 1.0}, {name: k3, weight: 0.5}, {name: sft, weight: 0.25}]",
        "distill.on_policy_share=0.5",
        "teacher.mass=0.2",
        "trainer.total_steps=3",
        "trainer.n_gpus_per_node=2",
        "eval.metric=none",
        "eval.keep_token_losses=5",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = steps_of(run_dir)
    for step in (1, 2, 3):
        m = lines[step]
        # Three of six prompts are answered twice by the student, the other three once by the dataset.
        assert m["rollout/sequences"] == 9
        assert m["rollout/on_policy_sequences"] == 6
        assert 0 < m["teacher/topk_mass"] < 0.9
        assert m["loss/importance_weight"] == pytest.approx(1.0, abs=0.02), "the actor and the engine are one model"
        assert m["loss/importance_clipped"] == 0.0
        assert m["loss/sft"] > 0 and m["loss/k3"] > 0 and m["loss/reverse_kl"] > 0
        terms = m["loss/reverse_kl"] + 0.5 * m["loss/k3"] + 0.25 * m["loss/sft"]
        assert m["loss/total"] < terms, "k3 and sft cover a part of the tokens each, and are divided by all"
    assert lines[3]["eval/kl"] < lines[0]["eval/kl"]
    kept = [json.loads(line) for line in (run_dir / "token_losses" / "step_00000003.jsonl").read_text().splitlines()]
    assert [record["sample_index"] for record in kept] == [0, 1, 2, 3, 4], "from both data-parallel groups, in order"
    for record in kept:
        n_tokens = len(record["response_ids"])
        assert {len(values) for values in record["values"].values()} == {n_tokens}
        reverse_kl, k3, total = (record["values"][name] for name in ("reverse_kl", "k3", "total"))
        assert total == pytest.approx([r + 0.5 * k for r, k in zip(reverse_kl, k3, strict=True)], rel=1e-5)

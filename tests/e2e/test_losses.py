"""Test losses, routes and prompts of a teacher through the whole loop with real components.

Signals: tests/service/test_endpoint_signals.py has what arrives, tests/dist/test_megatron_losses.py what is trained.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gkd.pipeline.evaluate import KEPT_SAMPLES
from tests.e2e.conftest import REWARDS, TWO_ROUTES, Lab, resized
from tests.e2e.exactness import differences, steps_of

pytestmark = pytest.mark.e2e


@pytest.mark.slow  # in CI test_other_tokenizer.py has a stream, tests/service/test_routes.py the heads of routes
def test_hidden_states_train(lab: Lab, teacher_port: int, shared_ray: str) -> None:
    """If it fails, the LM head of two routes to one teacher does not reach the actor, its logits do not reduce the KL,
    a stream of real engines does not feed the loop, a stream has other shares of the routes, or the student generates
    one of the ids that it alone has, which would be the most probable ones.
    """
    wide = f"model.path={resized(lab.student, 32064)}"
    shares = ("data.domain_shares={a: 2, b: 1}", "distill.normalize=domain", "teacher.routes.b.temperature=0.9")
    loss = ("distill.loss=jsd", "distill.beta=0.3", "teacher.signal=hidden", "eval.metric=none")
    layout = ("trainer.n_gpus_per_node=2", "actor.tp=2", "trainer.scheduler=stream", "trainer.total_steps=2")
    run_dir = lab.root / "run_hidden"
    lab.finished_run(run_dir, teacher_port, *loss, *layout, shared_ray, wide, *TWO_ROUTES, *shares)
    lines = steps_of(run_dir)
    first, last = (
        [json.loads(text) for text in (run_dir / f"samples/step_0000000{step}.jsonl").open()] for step in (0, 2)
    )
    assert [row["prompt_ids"] for row in first] == [row["prompt_ids"] for row in last] and len(first) == KEPT_SAMPLES
    assert [row["prompt_id"] for row in first] == list(range(KEPT_SAMPLES)) and all(row["text"] for row in first)
    assert {row["answer"] for row in last} == {"w2"} and {row["correct"] for row in last} == {None}
    for step in (1, 2):
        m = lines[step]
        assert m["rollout/sequences"] == 12 and m["staleness/max"] <= 1
        assert m["loss/total"] > m["loss/jsd"] > 0, "a sum over routes"
        assert m["domain/a/loss_share"] + m["domain/b/loss_share"] == pytest.approx(1)
        assert m["domain/a/token_kl"] > 0 < m["domain/b/token_kl"]
        assert 0 < m["loss/overlap"] < 1 and m["loss/student_entropy"] > 0
        assert "teacher/topk_mass" not in m
    n_sequences = [
        sum(m["loss/tokens"] * m[f"domain/{d}/tokens_share"] / m[f"domain/{d}/length"] for m in (lines[1], lines[2]))
        for d in "ab"
    ]
    assert n_sequences == pytest.approx([16, 8])
    assert lines[2]["eval/kl"] < lines[0]["eval/kl"], "JSD must bring the student closer"


@pytest.mark.slow
def test_settings_without_effect_change_no_bit(base_run: Path, lab: Lab, teacher_port: int, shared_ray: str) -> None:
    """If it fails, two routes to one teacher, the student's own prompt for the teacher, or rewards of weight 0 change
    the training: a route has other scores or another share, or what they add is not left out of the loss.
    """
    run_dir = lab.root / "run_same"
    rewards = (REWARDS[0], "distill.reward_weight=0")
    prompts = ("data.teacher_prompt_key=prompt",)
    done = lab.finished_run(run_dir, teacher_port, *TWO_ROUTES, *prompts, *rewards, shared_ray)
    assert "data.train_files: 40 of 40 rows have a prompt for the teacher" in done.stderr
    lines = steps_of(run_dir)
    assert all(lines[step]["reward/std"] > 0 < lines[step]["domain/b/token_kl"] for step in (1, 2, 3, 4))
    added = ("reward/", "domain/")
    assert not [text for text in differences(base_run, run_dir) if not text.split(": ")[-1].startswith(added)]

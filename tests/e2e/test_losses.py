"""Test losses, routes and prompts of a teacher through the whole loop with real components.

Signals: tests/service/test_endpoint_signals.py has what arrives, tests/dist/test_megatron_losses.py what is trained.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gkd.pipeline.evaluate import KEPT_SAMPLES
from gkd.tools.report.page import page
from gkd.tools.report.read import read_runs
from gkd.tools.report.samples import browser
from tests.e2e.conftest import REWARDS, TWO_ROUTES, Lab, resized
from tests.e2e.exactness import differences, steps_of

pytestmark = pytest.mark.e2e


def responses(samples: Path) -> list[list[int]]:
    return [json.loads(line)["response_ids"] for line in samples.read_text().splitlines()]


REFERENCE = 0.1


@pytest.mark.slow  # in CI test_other_tokenizer.py has hidden states in a stream, tests/service/test_routes.py routes
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


def test_a_mixture_trains_adapters_on_student_and_dataset_responses(
    base_run: Path, lab: Lab, teacher_port: int, shared_ray: str
) -> None:
    """If it fails, a term of a mixture, the adaptive top-k, or GKD's lambda has no effect; adapters in host memory are
    not trained, or their base model is not the reference; a rank does not log its GPUs; or the export of a run is not
    the student of the next one.
    """
    run_dir = lab.root / "run_mixture"
    done = lab.finished_run(
        run_dir,
        teacher_port,
        shared_ray,
        f"model.path={base_run / 'export'}",
        "actor.strategy=fsdp2",
        "actor.lora.rank=8",
        "actor.fsdp_cpu_offload=true",
        "actor.offload_train=true",
        f"distill.reference_kl_weight={REFERENCE}",
        "distill.losses=[{name: reverse_kl, weight: 1.0}, {name: k3, weight: 0.5}, {name: sft, weight: 0.25}]",
        "distill.on_policy_share=0.5",
        "teacher.mass=0.2",
        "trainer.total_steps=2",
        "trainer.n_gpus_per_node=2",
        "weight_sync.verify=always",
    )
    assert "actor.offload_train" in done.stderr, "a setting without effect is named"
    ranks = {"actor worker 0", "actor worker 1", "rollout worker 0"}
    assert set(re.findall(r"(\w+ worker \d): CUDA_VISIBLE_DEVICES=\d", done.stderr)) == ranks
    before, after = base_run / "samples" / "step_00000004.jsonl", run_dir / "samples" / "step_00000000.jsonl"
    assert responses(before) == responses(after), "the export answers like the engine of its run"
    lines = steps_of(run_dir)
    kl = {step: lines[step]["loss/reference_kl"] for step in (1, 2)}
    assert abs(kl[1]) <= 1e-6 < kl[2], kl
    for step in (1, 2):
        m = lines[step]
        assert not [name for name in m if name.startswith("time/train/")], "states in host memory are not moved"
        assert m["weight_sync/verified_tensors"] > 0, "the engine's digests were compared with the actor's"
        # Three of six prompts have two student responses, the other three one dataset response.
        assert m["rollout/sequences"] == 9
        assert m["rollout/on_policy_sequences"] == 6
        assert 0 < m["teacher/topk_mass"] < 0.9
        assert m["loss/importance_weight"] == pytest.approx(1.0, abs=0.02), "actor and engine have the same weights"
        assert m["loss/importance_clipped"] == 0.0
        assert m["time/reference_s"] > 0
        assert m["loss/sft"] > 0 and m["loss/k3"] > 0 and m["loss/reverse_kl"] > 0
        terms = m["loss/reverse_kl"] + 0.5 * m["loss/k3"] + 0.25 * m["loss/sft"]
        assert m["loss/total"] < terms + REFERENCE * kl[step], (
            "k3 and sft cover a part of the tokens each, but are divided by all tokens"
        )
    kept = [json.loads(line) for line in (run_dir / "token_losses" / "step_00000002.jsonl").read_text().splitlines()]
    assert [record["sample_index"] for record in kept] == list(range(8)), "from both data-parallel groups, in order"
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

"""The whole loop with a reference that holds the student: Ray, vLLM, Megatron-core or adapters, the teacher server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gkd.metrics import read_metrics
from tests.e2e.conftest import VOCAB, Lab

pytestmark = pytest.mark.e2e

WEIGHT = 3.0


def steps_of(run_dir: Path) -> dict[int, dict[str, float]]:
    return {int(line["step"]): line for line in read_metrics(run_dir / "metrics.jsonl")}


def train(lab: Lab, name: str, port: int, *overrides: str) -> dict[int, dict[str, float]]:
    run_dir = lab.root / name
    done = lab.train_run(run_dir, port, f"distill.reference_kl_weight={WEIGHT:g}", *overrides)
    assert done.returncode == 0, done.stderr[-4000:]
    return steps_of(run_dir)


def distance(student: Path, initial: Path) -> float:
    """KL(student || initial) over the whole vocabulary, at every token of some random sequences; nats a token."""
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(2, VOCAB, (16, 12), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        log_q, log_p = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits.log_softmax(-1)
            for folder in (student, initial)
        )
    return float((log_q.exp() * (log_q - log_p)).sum(-1).mean())


def test_a_reference_holds_the_student(lab: Lab, teacher_port: int, base_run: Path) -> None:
    """If it fails, the reference is another model than the initial student, its logprobs reach other tokens, its term
    does not train, or an evaluation has it."""
    lines = train(lab, "held", teacher_port)
    kl = {step: lines[step]["loss/reference_kl"] for step in (1, 2, 3, 4)}
    assert abs(kl[1]) <= 1e-6 < min(kl[2], kl[3], kl[4]), kl
    for step, m in lines.items():
        if step:
            assert m["loss/total"] == pytest.approx(m["loss/forward_kl"] + WEIGHT * kl[step], rel=1e-5), step
            assert m["time/reference_s"] > 0 and m["loss/importance_weight"] == pytest.approx(1.0, abs=0.05)
    free = steps_of(base_run)
    # Where the term is 0 to the second order, nothing else has changed either.
    assert lines[1]["loss/total"] == pytest.approx(free[1]["loss/total"], abs=1e-5)
    assert lines[0]["eval/kl"] == pytest.approx(free[0]["eval/kl"], abs=1e-6)
    held, loose = (distance(lab.root / name / "export", lab.student) for name in ("held", "base_run"))
    assert 0 < held < 0.8 * loose, (held, loose)

"""Test the whole loop with a KL penalty to a reference: Ray, vLLM, Megatron-core, teacher server or local teacher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import VOCAB, Lab
from tests.e2e.exactness import steps_of

# In CI test_own_pipeline.py has a reference of its own, test_lora.py has the base.
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WEIGHT = 10.0


def train(lab: Lab, name: str, port: int, *overrides: str) -> dict[int, dict[str, float]]:
    run_dir = lab.root / name
    lab.finished_run(run_dir, port, f"distill.reference_kl_weight={WEIGHT:g}", *overrides)
    return steps_of(run_dir)


def distance(student: Path, initial: Path) -> float:
    """Return KL(student || initial) in nats per token, over the whole vocabulary, on random sequences."""
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(2, VOCAB, (16, 12), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        log_q, log_p = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits.log_softmax(-1)
            for folder in (student, initial)
        )
    return float((log_q.exp() * (log_q - log_p)).sum(-1).mean())


def test_a_reference_keeps_the_student_close(lab: Lab, teacher_port: int, base_run: Path, shared_ray: str) -> None:
    """If it fails, the reference is not the initial student, its logprobs are misaligned, its term does not train, or
    an evaluation includes it; or two data-parallel ranks do not train like one.
    """
    lines = train(lab, "held", teacher_port, "trainer.n_gpus_per_node=2", shared_ray)
    kl = {step: lines[step]["loss/reference_kl"] for step in (1, 2, 3, 4)}
    assert abs(kl[1]) <= 1e-6 < min(kl[2], kl[3], kl[4]), kl
    for step, m in lines.items():
        if step:
            assert m["loss/total"] == pytest.approx(m["loss/forward_kl"] + WEIGHT * kl[step], rel=1e-5), step
            assert m["time/reference_s"] > 0 and m["loss/importance_weight"] == pytest.approx(1.0, abs=0.05)
    free = steps_of(base_run)
    assert lines.keys() == free.keys()
    missing = {key for step in free for key in free[step].keys() - lines[step].keys()}
    missing -= {"time/record_s"}
    assert all("checkpoint" in key for key in missing), missing  # these and earlier saves are of the base run alone
    # In the first step the term is 0 to second order, so all other metrics are unchanged.
    assert lines[1]["loss/total"] == pytest.approx(free[1]["loss/total"], abs=1e-5)
    assert lines[0]["eval/kl"] == pytest.approx(free[0]["eval/kl"], abs=1e-6)
    held, loose = (distance(lab.root / name / "export", lab.student) for name in ("held", "base_run"))
    assert 0 < held < 0.9 * loose, (held, loose)


def test_a_reference_with_a_local_teacher_resumes_and_replays_bit_exactly(lab: Lab) -> None:
    """If it fails, a resume or replay has another reference or loses its updates, or the reference cannot share GPUs
    with engines and a local teacher.
    """
    local = ("teacher.backend=local", f"teacher.path={lab.teacher}", "trainer.n_gpus_per_node=2", "actor.pp=2")
    local = (*local, "trainer.colocate=true", "rollout.n_gpus_per_node=2", f"reference.path={lab.teacher}")
    local = (*local, "reference.update_interval=2")
    lines = train(
        lab, "recorded", 15555, *local, "trainer.save_every=2", "trainer.keep_last=9", "trainer.record_batches=true"
    )
    first = {step: (m["loss/total"], m["loss/reference_kl"]) for step, m in lines.items() if step}
    assert first[1][1] > 0.1  # the teacher is another model
    start = lab.root / "recorded" / "checkpoints" / "step_00000002"
    again = train(lab, "resumed", 15555, *local, f"trainer.resume={start}")
    replayed = train(lab, "replayed", 15555, *local, f"trainer.replay={lab.root / 'recorded' / 'batches'}")
    for other, steps in ((again, (3, 4)), (replayed, (1, 2, 3, 4))):
        assert {s: (other[s]["loss/total"], other[s]["loss/reference_kl"]) for s in steps} == {
            s: first[s] for s in steps
        }

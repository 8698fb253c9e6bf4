"""Test the whole loop with a KL penalty to a reference and a local teacher: Ray, vLLM, Megatron-core."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Lab
from tests.e2e.exactness import steps_of

# In CI test_own_pipeline.py has the initial student as a reference, and test_lora.py the base of adapters.
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WEIGHT = 10.0


def train(lab: Lab, name: str, port: int, *overrides: str) -> dict[int, dict[str, float]]:
    run_dir = lab.root / name
    lab.finished_run(run_dir, port, f"distill.reference_kl_weight={WEIGHT:g}", *overrides)
    return steps_of(run_dir)


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

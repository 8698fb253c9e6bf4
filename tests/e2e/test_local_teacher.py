"""Test the whole loop with a local teacher on the actor's ranks: Ray, vLLM, Megatron-core or fully_shard."""

from __future__ import annotations

from pathlib import Path

import pytest

from gkd.metrics.writer import read_metrics
from tests.e2e.conftest import Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # in CI test_lora.py compares an evaluation

TOLERANCE = 1e-5
UNUSED_PORT = 15555  # the default; a local teacher does not use it


def losses(run_dir: Path) -> dict[int, float]:
    return {int(line["step"]): line["loss/total"] for line in read_metrics(run_dir / "metrics.jsonl") if line["step"]}


def train(lab: Lab, name: str, *overrides: str) -> Path:
    run_dir = lab.root / name
    local = ("teacher.backend=local", f"teacher.path={lab.teacher}", *overrides)
    lab.finished_run(run_dir, UNUSED_PORT, *local)
    return run_dir


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor.pp=2", "teacher.signal=hidden"),
        ("actor.strategy=fsdp2", "teacher.signal=logits", "teacher.fsdp_cpu_offload=false", "memory.strategy=resident"),
        (
            "actor.tp=2",
            "distill.losses=[{name: jsd}, {name: k1}]",
            "distill.on_policy_share=0.5",
            "distill.support=union",
        ),
    ],
    ids=["stages", "fsdp2", "mixture"],
)
def test_local_losses_on_two_ranks_equal_those_of_the_server(
    lab: Lab, teacher_port: int, request: pytest.FixtureRequest, overrides: tuple[str, ...]
) -> None:
    """If it fails, local scores of a signal, a mixture or a layout differ from those of the server."""
    name = request.node.callspec.id
    served = lab.root / f"served_{name}"
    settings = ("trainer.n_gpus_per_node=2", "trainer.total_steps=3")
    of_server = [each for each in overrides if not each.startswith(("teacher.fsdp", "memory."))]
    lab.finished_run(served, teacher_port, *settings, *of_server)
    run_dir = train(lab, f"local_{name}", *settings, *overrides)
    found, expected = losses(run_dir), losses(served)
    assert found.keys() == expected.keys() == {1, 2, 3}
    if "memory.strategy=resident" in overrides:
        moves = [key for line in read_metrics(run_dir / "metrics.jsonl") for key in line if key.endswith("/onload")]
        assert not moves, "the student's states move although all models are resident"
    assert max(abs(found[step] - loss) for step, loss in expected.items()) <= TOLERANCE, (found, expected)


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor.pp=2",),
        ("actor.strategy=fsdp2", "teacher.update_ema=0.5", "teacher.signal=hidden"),
    ],
    ids=["copy", "average"],
)
def test_a_refreshed_teacher_is_restored_by_a_resume(
    lab: Lab, request: pytest.FixtureRequest, overrides: tuple[str, ...]
) -> None:
    """If it fails, a teacher refresh is lost, late or partial, or a resumed run has other teacher weights."""
    name = f"following_{request.node.callspec.id}"
    settings = ("teacher.update_interval=2", "trainer.n_gpus_per_node=2", "trainer.total_steps=6", *overrides)
    whole = train(lab, name, *settings, "trainer.save_every=3", "trainer.keep_last=9")
    first = losses(whole)
    if "copy" in name:
        # The refresh made the teacher equal to the student, so the loss is 0 at step 3 and positive at step 4.
        assert abs(first[3]) < 1e-6 < first[4] < first[2]
    start = whole / "checkpoints" / "step_00000003"  # between two refreshes
    again = losses(train(lab, f"{name}_again", *settings, f"trainer.resume={start}"))
    assert again == {step: first[step] for step in (4, 5, 6)}


def test_the_engines_score_like_a_teacher_that_follows_the_student(lab: Lab) -> None:
    """If it fails, the engines score after another prompt, with the weights of another step, or other sequences."""
    settings = ("teacher.prompt_template=w3 w5 {prompt}", "data.max_teacher_prompt_length=14", "eval.every=2")
    settings = (*settings, "eval.max_prompts=4", "eval.metric=none", "rollout.n_gpus_per_node=2")
    settings = (*settings, "distill.losses=[{name: jsd}, {name: k1}]")
    of_student = train(lab, "live", *settings, f"teacher.path={lab.student}", "teacher.update_interval=1")
    run_dir = lab.root / "live_rollout"
    lab.finished_run(run_dir, UNUSED_PORT, "teacher.backend=rollout", *settings)
    found, expected = losses(run_dir), losses(of_student)
    assert found.keys() == expected.keys() == {1, 2, 3, 4} and min(expected.values()) > 1e-3
    assert max(abs(found[step] - loss) for step, loss in expected.items()) <= 10 * TOLERANCE, (found, expected)

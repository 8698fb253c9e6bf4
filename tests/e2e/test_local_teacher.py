"""Test the whole loop with a local teacher on the actor's ranks: Ray, vLLM, Megatron-core or fully_shard."""

from __future__ import annotations

from pathlib import Path

import pytest

from gkd.metrics.writer import read_metrics
from tests.e2e.conftest import Lab

pytestmark = pytest.mark.e2e

TOLERANCE = 1e-5
UNUSED_PORT = 15555  # the default; a local teacher does not use it


def losses(run_dir: Path) -> dict[int, float]:
    return {int(line["step"]): line["loss/total"] for line in read_metrics(run_dir / "metrics.jsonl") if line["step"]}


def train(lab: Lab, name: str, *overrides: str) -> Path:
    run_dir = lab.root / name
    local = ("teacher.backend=local", f"teacher.path={lab.teacher}", *overrides)
    lab.finished_run(run_dir, UNUSED_PORT, *local)
    return run_dir


@pytest.mark.slow  # in CI test_lora.py has a local teacher and compares the first step
def test_local_losses_equal_those_of_the_server(lab: Lab, base_run: Path, shared_ray: str) -> None:
    """If it fails, local and served scores of the same responses differ, scores are assigned to other sequences, or two
    pipeline stages do not train like one rank.
    """
    # All three roles share two slots.
    layout = ("trainer.n_gpus_per_node=2", "actor.pp=2", "rollout.n_gpus_per_node=2", "trainer.colocate=true")
    run_dir = train(lab, "local_run", *layout, shared_ray)
    found, expected = losses(run_dir), losses(base_run)
    assert found.keys() == expected.keys() == {1, 2, 3, 4}
    for step, loss in expected.items():
        assert abs(found[step] - loss) <= TOLERANCE, (step, found, expected)
    lines, served = (read_metrics(folder / "metrics.jsonl") for folder in (run_dir, base_run))
    names = [{name for line in each for name in line if name.startswith("teacher/")} for each in (lines, served)]
    assert names[0] == names[1] >= {"teacher/topk_mass", "teacher/score_bytes"}
    assert all(line["memory/train/before_onload"] == 0 for line in lines if line["step"]), "the student is offloaded"


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_with_a_local_teacher_resumes_and_replays_bit_exactly(lab: Lab) -> None:
    """If it fails, recorded scores are computed again, or a resumed run gets other scores."""
    settings = ("trainer.save_every=2", "trainer.record_batches=true")
    whole = train(lab, "recorded", *settings, "trainer.keep_last=9", "actor.strategy=fsdp2")
    first = losses(whole)
    start = whole / "checkpoints" / "step_00000002"
    again = losses(train(lab, "resumed", *settings, "actor.strategy=fsdp2", f"trainer.resume={start}"))
    assert again == {step: first[step] for step in (3, 4)}
    replayed = train(lab, "replayed", "actor.strategy=fsdp2", f"trainer.replay={whole / 'batches'}")
    assert losses(replayed) == first


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ("distill.losses=[{name: jsd}, {name: k1}]", "rollout.n_gpus_per_node=2")])
def test_the_engines_score_like_a_teacher_that_follows_the_student(lab: Lab, overrides: tuple[str, ...]) -> None:
    """If it fails, the engines score after another prompt, with the weights of another step, or other sequences."""
    settings = ("teacher.prompt_template=w3 w5 {prompt}", "data.max_teacher_prompt_length=14", "eval.every=2")
    settings = (*settings, "eval.max_prompts=4", "eval.metric=none", *overrides)
    name = f"live{len(overrides)}"
    of_student = train(lab, name, *settings, f"teacher.path={lab.student}", "teacher.update_interval=1")
    run_dir = lab.root / f"{name}_rollout"
    lab.finished_run(run_dir, UNUSED_PORT, "teacher.backend=rollout", *settings)
    found, expected = losses(run_dir), losses(of_student)
    assert found.keys() == expected.keys() == {1, 2, 3, 4} and min(expected.values()) > 1e-3
    assert max(abs(found[step] - loss) for step, loss in expected.items()) <= 10 * TOLERANCE, (found, expected)

"""Test functions that get all responses to a prompt, in real runs with real engines and two data-parallel groups."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import REWARDS, Lab
from tests.e2e.exactness import differences, recorded, steps_of

pytestmark = pytest.mark.e2e
HERE = "tests.unit.group_functions"
FUNCTIONS = (f"teacher.prompt_function={HERE}:from_column", f"distill.response_weight={HERE}:pass_rate")


@pytest.fixture(scope="module")
def settings(lab: Lab, shared_ray: str) -> tuple[str, ...]:
    """Return the settings of the runs; half of the rows have a prompt for the teacher in the column `t`."""
    rows = [json.loads(line) for line in lab.train.read_text().splitlines()]
    views = [f"w3 w5 {row['prompt']}" if row["domain"] == "a" else None for row in rows]
    train = lab.root / "with_views.jsonl"
    train.write_text("".join(json.dumps({**row, "t": view}) + "\n" for row, view in zip(rows, views, strict=True)))
    layout = ("trainer.n_gpus_per_node=2", "trainer.scheduler=one_step_off", "trainer.save_every=2", shared_ray)
    data = (f"data.train_files=[{train}]", "data.max_teacher_prompt_length=14", REWARDS[0], "rollout.n=4")
    return (
        *layout,
        *data,
        "trainer.record_batches=true",
        "trainer.keep_last=9",
        "eval.metric=none",
        "data.val_files=[]",
    )


@pytest.fixture(scope="module")
def run_dir(lab: Lab, teacher_port: int, settings: tuple[str, ...]) -> Path:
    """Run four steps with both functions."""
    lab.finished_run(lab.root / "group_functions", teacher_port, *settings, *FUNCTIONS)
    return lab.root / "group_functions"


def test_the_teacher_reads_the_prompts_of_a_function(run_dir: Path) -> None:
    """If it fails, a function's prompt does not reach the teacher, or reaches it with responses to another prompt."""
    lines = steps_of(run_dir)
    assert 0 < lines[1]["teacher/own_prompt_share"] < 1 and 0 < lines[1]["reward/trained_share"] <= 1
    rollouts = [rollout for rollout, _ in recorded(run_dir, 1)]
    assert {rollout.teacher_ids is None for rollout in rollouts} == {True, False}
    for rollout in rollouts:
        if rollout.teacher_ids is not None:
            assert len(rollout.teacher_ids) == len(rollout.prompt_ids) + 2
            assert rollout.teacher_ids.tolist()[3:] == rollout.prompt_ids.tolist()[1:]


@pytest.mark.slow
def test_functions_do_what_a_column_and_pass_rates_do(
    run_dir: Path, lab: Lab, teacher_port: int, settings: tuple[str, ...]
) -> None:
    """If it fails, a function's prompt reaches the teacher late, in part or for another response, or its weights are
    those of other responses.
    """
    other_dir = lab.root / "group_column"
    column = ("data.teacher_prompt_key=t", "distill.response_weight=pass_rate", "trainer.total_steps=2")
    lab.finished_run(other_dir, teacher_port, *settings, *column)
    # loss/engine_kl depends on which sequences shared a pass of the engine.
    but = ("teacher/own_prompt_share", "loss/engine_kl")
    assert not differences(other_dir, run_dir, export=False, through=2, but=but)
    for step in (1, 2):
        one, other = ({r.sample_index: (r, s) for r, s in recorded(each, step)} for each in (run_dir, other_dir))
        assert one.keys() == other.keys() and any(r.teacher_ids is not None for r, _ in one.values())
        for index, (rollout, scores) in one.items():
            same, expected = other[index]
            np.testing.assert_array_equal(rollout.response_ids, same.response_ids)
            np.testing.assert_array_equal(scores.topk.logprobs, expected.topk.logprobs)


@pytest.mark.slow  # in CI tests/unit/test_group_functions.py restores a chunk
def test_a_resumed_run_has_the_same_prompts_and_weights(
    run_dir: Path, lab: Lab, teacher_port: int, settings: tuple[str, ...]
) -> None:
    """If it fails, a run that resumes with a batch in flight trains on other prompts of the teacher or weights."""
    again_dir = lab.root / "group_resumed"
    begin = f"trainer.resume={run_dir / 'checkpoints' / 'step_00000002'}"
    lab.finished_run(again_dir, teacher_port, *settings, *FUNCTIONS, begin)
    lines, again = steps_of(run_dir), steps_of(again_dir)
    assert sorted(again) == [3, 4]
    kinds = ("loss/", "optim/", "reward/", "rollout/", "teacher/own")
    compared = [key for key in lines[3] if key.startswith(kinds) and key != "loss/engine_kl"]
    for step in (3, 4):
        assert [again[step][key] for key in compared] == [lines[step][key] for key in compared]

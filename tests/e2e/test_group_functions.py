"""Test functions that get all responses to a prompt, in a real run with a real engine and two data-parallel groups.

tests/unit/test_group_functions.py compares them with a column and with pass rates, and restores a chunk.
"""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import REWARDS, Lab
from tests.e2e.exactness import recorded, steps_of

pytestmark = pytest.mark.e2e
HERE = "tests.unit.group_functions"
FUNCTIONS = (f"teacher.prompt_function={HERE}:from_column", f"distill.response_weight={HERE}:pass_rate")


def test_the_teacher_reads_the_prompts_of_a_function(lab: Lab, teacher_port: int, shared_ray: str) -> None:
    """If it fails, a function's prompt does not reach the teacher, or reaches it with responses to another prompt."""
    rows = [json.loads(line) for line in lab.train.read_text().splitlines()]
    views = [f"w3 w5 {row['prompt']}" if row["domain"] == "a" else None for row in rows]
    train = lab.root / "with_views.jsonl"
    train.write_text("".join(json.dumps({**row, "t": view}) + "\n" for row, view in zip(rows, views, strict=True)))
    layout = ("trainer.n_gpus_per_node=2", "trainer.scheduler=one_step_off", "trainer.save_every=2", shared_ray)
    data = (f"data.train_files=[{train}]", "data.max_teacher_prompt_length=14", REWARDS[0], "rollout.n=4")
    rest = ("trainer.record_batches=true", "eval.metric=none", "data.val_files=[]")
    run_dir = lab.root / "group_functions"
    lab.finished_run(run_dir, teacher_port, *layout, *data, *rest, *FUNCTIONS)
    lines = steps_of(run_dir)
    assert 0 < lines[1]["teacher/own_prompt_share"] < 1 and 0 < lines[1]["reward/trained_share"] <= 1
    rollouts = [rollout for rollout, _ in recorded(run_dir, 1)]
    assert {rollout.teacher_ids is None for rollout in rollouts} == {True, False}
    for rollout in rollouts:
        if rollout.teacher_ids is not None:
            assert len(rollout.teacher_ids) == len(rollout.prompt_ids) + 2
            assert rollout.teacher_ids.tolist()[3:] == rollout.prompt_ids.tolist()[1:]

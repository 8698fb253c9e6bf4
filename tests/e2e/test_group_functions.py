"""Test functions that get all responses to a prompt, in real runs with real engines and two data-parallel groups."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gkd.run.rollout_file import read_sequences
from gkd.types import Rollout, TeacherScores
from tests.e2e.conftest import REWARDS, Lab
from tests.e2e.exactness import differences, steps_of

pytestmark = pytest.mark.e2e
HERE = "tests.unit.group_functions"


def recorded(run_dir: Path, step: int) -> dict[int, tuple[Rollout, TeacherScores]]:
    found = {}
    for file in (run_dir / "batches" / f"step_{step:08d}").glob("*.npz"):
        rollouts, scores = read_sequences(file)
        assert scores is not None
        found |= {r.sample_index: (r, s) for r, s in zip(rollouts, scores, strict=True)}
    return found


def test_functions_do_what_a_column_and_pass_rates_do(lab: Lab, teacher_port: int, shared_ray: str) -> None:
    """If it fails, a function's prompt reaches the teacher late, in part or for another response, its weights are those
    of other responses, or a run that resumes with a batch in flight has other prompts or weights.
    """
    rows = [json.loads(line) for line in lab.train.read_text().splitlines()]
    views = [f"w3 w5 {row['prompt']}" if row["domain"] == "a" else None for row in rows]
    train = lab.root / "with_views.jsonl"
    train.write_text("".join(json.dumps({**row, "t": view}) + "\n" for row, view in zip(rows, views, strict=True)))
    settings = ("trainer.n_gpus_per_node=2", "trainer.scheduler=one_step_off", "trainer.save_every=2", shared_ray)
    settings += (f"data.train_files=[{train}]", "data.max_teacher_prompt_length=14", REWARDS[0], "rollout.n=4")
    settings += ("trainer.record_batches=true", "trainer.keep_last=9", "eval.metric=none", "data.val_files=[]")
    functions = (f"teacher.prompt_function={HERE}:from_column", f"distill.response_weight={HERE}:pass_rate")
    of_functions, of_column, resumed = (lab.root / f"group_{name}" for name in ("functions", "column", "resumed"))
    lab.finished_run(of_functions, teacher_port, *settings, *functions)
    column = ("data.teacher_prompt_key=t", "distill.response_weight=pass_rate", "trainer.total_steps=2")
    lab.finished_run(of_column, teacher_port, *settings, *column)
    lines = steps_of(of_functions)
    assert 0 < lines[1]["teacher/own_prompt_share"] < 1 and 0 < lines[1]["reward/trained_share"] <= 1
    # Evenly shared GPUs, other sizes of chunks: nothing else may differ.
    but = ("teacher/own_prompt_share", "loss/engine_kl")
    assert not differences(of_column, of_functions, export=False, through=2, but=but)
    for step in (1, 2):
        one, other = recorded(of_functions, step), recorded(of_column, step)
        assert one.keys() == other.keys() and any(r.teacher_ids is not None for r, _ in one.values())
        for index, (rollout, scores) in one.items():
            same, expected = other[index]
            np.testing.assert_array_equal(rollout.response_ids, same.response_ids)
            assert scores.topk is not None and expected.topk is not None
            np.testing.assert_array_equal(scores.topk.logprobs, expected.topk.logprobs)
    begin = f"trainer.resume={of_functions / 'checkpoints' / 'step_00000002'}"
    lab.finished_run(resumed, teacher_port, *settings, *functions, begin)
    again = steps_of(resumed)
    assert sorted(again) == [3, 4]
    kinds = ("loss/", "optim/", "reward/", "rollout/", "teacher/own")
    compared = [key for key in lines[3] if key.startswith(kinds) and key != "loss/engine_kl"]
    for step in (3, 4):
        assert [again[step][key] for key in compared] == [lines[step][key] for key in compared]

"""Test `trainer.scheduler: stream` with real engines: prompts and staleness across a kill, and an exact replay."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import N_TRAIN, REWARDS, TWO_ROUTES, Lab
from tests.e2e.exactness import check_stream
from tests.e2e.kill_matrix import Kill, Runs, check_replay

pytestmark = pytest.mark.e2e
N_STEPS = 20
SETTINGS = (
    "trainer.scheduler=stream",
    f"trainer.total_steps={N_STEPS}",
    "rollout.max_num_seqs=4",  # so that weight syncs occur in the middle of responses
    "trainer.record_batches=true",
    "eval.max_prompts=4",
    "trainer.save_every=1",
    "trainer.resume=auto",
    "distill.support=union",  # so that responses in flight take the student's ids along
    "data.max_teacher_prompt_length=14",
)
# Bound -> other settings. With a bound of 2 responses have finished at every save; with rewards batches are whole. With
# a bound of 1 and an engine that takes as long as the actor, about eight of the 20 batches have parts.
CASES = {
    2: (
        *(*TWO_ROUTES, *REWARDS, "teacher.prompt_function=tests.unit.group_functions:shortest"),
        "distill.response_weight=tests.unit.group_functions:pass_rate",
    ),
    1: ("rollout.max_num_seqs=2", "teacher.prompt_template=w3 w5 {prompt}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bound", CASES)
def test_a_killed_stream_loses_no_prompt_and_can_be_replayed(lab: Lab, teacher_port: int, bound: int) -> None:
    """If it fails, a resumed stream loses or repeats prompts, or a run with functions of rewards, prompts, weights, or
    with batches in parts, cannot be replayed exactly.
    """
    settings = (*SETTINGS, *CASES[bound], f"trainer.max_staleness={bound}")
    runs = Runs(lab, teacher_port, lab.root / f"stream_{bound}_logs", settings)
    run_dir = lab.root / f"stream_{bound}"
    code, log = runs.launch(run_dir, Kill("train", 4, 0.0, "all"))
    assert code == -9, log[-3000:]
    latest = (run_dir / "checkpoints" / "latest").read_text().strip()
    if bound == 2:
        assert list((run_dir / "checkpoints" / latest / "in_flight").iterdir()), (
            "nothing was in flight, so nothing was tested"
        )
    code, log = runs.launch(run_dir, None)
    assert code == 0 and "resumed from" in log, log[-3000:]
    assert any((run_dir / "batches").glob("step_*/early_*.npz")) == (bound == 1), "no batch had parts"
    check_stream(run_dir, n_steps=N_STEPS, n_prompts=N_TRAIN, max_staleness=bound)
    check_replay(runs, run_dir)

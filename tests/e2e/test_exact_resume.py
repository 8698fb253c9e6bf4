"""Killed and resumed, a run is the run that was left alone, to the bit. In full: `python -m tests.e2e.kill_matrix`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Lab
from tests.e2e.exactness import differences
from tests.e2e.kill_matrix import Kill, Runs, torture

pytestmark = pytest.mark.e2e


@pytest.mark.slow  # in CI a stream is killed, and a run ahead resumes to the bit: test_stream.py, test_schedulers.py
def test_a_killed_run_is_the_same_run(base_run: Path, lab: Lab, teacher_port: int) -> None:
    """If it fails, a kill -9 while a checkpoint is written changes what is learned, or loses it."""
    runs = Runs(lab, teacher_port, lab.root / "killed_logs", ("trainer.save_every=1", "trainer.resume=auto"))
    # The first visit of the stage is that of step 0, where there is nothing to save.
    outcomes = torture(runs, base_run, lab.root / "killed", [Kill("checkpoint", 3, 0.03, "all")])
    assert [o.killed for o in outcomes] == [True], "the run was over before its kill: the test shows nothing"
    assert outcomes[0].reached == 2 and outcomes[0].resumed_from == 0


@pytest.mark.slow
def test_the_comparison_sees_another_run(base_run: Path, lab: Lab, teacher_port: int) -> None:
    """If it fails, the comparison above would pass whatever a resume does."""
    other = lab.root / "other_seed"
    code, log = Runs(lab, teacher_port, lab.root / "seed_logs", ("data.seed=2",)).launch(other, None)
    assert code == 0, log
    found = differences(base_run, other)
    assert any("loss/total" in text for text in found) and any("weights" in text for text in found)

"""Test that a killed and resumed run is bit-exact. All kills: `python -m tests.e2e.kill_matrix`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Lab
from tests.e2e.exactness import differences
from tests.e2e.kill_matrix import Kill, Runs, torture

pytestmark = pytest.mark.e2e


@pytest.mark.slow  # CI covers kills and resumes in test_stream.py and test_schedulers.py
def test_a_killed_run_resumes_bit_exactly(base_run: Path, lab: Lab, teacher_port: int) -> None:
    """If it fails, a SIGKILL during a save changes the resumed run."""
    runs = Runs(lab, teacher_port, lab.root / "killed_logs", ("trainer.save_every=1", "trainer.resume=auto"))
    # The first visit of the stage is at step 0, where no save is due.
    outcomes = torture(runs, base_run, lab.root / "killed", [Kill("checkpoint", 3, 0.03, "all")])
    assert [o.killed for o in outcomes] == [True], "the run finished before its kill, so nothing was tested"
    assert outcomes[0].reached == 2 and outcomes[0].resumed_from == 0


@pytest.mark.slow
def test_the_comparison_detects_another_run(base_run: Path, lab: Lab, teacher_port: int) -> None:
    """If it fails, the comparison above would pass for any run."""
    other = lab.root / "other_seed"
    code, log = Runs(lab, teacher_port, lab.root / "seed_logs", ("data.seed=2",)).launch(other, None)
    assert code == 0, log
    found = differences(base_run, other)
    assert any("loss/total" in text for text in found) and any("weights" in text for text in found)

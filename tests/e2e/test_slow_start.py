"""A real run whose processes need longer to start than they may."""

from __future__ import annotations

import psutil
import pytest

from tests.e2e.conftest import Lab
from tests.e2e.test_loop import environment

pytestmark = pytest.mark.e2e


def test_a_start_that_takes_too_long_says_who_and_where(
    lab: Lab, teacher_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a start that hangs ends without a word of who hangs and at which line, or leaves processes."""
    run_dir = lab.root / "slow_start"
    monkeypatch.setenv("GKD_TEST_RUN", str(run_dir))
    # No machine imports vLLM in that time; and 2 s are over for a late rank of any other kind in the same way.
    done = lab.train_run(run_dir, teacher_port, "trainer.init_timeout_s=2", timeout_s=120)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "LateError: not all ranks were up within trainer.init_timeout_s = 2 s" in done.stderr
    told = done.stderr[done.stderr.index("LateError") :]
    assert "rollout engine 0 (" in told and f"stacks of all ranks: {run_dir}/stacks.txt" in told
    stacks = (run_dir / "stacks.txt").read_text()
    assert "== rollout engine 0 (" in stacks and 'File "' in stacks, stacks
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    left = [p for p in psutil.process_iter() if environment(p).get("GKD_TEST_RUN") == str(run_dir)]
    _, alive = psutil.wait_procs(left, timeout=15)  # Ray's daemons end by themselves, within seconds
    assert not alive, [p.cmdline()[:3] for p in alive]

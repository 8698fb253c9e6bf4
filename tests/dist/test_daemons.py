"""Ray's own processes end under a job: a real Ray in a program of its own, which Ray ends a minute later."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

pytestmark = [pytest.mark.dist, pytest.mark.cpu_only("Ray's slots are logical CPUs")]

_HOLD = """
import sys, time
from gkd.cluster.pools import Cluster
import ray
cluster = Cluster("", n_slots=64, on_cpu=False)  # more slots than this machine has cores
print("CPUs", ray.cluster_resources()["CPU"], flush=True)
sys.stdin.readline()
cluster.close()
"""


@pytest.mark.parametrize("victim", ["gcs_server", "raylet", ""])
def test_the_end_of_rays_daemons_is_reported(victim: str) -> None:
    """Fails if a run under which `ray stop` ended Ray is silent until Ray ends it, a clean end logs an error, or a
    GPU machine with few cores has no CPUs for its slots.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD],
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin and program.stdout and program.stderr
        try:
            assert float(program.stdout.readline().removeprefix("CPUs ")) >= 64 * 1.1
            daemons = {child.name(): child for child in psutil.Process(program.pid).children()}
            if victim:
                daemons[victim].kill()
                line = next(line for line in program.stderr if "[gkd.daemons]" in line)
                assert victim in line and str(daemons[victim].pid) in line and "trainer.resume=auto" in line
            else:
                _, rest = program.communicate("\n", timeout=60)
                assert program.returncode == 0 and "[gkd.daemons]" not in rest
        finally:
            program.kill()

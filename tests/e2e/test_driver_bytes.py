"""Test that the driver handles references only: its traffic does not grow with tokens or scores.

`tests.e2e.driver_bytes` lists the counted bytes.
"""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.e2e.conftest import Lab

LIMIT = 100  # bytes a sequence
# The same on the wire, including Ray's bookkeeping of calls and handles, which dominates: 273 were measured.
TCP_LIMIT = 400
CONTROL = 50_000


@pytest.mark.e2e
@pytest.mark.slow  # CI checks the sizes in tests/unit/test_inline_bytes.py
def test_driver_traffic_is_at_most_100_bytes_per_sequence(lab: Lab, teacher_port: int) -> None:
    """Fails if tokens or scores pass through the driver, which would become the bottleneck of large steps."""
    command = lab.command(
        lab.root / "run_driver_bytes", teacher_port, "trainer.n_gpus_per_node=2", "data.max_response_length=48"
    )
    command[command.index("gkd.main_gkd")] = "tests.e2e.driver_bytes"
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    print(measured)
    small, large, short, control = (measured[name] for name in ("small", "large", "short", "control"))

    more = large["n_sequences"] - small["n_sequences"]
    assert more == 64
    growth = {name: (large[name] - small[name]) / more for name in control}
    # written_bytes include the prompt tokens, which the driver reads from the file and sends on.
    assert growth["read_bytes"] + growth["written_bytes"] <= LIMIT
    assert growth["tcp_bytes"] <= TCP_LIMIT
    # Inline results are limited to chunk sizes, which are released when they are read.
    assert large["inline_bytes"] <= LIMIT * large["n_sequences"]

    assert large["n_sequences"] == short["n_sequences"]
    assert large["n_response_tokens"] > 3 * short["n_response_tokens"]
    longer = large["n_teacher_bytes"] - short["n_teacher_bytes"]
    assert longer > 10**6
    for name in control:
        assert abs(large[name] - short[name]) < 0.02 * longer, f"{name} grow with the responses"

    for name in ("read_bytes", "inline_bytes", "tcp_bytes"):
        assert control[name] >= CONTROL, f"{name} missed a result that passed through the driver"

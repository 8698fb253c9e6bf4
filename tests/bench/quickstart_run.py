"""Train with the quickstart's settings and others, and measure the CPU time of the processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gkd.metrics.writer import read_metrics
from tests.bench.cpu_time import CpuTime

_LIMIT_S = 1800.0


def train(
    out: Path, settings: Sequence[str], steps: int, *, servers: Sequence[int] = ()
) -> tuple[list[dict[str, Any]], CpuTime]:
    """Run the trainer in `out/run`; what `out` has is deleted. Raises RuntimeError: it ended early.

    Args:
        servers: process ids of its teacher servers, where other runs have servers of their own; only they and the
            trainer are measured. None: all that this process has started.

    Returns:
        The lines of its metrics.jsonl, and its CPU time.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with (out / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "gkd.main_gkd", "--config", "configs/quickstart_cpu.yaml"]
        command += [f"trainer.run_dir={out / 'run'}", f"trainer.total_steps={steps}"]
        command += [f"trainer.total_epochs={steps}", *settings]  # the steps decide
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        with process, CpuTime([process.pid, *servers] if servers else ()) as cpu:
            process.wait(_LIMIT_S)
    file = out / "run" / "metrics.jsonl"
    lines = read_metrics(file) if file.exists() else []
    if not lines or lines[-1]["step"] < steps:
        raise RuntimeError(f"{out.name}: it ended before step {steps}; see {out / 'log.txt'}")
    return lines, cpu

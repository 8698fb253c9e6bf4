"""Thousands of steps: no process of a run may grow. Run it with `-m slow -s`; it prints a table."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import ALONE, Lab, save_model
from tests.e2e.exactness import last_step
from tests.service.harness import ServerProcess

SETTLED, LAST = 500, 3000  # steps
# Bounds of the growth from SETTLED to LAST. The heaps of small processes settle by up to 1.7 MiB, which is more than
# their share, and a thread pool of Ray has one thread more or less.
SHARE, HEAP_MIB, COUNTS = 0.02, 3.0, 3
SETTINGS = (
    *("data.val_files=[]", "eval.metric=none", "data.max_response_length=4", "teacher.topk=8"),
    *("trainer.global_batch_size=2", "rollout.n=1", "trainer.total_epochs=999", f"trainer.total_steps={LAST + 50}"),
    *("trainer.save_every=250", "trainer.scheduler=one_step_off"),
)


def measured(root: Path, step: int, *processes: subprocess.Popen[Any]) -> dict[str, tuple[float, int, int]]:
    """Wait for a step; return resident MiB, threads and open files of each process below these, by name and number."""
    while last_step(root / "run") < step:
        assert processes[0].poll() is None, (root / "log").read_text()[-3000:]
        time.sleep(2.0)
    found = {}
    for root_process in (psutil.Process(each.pid) for each in processes):
        for process in (root_process, *root_process.children(recursive=True)):
            words = [os.path.basename(word) for word in process.cmdline() if not word.startswith("-")]
            name = " ".join(words[:3]).partition(".")[0].strip()  # without the method that a process of Ray runs
            mib = round(process.memory_info().rss / (1 << 20), 1)
            found[f"{name} {process.pid}"] = (mib, process.num_threads(), process.num_fds())
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_process_grows(tmp_path: Path) -> None:
    """Fails if the memory of a process, its threads or its open files grow with the number of steps."""
    small = Lab(tmp_path, *(tmp_path / name for name in ("teacher", "student", "train.jsonl", "heldout.jsonl")))
    for seed, folder in enumerate((small.teacher, small.student)):
        save_model(folder, seed=seed, layers=1, n_vocab=64)
    small.train.write_text("".join(json.dumps({"prompt": f"w{2 + i} w{3 + i}"}) + "\n" for i in range(40)))
    with ServerProcess(small.teacher, tmp_path, options=ALONE) as server, (tmp_path / "log").open("w") as log:
        command = small.command(tmp_path / "run", server.port, *SETTINGS)
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            before, after = (measured(tmp_path, step, process, server.process) for step in (SETTLED, LAST))
        finally:
            process.terminate()
            process.wait(120)
    print("\nprocess, then MiB, threads and files at both steps, and the growth of the memory")
    for name, first in before.items():
        print(f"{name:<58}{first!s:>20}{after[name]!s:>20}{after[name][0] / first[0] - 1:>8.1%}")
    for name, (mib, *counts) in after.items():
        assert mib - before[name][0] <= max(HEAP_MIB, SHARE * before[name][0]), name
        assert all(now <= first + COUNTS for now, first in zip(counts, before[name][1:], strict=True)), name

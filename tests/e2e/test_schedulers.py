"""Test the prefetching schedulers: staleness and bit-exact resume.

In CI test_tools.py runs one_step_off, test_other_tokenizer.py stream; tests/unit/test_prefetch.py has checkpoints.
With kills: `python -m tests.e2e.kill_matrix --layouts one_step_off,two_step_off`. Streams: `test_stream.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from gkd.metrics.writer import read_metrics
from tests.dist.helpers import free_port
from tests.e2e.conftest import ALONE, N_TRAIN, REWARDS, Lab
from tests.e2e.engine_kills import is_engine
from tests.e2e.exactness import check_taken, differences
from tests.e2e.test_loop import start, wait_for_step
from tests.service.harness import ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
FEW = "eval.max_prompts=4"
METHODS = (
    *(REWARDS[0], "distill.response_weight=wrong", "distill.token_clip=2"),
    "distill.losses=[{name: forward_kl}, {name: reverse_kl}]",
    "trainer.schedules={data.max_response_length: {from: 3, to: 8, steps: 8}, rollout.temperature: [[0, 1], [9, 0.8]], "
    "distill.losses.forward_kl: {from: 1, to: 0, steps: 9}}",
)


@pytest.mark.parametrize(("scheduler", "ahead"), [("one_step_off", 1), ("two_step_off", 2)])
def test_a_prefetching_run_that_loses_its_engine_and_its_teacher_is_bit_exact(
    scheduler: str, ahead: int, lab: Lab, teacher_port: int, shared_ray: str
) -> None:
    """If it fails, batches in flight at a checkpoint or on a killed engine are lost, generated with other weights, or
    trained twice, rewards of a resumed run differ, a killed engine is not restarted, the staleness is not that of the
    scheduler, or an outage hangs a run or loses steps.
    """
    n_steps = 10
    settings = (f"trainer.scheduler={scheduler}", "trainer.save_every=2", "trainer.keep_last=99", FEW, *METHODS)
    whole, rest = lab.root / scheduler, lab.root / f"{scheduler}_resumed"
    lab.finished_run(whole, teacher_port, *settings, shared_ray, f"trainer.total_steps={n_steps}")
    lines = {line["step"]: line for line in read_metrics(whole / "metrics.jsonl") if "loss/total" in line}
    assert all(line["reward/std"] > 0 for line in lines.values())
    assert lines[1]["rollout/response_length_mean"] <= 3 < lines[n_steps]["rollout/response_length_mean"]
    assert "loss/forward_kl" in lines[n_steps - 1] and "loss/forward_kl" not in lines[n_steps]
    assert all(0 < line["reward/trained_share"] < 1 and "loss/token_clipped" in line for line in lines.values())
    assert [line["staleness/max"] for line in lines.values()] == [min(step, ahead) for step in range(n_steps)]
    begin = whole / "checkpoints" / "step_00000002"
    assert _state(begin) == {"step": 2, "sampler_position": 6 * (2 + ahead), "unfinished": []}

    # Another run resumes from step 2. First its engine is killed, then, while it has many steps to go, its teacher.
    brief = ("teacher.outage_budget_s=3", "teacher.request_timeout_s=2")
    with ServerProcess(lab.teacher, lab.root, options=ALONE) as server:
        port = server.port
        more = ("trainer.total_steps=60", f"trainer.resume={begin}", shared_ray)
        process = start(lab, rest, port, *settings, *brief, *more)
        try:
            wait_for_step(rest, 3, process)
            # The nodes of the shared Ray are children of this process.
            (engine,) = (p for p in psutil.Process().children(recursive=True) if is_engine(p))
            engine.kill()
            wait_for_step(rest, int(read_metrics(rest / "metrics.jsonl")[-1]["step"]) + ahead + 1, process)
            server.kill()
            _, stderr = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 1, stderr[-4000:]
    assert sum(line.get("perf/engine_restarts", 0) for line in read_metrics(rest / "metrics.jsonl")) == 1
    assert f"127.0.0.1:{port}" in stderr and "TeacherUnavailable" in stderr and "failed, too" not in stderr
    lost = _newest(rest)
    assert 3 <= _state(lost)["step"] == read_metrics(rest / "metrics.jsonl")[-1]["step"]
    assert _state(lost)["step"] < n_steps, "the teacher was killed too late for a comparison"
    assert len(list((lost / "in_flight").iterdir())) == ahead
    # The session's server has the same teacher, at another address.
    more = (f"trainer.total_steps={n_steps}", "trainer.resume=auto", shared_ray)
    lab.finished_run(rest, teacher_port, *settings, *brief, *more)
    begins = [begin, lost]
    starts = [json.loads(line)["resumed_from"] for line in (rest / "environment.jsonl").read_text().splitlines()]
    assert list(map(Path, starts)) == begins
    again = {line["step"]: line for line in read_metrics(rest / "metrics.jsonl") if "loss/total" in line}
    assert list(again) == list(range(3, n_steps + 1))
    assert [line["loss/total"] for line in again.values()] == [lines[step]["loss/total"] for step in again]
    assert [line["reward/mean"] for line in again.values()] == [lines[step]["reward/mean"] for step in again]
    # weight_sync.verify: first = the sync at each start (not in a line) and the first one after a training step
    verified = [step for step, line in again.items() if line["weight_sync/verified_tensors"] > 0]
    assert verified == [_state(start_of)["step"] + 1 for start_of in begins]
    # loss/engine_kl depends on which sequences shared a pass of the engine: after the kill they are others.
    found = [text for text in differences(whole, rest) if "engine_kl" not in text]
    assert not [text for text in found if "weights" in text or " loss/" in text]


def _newest(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()


def _state(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "trainer.json").read_text())
    return state


def test_a_teacher_failure_keeps_the_rollouts_of_a_stream(lab: Lab) -> None:
    """If it fails, an outage hangs the run, or loses steps since the last checkpoint or rollouts in flight."""
    run_dir, port = lab.root / "outage_stream", free_port()
    # The stream has more finished prompts than the endpoint has threads, and all of them wait for the teacher.
    settings = ("trainer.scheduler=stream", "trainer.record_batches=true", "teacher.max_in_flight=2")
    brief = ("trainer.total_steps=60", "teacher.outage_budget_s=3", "teacher.request_timeout_s=2")
    with ServerProcess(lab.teacher, lab.root, port=port) as server:
        process = start(lab, run_dir, port, *settings, *brief)
        wait_for_step(run_dir, 1, process)
        server.kill()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1 and "TeacherUnavailable" in stderr and "failed, too" not in stderr, stderr[-4000:]
    latest = (run_dir / "checkpoints" / "latest").read_text().strip()
    reached = json.loads((run_dir / "checkpoints" / latest / "trainer.json").read_text())["step"]
    assert reached >= 1 and list((run_dir / "checkpoints" / latest / "in_flight").iterdir())
    with ServerProcess(lab.teacher, lab.root, port=port):
        more = (f"trainer.total_steps={reached + 3}", "trainer.resume=auto")
        lab.finished_run(run_dir, port, *settings, *brief, *more)
    lines = {line["step"]: line for line in read_metrics(run_dir / "metrics.jsonl") if "loss/total" in line}
    assert list(lines) == list(range(1, reached + 4))
    check_taken(run_dir, n_steps=reached + 3, n_prompts=N_TRAIN, whole=False)

"""CPU time of spans in a real run: `python -m tests.bench.bench_tracing [--json FILE]`.

Counts what each process records in a run of the end-to-end tests' models, times the same calls on this machine (thread
CPU time, with pickling and calls), and divides by the CPU time that the process used in the same steps.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import ray

from gkd.metrics.span_file import SpanFile, SpanLine, read_spans
from gkd.metrics.writer import MetricsWriter, read_metrics
from gkd.scoring.endpoint import Computations
from gkd.scoring.pool import TAKE_EVERY_S
from gkd.spans import Phase, ProcessSpans, SpanRecorder, driver
from gkd.types import ScoredChunk, ScoreTimes
from teacher_server.wire.protocol import ScoreReply
from tests.e2e.conftest import Lab, make_lab
from tests.rollout_chunks import chunk_of
from tests.service.harness import ServerProcess

WARM_UP, N_STEPS = 5, 40  # steps of the run; the first ones load libraries
_KINDS = {"ActorWorker": "actor 0", "RolloutWorker": "engine 0", "ScoringEndpoint": "scoring 0"}
_N = 20_000


def spans_cost(run: Path, used_s: dict[str, float], steps: range) -> dict[str, dict[str, float]]:
    """Return by process the CPU seconds of the spans of the measured steps, the CPU time used, and the share.

    Args:
        used_s: process -> CPU seconds in these steps.
    """
    lines = [line for line in read_spans(run / "spans.jsonl") if line.step in steps]
    n_steps = len(steps)
    unit = _unit_costs()
    of_process = {name: [span for line in lines if line.process == name for span in line.spans] for name in used_s}
    batches = [span for line in lines if line.process.startswith("teacher ") for span in line.spans]
    driver = of_process["driver"]
    n_calls = (driver[-1].start_s - driver[0].start_s) / TAKE_EVERY_S
    of = {
        "driver": _driver_s(lines, steps)
        + len(of_process["scoring 0"]) * unit["scored"]
        + n_calls * unit["call_driver"],
        "actor 0": len(of_process["actor 0"]) * unit["span"] + n_steps * unit["take"],
        "engine 0": sum(s.args.get("parts", 1) for s in of_process["engine 0"]) * unit["extend"]
        + n_steps * unit["take"],
        "scoring 0": sum(span.args["sequences"] for span in batches) * unit["note"] + n_calls * unit["call_worker"],
    }
    return {name: {"spans_s": of[name], "used_s": used_s[name], "share": of[name] / used_s[name]} for name in used_s}


def _driver_s(lines: list[SpanLine], steps: range) -> float:
    """Return the CPU time of writing these lines again, and of the stages' records."""
    own = {
        step: [s for line in lines if line.step == step and line.process == "driver" for s in line.spans]
        for step in steps
    }
    others = {
        step: [
            pickle.dumps(ProcessSpans(line.process, line.host, line.spans))
            for line in lines
            if line.step == step and line.process != "driver"
        ]
        for step in steps
    }
    with tempfile.TemporaryDirectory() as folder:
        file = SpanFile(MetricsWriter(Path(folder) / "spans.jsonl", -1), 1)
        began_s = time.thread_time()
        for step in steps:
            file.begin(step)
            for span in own[step]:
                driver.add(span.name, span.start_s, span.start_s + span.duration_s)
            file.add(pickle.loads(data) for data in others[step])
            file.end()
        return time.thread_time() - began_s


def _unit_costs() -> dict[str, float]:
    spans, noted = SpanRecorder("p"), Computations()
    scored = ScoredChunk(chunk_of(range(16), 10, n_prompt=10), None, None, 0, ScoreTimes(1.0, np.full(16, 2.0)))

    def one_span() -> None:
        with spans.span(Phase.TRAIN):
            pass

    def take() -> None:
        for name in ("train", "sync", "save", "evaluate"):
            spans.add(name, 0.0, 1.0)
        pickle.dumps(spans.take())

    fields = {"request_id": b"", "token_digest": b"", "model_fingerprint": "", "signal": "topk", "n_rows": 1}
    reply = ScoreReply(**fields, worker="w", k=1, n_entries=1, wire="fp16", checksums=[], queue_s=0.0, compute_s=1.0)
    costs = {
        "span": _each(one_span),
        "extend": _each(lambda: spans.extend(Phase.GENERATE, 0.0, 1.0)),
        "take": _each(take),
    }
    costs["note"] = _each(lambda: noted.note(reply, 1))
    with tempfile.TemporaryDirectory() as folder:
        file = SpanFile(MetricsWriter(Path(folder) / "spans.jsonl", -1), 1)
        costs["scored"] = _each(lambda: file.add_scored([scored]))
    return costs | _call_costs()


def _each(function: Callable[[], None]) -> float:
    began_s = time.thread_time()
    for _ in range(_N):
        function()
    return (time.thread_time() - began_s) / _N


@ray.remote(concurrency_groups={"records": 1}, num_cpus=0)
class _Endpoint:
    def cpu_s(self) -> float:
        return time.process_time()

    @ray.method(concurrency_group="records")
    def take(self) -> list[int]:
        return []


def _call_costs(n: int = 1000) -> dict[str, float]:
    """Return the CPU seconds, of all threads, of a call and its result: on the driver and in the worker."""
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        endpoint = _Endpoint.remote()  # type: ignore[attr-defined]
        ray.get(endpoint.take.remote())
        before_s, here_s = ray.get(endpoint.cpu_s.remote()), time.process_time()
        for _ in range(n):
            ray.get(endpoint.take.remote())
        used_s = time.process_time() - here_s
        return {"call_driver": used_s / n, "call_worker": (ray.get(endpoint.cpu_s.remote()) - before_s) / n}
    finally:
        ray.shutdown()


def measured_run(lab: Lab, port: int) -> tuple[Path, dict[str, float], range]:
    """Train, and return the run folder, the CPU seconds of each process in the measured steps, and these steps."""
    run = lab.root / "run"
    settings = (f"trainer.total_steps={N_STEPS}", "trainer.global_batch_size=16", "data.max_response_length=40")
    process = subprocess.Popen(lab.command(run, port, *settings), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    at: dict[int, dict[str, float]] = {}
    while process.poll() is None:
        step = _step(run)
        if WARM_UP <= step < N_STEPS and step not in at:  # the last step is followed by an evaluation and the export
            at[step] = _cpu_s(psutil.Process(process.pid))
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
    assert process.returncode == 0 and len(at) > 1, (process.returncode, at)
    first, last = min(at), max(at)
    return run, {name: at[last][name] - at[first][name] for name in at[last]}, range(first + 1, last + 1)


def _step(run: Path) -> int:
    file = run / "metrics.jsonl"
    lines = read_metrics(file) if file.exists() else []
    return int(lines[-1]["step"]) if lines else -1


def _cpu_s(driver: psutil.Process) -> dict[str, float]:
    found = {"driver": sum(driver.cpu_times()[:2])}
    for child in driver.children(recursive=True):
        title = " ".join(child.cmdline())
        for kind, name in _KINDS.items():
            if f"::{kind}" in title:
                found[name] = sum(child.cpu_times()[:2])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as folder:
        lab = make_lab(Path(folder))
        with ServerProcess(lab.teacher, lab.root) as server:
            run, used_s, steps = measured_run(lab, server.port)
        costs = spans_cost(run, used_s, steps)
        n_bytes = (run / "spans.jsonl").stat().st_size / N_STEPS
    print(f"steps {steps[0]} to {steps[-1]}; {n_bytes:.0f} bytes of spans.jsonl per step")
    print(f"{'process':<12}{'spans, ms/step':>16}{'used, ms/step':>16}{'share':>10}")
    for name, cost in costs.items():
        ms = [cost[key] * 1e3 / len(steps) for key in ("spans_s", "used_s")]
        print(f"{name:<12}{ms[0]:>16.3f}{ms[1]:>16.1f}{cost['share']:>10.2%}")
    if args.json is not None:
        args.json.write_text(
            json.dumps({"n_steps": len(steps), "bytes_per_step": n_bytes, "processes": costs}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

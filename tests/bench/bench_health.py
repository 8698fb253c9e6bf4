"""Count alarms: none in 10 healthy quickstart runs, one within 10 steps in each of 6 with a seeded fault.

    python -m tests.bench.bench_health --models DIR --out DIR [--steps N] [--only TEXT] [--json FILE]
    python -m tests.bench.bench_health --recorded DIR [--json FILE]

The first form runs what `--out` lacks, then evaluates; it needs the models of
`python -m examples.quickstart.make_models`.
The second only feeds recorded metrics through the checks, for example after a threshold has changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gkd.health.monitor import Monitor
from gkd.metrics.writer import read_metrics
from tests.bench.health_cases import CASES, Case, changed_model
from tests.bench.teacher_report import machine
from tests.service.harness import ServerProcess

FAULT_STEPS = 12
GOAL_STEPS = 10  # a seeded fault raises an alarm within this number of steps
_LIMIT_S = 1500.0


def record(case: Case, models: Path, out: Path, steps: int) -> None:
    """Run a case; its metrics are then in `out`. Raises RuntimeError: it wrote too few steps."""
    folder = out / slug(case)
    folder.mkdir(parents=True)
    teacher, student = models / "teacher", models / "student"
    if case.teacher is not None:
        teacher = changed_model(teacher, folder / "teacher", case.teacher)
    if case.student is not None:
        student = changed_model(student, folder / "student", case.student)
    n = FAULT_STEPS if case.seeded else steps
    with ServerProcess(teacher, folder, options=("--dtype", "float32")) as server:
        settings = [
            *(f"data.train_files=[{models / 'train.jsonl'}]", f"data.val_files=[{models / 'heldout.jsonl'}]"),
            *(f"model.path={student}", f"trainer.run_dir={folder / 'run'}", f"teacher.server_port={server.port}"),
            *(f"trainer.total_steps={120 if case.seeded else steps}", "trainer.scheduler=sync", *case.settings),
        ]
        command = [sys.executable, "-m", "tests.bench.health_fault", case.fault, str(n)]
        with (folder / "log.txt").open("wb") as log:
            subprocess.run(
                [*command, "--config", "configs/quickstart_cpu.yaml", *settings],
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=_LIMIT_S,
                check=False,
            )
    if (
        not (folder / "run" / "metrics.jsonl").exists()
        or read_metrics(folder / "run" / "metrics.jsonl")[-1]["step"] < n
    ):
        (folder / "run").rename(folder / "failed")
        raise RuntimeError(f"{case.name}: fewer than {n} steps; see {folder / 'log.txt'}")


def evaluate(case: Case, recorded: Path) -> dict[str, Any]:
    """Return the steps at which a recorded case raised alarms, and whether that is as expected."""
    lines = read_metrics(recorded / slug(case) / "run" / "metrics.jsonl")
    monitor, alarms = Monitor(), []
    for line in lines:
        alarms += [[alarm.step, alarm.check.name, alarm.evidence] for alarm in monitor.feed(line).started]
    early = [alarm for alarm in alarms if alarm[0] <= GOAL_STEPS]
    met = bool(early) if case.seeded else not alarms
    evaluations = [line["eval/kl"] for line in lines if line.get("eval/kl") is not None]
    return {"case": case.name, "steps": lines[-1]["step"], "met": met, "alarms": alarms, "eval_kl": evaluations}


def as_table(results: list[dict[str, Any]]) -> str:
    """Return one line per run: its steps, and the first step of each alarm."""
    rows = []
    for result in results:
        alarms = ", ".join(f"{name} ({step})" for step, name, _ in result["alarms"]) or "none"
        rows.append(
            f"{'ok    ' if result['met'] else 'MISSED'}  {result['case']:62} {result['steps']:4} steps  {alarms}"
        )
    return "\n".join(rows)


def slug(case: Case) -> str:
    return "".join(c if c.isalnum() else "_" for c in case.name)


def main(argv: list[str] | None = None) -> int:
    """Return 1 if a healthy run has an alarm, or a seeded fault has none in time."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_health")
    parser.add_argument("--models", type=Path, help="folder of examples.quickstart.make_models")
    parser.add_argument("--out", type=Path, help="folder of the runs; those that exist are not repeated")
    parser.add_argument("--recorded", type=Path, help="evaluate the runs of an earlier --out")
    parser.add_argument("--steps", type=int, default=120, help="of a healthy run; default: %(default)s, the quickstart")
    parser.add_argument("--only", default="", help="cases whose name contains it")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(argv)
    if (args.recorded is None) == (args.out is None or args.models is None):
        parser.error("give --models and --out, or --recorded")
    cases = [case for name, case in CASES.items() if args.only in name]
    if args.recorded is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for case in cases:
            if not (args.out / slug(case) / "run").exists():
                print(f"running {case.name} ...", file=sys.stderr, flush=True)
                record(case, args.models, args.out, args.steps)
    results = [evaluate(case, args.recorded or args.out) for case in cases]
    print(as_table(results))
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), "runs": results}, indent=1) + "\n")
    return 0 if all(result["met"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())

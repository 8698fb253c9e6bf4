"""Count alarms: none in 10 healthy quickstart runs, one within 10 steps in each with a seeded fault.

    python -m tests.bench.bench_health --models DIR --out DIR [--steps N] [--only TEXT] [--json FILE]
    python -m tests.bench.bench_health --recorded DIR [--json FILE]
    python -m tests.bench.bench_health --where ...

The first form runs what `--out` lacks, then evaluates; it needs the models of
`python -m examples.quickstart.make_models`.
The second only feeds recorded metrics through the checks, for example after a threshold has changed.
With `--where` the runs are the healthy ones and those of which `gkd where` or a check has to name the fault; the tool's
time is measured on 10 evaluations of 8 responses with 1,000 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gkd.metrics.health import Monitor
from gkd.metrics.token_groups import evaluation_numbers
from gkd.metrics.writer import read_metrics
from gkd.tools.report.groups import read_evaluation
from gkd.tools.report.read import json_lines, read_runs
from gkd.tools.report.samples import TokenTexts
from gkd.types import TokenRecord
from tests.bench.health_cases import CASES, Case, changed_model
from tests.bench.teacher_report import machine
from tests.report_run import make_run
from tests.service.harness import ServerProcess

FAULT_STEPS = 12
GOAL_STEPS = 10  # a seeded fault raises an alarm within this number of steps
EVAL_EVERY = 5  # so that `gkd where` has evaluations within these steps
NEW_CHECKS = {"ends_disagree", "sure_and_wrong"}  # others are counted by the first two forms
GOAL_S = 2.0  # of `gkd where`
_LIMIT_S = 1500.0


def record(case: Case, models: Path, out: Path, steps: int) -> None:
    """Run a case; its metrics are then in `out`. Raises RuntimeError: it wrote too few steps."""
    folder = out / slug(case)
    folder.mkdir(parents=True)
    teacher, student = models / case.teacher_folder, models / "student"
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
            f"eval.every={EVAL_EVERY}",
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


def evaluate_where(case: Case, recorded: Path) -> dict[str, Any]:
    """Return what the first line of `gkd where` and the checks say about a recorded case within `GOAL_STEPS`."""
    run = read_runs([recorded / slug(case) / "run"])[0]
    files = {step: file for step, file in run.step_files("token_losses").items() if step <= GOAL_STEPS}
    texts, monitor = TokenTexts(run), Monitor()
    findings = {step: read_evaluation(step, file, texts, is_first=step == 0).finding() for step, file in files.items()}
    alarms = []
    for line in run.lines:
        step = int(line["step"] or 0)
        numbers = evaluation_numbers(_records(files[step])) if step in files else {}  # older runs have none
        alarms += [alarm.check.name for alarm in monitor.feed(numbers | dict(line)).started if step <= GOAL_STEPS]
    told = sorted(name for name in case.named if any(name in text for text in [*findings.values(), *alarms]))
    met = bool(told) if case.named else not {*alarms} & NEW_CHECKS and not any(findings.values())
    return {"case": case.name, "met": met, "named_by": told, "findings": findings, "alarms": alarms}


def _records(file: Path) -> list[TokenRecord]:
    records = [TokenRecord(**line) for line in json_lines(file)]
    for record in records:
        record.values.update({k: [float("inf") if v is None else v for v in row] for k, row in record.values.items()})
    return records


def tool_seconds() -> tuple[float, float]:
    """Return time and CPU time of `gkd where` for 10 evaluations of 8 responses with 1,000 tokens.

    The tool has one thread that computes, so its CPU time is its time on a machine that does nothing else.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run", steps=9, eval_every=1, n_tokens=1000)
        began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "gkd.tools.where", str(run)], check=True, stdout=subprocess.DEVNULL)
        ended, now = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended - began, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def where(cases: list[Case], recorded: Path, file: Path | None) -> bool:
    """Print and write what `gkd where` finds; return whether all goals are met."""
    results, seconds = [evaluate_where(case, recorded) for case in cases], [tool_seconds() for _ in range(3)]
    for result in results:
        print(f"{'ok    ' if result['met'] else 'MISSED'}  {result['case']:62} {', '.join(result['named_by']) or '-'}")
    n_faults = sum(case.named != () for case in cases)
    n_named = sum(result["met"] for result, case in zip(results, cases, strict=True) if case.named)
    n_quiet = sum(result["met"] for result in results) - n_named
    print(f"faults named: {n_named} of {n_faults}; quiet healthy runs: {n_quiet} of {len(cases) - n_faults}")
    best, cpu = (min(column) for column in zip(*seconds, strict=True))
    print(f"gkd where: {best:.2f} s, CPU time {cpu:.2f} s, best of {len(seconds)}")
    if file is not None:
        file.write_text(
            json.dumps({"machine": machine(), "seconds": best, "cpu_seconds": cpu, "runs": results}, indent=1) + "\n"
        )
    return all(result["met"] for result in results) and cpu < GOAL_S


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
    parser.add_argument("--where", action="store_true", help="evaluate `gkd where`")
    args = parser.parse_args(argv)
    if (args.recorded is None) == (args.out is None or args.models is None):
        parser.error("give --models and --out, or --recorded")
    cases = [case for name, case in CASES.items() if args.only in name]
    if args.where:
        cases = [case for case in cases if case.named or not case.seeded]
    if args.recorded is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for case in cases:
            if not (args.out / slug(case) / "run").exists():
                print(f"running {case.name} ...", file=sys.stderr, flush=True)
                record(case, args.models, args.out, args.steps)
    if args.where:
        return 0 if where(cases, args.recorded or args.out, args.json) else 1
    results = [evaluate(case, args.recorded or args.out) for case in cases]
    print(as_table(results))
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), "runs": results}, indent=1) + "\n")
    return 0 if all(result["met"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Run the stages one after the other, print a table and write JSON: `python -m tests.gpu_proof --out DIR`."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from examples.quickstart import processes
from gkd.cluster.gpus import machine_gpus, visible_gpus
from gkd.preflight.environment import describe_machine
from tests.device import VARIABLE
from tests.gpu_proof.stages import DEVICE, JSON, STAGES, Stage
from tests.results import write_results

ROOT = Path(__file__).resolve().parents[2]
PASS, FAIL, SKIPPED, TIMED_OUT = "pass", "fail", "skipped", "timed out"
_EPILOG = "exit code: 0 every stage passed or was skipped; 1 one did not; 2 wrong arguments; 130 Ctrl-C."


def main(argv: Sequence[str] | None = None, stages: Sequence[Stage] = STAGES, grace_s: float = 20.0) -> int:
    """Run the command line; return the exit code, see `_EPILOG`."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_proof", description=__doc__, epilog=_EPILOG)
    parser.add_argument("--out", type=Path, metavar="DIR", help="for JSON and logs; default: runs/gpu_proof/<time>")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: stages that have a CPU form")
    parser.add_argument("--from", dest="first", metavar="STAGE", help="leave out the stages before this one")
    parser.add_argument("--only", metavar="STAGE,..", help="run only these")
    parser.add_argument("--list", action="store_true", help="print the stages, and run none")
    args = parser.parse_args(argv)
    names = [stage.name for stage in stages]
    first, wanted = args.first or names[0], names if args.only is None else args.only.split(",")
    if unknown := [name for name in (first, *wanted) if name not in names]:
        parser.error(f"no stage {unknown[0]!r}; there are {', '.join(names)}")
    chosen = [stage for stage in stages[names.index(first) :] if stage.name in wanted]
    if args.list:
        print("\n".join(f"{one.name:16}{one.limit_s:5} s  python -m {' '.join(one.gpu)}" for one in chosen))
        return 0
    found = machine_gpus() if args.device == "cuda" else []
    gpus = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), found)
    if args.device == "cuda" and not gpus:
        parser.error("no visible NVIDIA GPU; check nvidia-smi, or use --device cpu for the stages that have a CPU form")
    out = (args.out or ROOT / "runs" / "gpu_proof" / datetime.now().strftime("%Y%m%d-%H%M%S")).resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {out}: {error.strerror}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A shell ignores SIGINT for what it starts in the background; nohup ignores SIGHUP on purpose.
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _as_interrupt)
    return _run(chosen, args.device, [(gpu.memory_total_mib or math.inf) / 1024 for gpu in gpus], out, grace_s)


def _run(stages: Sequence[Stage], device: str, gpus_gib: Sequence[float], out: Path, grace_s: float) -> int:
    """Run the stages, and add their rows to the rows that an earlier call has left in this folder."""
    file, code = out / "gpu_proof.json", 0
    rows: dict[str, dict[str, Any]] = json.loads(file.read_text())["stages"] if file.exists() else {}
    try:
        for number, stage in enumerate(stages, 1):
            print(f"[{number}/{len(stages)}] {stage.name} (at most {stage.limit_s} s)", flush=True)
            rows.pop(stage.name, None)
            rows[stage.name] = row = run_stage(stage, device, gpus_gib, out, grace_s)
            partial = file.with_suffix(".partial")
            write_results(partial, {"device": device, "machine": describe_machine(), "stages": rows}, levels=2)
            partial.replace(file)  # in one step, so the file is complete whenever the run is killed
            print(f"    {row['verdict']}, {row['seconds']:.0f} s  {row['reason']}", flush=True)
    except KeyboardInterrupt:
        print("interrupted; every process of the stage is stopped", file=sys.stderr)
        code = 130
    print(f"\n{_table(rows)}\nJSON and logs: {out}")
    return code or int(any(row["verdict"] in (FAIL, TIMED_OUT) for row in rows.values()))


def missing(stage: Stage, device: str, gpus_gib: Sequence[float]) -> str:
    """Return what this machine lacks for a stage, or "".

    Args:
        gpus_gib: the memory of each visible GPU.
    """
    if device == "cpu":
        return "no form without a GPU" if stage.cpu is None else ""
    if len(gpus_gib) < stage.n_gpus:
        return f"needs {stage.n_gpus} GPUs, and {len(gpus_gib)} are visible"
    if min(gpus_gib[: stage.n_gpus]) < stage.min_gib:
        return f"needs {stage.min_gib} GiB of GPU memory, and a GPU has {min(gpus_gib[: stage.n_gpus]):.1f}"
    return ""


def run_stage(stage: Stage, device: str, gpus_gib: Sequence[float], out: Path, grace_s: float = 20.0) -> dict[str, Any]:
    """Run a stage until it ends or its limit is reached, stop all its processes, and return its row.

    Args:
        grace_s: from SIGTERM to SIGKILL. A run of the whole system stops its own processes.

    Raises KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; its processes are stopped.
    """
    if lack := missing(stage, device, gpus_gib):
        return _row(SKIPPED, lack)
    results, log = out / f"{stage.name}.json", out / f"{stage.name}.log"
    results.unlink(missing_ok=True)
    words = stage.gpu if device == "cuda" else stage.cpu or ()
    command = ["-m", *({JSON: str(results), DEVICE: device}.get(word, word) for word in words)]
    environment = {VARIABLE: device, "PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"}
    began, code = time.monotonic(), None
    with processes.process_family(grace_s):
        process = processes.start([sys.executable, *command], log=log, cwd=ROOT, env=os.environ | environment)
        with suppress(subprocess.TimeoutExpired):  # `code` stays None
            code = process.wait(timeout=stage.limit_s)
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["(empty)"]
    if code is None:
        row = _row(TIMED_OUT, f"stopped after {stage.limit_s} s; {log.name} ends: {lines[-1][:200]}")
    else:
        row = _judged_tests(code, lines) if words[0] == "pytest" else _judged_figures(code, results, lines)
    portable = ["python", *(word.replace(f"{out}/", "OUT/") for word in command)]
    return row | {"seconds": round(time.monotonic() - began, 1), "command": portable}


def _row(verdict: str, reason: str, figures: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    return {"verdict": verdict, "reason": reason, "seconds": 0.0, "figures": figures}


def _judged_tests(code: int, lines: Sequence[str]) -> dict[str, Any]:
    """Judge a run of pytest by its exit code; a run whose tests are all skipped is skipped."""
    if code == 0 and " passed" in lines[-1]:
        return _row(PASS, lines[-1].strip("= "))
    named = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    return _row(FAIL if code else SKIPPED, "; ".join([*named[:3], lines[-1].strip("= ")])[:600])


def _judged_figures(code: int, results: Path, lines: Sequence[str]) -> dict[str, Any]:
    """Judge a benchmark by its figures, which tests/bench/teacher_report.py writes, and by its exit code."""
    found = json.loads(results.read_text())["parts"] if results.exists() else {}
    figures = [figure for part in found.values() for figure in part["figures"]]
    wrong = [figure for figure in figures if figure.get("met") is False]
    missed = [f"{f['name']} = {f['value']:.4g}, {f['goal']} wanted. {f.get('note', '')}" for f in wrong]
    if not missed and (code or not figures):
        missed = [f"exit code {code}, {len(figures)} figures; the log ends: {lines[-1][:200]}"]
    return _row(FAIL if missed else PASS, "; ".join(missed), figures)


def _table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each stage, and one for each of its figures that has a bar."""
    lines = [f"{'stage':16}{'verdict':11}{'s':>5}"]
    for name, row in rows.items():
        lines.append(f"{name:16}{row['verdict']:11}{row['seconds']:5.0f}  {row['reason']}")
        barred = [figure for figure in row["figures"] if "met" in figure]
        lines += [f"    {f['name']}: {f['value']:.4g} {f.get('unit', '')} (bar: {f['goal']})" for f in barred]
    return "\n".join([*lines, ""])


def _as_interrupt(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

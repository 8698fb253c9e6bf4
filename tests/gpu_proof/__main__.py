"""Run the stages one after the other, print a table and write JSON: `python -m tests.gpu_proof --out DIR`.

`--plan twelve_minutes`: the stages for a card that is at hand for minutes. `bash tests/gpu/twelve_minutes.sh` calls it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from examples.quickstart import processes
from gkd.cluster.gpus import machine_gpus, visible_gpus
from gkd.preflight.environment import describe_machine
from tests.device import VARIABLE
from tests.gpu_proof.stages import DEVICE, JSON, PLANS, Stage
from tests.results import write_results

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "results" / "twelve_minutes.json"  # what earlier cards have measured
PASS, FAIL, SKIPPED, TIMED_OUT = "pass", "fail", "skipped", "timed out"
_EPILOG = "exit code: 0 every stage passed or was skipped; 1 one did not; 2 wrong arguments; 130 Ctrl-C."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code, see `_EPILOG`."""
    what = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_proof", description=what, epilog=_EPILOG)
    parser.add_argument("--out", type=Path, metavar="DIR", help="for JSON and logs; default: runs/gpu_proof/<time>")
    parser.add_argument("--plan", choices=tuple(PLANS), default="gpu_proof", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no stage that would end later")
    parser.add_argument("--again", action="store_true", help="twelve_minutes: also what this commit has figures of")
    parser.add_argument("--tiny", action="store_true", help="tiny models: a rehearsal without times")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: stages that have a CPU form")
    parser.add_argument("--from", dest="first", metavar="STAGE", help="leave out the stages before this one")
    parser.add_argument("--only", metavar="STAGE,..", help="run only these")
    parser.add_argument("--list", action="store_true", help="print the stages, and run none")
    args = parser.parse_args(argv)
    stages = PLANS[args.plan]
    names = [stage.name for stage in stages]
    first = args.first or names[0]
    wanted = names if args.only is None else args.only.split(",")
    if unknown := [name for name in (first, *wanted) if name not in names]:
        parser.error(f"no stage {unknown[0]!r}; there are {', '.join(names)}")
    chosen = [stage for stage in stages[names.index(first) :] if stage.name in wanted]
    if args.list:
        for one in chosen:
            needs = ", ".join(filter(None, [f"{one.min_gib} GiB" if one.min_gib else "", *one.needs])) or "-"
            print(
                f"{one.name:16}{one.minutes:4.1f} min, at most {one.limit_s:4} s  needs {needs:18} {' '.join(one.gpu)}"
            )
        return 0
    found = machine_gpus() if args.device == "cuda" else []
    gpus = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), found)
    if args.device == "cuda" and not gpus:
        parser.error("no visible NVIDIA GPU; check nvidia-smi, or use --device cpu for the stages that have a CPU form")
    folder = datetime.now().strftime("%Y%m%d-%H%M%S") if args.plan == "gpu_proof" else "figures"
    out = (args.out or ROOT / "runs" / args.plan / folder).resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {out}: {error.strerror}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A shell ignores SIGINT for what it starts in the background; nohup ignores SIGHUP on purpose.
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt
    return _run(chosen, args, [(gpu.memory_total_mib or math.inf) / 1024 for gpu in gpus], out)


def _run(stages: Sequence[Stage], args: argparse.Namespace, gpus_gib: Sequence[float], out: Path) -> int:
    """Run the stages, and add their rows to the rows of earlier calls."""
    code = 0
    file = out / f"{args.plan}.json"
    began = time.monotonic()
    keeps = args.plan == "twelve_minutes"
    known = next((each for each in (file, FIGURES) if each.exists() and (keeps or each == file)), None)
    try:
        rows: dict[str, dict[str, Any]] = json.loads(known.read_text())["stages"] if known is not None else {}
    except (ValueError, LookupError, TypeError) as error:
        sys.exit(f"{known} is damaged ({error!r}): replace it by a whole copy, or remove it and measure all again")
    machine = describe_machine()
    del machine["platform"]  # a kernel's name and the cards' identities are of one machine
    machine["gpus"] = [{name: gpu[name] for name in ("name", "mib")} for gpu in machine["gpus"]]
    commit = (machine["git"] or {}).get("commit") or os.environ.get("GKD_COMMIT")
    if keeps and not commit:
        sys.exit("this tree has no .git, so figures would have no commit: set GKD_COMMIT to the commit of its code")
    where = {"commit": commit or "unknown", "device": args.device, "tiny": args.tiny, "machine": machine}
    try:
        for number, stage in enumerate(stages, 1):
            print(f"[{number}/{len(stages)}] {stage.name} (at most {stage.limit_s} s)", flush=True)
            if keeps and not args.again and _is_measured(rows.get(stage.name), where):
                print(f"    has figures of commit {where['commit'][:8]}", flush=True)
                continue
            left_s = 60 * args.minutes - (time.monotonic() - began)
            row = run_stage(stage, args.device, gpus_gib, out, tiny=args.tiny, left_s=left_s)
            if row["verdict"] != SKIPPED or stage.name not in rows:
                rows[stage.name] = row | where
            write_results(file, {"stages": rows}, levels=2)
            print(f"    {row['verdict']}, {row['seconds']:.0f} s  {row['reason']}", flush=True)
    except KeyboardInterrupt:
        print("interrupted; every process of the stage is stopped", file=sys.stderr)
        code = 130
    except OSError as error:
        print(f"the run cannot go on: {error}; the table has what was measured", file=sys.stderr)
        code = 1
    print(f"\n{_table(rows)}\nJSON and logs: {out}")
    return code or int(any(row["verdict"] in (FAIL, TIMED_OUT) for row in rows.values()))


def _is_measured(row: Mapping[str, Any] | None, where: Mapping[str, Any]) -> bool:
    """Return whether the row has figures of this code; what was skipped, timed out or crashed has to run again."""
    if row is None or any(row.get(key) != where[key] for key in ("commit", "device", "tiny")):
        return False
    return row["verdict"] == PASS or (row["verdict"] == FAIL and bool(row["figures"]))


def missing(stage: Stage, device: str, gpus_gib: Sequence[float]) -> str:
    """Return what this machine lacks for a stage, or "".

    Args:
        gpus_gib: the memory of each visible GPU.
    """
    if absent := [name for name in stage.needs if importlib.util.find_spec(name) is None]:
        return f"needs the package {absent[0]}, which this environment lacks"
    if device == "cpu":
        return "no form without a GPU" if stage.cpu is None else ""
    if len(gpus_gib) < stage.n_gpus:
        return f"needs {stage.n_gpus} GPUs, and {len(gpus_gib)} are visible"
    if min(gpus_gib[: stage.n_gpus]) < stage.min_gib:
        return f"needs {stage.min_gib} GiB of GPU memory, and a GPU has {min(gpus_gib[: stage.n_gpus]):.1f}"
    return ""


def run_stage(
    stage: Stage,
    device: str,
    gpus_gib: Sequence[float],
    out: Path,
    *,
    grace_s: float = 20.0,
    tiny: bool = False,
    left_s: float = math.inf,
) -> dict[str, Any]:
    """Run a stage until it ends or its limit is reached, stop all its processes, and return its row.

    Args:
        grace_s: from SIGTERM to SIGKILL. A run of the whole system stops its own processes.
        tiny: with the sizes of a CPU, and ten times the limit: stand-in cards are slow.
        left_s: until the card is given back. A stage that needs longer is skipped.

    Raises KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; its processes are stopped.
    """
    if lack := missing(stage, device, [math.inf] * len(gpus_gib) if tiny else gpus_gib):
        return _row(SKIPPED, lack)
    if 60 * stage.minutes > left_s:
        return _row(SKIPPED, f"needs about {stage.minutes:g} minutes, and {max(0.0, left_s) / 60:.1f} are left")
    results, log = out / f"{stage.name}.json", out / f"{stage.name}.log"
    results.unlink(missing_ok=True)
    words = stage.gpu if device == "cuda" else stage.cpu or ()
    command = ["-m", *({JSON: str(results), DEVICE: device}.get(word, word) for word in words)]
    if tiny and JSON in words:
        command.append("--tiny")
    environment = {VARIABLE: device, "PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"}
    began, code = time.monotonic(), None
    with processes.process_family(grace_s):
        process = processes.start([sys.executable, *command], log=log, cwd=ROOT, env=os.environ | environment)
        with suppress(subprocess.TimeoutExpired):  # `code` stays None
            code = process.wait(timeout=min(stage.limit_s * (10 if tiny else 1), left_s))
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["(empty)"]
    if code is None:
        reason = f"stopped after {time.monotonic() - began:.0f} s; {log.name} ends: {lines[-1][:200]}"
        row = _row(TIMED_OUT, reason, _figures(results))
    else:
        row = _judged_tests(code, lines) if words[0] == "pytest" else _judged_figures(code, results, lines)
    portable = ["python", *(word.replace(f"{out}/", "OUT/") for word in command)]
    tables = [table for part in _parts(results) for table in part["tables"]]
    return row | {"tables": tables, "seconds": round(time.monotonic() - began, 1), "command": portable}


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
    figures = _figures(results)
    wrong = [figure for figure in figures if figure.get("met") is False]
    missed = [f"{f['name']} = {f['value']:.4g}, {f['goal']} wanted. {f.get('note', '')}" for f in wrong]
    if not missed and (code or not figures):
        # A benchmark whose run failed ends with the command of the run, which does not say why.
        errors = [line for line in lines if re.match(r"(?!subprocess)[\w.]*(Error|Exception)\b", line)] or lines
        said = errors[-1].replace(f"{ROOT}/", "")
        missed = [f"exit code {code}, {len(figures)} figures; the log says: {said[:200]}"]
    return _row(FAIL if missed else PASS, "; ".join(missed), figures)


def _parts(results: Path) -> list[dict[str, Any]]:
    """Return the parts that a benchmark has written."""
    return list(json.loads(results.read_text())["parts"].values()) if results.exists() else []


def _figures(results: Path) -> list[dict[str, Any]]:
    return [figure for part in _parts(results) for figure in part["figures"]]


def _table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each stage, and one for each of its figures that has a bar."""
    lines = [f"{'stage':16}{'verdict':11}{'s':>5}"]
    for name, row in rows.items():
        lines.append(f"{name:16}{row['verdict']:11}{row['seconds']:5.0f}  {row['reason']}")
        barred = [figure for figure in row["figures"] if "met" in figure]
        lines += [f"    {f['name']}: {f['value']:.4g} {f.get('unit', '')} (bar: {f['goal']})" for f in barred]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())

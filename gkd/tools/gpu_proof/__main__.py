"""Run every stage on this machine, print one table and write JSON: `python -m gkd.tools.gpu_proof --out DIR`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from gkd.cluster.gpus import machine_gpus, visible_gpus
from gkd.errors import ConfigError
from gkd.preflight.environment import describe_machine
from gkd.tools.gpu_proof.judge import ERROR, FAIL, PASS, SKIPPED, TIMED_OUT, Outcome, headline
from gkd.tools.gpu_proof.run import INTERRUPTS, Place, missing, run_all
from gkd.tools.gpu_proof.schedule import expected_seconds
from gkd.tools.gpu_proof.stage import Stage
from gkd.tools.gpu_proof.stages import STAGES

ROOT = Path(__file__).resolve().parents[3]
RESULTS = "gpu_proof.json"
_EPILOG = """exit code: 0 every stage passed or was skipped; 1 one did not; 2 wrong arguments; 130 Ctrl-C.
Expected figures are computed for an H100 and were never measured."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code, see `_EPILOG`."""
    args = _parser().parse_args(argv)
    try:
        stages = _chosen(args.stages)
        if args.list:
            print(_listing(stages))
            return 0
        gpus_gib = _gpus_gib(args.device)
        _check_checkout()
        out = _out_folder(args.out)
    except ConfigError as error:
        print(f"gpu_proof: {error}", file=sys.stderr)
        return 2
    for number in INTERRUPTS:  # SIGINT included, which a shell ignores for what it starts in the background
        signal.signal(number, _as_interrupt)
    return _run(stages, args.device, gpus_gib, out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gkd.tools.gpu_proof", description=__doc__, epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="for JSON and logs; default: runs/gpu_proof/<time>")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the stages that have a CPU form"
    )
    parser.add_argument("--stages", metavar="NAME,..", help="default: all")
    parser.add_argument("--list", action="store_true", help="print the stages, and run none")
    return parser


def _chosen(names: str | None) -> list[Stage]:
    """Raise ConfigError for a stage that does not exist."""
    if names is None:
        return list(STAGES)
    known = {stage.name: stage for stage in STAGES}
    wanted = [name for name in names.split(",") if name]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        problem = f"no stage {unknown[0]!r}." if unknown else "no stage is named."
        raise ConfigError("--stages", names, problem, f"some of {','.join(known)}.")
    return [stage for stage in STAGES if stage.name in wanted]


def _gpus_gib(device: str) -> list[float | None]:
    """Return the memory of each visible GPU, or None if it is unknown. Raise ConfigError: cuda without one."""
    if device == "cpu":
        return []
    gpus = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), machine_gpus())
    if not gpus:
        fix = "check the driver with nvidia-smi, or use --device cpu for the stages that have a CPU form."
        raise ConfigError("--device", device, "this machine has no visible NVIDIA GPU.", fix)
    return [gpu.memory_total_mib / 1024 if gpu.memory_total_mib else None for gpu in gpus]


def _check_checkout() -> None:
    """Raise ConfigError if there are no tests and benchmarks here, as in an installed wheel."""
    if not (ROOT / "tests" / "bench").is_dir():
        fix = "run it in a checkout of the repository: the stages are its tests and benchmarks."
        raise ConfigError("gkd.tools.gpu_proof", str(ROOT), "this folder has no tests/bench.", fix)


def _out_folder(given: Path | None) -> Path:
    """Return an existing folder. Raise ConfigError: nothing can be written there."""
    out = given or ROOT / "runs" / "gpu_proof" / datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError("--out", str(out), f"not writable: {error.strerror}.", "give another folder.") from error
    return out.resolve()


def _run(stages: Sequence[Stage], device: str, gpus_gib: Sequence[float | None], out: Path) -> int:
    report: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "expected": "computed from first principles, never measured",
        "machine": describe_machine(),
        "stages": {},
    }
    began, number, rows = time.monotonic(), 0, dict[str, dict[str, Any]]()
    place = Place(device, ROOT, out, tuple(gpus_gib), cores=len(os.sched_getaffinity(0)))
    if device == "cuda":
        runnable = [stage for stage in stages if not missing(stage, device, gpus_gib)]
        print(f"expected on an H100 with 16 cores: {_minutes(runnable)}", flush=True)

    def before(stage: Stage) -> None:
        nonlocal number
        number += 1
        print(f"[{number}/{len(stages)}] {stage.name}: {stage.what} (at most {stage.limit_s} s)", flush=True)

    def after(stage: Stage, outcome: Outcome) -> None:
        row = asdict(outcome) | {"what": stage.what, "limit_s": stage.limit_s, "expected": stage.expected}
        row["expected_s"] = stage.expected_s
        row["figure"] = headline(outcome.figures, stage.figure)
        rows[stage.name] = row | {"command": _portable(outcome.command, out)}
        report["stages"] = {one.name: rows[one.name] for one in stages if one.name in rows}
        report["seconds"] = round(time.monotonic() - began, 1)
        _write(out / RESULTS, report)
        end = f"{outcome.verdict}, {outcome.seconds:.0f} s  {outcome.reason or _figure(row)}"
        print(f"    {stage.name}: {end}", flush=True)

    code = 0
    try:
        outcomes = run_all(stages, place, before, after)
        code = int(any(outcome.verdict in (FAIL, ERROR, TIMED_OUT) for outcome in outcomes.values()))
    except KeyboardInterrupt:
        print("interrupted; every process of the stages is stopped", file=sys.stderr)
        code = 130
    print(f"\n{_table(report['stages'])}\n\nJSON and logs: {out}")
    return code


def _portable(command: Sequence[str], out: Path) -> list[str]:
    """Return the command as it would be typed: without the paths of this machine."""
    return ["python", *(word.replace(f"{out}/", "OUT/") for word in command[1:])] if command else []


def _write(file: Path, report: Mapping[str, Any]) -> None:
    """Replace the file in one step, so that it is complete whenever the run is killed."""
    partial_file = file.with_suffix(".partial")
    partial_file.write_text(json.dumps(report, indent=1) + "\n")
    partial_file.replace(file)


def _figure(row: Mapping[str, Any]) -> str:
    figure = row["figure"]
    return f"{figure['name']} {figure['value']:.4g} {figure['unit']}".strip() if figure else ""


def _table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    head = ("stage", "verdict", "s", "figure", "bar", "expected on an H100 (never run)")
    cells = [
        (name, row["verdict"], f"{row['seconds']:.0f}", _figure(row), _bar(row), row["expected"])
        for name, row in rows.items()
    ]
    widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in [head, *cells]]
    notes = [f"{name}: {row['reason']}" for name, row in rows.items() if row["reason"]]
    counts = {verdict: sum(row["verdict"] == verdict for row in rows.values()) for verdict in _VERDICTS}
    total = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    return "\n".join([*lines, "", *notes, *([""] if notes else []), total])


_VERDICTS = (PASS, FAIL, SKIPPED, ERROR, TIMED_OUT)


def _bar(row: Mapping[str, Any]) -> str:
    return str(row["figure"]["goal"]) if row["figure"] else ""


def _listing(stages: Sequence[Stage]) -> str:
    head = f"{'stage':16}{'GPUs':>5}{'shares, GiB':>13}{'CPU form':>10}{'limit, s':>10}{'expected, s':>13}"
    lines = [f"{head}  what it shows; expected on an H100 (never run)"]
    for stage in stages:
        form = "no" if stage.cpu is None else "yes"
        numbers = f"{stage.n_gpus:5}{stage.shares_gib or '':>13}{form:>10}{stage.limit_s:10}{stage.expected_s:13}"
        lines.append(f"{stage.name:16}{numbers}  {stage.what}; {stage.expected}")
    return "\n".join([*lines, f"expected in all: {_minutes(stages)}"])


def _minutes(stages: Sequence[Stage]) -> str:
    return f"{expected_seconds(stages) / 60:.0f} minutes"


def _as_interrupt(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

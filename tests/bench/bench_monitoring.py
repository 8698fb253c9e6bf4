"""Measure the driver's CPU time for monitoring, and the longest silence, in real runs of the quickstart's models.

    python -m tests.bench.bench_monitoring [--only lines,panel] [--json FILE] [--models DIR] [--steps N]

`lines`: stderr is a pipe. `panel`: stderr is a pseudo-terminal. CPU time is accounted by wrapping the functions of each
part (`monitored_main.PARTS`); nothing is switched off for a comparison. `--rounds` has no effect.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.command import parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table
from tests.service.harness import ServerProcess

_STREAMS = {"lines": "pipe", "panel": "pseudo-terminal"}
PARTS = tuple(_STREAMS)
_SHARE = 0.01  # goal
_SILENCE_S = 5.0  # goal
_LIMIT_S = 900.0


def watched(command: Sequence[str], *, on_terminal: bool) -> tuple[list[tuple[float, str]], int]:
    """Run a command; return (seconds after its start, text) of everything that it prints, and its exit code."""
    reader, writer = pty.openpty() if on_terminal else os.pipe()
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=writer, stderr=writer, env=os.environ | {"TERM": "xterm", "COLUMNS": "140"}
    )
    os.close(writer)
    printed = [(0.0, "")]
    while True:
        try:
            data = os.read(reader, 65536)
        except OSError:  # the terminal's last writer has ended
            data = b""
        if not data:
            break
        printed.append((time.monotonic() - began, data.decode(errors="replace")))
    os.close(reader)
    code = process.wait(timeout=_LIMIT_S)
    return [*printed, (time.monotonic() - began, "")], code


def measure(name: str, models: Path, steps: int) -> Part:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with ServerProcess(models / "teacher", root) as server:
            settings = {
                "data.train_files": f"[{models / 'train.jsonl'}]",
                "data.val_files": f"[{models / 'heldout.jsonl'}]",
                "model.path": models / "student",
                "trainer.run_dir": root / "run",
                "trainer.total_steps": steps,
                "trainer.loggers": "[tensorboard]",
                "teacher.server_port": server.port,
                "eval.every": max(1, steps // 4),
                "eval.metric": "exact_match",
            }
            command = [sys.executable, "-m", "tests.bench.monitored_main", str(root / "result.json")]
            command += ["--config", "configs/quickstart_cpu.yaml"]
            printed, code = watched(
                [*command, *(f"{key}={value}" for key, value in settings.items())], on_terminal=name == "panel"
            )
        if code:
            raise RuntimeError(f"the run ended with exit code {code}:\n{''.join(text for _, text in printed)[-3000:]}")
        result = json.loads((root / "result.json").read_text())
    driver, spent = result["driver"], result["parts"]
    silence_s, after = max(
        (later[0] - earlier[0], earlier[1]) for earlier, later in zip(printed, printed[1:], strict=False)
    )
    print(f"longest silence: {silence_s:.2f} s after {after[-200:]!r}", file=sys.stderr)
    all_s = driver["cpu_s"] + driver["children_cpu_s"]
    rows: list[list[str | float]] = [[part, 1e3 * s / steps, s / driver["cpu_s"]] for part, s in spent.items()]
    rows.append(["driver", 1e3 * driver["cpu_s"] / steps, 1.0])
    rows.append(["driver and workers", 1e3 * all_s / steps, all_s / driver["cpu_s"]])
    figures = [
        Figure("share of the CPU time of the driver and its workers", sum(spent.values()) / all_s, at_most=_SHARE),
        Figure("share of the driver's CPU time", sum(spent.values()) / driver["cpu_s"]),
        Figure("longest silence", silence_s, "s", at_most=_SILENCE_S),
        Figure("driver's CPU time by wall time", driver["cpu_s"] / driver["wall_s"]),
        Figure("mean step, with evaluations", driver["wall_s"] / steps, "s"),
    ]
    what = f"CPU time of the driver within Trainer.fit, by part of the monitoring; stderr is a {_STREAMS[name]}."
    return Part(
        name, what, figures, [Table(f"{steps} steps", ["part", "CPU ms per step", "share of the driver"], rows)]
    )


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("tests.bench.bench_monitoring", __doc__ or "", PARTS, 1)
    made.add_argument(
        "--models", type=Path, default=Path("models/quickstart"), metavar="DIR", help="default: %(default)s"
    )
    made.add_argument("--steps", type=int, default=40, metavar="N", help="default: %(default)s")
    args = parsed(made, PARTS, argv)
    if not (args.models / "teacher").is_dir():
        made.error(
            f"--models {args.models}: make them with python -m examples.quickstart.make_models --out {args.models}"
        )
    return run_parts(args, lambda name: measure(name, args.models, args.steps))


if __name__ == "__main__":
    sys.exit(main())

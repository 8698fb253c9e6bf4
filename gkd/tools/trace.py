"""`gkd trace RUN [--steps A-B] [--out trace.json]`: what each process of a run did, for Perfetto.

Reads spans.jsonl of a run folder, also while the run is in progress, and writes a trace in Chrome's format.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gkd.errors import ConfigError
from gkd.metrics.span_file import SpanLine, read_spans, sort_key
from gkd.run.disk import naming
from gkd.spans import Span
from gkd.tools import exit_codes
from teacher_server.config.command import command_parser

_EXAMPLES = """example:
  gkd trace runs/mine --steps 10-12 --out trace.json

Open the file at https://ui.perfetto.dev (it stays on this machine), or without a network at chrome://tracing in Chrome.
Each process is a group: driver, actor ranks, engines, scoring endpoints, teacher workers. The times of a process are
on the clock of its host: NTP keeps several hosts together.

exit code: 0 the trace was written, 1 a file is damaged or cannot be written, 2 wrong arguments, or no such run
"""
_STEPS_ROW = 1000  # row of the driver that marks the steps, below its stages


@exit_codes(ConfigError)
def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    if not (args.run / "spans.jsonl").is_file():
        problem = "there is no spans.jsonl: not the folder of a run that has made a step."
        raise ConfigError("RUN", str(args.run), problem, "give the folder of a run (trainer.run_dir).")
    chosen = select(read_spans(args.run / "spans.jsonl"), args.steps)
    trace = chrome_trace(chosen)
    with naming(args.out):
        args.out.write_text(json.dumps(trace) + "\n")
    steps = sorted({line.step for line in chosen})
    n_spans = sum(len(line.spans) for line in chosen)
    n_processes = len({line.process for line in chosen})
    print(f"{args.out}: {n_spans} spans of {n_processes} processes, steps {steps[0]} to {steps[-1]}")
    print("open it at https://ui.perfetto.dev, or at chrome://tracing")
    return 0


def select(lines: Sequence[SpanLine], steps: str | None) -> list[SpanLine]:
    """Return the lines of these steps; None means all.

    Args:
        steps: "12" or "10-12".

    Raises:
        ConfigError: not of this form, or there is no span in these steps.
    """
    first = 0
    last = sys.maxsize
    if steps is not None:
        matched = re.fullmatch(r"(\d+)(?:-(\d+))?", steps)
        if matched is None:
            raise ConfigError("--steps", steps, "neither a step nor a range.", "write it as 12 or 10-12.")
        first = int(matched[1])
        last = int(matched[2] or matched[1])
    chosen = [line for line in lines if first <= line.step <= last]
    if not chosen:
        in_run = sorted({line.step for line in lines})
        have = f"the run has spans of steps {in_run[0]} to {in_run[-1]}" if in_run else "the run has none"
        fix = "choose among these." if in_run else "let it make a step first."
        raise ConfigError("--steps", steps or "all", f"no spans; {have}.", fix)
    return chosen


def chrome_trace(lines: Sequence[SpanLine]) -> dict[str, Any]:
    """Return the trace as the JSON object of Chrome's trace event format.

    Times are in microseconds from the first span; `otherData` has its time. Source:
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    begin_s = min(span.start_s for line in lines for span in line.spans)
    processes = sorted({line.process for line in lines}, key=sort_key)
    last = {line.process: line for line in lines}  # last line of each process
    events: list[dict[str, Any]] = []
    for pid, process in enumerate(processes):
        line = last[process]
        events += [
            _about(pid, "process_name", name=process + (f" on {line.host}" if line.host else "")),
            _about(pid, "process_sort_index", sort_index=pid),
        ]
    slices = []
    marked = set[int]()
    for line in lines:
        pid = processes.index(line.process)
        spans = list(line.spans)
        for span in spans:
            args = {"step": line.step, **{key: value for key, value in span.args.items() if key != "lane"}}
            slices.append(_slice(pid, int(span.args.get("lane", 0)), span, begin_s, args))
        if line.process == "driver" and spans and line.step not in marked:
            marked.add(line.step)
            start_s = spans[0].start_s
            end_s = max(span.start_s + span.duration_s for span in spans)
            slices.append(_slice(pid, _STEPS_ROW, Span(f"step {line.step}", start_s, end_s - start_s), begin_s, {}))
    for pid, tid in sorted({(event["pid"], event["tid"]) for event in slices}):
        name = "steps" if tid == _STEPS_ROW else processes[pid]
        events += [_about(pid, "thread_name", tid, name=name), _about(pid, "thread_sort_index", tid, sort_index=tid)]
    slices.sort(key=lambda event: (event["ts"], -event["dur"]))
    return {"displayTimeUnit": "ms", "otherData": {"start_unix_s": begin_s}, "traceEvents": events + slices}


def _slice(pid: int, tid: int, span: Span, begin_s: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round((span.start_s - begin_s) * 1e6, 1), "dur": round(span.duration_s * 1e6, 1)}
    return {"ph": "X", "name": span.name, "pid": pid, "tid": tid, **times, "args": args}


def _about(pid: int, what: str, tid: int = 0, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "gkd trace", "Write what each process of a run did as a trace that Perfetto shows.", _EXAMPLES
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder; the run may be in progress")
    parser.add_argument("--steps", metavar="A-B", help="a step or a range of steps; default: all")
    parser.add_argument("--out", type=Path, default=Path("trace.json"), metavar="FILE", help="default: %(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

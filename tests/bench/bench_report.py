"""Measure the report of a run of 10,000 steps: time to write it, its size, and how long a browser takes to show it.

    python -m tests.bench.bench_report [--only write,open] [--json docs/results/report.json] [--rounds 3]

The run is made up: every key of the catalog in each line, an evaluation every 500 steps with 8 kept responses
of 512 tokens. Part `open` needs a Chromium, see tests/browser/chromium.py. The goals:
10 s, 15 MB, a page that can be read after 3 s, and no pause above 1 s while one scrolls through all charts.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.bench.command import parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part
from tests.browser.chromium import chromium_program, sandbox_arguments
from tests.report_run import make_run
from tests.structure import ROOT

STEPS = 10_000
PARTS = ("write", "open")
_LONG_TASKS = (
    "window.longest = 0; new PerformanceObserver(list => list.getEntries().forEach(entry => "
    "{ window.longest = Math.max(window.longest, entry.duration); })).observe({entryTypes: ['longtask']});"
)


def write(run: Path, rounds: int) -> Part:
    """Time and size of the command, in a process of its own."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "gkd.tools.report", str(run)], check=True, cwd=ROOT, stdout=sys.stderr)
        seconds.append(time.perf_counter() - began)
    figures = [
        Figure("write the page, with the start of Python", statistics.median(seconds), "s", at_most=10.0),
        Figure("size", (run / "report.html").stat().st_size / 1e6, "MB", at_most=15.0),
    ]
    return Part("write", "python -m gkd.tools.report RUN, median of the rounds.", figures, settings=_settings(run))


def show(run: Path, rounds: int) -> Part:
    """Time until the page can be used, and the longest task of its main thread while one scrolls through it."""
    file = run / "report.html"
    if not file.exists():
        subprocess.run([sys.executable, "-m", "gkd.tools.report", str(run)], check=True, cwd=ROOT, stdout=sys.stderr)
    ready, longest = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_program(), args=sandbox_arguments())
        for _ in range(rounds):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            began = time.perf_counter()
            page.goto(file.as_uri())
            page.locator("html[data-ready]").wait_for(state="attached")
            page.locator(".plot[data-drawn]").first.wait_for()
            ready.append(time.perf_counter() - began)
            page.evaluate(_LONG_TASKS)
            for y in range(0, page.evaluate("document.documentElement.scrollHeight"), 400):
                page.evaluate(f"scrollTo(0, {y})")
                page.wait_for_timeout(100)
            longest.append(page.evaluate("window.longest") / 1000)
            page.close()
        browser.close()
    figures = [
        Figure("open until the first chart is drawn", statistics.median(ready), "s", at_most=3.0),
        Figure("longest pause while scrolling through all charts", statistics.median(longest), "s", at_most=1.0),
    ]
    return Part("open", "Headless Chromium, median of the rounds.", figures, settings=_settings(run))


def _settings(run: Path) -> dict[str, float]:
    return {"steps": STEPS, "metrics.jsonl_mb": round((run / "metrics.jsonl").stat().st_size / 1e6, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    args = parsed(parser("tests.bench.bench_report", __doc__ or "", PARTS, rounds=3), PARTS, argv)
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as folder:
        print("making the run ...", file=sys.stderr, flush=True)
        run = make_run(Path(folder) / "run", steps=STEPS, eval_every=500, n_tokens=512, n_ranks=8)
        return run_parts(args, lambda name: (write if name == "write" else show)(run, args.rounds))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

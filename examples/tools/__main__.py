"""Run the example: make models, start the teacher server, train, and try the student with another calculator.

Each part is a command that a user can type, run as a separate process. `processes.process_family` stops all of them at
the end, on an error, and on Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from examples.quickstart import processes

MODELS, RUNS, CONFIG = Path("models/tools"), Path("runs/tools"), Path("examples/tools/calculator.yaml")
N_SHOWN, N_CHECKED = 3, 128


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bash examples/tools/run.sh",
        description="A small student learns to call a calculator and to use its answer; takes minutes on two cores.",
        epilog=f"key=value arguments override {CONFIG}, e.g. trainer.total_steps=20",
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="also write the figures to this JSON file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for gkd train")
    args = parser.parse_intermixed_args()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # inherited by all parts, which load small models
    return processes.run_parts(lambda: _run(args.overrides, args.results))


def _run(overrides: list[str], results: Path | None) -> None:
    began, python = time.time(), sys.executable
    run_dir = RUNS / datetime.now().strftime("%Y%m%d-%H%M%S")
    RUNS.mkdir(parents=True, exist_ok=True)

    print(
        "\n[1/3] two small models: a teacher that uses the calculator, a student that fails to (made once)", flush=True
    )
    processes.run([python, "-m", "examples.tools.make_models", "--out", str(MODELS)], "making the models")

    print(f"\n[2/3] a teacher server, and training: gkd train --config {CONFIG}", flush=True)
    trained_s = time.time()
    processes.train(CONFIG, run_dir, MODELS / "teacher", overrides)
    trained_s = time.time() - trained_s

    print("\n[3/3] the trained student with a calculator that computes something else", flush=True)
    found = _figures(run_dir) | {"training_s": trained_s, "wall_s": time.time() - began}
    for each in found["trajectories"]:
        print("\n".join(f"    {message['role']:<10} {message['content']}" for message in each) + "\n")
    for name, value in found.items():
        if isinstance(value, float):
            print(f"{name:<28}{value:8.1%}" if value <= 1 else f"{name:<28}{value:8.1f}")
    print(f"responses  {max((run_dir / 'samples').glob('*.jsonl'))}")
    (run_dir / "outcome.json").write_text(json.dumps(found, indent=1) + "\n")
    if results is not None:
        results.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(run_dir / "outcome.json", results)


def _figures(run_dir: Path) -> dict[str, Any]:
    """Return the accuracies, the share of answers that follow another calculator, and some trajectories."""
    from examples.quickstart.evaluate import load
    from examples.tools.products import accuracy, calculate, read_jsonl, solve
    from gkd.metrics.writer import read_metrics

    evaluated = [line for line in read_metrics(run_dir / "metrics.jsonl") if "eval/accuracy" in line]
    heldout = read_jsonl(MODELS / "heldout.jsonl")[:N_CHECKED]
    # Six digits as well, because the models know no other length.
    answers = solve(load(run_dir / "export"), heldout, lambda expression: str(1099998 - int(calculate(expression))))
    samples = max((run_dir / "samples").glob("*.jsonl")).read_text().splitlines()
    return {
        "accuracy_before": evaluated[0]["eval/accuracy"],
        "accuracy_after": evaluated[-1]["eval/accuracy"],
        "accuracy_teacher": accuracy(load(MODELS / "teacher"), heldout),
        "follows_another_calculator": sum(written == answer != "" for written, answer in answers) / len(answers),
        "trajectories": [json.loads(line)["messages"] for line in samples[:N_SHOWN]],
    }


if __name__ == "__main__":
    sys.exit(main())

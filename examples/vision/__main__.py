"""Run the example: make models, start the teacher server, train, print a table.

Each part is a command that a user can type, run as a separate process. `processes.process_family` stops all of them at
the end, on an error, and on Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from examples.quickstart import processes, summary

MODELS, RUNS, CONFIG = Path("models/vision"), Path("runs/vision"), Path("examples/vision/tiny.yaml")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bash examples/vision/run.sh",
        description="The language model of a small student learns to read images; takes two minutes on two cores.",
        epilog=f"key=value arguments override {CONFIG}, e.g. trainer.total_steps=20",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for gkd train")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # inherited by all parts, which load small models
    return processes.run_parts(lambda: _run(args.overrides))


def _run(overrides: Sequence[str]) -> None:
    began = time.time()
    run_dir = RUNS / f"{datetime.now():%Y%m%d-%H%M%S}"
    RUNS.mkdir(parents=True, exist_ok=True)

    print("\n[1/3] two small models: a teacher that answers, a student that cannot yet (made once)", flush=True)
    processes.run([sys.executable, "-m", "examples.vision.make_models", "--out", str(MODELS)], "making the models")

    print(f"\n[2/3] a teacher server, and training: gkd train --config {CONFIG}", flush=True)
    processes.train(CONFIG, run_dir, MODELS / "teacher", overrides, [*processes.ON_CPU, "--images"])
    processes.run([sys.executable, "-m", "gkd.tools.report", str(run_dir)], "the report")

    print("\n[3/3] check: responses of the export with transformers against those of the engine", flush=True)
    teacher = json.loads((MODELS / "models.json").read_text())
    found = summary.summarize(run_dir, teacher["accuracy"], _equal_responses(run_dir), time.time() - began)
    (run_dir / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{summary.as_table(found)}\n\nreport     {run_dir / 'report.html'}")


def _equal_responses(run_dir: Path) -> str:
    from transformers import AutoModelForImageTextToText

    from examples.quickstart.evaluate import load
    from examples.vision.make_models import HELDOUT_SEED, N_HELDOUT
    from examples.vision.pictures import greedy_responses, make_problems

    problems = make_problems(HELDOUT_SEED, N_HELDOUT)
    last = max((run_dir / "samples").glob("*.jsonl"))
    samples = [json.loads(line) for line in last.read_text().splitlines()]
    model = load(run_dir / "export", AutoModelForImageTextToText)
    made = greedy_responses(model, [problems[sample["prompt_id"]] for sample in samples])
    equal = sum(ids == sample["response_ids"] for ids, sample in zip(made, samples, strict=True))
    return f"{equal}/{len(samples)}"


if __name__ == "__main__":
    sys.exit(main())

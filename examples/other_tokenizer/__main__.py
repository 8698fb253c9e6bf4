"""Run the example: write the models and the prompts, start the teacher server, train, print responses and the KL."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from examples.quickstart import processes
from examples.real_model import outcome
from examples.real_model.memory import peak_memory
from examples.real_model.prompts import write_prompts

BASE, MODELS, RUNS = Path("models/smollm2"), Path("models/other_tokenizer"), Path("runs/other_tokenizer")
CONFIG = Path("examples/other_tokenizer/real_pair.yaml")
N_LAYERS = "12"


def run(overrides: Sequence[str]) -> None:
    began, run_dir = time.time(), RUNS / f"{datetime.now():%Y%m%d-%H%M%S}"
    prepare()
    with peak_memory() as peak_gib:
        processes.train(CONFIG, run_dir, BASE / "whole", overrides)
    found = outcome.read(run_dir, BASE / "heldout.jsonl", time.time() - began, peak_gib[0])
    print(outcome.as_text(found), flush=True)


def prepare() -> None:
    """Write the models, if they are absent, and the prompts, as messages, which each model's own template renders."""
    python, write = sys.executable, "writing the models"
    processes.run([python, "-m", "examples.real_model.model", "--out", str(BASE), "--layers", N_LAYERS], write)
    student = ["--base", str(BASE / "whole"), "--out", str(MODELS / "student"), "--layers", N_LAYERS]
    processes.run([python, "-m", "examples.other_tokenizer.student", *student], write)
    write_prompts(BASE)
    for name in ("train", "heldout"):
        texts = [json.loads(line)["prompt"] for line in (BASE / f"{name}.jsonl").read_text().splitlines()]
        rows = [json.dumps({"prompt": [{"role": "user", "content": text}]}) for text in texts]
        (MODELS / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bash examples/other_tokenizer/run.sh",
        description="Distill SmolLM2-135M into 12 of its layers that have another tokenizer, on a CPU.",
        epilog=f"key=value arguments override {CONFIG}, e.g. trainer.total_steps=10",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for gkd train")
    args = parser.parse_args()
    return processes.run_parts(lambda: run(args.overrides))


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(4 << 20))  # larger blocks return to the system when freed
    sys.exit(main())

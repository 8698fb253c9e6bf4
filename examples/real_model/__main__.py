"""Run the example: fetch the model, write prompts, start the teacher server, train, print the responses.

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

from examples.quickstart import processes
from examples.real_model import outcome
from examples.real_model.memory import peak_memory
from examples.real_model.prompts import write_prompts

MODELS, RUNS, HERE = Path("models"), Path("runs/real_model"), Path("examples/real_model")
N_LAYERS = 12  # of the student of --task shrink


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bash examples/real_model/run.sh",
        description="Distill SmolLM2-135M-Instruct: about ten minutes on two idle cores, 6.3 GB of memory. "
        "--task examples distills Gemma 3 270M, which has terms of use: ai.google.dev/gemma/terms.",
        epilog="key=value arguments override examples/real_model/TASK.yaml, e.g. trainer.total_steps=10",
    )
    parser.add_argument(
        "--task",
        choices=("rule", "shrink", "examples"),
        default="rule",
        help="rule (default): the student learns to answer in one sentence, which only the teacher's prompt asks for. "
        f"shrink: {N_LAYERS} of the model's 30 layers learn from all of them. "
        "examples: Gemma learns to answer without the examples that only the teacher's prompt has",
    )
    parser.add_argument(
        "--teacher", choices=("smollm2",), help="of --task examples, with another tokenizer; otherwise Gemma itself"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="also write the figures to this JSON file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for gkd train")
    args = parser.parse_intermixed_args()
    if args.teacher and args.task != "examples":
        parser.error("--teacher belongs to --task examples")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(4 << 20))  # larger blocks return to the system when freed
    return processes.run_parts(lambda: _run(args.task, args.teacher, args.overrides, args.results))


def _run(task: str, other: str | None, overrides: list[str], results: Path | None) -> None:
    began, python = time.time(), sys.executable
    run_dir = RUNS / f"{task}-{datetime.now():%Y%m%d-%H%M%S}"
    RUNS.mkdir(parents=True, exist_ok=True)

    print("\n[1/3] the model and the prompts (made once)", flush=True)
    student = "gemma3" if task == "examples" else "smollm2"
    teacher, models = MODELS / (other or student) / "whole", MODELS / student
    layers = ["--layers", str(N_LAYERS)] if task == "shrink" else []
    for name, more in {other or student: [], student: layers}.items():
        command = [python, "-m", "examples.real_model.model", "--model", name, "--out", str(MODELS / name), *more]
        processes.run(command, "making the model")
    write_prompts(models, with_examples=task == "examples")
    if other:  # the lists of its tokens say nothing of the student's tokens, but of the bytes of the text
        overrides = [f"teacher.tokenizer={teacher}", "distill.units=text", *overrides]

    config = HERE / f"{task}.yaml"
    print(f"\n[2/3] a teacher server, and training: gkd train --config {config}", flush=True)
    with peak_memory() as peak_gib:
        processes.train(config, run_dir, teacher, overrides)
    processes.run([python, "-m", "gkd.tools.report", str(run_dir)], "the report")

    print("\n[3/3] held-out prompts before and after\n", flush=True)
    found = outcome.read(run_dir, models / "heldout.jsonl", time.time() - began, peak_gib[0])
    print(outcome.as_text(found), flush=True)
    (run_dir / "outcome.json").write_text(json.dumps(found, indent=1) + "\n")
    if results is not None:
        results.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(run_dir / "outcome.json", results)


if __name__ == "__main__":
    sys.exit(main())

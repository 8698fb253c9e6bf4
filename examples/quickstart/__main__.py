"""Run the quickstart: make models, start the teacher server, train, evaluate, print a table.

Each part is a command that a user can type, run as a separate process. This module starts them in order and stops all
of them at the end, on an error, and on Ctrl-C. launch/quickstart.sh installs the dependencies first.
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

from examples.quickstart import processes, summary
from gkd.config.load import load_config
from gkd.config.schema import Config

MODELS = Path("models/quickstart")
RUNS = Path("runs/quickstart")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bash launch/quickstart.sh",
        description="Distill a small student on this machine with the real components; takes minutes on two cores.",
        epilog="key=value arguments override configs/quickstart_cpu.yaml (quickstart_one_gpu.yaml where torch sees one "
        "GPU, quickstart_gpu.yaml where it sees several), e.g. trainer.total_steps=20",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for gkd train")
    parser.add_argument("--results", type=Path, metavar="FILE", help="also write the summary to this file")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # inherited by all parts, which load small models
    began = float(os.environ.get("GKD_QUICKSTART_BEGAN", time.time()))
    return processes.run_parts(lambda: _run(args.overrides, began, args.results))


def _run(overrides: list[str], began: float, results: Path | None) -> None:
    python = sys.executable
    run_dir = RUNS / datetime.now().strftime("%Y%m%d-%H%M%S")
    RUNS.mkdir(parents=True, exist_ok=True)

    _say(1, "two small models: a teacher that can add, a student that cannot yet (made once)")
    processes.run([python, "-m", "examples.quickstart.make_models", "--out", str(MODELS)], "making the models")

    import torch

    config, why = choose_config(torch.cuda.device_count())
    print(f"    {config}: {why}", flush=True)
    _say(2, f"a teacher server, and training: gkd train --config {config}")
    flags = teacher_flags(load_config(config, overrides))
    overrides = [*overrides, "eval.metric=exact_match"]  # the table has its accuracy
    processes.train(Path(config), run_dir, MODELS / "teacher", overrides, flags)

    _say(3, "checks: greedy accuracy of the teacher with transformers; 50 responses of the export against the engine")
    from examples.quickstart.addition import read_jsonl
    from examples.quickstart.evaluate import count_equal, greedy_score, load

    teacher_accuracy, _ = greedy_score(load(MODELS / "teacher"), read_jsonl(MODELS / "heldout.jsonl"))
    samples = max((run_dir / "samples").glob("*.jsonl"))
    equal, n = count_equal(run_dir / "export", samples)

    found = summary.summarize(run_dir, teacher_accuracy, f"{equal}/{n}", time.time() - began)
    (run_dir / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
    for copy in (RUNS / "summary.json", results):
        if copy is not None:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(run_dir / "summary.json", copy)
    print(f"\n{summary.as_table(found)}\n")
    print(f"student    {run_dir / 'export'} (Hugging Face format)")
    print(f"metrics    {run_dir / 'metrics.jsonl'}")
    print(f"responses  {samples}")
    print(f"summary    {RUNS / 'summary.json'}")


def choose_config(n_gpus: int) -> tuple[str, str]:
    """Return the settings for the GPUs that torch sees, and why."""
    name, why = {
        0: ("cpu", "torch sees no GPU"),
        1: ("one_gpu", "torch sees one GPU: actor and engine take turns on it, and the teacher is on it, too"),
    }.get(n_gpus, ("gpu", f"torch sees {n_gpus} GPUs: the actor has one, the engine another, the teacher a CPU"))
    return f"configs/quickstart_{name}.yaml", why


def teacher_flags(config: Config) -> list[str]:
    """Return the flags of the teacher server: its share of a GPU, if the settings state one, otherwise the CPU."""
    share = config.cluster.teacher_gpu_share
    if not share:
        return [*processes.ON_CPU]
    return ["--device", "cuda", "--engine", "hf", "--dtype", "float32", "--gpu-memory-utilization", f"{share:g}"]


def _say(part: int, text: str) -> None:
    print(f"\n[{part}/3] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

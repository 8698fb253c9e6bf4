"""Run the quickstart, which is the whole loop with real models, on one or two GPUs or on the CPU, and judge its result.

    python -m tests.gpu.bench_loop [--json FILE] [--device cuda|cpu] [--gpus 1] [--steps 40]

The configuration is the one that launch/quickstart.sh chooses for these GPUs: configs/quickstart_one_gpu.yaml (actor
and engine take turns), quickstart_gpu.yaml, or quickstart_cpu.yaml. Every weight sync is verified by digests. The first
run makes the models on the CPU, which takes two to four minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gkd.cluster.gpus import machine_gpus, visible_gpus
from tests.bench.command import ROOT, add_device, parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part


def measure(device: str, n_gpus: int, steps: int) -> Part:
    visible = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), machine_gpus())
    chosen = ",".join(gpu.id for gpu in visible[:n_gpus]) if device == "cuda" else ""
    settings = [f"trainer.total_steps={steps}", f"trainer.total_epochs={steps}", "weight_sync.verify=always"]
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as folder:
        results = Path(folder) / "summary.json"
        command = [sys.executable, "-m", "examples.quickstart", "--results", str(results), *settings]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": chosen}, check=True)
        found = json.loads(results.read_text())
    if (used := _device_of_last_run()) != device:
        raise RuntimeError(f"the quickstart has chosen {used} for CUDA_VISIBLE_DEVICES={chosen!r}")
    equal, n = (int(number) for number in found["export_equals_engine"].split("/"))
    figures = [
        Figure("KL after / before", found["kl_after"] / found["kl_before"], at_most=0.5),
        Figure("accuracy gained", found["student_accuracy_after"] - found["student_accuracy_before"], at_least=0.2),
        Figure("responses of the export equal to the engine's", equal / n, at_least=0.95 if device == "cpu" else 0.5),
        Figure("the whole command", found["wall_s"], "s"),
    ]
    what = f"The quickstart, {steps} steps, {f'{n_gpus} GPU(s)' if chosen else 'CPU'}; every sync verified."
    return Part("loop", what, figures, (), {"device": device, "gpus": n_gpus, "steps": steps})


def _device_of_last_run() -> str:
    files = (ROOT / "runs" / "quickstart").glob("*/environment.jsonl")
    newest = max(files, key=lambda file: file.stat().st_mtime)
    return str(json.loads(newest.read_text().splitlines()[-1])["device"])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.gpu.bench_loop", __doc__ or "", ("loop",), rounds=1)
    made.add_argument("--gpus", type=int, default=1, choices=(1, 2), help="default: %(default)s")
    made.add_argument("--steps", type=int, default=40, help="default: %(default)s")
    add_device(made, "cuda")
    args = parsed(made, ("loop",), argv)
    return run_parts(args, lambda _: measure(args.device, args.gpus, args.steps))


if __name__ == "__main__":
    sys.exit(main())

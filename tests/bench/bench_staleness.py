"""Measure what stale rollouts cost: final accuracy and KL of the quickstart, by loss and by staleness.

    python -m tests.bench.bench_staleness --models DIR --out DIR [--seeds N] [--steps N] [--json FILE]

Each run is the quickstart with another loss, scheduler and seed. A run that `--out` has is not repeated, so the command
can be interrupted and continued. About 1.5 minutes per run on two idle cores; 45 runs with three seeds. It needs the
models of `python -m examples.quickstart.make_models`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from gkd.metrics.writer import read_metrics
from tests.bench.command import call
from tests.bench.teacher_report import machine
from tests.results import write_results
from tests.service.harness import ServerProcess

LOSSES = ("forward_kl", "reverse_kl", "jsd")
# Bound of the staleness in steps and scheduler -> settings.
SCHEDULERS = {
    "0 sync": ("trainer.scheduler=sync",),
    "1 one_step_off": ("trainer.scheduler=one_step_off",),
    "2 two_step_off": ("trainer.scheduler=two_step_off",),
    "2 stream": ("trainer.scheduler=stream", "trainer.max_staleness=2"),
    "4 stream": ("trainer.scheduler=stream", "trainer.max_staleness=4"),
}


def run(loss: str, scheduler: str, seed: int, *, models: Path, out: Path, port: int, steps: int) -> None:
    """Run one case, unless `out` has it. Raises RuntimeError: it did not reach its last step."""
    folder = out / slug(loss, scheduler, seed)
    if (folder / "result.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    settings = [
        *(f"data.train_files=[{models / 'train.jsonl'}]", f"data.val_files=[{models / 'heldout.jsonl'}]"),
        *(f"model.path={models / 'student'}", f"trainer.run_dir={folder / 'run'}", f"teacher.server_port={port}"),
        *(f"trainer.total_steps={steps}", f"data.seed={seed}", f"distill.loss={loss}", "eval.metric=exact_match"),
        *SCHEDULERS[scheduler],
    ]
    log = folder / "log.txt"
    call("gkd.main_gkd", "--config", "configs/quickstart_cpu.yaml", *settings, log=log, check=False)
    metrics = folder / "run" / "metrics.jsonl"
    lines = read_metrics(metrics) if metrics.exists() else []
    if not lines or lines[-1]["step"] < steps:
        raise RuntimeError(f"{folder.name}: it ended before step {steps}; see {log}")
    result = {
        "loss": loss,
        "scheduler": scheduler,
        "seed": seed,
        "steps": steps,
        "accuracy": lines[-1]["eval/accuracy"],
        "kl": lines[-1]["eval/kl"],
        "mean_staleness": mean(line["staleness/mean"] for line in lines if "staleness/mean" in line),
    }
    (folder / "result.json").write_text(json.dumps(result) + "\n")
    shutil.rmtree(folder / "run")  # checkpoints and samples


def slug(loss: str, scheduler: str, seed: int) -> str:
    return f"{loss}_{scheduler.replace(' ', '_')}_seed{seed}"


def as_table(results: Sequence[dict[str, Any]]) -> str:
    """Return one line per loss and scheduler: mean over the seeds, and (lowest to highest)."""
    rows = [f"{'loss':12}{'staleness':16}{'seeds':>6}{'mean age':>9}  {'accuracy, %':24}KL(teacher || student), nats"]
    for loss, scheduler in itertools.product(LOSSES, SCHEDULERS):
        runs = [r for r in results if (r["loss"], r["scheduler"]) == (loss, scheduler)]
        if runs:
            accuracy, kl = [100 * r["accuracy"] for r in runs], [r["kl"] for r in runs]
            spread = f"{mean(accuracy):.1f} ({min(accuracy):.1f} to {max(accuracy):.1f})"
            rows.append(
                f"{loss:12}{scheduler:16}{len(runs):6}{mean(r['mean_staleness'] for r in runs):9.2f}  {spread:24}"
                f"{mean(kl):.4f} ({min(kl):.4f} to {max(kl):.4f})"
            )
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    """Return 1 if `stream` with bound 2 is more than 3 points of accuracy below `sync` for a loss."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_staleness")
    parser.add_argument("--models", type=Path, required=True, help="folder of examples.quickstart.make_models")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; those that exist are not repeated")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=120, help="default: %(default)s, the quickstart")
    parser.add_argument("--json", type=Path, help="write the results to this file, after every run")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    models, out = args.models.absolute(), args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    cases = [(loss, name, seed) for seed, name, loss in itertools.product(range(args.seeds), SCHEDULERS, LOSSES)]
    with ServerProcess(models / "teacher", out, options=("--dtype", "float32")) as server:
        for number, case in enumerate(cases, start=1):
            print(f"run {number} of {len(cases)}: {slug(*case)}", file=sys.stderr, flush=True)
            run(*case, models=models, out=out, port=server.port, steps=args.steps)
            results = [json.loads(path.read_text()) for path in sorted(out.glob("*/result.json"))]
            if args.json is not None:
                write_results(args.json, {"machine": machine(), "runs": results})
    print(as_table(results))
    accuracy = {
        (loss, name): mean(r["accuracy"] for r in results if (r["loss"], r["scheduler"]) == (loss, name))
        for loss, name in itertools.product(LOSSES, SCHEDULERS)
    }
    return int(any(accuracy[loss, "0 sync"] - accuracy[loss, "2 stream"] > 0.03 for loss in LOSSES))


if __name__ == "__main__":
    sys.exit(main())

"""Count alarms: none in 10 healthy quickstart runs, one within 10 steps in each with a seeded fault.

    python -m tests.bench.bench_health --models DIR --out DIR [--steps N] [--only TEXT] [--json FILE]

Makes the runs that `--out` lacks, and feeds their metrics through the checks, which is all that is left to do after a
threshold has changed. It needs the models of `python -m examples.quickstart.make_models`. Faults are in changed model
folders, in settings, or in `tests.bench.health_fault`; the product has no switch for them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gkd.metrics.health import Monitor
from gkd.metrics.writer import read_metrics
from tests.bench.command import call
from tests.bench.teacher_report import machine
from tests.results import write_results
from tests.service.harness import ServerProcess

FAULT_STEPS = 12
GOAL_STEPS = 10  # a seeded fault raises an alarm within this number of steps
EVAL_EVERY = 5
EOS, PAD = 1, 0  # ids of the quickstart's tokenizer

Change = Callable[[dict[str, torch.Tensor]], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One run.

    Args:
        settings: overrides of configs/quickstart_cpu.yaml.
        fault: of `tests.bench.health_fault`.
        teacher, student: change the weights of the quickstart's model.
        teacher_folder: the quickstart's model that teaches.
        seeded: whether an alarm is expected.
    """

    name: str
    settings: tuple[str, ...] = ()
    fault: str = "none"
    teacher: Change | None = None
    student: Change | None = None
    teacher_folder: str = "teacher"
    seeded: bool = True

    @property
    def slug(self) -> str:
        return "".join(c if c.isalnum() else "_" for c in self.name)


def swap_end_token(weights: dict[str, torch.Tensor]) -> None:
    """Let the model end its responses with the padding token."""
    embedding = weights["model.embed_tokens.weight"]
    embedding[[EOS, PAD]] = embedding[[PAD, EOS]]


def permute_vocabulary(weights: dict[str, torch.Tensor]) -> None:
    """Give every token the row of another one, as with a teacher of another tokenizer that passes the checks."""
    embedding = weights["model.embed_tokens.weight"]
    order = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(0))
    weights["model.embed_tokens.weight"] = embedding[order].clone()


def repeat_last_token(weights: dict[str, torch.Tensor]) -> None:
    """Let the model repeat the last token: no layer changes the hidden state, and the logits are sharp."""
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    weights["model.norm.weight"] *= 4.0


HEALTHY = (
    (),
    ("distill.loss=reverse_kl",),
    ("distill.loss=jsd", "trainer.scheduler=one_step_off"),
    ("distill.loss=k1",),
    ("trainer.scheduler=stream",),
    ("distill.loss=skew_kl", "trainer.scheduler=two_step_off"),
    ("teacher.signal=hidden",),
    ("distill.loss=k3",),
    ("distill.loss=jsd", "trainer.scheduler=stream", "trainer.max_staleness=2"),
    ("distill.loss=reverse_kl", "rollout.n=4", "trainer.global_batch_size=32"),
)
CASES = (
    Case("EOS mismatch", teacher=swap_end_token),
    Case("lr x30", ("actor.optim.lr=0.06",)),
    Case("repetition loop", student=repeat_last_token),
    Case("weight sync frozen", fault="frozen"),
    Case("permuted teacher vocabulary", teacher=permute_vocabulary),
    Case("stale rollouts", fault="stale"),
    Case("teacher is the student", teacher_folder="student"),
    # Meant as a healthy run, it collapsed: accuracy 0.13 -> 0 in 60 steps.
    Case("k3 with one_step_off, collapses", ("distill.loss=k3", "trainer.scheduler=one_step_off", "data.seed=8")),
    *(
        Case(f"healthy {i}: {' '.join(settings) or 'defaults'}", (*settings, f"data.seed={i}"), seeded=False)
        for i, settings in enumerate(HEALTHY, start=1)
    ),
)


def changed_model(source: Path, folder: Path, change: Change | None) -> Path:
    """Copy a model folder with changed weights, and return it; without a change return the source."""
    if change is None:
        return source
    shutil.copytree(source, folder)
    weights = {name: tensor.clone() for name, tensor in load_file(source / "model.safetensors").items()}
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def record(case: Case, models: Path, folder: Path, steps: int) -> None:
    """Run a case in a folder. Raises RuntimeError: it wrote too few steps."""
    folder.mkdir(parents=True)
    teacher = changed_model(models / case.teacher_folder, folder / "teacher", case.teacher)
    student = changed_model(models / "student", folder / "student", case.student)
    n = FAULT_STEPS if case.seeded else steps
    with ServerProcess(teacher, folder, options=("--dtype", "float32")) as server:
        settings = [
            *(f"data.train_files=[{models / 'train.jsonl'}]", f"data.val_files=[{models / 'heldout.jsonl'}]"),
            *(f"model.path={student}", f"trainer.run_dir={folder / 'run'}", f"teacher.server_port={server.port}"),
            *(f"trainer.total_steps={120 if case.seeded else steps}", "trainer.scheduler=sync", *case.settings),
            f"eval.every={EVAL_EVERY}",
        ]
        words = ["tests.bench.health_fault", case.fault, str(n), "--config", "configs/quickstart_cpu.yaml", *settings]
        call(*words, log=folder / "log.txt", timeout_s=1500.0, check=False)
    metrics = folder / "run" / "metrics.jsonl"
    if not metrics.exists() or read_metrics(metrics)[-1]["step"] < n:
        raise RuntimeError(f"{case.name}: fewer than {n} steps; see {folder / 'log.txt'}, and delete the folder")


def evaluate(case: Case, folder: Path) -> dict[str, Any]:
    """Return the steps at which a recorded case raised alarms, and whether that is as expected."""
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    monitor, alarms = Monitor(), []
    for line in lines:
        alarms += [[alarm.step, alarm.check.name, alarm.evidence] for alarm in monitor.feed(line).started]
    early = [alarm for alarm in alarms if alarm[0] <= GOAL_STEPS]
    met = bool(early) if case.seeded else not alarms
    evaluations = [line["eval/kl"] for line in lines if line.get("eval/kl") is not None]
    return {"case": case.name, "steps": lines[-1]["step"], "met": met, "alarms": alarms, "eval_kl": evaluations}


def main(argv: list[str] | None = None) -> int:
    """Return 1 if a healthy run has an alarm, or a seeded fault has none in time."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_health")
    parser.add_argument("--models", type=Path, required=True, help="folder of examples.quickstart.make_models")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; those that exist are not repeated")
    parser.add_argument("--steps", type=int, default=120, help="of a healthy run; default: %(default)s, the quickstart")
    parser.add_argument("--only", default="", help="cases whose name contains it")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = []
    for case in (case for case in CASES if args.only in case.name):
        folder = args.out / case.slug
        if not folder.exists():
            print(f"running {case.name} ...", file=sys.stderr, flush=True)
            record(case, args.models, folder, args.steps)
        result = evaluate(case, folder)
        results.append(result)
        alarms = ", ".join(f"{name} ({step})" for step, name, _ in result["alarms"]) or "none"
        print(f"{'ok    ' if result['met'] else 'MISSED'}  {case.name:62} {result['steps']:4} steps  {alarms}")
    if args.json is not None:
        write_results(args.json, {"machine": machine(), "runs": results}, levels=2)
    return 0 if all(result["met"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Measure distillation from a teacher with another tokenizer: three-digit addition, pairs of digits as tokens.

    python -m tests.bench.bench_tokenizers --work DIR [--json docs/results/tokenizers_addition.json] [--seeds N]
                                           [--methods nodes,units] [--pairs 'left<-char'] [--only-models]

Pairs of tokenizers (student<-teacher, see `tests.bench.addition_pairs`): left<-char, right<-left. Methods:
teacher.tokenizer with distill.units `nodes` or `text`; `list` and `list_text` with the teacher's most probable tokens
instead of its hidden states, `units` and `units_text` with its most probable units.

Accuracy: greedy, on 256 held-out problems. Canonical: share of the sampled responses of the last four batches that are
the tokenizer's own encoding of their text. A run that the file has is not repeated. On one core a run takes 2 to 6
minutes. Returns 1 if `nodes` misses the goal: 95% with each seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from examples.quickstart.addition import read_jsonl
from examples.quickstart.make_models import make_models as make_quickstart
from gkd.metrics.writer import read_metrics
from gkd.run.checkpoints import step_folder
from gkd.run.rollout_file import read_sequences
from tests.bench import addition_pairs as pairs
from tests.bench.command import call
from tests.bench.teacher_report import machine
from tests.results import write_results
from tests.service.harness import ServerProcess

EVERY, GOAL = 100, 0.95
PAIRS = ("left<-char", "right<-left")
METHODS = ("nodes", "text", "list", "list_text", "units", "units_text")
TOPK = 16  # entries of a list
BATCH = 64


def run(method: str, student: Path, teacher: Path, data: Path, seed: int, steps: int, work: Path) -> list[Any]:
    """Train, and return accuracy and canonical share of each evaluation."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    settings = [
        *(f"model.path={student}", f"data.seed={seed}", "trainer.scheduler=sync", "trainer.save_every=0"),
        *(f"data.train_files=[{data / 'train.jsonl'}]", f"data.val_files=[{data / 'heldout.jsonl'}]"),
        *(f"data.max_response_length={pairs.MAX_RESPONSE}", "trainer.record_batches=true", f"eval.every={EVERY}"),
        *(f"trainer.global_batch_size={BATCH}", f"actor.micro_batch_size={BATCH}", "actor.optim.lr=3e-3"),
        *("actor.optim.betas=[0.9,0.95]", "actor.optim.warmup_steps=10", "actor.optim.min_lr_ratio=0.05"),
        *("actor.optim.clip_grad=1.0", f"trainer.run_dir={work / 'run'}"),
        *(f"trainer.total_steps={steps}", f"trainer.total_epochs={steps}"),  # the steps decide
    ]
    signal = {"list": "topk", "units": "units"}.get(method.removesuffix("_text"), "hidden")
    settings += [f"teacher.signal={signal}", *([f"teacher.topk={TOPK}"] if signal != "hidden" else [])]
    units = "text" if method.endswith("text") else "nodes"
    settings += [f"teacher.tokenizer={teacher}", f"distill.units={units}"]
    with ServerProcess(teacher, work, options=("--dtype", "float32")) as server:
        settings.append(f"teacher.server_port={server.port}")
        call("gkd.main_gkd", "--config", "configs/quickstart_cpu.yaml", *settings, log=work / "log.txt")
    tokenizer = AutoTokenizer.from_pretrained(student)
    found = []
    for line in read_metrics(work / "run" / "metrics.jsonl"):
        if "eval/accuracy" in line:
            step = int(line["step"])
            # step 1: by the first weights
            batches = [step_folder(n) for n in range(max(1, step - 3), max(1, step) + 1)]
            files = [file for batch in batches for file in (work / "run/batches" / batch).glob("*.npz")]
            responses = [rollout.response_ids.tolist() for file in files for rollout in read_sequences(file)[0]]
            share = pairs.canonical_share(tokenizer, responses)
            found.append({"step": step, "accuracy": line["eval/accuracy"], "canonical": share})
    shutil.rmtree(work / "run")  # batches and checkpoints
    return found


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return accuracy / canonical share of each run at each evaluation."""
    steps = sorted({each["step"] for run in runs for each in run["evaluations"]})
    lines = [f"{'pair':12} {'method':12} {'seed':>4}" + "".join(f"{f'step {step}':>16}" for step in steps)]
    for run in runs:
        by_step = {each["step"]: f"{each['accuracy']:.1%} / {each['canonical']:.2f}" for each in run["evaluations"]}
        cells = "".join(f"{by_step.get(step, ''):>16}" for step in steps)
        lines.append(f"{run['pair']:12} {run['method']:12} {run['seed']:4}{cells}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_tokenizers")
    parser.add_argument("--quickstart", type=Path, default=Path("models/quickstart"), help="made if it is missing")
    parser.add_argument("--models", type=Path, default=Path("models/tokenizers"), help="made if they are missing")
    parser.add_argument("--only-models", action="store_true", help="make the models, and train nothing")
    parser.add_argument("--work", type=Path, required=True, help="folder of the logs")
    parser.add_argument("--json", type=Path, help="file of the results; runs that it has are not repeated")
    parser.add_argument("--methods", default="nodes,text", help="default: %(default)s")
    parser.add_argument("--pairs", default=",".join(PAIRS), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    args = parser.parse_args(argv)
    methods, chosen = args.methods.split(","), args.pairs.split(",")
    if wrong := [*set(methods) - set(METHODS), *set(chosen) - set(PAIRS)]:
        parser.error(f"{wrong[0]}: not one of {', '.join(METHODS + PAIRS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    data, folder = make_quickstart(args.quickstart.absolute()), args.models.absolute()
    models = pairs.make_models(folder, read_jsonl(data / "train.jsonl"), read_jsonl(data / "heldout.jsonl"))
    kept = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    runs: list[dict[str, Any]] = kept.get("runs", [])
    for seed, pair, method in itertools.product(range(0 if args.only_models else args.seeds), chosen, methods):
        which = {"pair": pair, "method": method, "seed": seed, "steps": args.steps}
        if any(which.items() <= run.items() for run in runs):
            continue
        print(f"{pair}, {method}, seed {seed}", file=sys.stderr, flush=True)
        kinds, start = pair.split("<-"), time.monotonic()
        teacher = data / "teacher" if kinds[1] == "char" else folder / f"teacher_{kinds[1]}"
        work = args.work.absolute() / f"{'_'.join(kinds)}_{method}_{seed}"
        found = run(method, folder / f"student_{kinds[0]}", teacher, data, seed, args.steps, work)
        runs.append({**which, "seconds": round(time.monotonic() - start), "evaluations": found})
        if args.json is not None:
            write_results(args.json, {"machine": machine(), "models": models, "goal": GOAL, "runs": runs}, levels=2)
    print(table(runs))
    nodes = [run["evaluations"][-1]["accuracy"] for run in runs if run["method"] == "nodes"]
    return int(any(accuracy < GOAL for accuracy in nodes))


if __name__ == "__main__":
    sys.exit(main())

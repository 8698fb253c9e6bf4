"""Measure distillation from a teacher with another tokenizer: three-digit addition, pairs of digits as tokens.

    python -m venv DIR && DIR/bin/pip install trl==1.16.0 torch==2.13.0
    python -m tests.bench.bench_tokenizers --work DIR --trl-python DIR/bin/python \
        --out docs/results/tokenizers_addition.json [--methods nodes,equal] [--pairs 'left<-char'] [--seeds N]

Pairs of tokenizers (student<-teacher, see `tests.bench.addition_pairs`): left<-char, right<-left; left<-left is the
control, with the same tokens. Programs, with the same prompts, batch, learning rate and steps:

nodes, text     this system with teacher.tokenizer and distill.units; tokens: without them, left<-left only
list, list_text the same with the teacher's most probable tokens instead of its hidden states; units, units_text: with
                its most probable units
equal           a loop of transformers: forward KL over the strings that are tokens of both, at common boundaries
boundaries      the same over the nodes of all tokens, and nothing elsewhere
gold            TRL's GOLDTrainer, unmodified, in its own Python: its loss for other tokenizers with the defaults
gold_hybrid     the same with uld_use_hybrid_loss, the token merge strategy "bayesian", and the forward KL (beta 0)

Accuracy: greedy, on 256 held-out problems. Canonical: share of sampled responses that are the tokenizer's own encoding
of their text; of the held-out problems, in this system of its last four batches. A run that `--out` has is not
repeated. On one core a run takes 2 to 6 minutes. Returns 1 if `nodes` misses the goal: 95% with each seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from examples.quickstart.addition import read_jsonl
from examples.quickstart.make_models import make_models as make_quickstart
from gkd.run.checkpoints import step_folder
from gkd.run.rollout_file import read_sequences
from tests.bench import addition_pairs as pairs
from tests.bench.quickstart_run import train
from tests.bench.teacher_report import machine
from tests.service.harness import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
EVERY, GOAL = 100, 0.95
PAIRS = ("left<-char", "right<-left", "left<-left")
OURS = ("nodes", "text", "list", "list_text", "units", "units_text", "tokens")
TOPK = 16  # entries of a list
GOLD: dict[str, dict[str, Any]] = {
    "gold": {},
    "gold_hybrid": {"uld_use_hybrid_loss": True, "uld_token_merge_strategy": "bayesian", "beta": 0.0},
}
METHODS = (*OURS, "equal", "boundaries", *GOLD)


def run_ours(method: str, student: Path, teacher: Path, data: Path, seed: int, steps: int, work: Path) -> list[Any]:
    """Train with this system; return accuracy and canonical share of each evaluation."""
    work.mkdir(parents=True, exist_ok=True)
    settings = [
        *(f"model.path={student}", f"data.seed={seed}", "trainer.scheduler=sync", "trainer.save_every=0"),
        *(f"data.train_files=[{data / 'train.jsonl'}]", f"data.val_files=[{data / 'heldout.jsonl'}]"),
        *(f"data.max_response_length={pairs.MAX_RESPONSE}", "trainer.record_batches=true", f"eval.every={EVERY}"),
        *(f"trainer.global_batch_size={pairs.BATCH}", f"actor.micro_batch_size={pairs.BATCH}"),
        *(f"actor.optim.lr={pairs.LEARNING_RATE}", f"actor.optim.betas={list(pairs.BETAS)}"),
        *(f"actor.optim.warmup_steps={pairs.WARM_UP}", f"actor.optim.min_lr_ratio={pairs.FINAL_LR_SHARE}"),
        f"actor.optim.clip_grad={pairs.CLIP}",
    ]
    signal = {"list": "topk", "units": "units"}.get(method.removesuffix("_text"), "hidden")
    settings += [f"teacher.signal={signal}", *([f"teacher.topk={TOPK}"] if signal != "hidden" else [])]
    if method != "tokens":
        units = "text" if method.endswith("text") else "nodes"
        settings += [f"teacher.tokenizer={teacher}", f"distill.units={units}"]
    with ServerProcess(teacher, work, options=("--dtype", "float32")) as server:
        lines, _ = train(work / "run", [*settings, f"teacher.server_port={server.port}"], steps)
    tokenizer = AutoTokenizer.from_pretrained(student)
    found = []
    for line in lines:
        if "eval/accuracy" in line:
            step = line["step"]
            batches = [
                step_folder(n) for n in range(max(1, step - 3), max(1, step) + 1)
            ]  # step 1: by the first weights
            files = [file for batch in batches for file in (work / "run/run/batches" / batch).glob("*.npz")]
            responses = [rollout.response_ids.tolist() for file in files for rollout in read_sequences(file)[0]]
            share = pairs.canonical_share(tokenizer, responses)
            found.append({"step": step, "accuracy": line["eval/accuracy"], "canonical": share})
    shutil.rmtree(work / "run" / "run")  # batches and checkpoints
    return found


def run_baseline(
    python: str, method: str, student: Path, teacher: Path, data: Path, seed: int, steps: int, work: Path
) -> list[Any]:
    """Train with a baseline in a process of its own; return as `run_ours`."""
    work.mkdir(parents=True, exist_ok=True)
    case: dict[str, Any] = {
        **{"method": method, "student": str(student), "teacher": str(teacher), "gold": GOLD.get(method)},
        **{"train": str(data / "train.jsonl"), "heldout": str(data / "heldout.jsonl"), "output": str(work / "trl")},
        **{"seed": seed, "steps": steps, "every": EVERY},
    }
    environment = os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": str(ROOT)}
    with (work / "log.txt").open("wb") as log:
        command = [python, "-m", "tests.bench.addition_pairs", json.dumps(case)]
        process = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, check=False)
    if process.returncode:
        raise RuntimeError(f"{method} ended with exit code {process.returncode}; see {work / 'log.txt'}")
    found: list[Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return accuracy / canonical share of each run at each evaluation."""
    steps = sorted({each["step"] for run in runs for each in run["evaluations"]})
    lines = [f"{'pair':12} {'program':12} {'seed':>4}" + "".join(f"{f'step {step}':>16}" for step in steps)]
    for run in sorted(runs, key=lambda run: (PAIRS.index(run["pair"]), METHODS.index(run["method"]), run["seed"])):
        by_step = {each["step"]: f"{each['accuracy']:.1%} / {each['canonical']:.2f}" for each in run["evaluations"]}
        cells = "".join(f"{by_step.get(step, ''):>16}" for step in steps)
        lines.append(f"{run['pair']:12} {run['method']:12} {run['seed']:4}{cells}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_tokenizers")
    parser.add_argument("--quickstart", type=Path, default=Path("models/quickstart"), help="made if it is missing")
    parser.add_argument("--models", type=Path, default=Path("models/tokenizers"), help="made if they are missing")
    parser.add_argument("--work", type=Path, required=True, help="folder of the logs")
    parser.add_argument("--out", type=Path, help="JSON file of the results; runs that it has are not repeated")
    parser.add_argument("--methods", default="nodes,text,equal,gold,gold_hybrid", help="default: %(default)s")
    parser.add_argument("--pairs", default="left<-char,right<-left", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--trl-python", help="Python with TRL, for gold and gold_hybrid")
    args = parser.parse_args(argv)
    methods, chosen = args.methods.split(","), args.pairs.split(",")
    if wrong := [*set(methods) - set(METHODS), *set(chosen) - set(PAIRS)]:
        parser.error(f"{wrong[0]}: not one of {', '.join(METHODS + PAIRS)}")
    if args.trl_python is None and set(methods) & GOLD.keys():
        parser.error("gold needs --trl-python; see the docstring of this module")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    data, folder = make_quickstart(args.quickstart.absolute()), args.models.absolute()
    models = pairs.make_models(folder, read_jsonl(data / "train.jsonl"), read_jsonl(data / "heldout.jsonl"))
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out is not None and args.out.exists() else {}
    runs: list[dict[str, Any]] = result.get("runs", [])
    for seed, pair, method in itertools.product(range(args.seeds), chosen, methods):
        which = {"pair": pair, "method": method, "seed": seed, "steps": args.steps}
        if any(which.items() <= run.items() for run in runs):
            continue
        print(f"{pair}, {method}, seed {seed}", file=sys.stderr, flush=True)
        kinds, start = pair.split("<-"), time.monotonic()
        teacher = data / "teacher" if kinds[1] == "char" else folder / f"teacher_{kinds[1]}"
        work = args.work.absolute() / f"{'_'.join(kinds)}_{method}_{seed}"
        case = (method, folder / f"student_{kinds[0]}", teacher, data, seed, args.steps, work)
        python = args.trl_python if method in GOLD else sys.executable
        found = run_ours(*case) if method in OURS else run_baseline(python, *case)
        runs.append({**which, "seconds": round(time.monotonic() - start), "evaluations": found})
        if args.out is not None:
            result = {"machine": machine(), "models": models, "goal": GOAL, "runs": runs}
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(runs))
    nodes = [run["evaluations"][-1]["accuracy"] for run in runs if run["method"] == "nodes"]
    return int(any(accuracy < GOAL for accuracy in nodes))


if __name__ == "__main__":
    sys.exit(main())

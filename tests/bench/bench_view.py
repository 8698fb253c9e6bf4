"""Measure self-distillation of a rule that only the teacher's prompt has.

    python -m tests.bench.bench_view --out DIR [--seeds N] [--steps N] [--only-rule] [--json FILE]

Teacher: the student's initial weights, which copy four digits, and reverse them if the prompt begins with the rule
(`tests.bench.view_models`). It sees "reverse:3584<" where the student sees "3584<" (`data.teacher_prompt_key`). A
quarter of the rows are letters to be capitalized, without a prompt for the teacher, to keep what the student can do;
`--only-rule` leaves them out. Measured on held-out digits: how often the student obeys the rule without it (greedy). On
held-out letters, and on capitals, of which training has none: KL(initial student || student), nats per token of the
initial student's greedy responses.

Each seed has its own initial model and its own order of the data. A model or a run that `--out` has is not made again,
so the command can be interrupted and continued. About three minutes per seed on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from examples.quickstart.addition import build_tokenizer
from examples.quickstart.evaluate import greedy_decode, load
from gkd.metrics.writer import read_metrics
from tests.bench.teacher_report import machine
from tests.bench.view_models import RULE, digits, letters, make
from tests.service.harness import ServerProcess

SETTINGS = (
    "data.max_response_length=8",
    "data.teacher_prompt_key=teacher",
    "trainer.global_batch_size=64",
    "trainer.total_epochs=2",
    "actor.micro_batch_size=64",
    "actor.optim.lr=5e-4",
    "eval.every=10",
    "eval.max_prompts=0",
)
OBEYED, LARGEST_KL = 0.9, 0.05
_LIMIT_S = 1800.0


def run(out: Path, model: Path, seed: int, steps: int, train: str) -> None:
    """Run the trainer against a server with the student's initial weights. Raises RuntimeError: it ended early."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with ServerProcess(model, out, options=("--dtype", "float32")) as server, (out / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "gkd.main_gkd", "--config", "configs/quickstart_cpu.yaml", *SETTINGS]
        command += [f"data.train_files=[{model / train}]", f"data.val_files=[{model / 'heldout.jsonl'}]"]
        command += [f"model.path={model}", f"teacher.server_port={server.port}", f"data.seed={seed}"]
        command += [f"trainer.run_dir={out / 'run'}", f"trainer.total_steps={steps}"]
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{out.name}: exit code {done.returncode}; see {out / 'log.txt'}")


def measure(out: Path, model: Path, steps: int) -> dict[str, Any]:
    """Return what a finished run has learned, and what it has changed."""
    lines = read_metrics(out / "run" / "metrics.jsonl")
    obeyed = {line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line}
    initial, trained = load(model), load(out / "run" / "export")
    kept = [f"{word}^" for word in letters(256, seed=99)]
    others = [f"{word.upper()}_" for word in letters(256, seed=98)]
    with_rule = [f"{RULE}{number}<" for number in digits()[1]]
    return {
        "obeyed_by_step": obeyed,
        "obeyed_before": obeyed[0],
        "obeyed_after": obeyed[steps],
        "first_step_of_90": next((step for step, share in obeyed.items() if share >= OBEYED), None),
        "obeyed_by_teacher": obeys(initial, with_rule),
        "kl_of_letters": divergence(initial, trained, kept),
        "kl_of_capitals": divergence(initial, trained, others),
        "kl_of_teacher": {
            step: line["eval/kl"] for step, line in ((li["step"], li) for li in lines) if "eval/kl" in line
        },
    }


def responses(model: PreTrainedModel, prompts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of the prompts, and of the greedy responses to them."""
    tokenizer = build_tokenizer()
    ids: list[list[int]] = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return ids, greedy_decode(model, ids)


def obeys(model: PreTrainedModel, prompts: list[str]) -> float:
    """Return the share of prompts whose digits are in the response, reversed, and nothing else."""
    ids, answers = responses(model, prompts)
    tokenizer = build_tokenizer()
    found = [str(tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]
    return sum(text == ";" + prompt[-5:-1][::-1] for text, prompt in zip(found, prompts, strict=True)) / len(ids)


@torch.no_grad()
def divergence(initial: PreTrainedModel, trained: PreTrainedModel, prompts: list[str]) -> float:
    """Return KL(initial || trained) in nats, mean over the tokens of the initial model's greedy responses."""
    total, n = 0.0, 0
    for prompt, response in zip(*responses(initial, prompts), strict=True):
        tokens = torch.tensor([prompt + response])
        p, q = (m(tokens).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1) for m in (initial, trained))
        total += float((p.exp() * (p - q)).sum())
        n += len(response)
    return total / n


def main(argv: list[str] | None = None) -> int:
    """Return 1 if a seed obeys the rule before training, or in less than 90% after, or has a KL above 0.05."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_view")
    parser.add_argument("--out", type=Path, required=True, help="folder of models and runs; existing ones are kept")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=120, help="default: %(default)s")
    parser.add_argument("--only-rule", action="store_true", help="train on the rows that have the rule alone")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    out, runs = args.out.absolute(), []
    title = f"{'seed':>4} {'teacher':>9} {'before':>8} {'after':>8} {'90% at step':>12} {'KL letters':>11}"
    print(f"{title} {'capitals':>9}", flush=True)
    for seed in range(args.seeds):
        model, folder = out / f"model{seed}", out / f"run{seed}"
        make(model, seed)
        if not (folder / "run" / "export").exists():
            run(folder, model, seed, args.steps, "rule.jsonl" if args.only_rule else "train.jsonl")
        found = measure(folder, model, args.steps)
        runs.append({"seed": seed, **found})
        cells = f"{found['obeyed_by_teacher']:9.1%} {found['obeyed_before']:8.1%} {found['obeyed_after']:8.1%}"
        kls = f"{found['kl_of_letters']:11.4f} {found['kl_of_capitals']:9.4f}"
        print(f"{seed:4} {cells} {found['first_step_of_90']!s:>12} {kls}", flush=True)
    if args.json is not None:
        result = {"machine": machine(), "steps": args.steps, "only_rule": args.only_rule, "settings": SETTINGS}
        result["runs"] = runs
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    missed = [r for r in runs if r["obeyed_before"] > 0 or r["obeyed_after"] < OBEYED]
    return int(bool(missed) or any(max(r["kl_of_letters"], r["kl_of_capitals"]) > LARGEST_KL for r in runs))


if __name__ == "__main__":
    sys.exit(main())

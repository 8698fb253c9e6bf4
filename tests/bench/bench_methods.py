"""Measure the methods of docs/methods.md on the quickstart's addition, each against the same run without it.

    python -m tests.bench.bench_methods --work DIR [--only NAME,..] [--seeds N] [--json docs/results/methods.json]

The first case of an experiment is the run without the method. All cases of an experiment generate about the same number
of tokens: a case with shorter responses makes more steps, and answers of the teacher count. A run that the file has is
not repeated, so the command can be interrupted and continued. A run takes about 1.5 minutes on two cores.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from examples.quickstart.make_models import Recipe, make_models
from gkd.metrics.writer import read_metrics
from tests.bench.command import call, parsed, parser
from tests.bench.teacher_report import machine
from tests.results import write_results
from tests.service.harness import ServerProcess

N_ANSWERS = 8192  # of the teacher
GOAL = 0.95  # of the accuracy without the method


class Case(NamedTuple):
    """Hold one way to train.

    Args:
        settings: what differs from configs/quickstart_cpu.yaml.
        steps: of training on the student's responses.
        warm_up: steps on the teacher's answers before.
        teacher: good, or weak: it solves about 70% of the problems.
        student: that of the quickstart, half (solves 30 to 60%) or none.
        on_answers: the prompts are those with an answer of the teacher.
    """

    settings: tuple[str, ...] = ()
    steps: int = 60
    warm_up: int = 0
    teacher: str = "good"
    student: str = "quickstart"
    on_answers: bool = False


# Learning rate: steps are made of a part of the responses.
_JUDGED = (
    *("reward.functions=[{path: exact_match}]", "rollout.n=4", "trainer.global_batch_size=32"),
    "actor.optim.lr=1e-3",
)
_REVERSE = "distill.loss=reverse_kl"
_K1 = (*_JUDGED, "distill.loss=k1", "distill.reward_weight=0.5")
CASES = {
    "weak teacher": Case(_JUDGED, teacher="weak", student="half"),
    "pass_rate": Case((*_JUDGED, "distill.response_weight=pass_rate"), teacher="weak", student="half"),
    "correct": Case((*_JUDGED, "distill.response_weight=correct"), teacher="weak", student="half"),
    "forward_kl": Case(),
    "prefixes": Case(("trainer.schedules={data.max_response_length: {from: 8, to: 32, steps: 40}}",), steps=72),
    "student at 0%": Case(student="none"),
    "warm-up": Case(steps=40, warm_up=20, student="none"),
    "reverse_kl": Case((_REVERSE,)),
    "forward, then reverse": Case(
        (
            "distill.losses=[{name: forward_kl}, {name: reverse_kl}]",
            "trainer.schedules={distill.losses.forward_kl: [[20, 1], [40, 0]], "
            "distill.losses.reverse_kl: [[20, 0], [40, 1]]}",
        )
    ),
    "StableOPD": Case((_REVERSE, "distill.reference_kl_weight=0.1", "distill.on_policy_share=0.7"), on_answers=True),
    "truncated": Case((_REVERSE, "distill.tail=renorm", "rollout.top_p=0.9")),
    "k1 and reward": Case(_K1, teacher="weak", student="half"),
    "token_clip": Case((*_K1, "distill.token_clip=1"), teacher="weak", student="half"),
}
# Name -> cases; the first one is the run without the method.
EXPERIMENTS = {
    "response_weight": ("weak teacher", "pass_rate", "correct"),
    "prefix": ("forward_kl", "prefixes"),
    "warm_up": ("student at 0%", "warm-up"),
    "loss_schedule": ("forward_kl", "reverse_kl", "forward, then reverse"),
    "stable": ("reverse_kl", "StableOPD"),
    "truncated": ("reverse_kl", "truncated"),
    "token_clip": ("k1 and reward", "token_clip"),
}


class Bench:
    """Hold models, servers and the teacher's answers in a folder. They are made when a case needs them first."""

    def __init__(self, work: Path, servers: ExitStack):
        self._work = work
        self._servers = servers
        self._ports: dict[str, int] = {}
        recipe = Recipe()
        some = replace(recipe.teacher, decay_from_accuracy=None, eval_every=10, stop_accuracy=0.7, min_accuracy=0.6)
        half = replace(recipe.student, stop_accuracy=0.4, min_accuracy=0.3, max_accuracy=0.6)
        none = replace(recipe.student, eval_every=70, stop_accuracy=0.0, min_accuracy=0.0, max_accuracy=0.02)
        none = replace(none, min_well_formed=0.0)
        self.folders: dict[str, Path] = {}
        self.models: dict[str, dict[str, float]] = {}
        for names, each in {
            ("good", "quickstart"): recipe,
            ("weak", "half"): replace(recipe, teacher=some, student=half),
            ("unused", "none"): replace(recipe, teacher=none, student=none),
        }.items():
            made = make_models(work / names[1], recipe=each)
            report = json.loads((made / "models.json").read_text())
            for name, role in zip(names, ("teacher", "student"), strict=True):
                self.folders[name] = made / role
                self.models[name] = {key: report[role][key] for key in ("n_parameters", "accuracy")}
        self._data = work / "quickstart"

    def run(self, case: Case, seed: int, folder: Path) -> list[dict[str, float]]:
        """Train, and return each evaluation with the tokens before it. Raises CalledProcessError: it failed."""
        shutil.rmtree(folder, ignore_errors=True)
        curve: list[dict[str, float]] = []
        student = self.folders[case.student]
        if case.warm_up:
            settings = ("distill.losses=[{name: sft}]", "distill.on_policy_share=0")
            warm_up = Case(settings, case.warm_up, teacher=case.teacher, on_answers=True)
            self._train(warm_up, student, seed, folder / "warm_up", curve)
            student = folder / "warm_up/run/export"
        self._train(case, student, seed, folder / "on_policy", curve)
        shutil.rmtree(folder)
        return curve

    def _train(self, case: Case, student: Path, seed: int, folder: Path, curve: list[dict[str, float]]) -> None:
        """Add the evaluations to a curve, which goes on where it ends."""
        train = self._answers() if case.on_answers else self._data / "train.jsonl"
        settings = [
            *(f"data.train_files=[{train}]", f"data.val_files=[{self._data / 'heldout.jsonl'}]"),
            *(f"model.path={student}", f"trainer.run_dir={folder / 'run'}", f"trainer.total_steps={case.steps}"),
            *(f"data.seed={seed}", f"teacher.server_port={self._port(case.teacher)}", "eval.every=10"),
            *("trainer.save_every=0", *case.settings),
        ]
        call("gkd.main_gkd", "--config", "configs/quickstart_cpu.yaml", *settings, log=folder / "log.txt")
        names = ("accuracy", "kl")  # k1 alone has no KL
        last = curve[-1] if curve else {}
        step, generated, processed = (last.get(key, 0) for key in ("step", "generated", "processed"))
        for line in read_metrics(folder / "run" / "metrics.jsonl"):
            generated += line.get("rollout/response_tokens", 0)
            processed += line.get("rollout/response_tokens", 0) + line.get("rollout/prompt_tokens", 0)
            if "eval/accuracy" in line and (line["step"] or not curve):
                found = {"step": step + line["step"], "generated": generated, "processed": processed}
                curve.append(found | {name: round(line[f"eval/{name}"], 4) for name in names if f"eval/{name}" in line})

    def _port(self, teacher: str) -> int:
        if teacher not in self._ports:
            server = ServerProcess(self.folders[teacher], self._work, options=("--dtype", "float32"))
            self._ports[teacher] = self._servers.enter_context(server).port
        return self._ports[teacher]

    def _answers(self) -> Path:
        """Return the file of the good teacher's answers."""
        answers = self._work / "answers.jsonl"
        if answers.exists():
            return answers
        prompts = self._work / "prompts.jsonl"
        rows = (self._data / "train.jsonl").read_text().splitlines()[:N_ANSWERS]
        prompts.write_text("\n".join(rows) + "\n")
        unfinished = self._work / "unfinished.jsonl"
        options = ("--dtype", "float32", "--engine", "vllm")
        with ServerProcess(self.folders["good"], self._work, options=options) as server:
            words = ["--config", "configs/quickstart_cpu.yaml", "--data", str(prompts), "--out", str(unfinished)]
            words += [f"teacher.server_port={server.port}", f"model.path={self.folders['quickstart']}"]
            call("gkd.cli", "generate", *words, log=self._work / "generate.txt")
        unfinished.rename(answers)
        return answers


def until(curve: Sequence[dict[str, float]], accuracy: float, tokens: str) -> float | None:
    """Return the tokens at which a curve reaches an accuracy, linear between evaluations; None: it does not."""
    for before, after in itertools.pairwise(curve):
        if before["accuracy"] < accuracy <= after["accuracy"]:
            share = (accuracy - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return before[tokens] + share * (after[tokens] - before[tokens])
    return None


def as_table(runs: Sequence[dict[str, Any]], experiment: str) -> str:
    """Return a line of Markdown for each case of an experiment, over the seeds that all of its cases have."""
    curves: dict[str, dict[int, list[dict[str, float]]]] = {name: {} for name in EXPERIMENTS[experiment]}
    for run in runs:
        curves.get(run["case"], {})[run["seed"]] = run["curve"]
    seeds = sorted(set.intersection(*(set(found) for found in curves.values())))
    rows = [f"| seeds: {len(seeds)} | accuracy, % | KL | tokens | to {GOAL:.0%} of the first accuracy | with prompts |"]
    rows.append("|---|---|---|---|---|---|")
    goal: float | None = None
    for name, found in curves.items() if seeds else ():
        ends = [found[seed][-1] for seed in seeds]
        goal = goal or GOAL * mean(end["accuracy"] for end in ends)
        cells = [name, _spread([100 * end["accuracy"] for end in ends], ".1f")]
        cells += [_spread([end.get("kl") for end in ends], ".4f"), f"{mean(end['generated'] for end in ends):,.0f}"]
        cells += [
            _spread([until(found[seed], goal, key) for seed in seeds], ",.0f") for key in ("generated", "processed")
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _spread(values: Sequence[float | None], form: str) -> str:
    """Return the mean, (lowest to highest), or how many values are known."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"{len(known)} of {len(values)}" if known else "-"
    around = f" ({min(known):{form}} to {max(known):{form}})" if len(known) > 1 else ""
    return f"{mean(known):{form}}{around}"


def main(argv: list[str] | None = None) -> int:
    made = parser("tests.bench.bench_methods", __doc__ or "", EXPERIMENTS)
    made.add_argument("--work", type=Path, required=True, help="folder of models, answers and logs")
    made.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    args = parsed(made, EXPERIMENTS, argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    work = args.work.absolute()
    runs: list[dict[str, Any]] = json.loads(args.json.read_text())["runs"] if args.json and args.json.exists() else []
    names = dict.fromkeys(name for each in args.only.split(",") for name in EXPERIMENTS[each])
    with ExitStack() as servers:
        bench = Bench(work, servers)
        for seed, name in itertools.product(range(args.seeds), names):
            case = CASES[name]
            which = {"case": name, "seed": seed}
            if any(which.items() <= run.items() for run in runs):
                continue
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
            curve = bench.run(case, seed, work / f"{name.replace(' ', '_')}_{seed}")
            runs.append(which | {"settings": case.settings, "curve": curve})
            if args.json is not None:
                write_results(args.json, {"machine": machine(), "models": bench.models, "runs": runs}, levels=2)
    for name in args.only.split(","):
        print(f"{name}\n\n{as_table(runs, name)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare a teacher with another tokenizer with one that has the student's: fall of the KL, and time of a step.

    python -m tests.bench.bench_real_pair          # 70 minutes on two idle cores; --only units: 20, lists: 2

pair: examples/other_tokenizer/real_pair.yaml, with teacher.signal=hidden. list, units: the same with teacher.signal
topk and units. same: as pair, with a student of the same layers that has the teacher's tokens. All have one teacher
server. Responses differ in length, so the time of a step is divided by its response tokens. The first steps and the
last one, which evaluates, are left out of it. The KL of lists has fewer outcomes: their student is evaluated with the
pair's, too.

The part `lists` compares what the teacher's K most probable tokens hold with its K most probable units, and with nodes,
which are coarser: probability in the mean over the rows of its greedy responses to the held-out prompts.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from examples.other_tokenizer.__main__ import BASE, CONFIG, MODELS, N_LAYERS, RUNS, prepare, teacher_server, train
from examples.quickstart.processes import process_family
from gkd.metrics.writer import read_metrics
from gkd.text.byte_vocab import common_nodes, token_bytes, units_of
from tests.bench.command import parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table

PARTS = ("real_pair", "units", "lists")
PAIRED = "loss/paired"  # share of the response tokens that have a loss; metrics.jsonl of a pair
_OF_PAIRS = (("teacher", "tokenizer"), ("teacher", "special_tokens"), ("distill", "units"))
_WARM_UP, _TOPK = 3, 64
_LISTS, _N_PROMPTS, _N_TOKENS = (16, 64, 256), 48, 48  # lengths of lists; prompts, and tokens of each response
_SAME_STEPS = 20  # of the run with the same tokenizer, whose KL has no goal: enough for the time of a step
_COLUMNS = (
    "run",
    "KL at the start",
    "KL at the end",
    "fall, %",
    "step, s",
    "response tokens a step",
    "step, ms a token",
)
_COLUMNS = (*_COLUMNS, "training, ms a token", "rows without a pair, %", "teacher's bytes a token")


def same_tokenizer(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a pair for a student with the teacher's tokens."""
    kept = copy.deepcopy(settings)
    for section, key in _OF_PAIRS:
        del kept[section][key]
    kept["model"]["path"] = str(BASE / f"{N_LAYERS}_layers")
    return kept


def summary(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the numbers of `_COLUMNS` behind the first one, of one run's metrics."""
    kl = [line["eval/kl"] for line in lines if "eval/kl" in line]
    steps = [line for line in lines if "rollout/response_tokens" in line]
    timed = steps[_WARM_UP:-1]
    tokens = [line["rollout/response_tokens"] for line in timed]
    seconds = [[line[key] for line in timed] for key in ("time/step_s", "time/train_s")]
    per_token = [median(1e3 * s / n for s, n in zip(each, tokens, strict=True)) for each in seconds]
    paired = fmean(line.get(PAIRED, 1.0) for line in steps)
    return [
        kl[0],
        kl[-1],
        100 * (1 - kl[-1] / kl[0]),
        median(seconds[0]),
        fmean(tokens),
        *per_token,
        100 * (1 - paired),
        sum(line["teacher/score_bytes"] for line in timed) / sum(tokens),
    ]


def whole_kl(out: Path, student: Path, port: int) -> float:
    """Return the KL of the text of a student, nats per token: that of the first evaluation, before a step."""
    run_dir = out / f"of_{student.parent.name}"
    train(out / "pair.yaml", run_dir, port, [f"model.path={student}", "trainer.total_steps=1"])
    return float(next(line["eval/kl"] for line in read_metrics(run_dir / "metrics.jsonl") if "eval/kl" in line))


def measure(steps: int, rounds: int, kinds: Sequence[str]) -> Part:
    """Return the part of runs with the teacher's signals `kinds`, and of one with the same tokenizer.

    Args:
        kinds: pair, list or units.
    """
    out = RUNS / f"bench-{os.getpid()}"
    out.mkdir(parents=True)
    settings = yaml.safe_load(CONFIG.read_text())
    signals = {"list": "topk", "units": "units"}
    contents = {"pair": settings, "same": same_tokenizer(settings)}
    contents |= {
        name: {**settings, "teacher": {**settings["teacher"], "signal": signal, "topk": _TOPK}}
        for name, signal in signals.items()
    }
    found: dict[str, list[list[float]]] = {name: [] for name in (*kinds, "same")}
    start_kl, kl_after = list[float](), {kind: list[float]() for kind in kinds}
    with process_family():
        prepare()
        for name, content in contents.items():
            (out / f"{name}.yaml").write_text(yaml.safe_dump(content))
        with teacher_server(out) as port:
            for i in range(rounds):
                for name, runs in found.items():
                    n = steps if name != "same" else min(steps, _SAME_STEPS)
                    train(out / f"{name}.yaml", out / f"{name}_{i}", port, [f"trainer.total_steps={n}"])
                    runs.append(summary(read_metrics(out / f"{name}_{i}" / "metrics.jsonl")))
                start_kl.append(whole_kl(out, MODELS / "student", port))
                for kind in kinds:
                    kl_after[kind].append(whole_kl(out, out / f"{kind}_{i}" / "export", port))
    means = {name: [fmean(column) for column in zip(*runs, strict=True)] for name, runs in found.items()}
    same, figures = means["same"], list[Figure]()
    for kind in kinds:
        fall = 100 * (1 - fmean(kl_after[kind]) / fmean(start_kl))
        figures += [
            Figure(f"{kind}: fall of the KL of the text in {steps} steps", fall, "%", at_least=60),
            Figure(f"{kind}: time of a step for each response token, / same", means[kind][5] / same[5], at_most=1.3),
            Figure(f"{kind}: training for each response token, / same", means[kind][6] / same[6]),
            Figure(f"{kind}: bytes that the teacher sends for each response token", means[kind][8], "bytes"),
        ]
    table = Table("Means of the rounds", _COLUMNS, [[name, *row] for name, row in means.items()])
    what = "12 layers of SmolLM2-135M with SentencePiece tokens, taught by SmolLM2, and 12 layers with SmolLM2's tokens"
    return Part(
        "units" if "units" in kinds else "real_pair", what, figures, [table], {"steps": steps, "rounds": rounds}
    )


def measure_lists() -> Part:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with process_family():
        prepare()
    folders = MODELS / "student", BASE / "whole"
    student, teacher = (AutoTokenizer.from_pretrained(folder) for folder in folders)
    tokens = token_bytes(teacher)
    nodes = common_nodes(token_bytes(student), tokens)
    units = units_of(tokens, nodes)
    maps = [(torch.from_numpy(units.of_token).long(), len(units.vocab)), (torch.from_numpy(nodes.teacher), nodes.n)]
    model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32).eval()
    held: dict[int, list[torch.Tensor]] = {k: [] for k in _LISTS}
    for line in (MODELS / "heldout.jsonl").read_text().splitlines()[:_N_PROMPTS]:
        messages = json.loads(line)["prompt"]
        ids = teacher.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        answer = model.generate(ids, max_new_tokens=_N_TOKENS, do_sample=False)
        with torch.inference_mode():
            p = model(answer).logits[0, ids.shape[1] - 1 : -1].softmax(dim=-1)
        p = p[:, : len(tokens)]
        sums = [p.new_zeros((len(p), n)).index_add_(1, ids, p) for ids, n in maps]
        for k, found in held.items():
            found.append(torch.stack([each.topk(k).values.sum(dim=1) for each in (p, *sums)]))
    rows = [[k, *torch.cat(found, dim=1).mean(dim=1).tolist()] for k, found in held.items()]
    table = Table("Mean probability of a list", ("length", "tokens", "units", "nodes"), rows)
    gains = [max(row[i] - row[1] for row in rows) for i in (2, 3)]
    figures = [
        Figure(f"most that {name} hold beyond tokens", 100 * gain, "points")
        for name, gain in zip(("units", "nodes"), gains, strict=True)
    ]
    settings = {"prompts": _N_PROMPTS, "tokens": _N_TOKENS}
    return Part("lists", "SmolLM2 as the teacher of SentencePiece tokens", figures, [table], settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a goal was missed."""
    made = parser("tests.bench.bench_real_pair", __doc__ or "", PARTS, 1)
    made.add_argument("--steps", type=int, default=100, metavar="N", help="of the pair's run; default: %(default)s")
    made.set_defaults(json=Path("docs/results/real_pair.json"))
    args = parsed(made, PARTS, argv)
    if args.steps < _WARM_UP + 2:
        made.error(f"--steps {args.steps}: at least {_WARM_UP + 2}")
    kinds = {"real_pair": ("pair", "list"), "units": ("units",)}
    return run_parts(
        args, lambda name: measure_lists() if name == "lists" else measure(args.steps, args.rounds, kinds[name])
    )


if __name__ == "__main__":
    sys.exit(main())

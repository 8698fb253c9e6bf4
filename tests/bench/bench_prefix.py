"""Measure what the teacher's engines save by computing a common prompt once.

    python -m tests.bench.bench_prefix [--json docs/results/prefix.json] [--only vllm,hf,quickstart] [--rounds 5]

vllm, hf: each engine scores the same sequences with and without sharing, in two processes with one thread, in turns: 4
prompts of 256 tokens with 8 responses of 64 tokens each, 16 prompts with one response each, and with vLLM 24 tokens of
greedy responses to 4 prompts, which ask for one token more each time. Each round has new tokens. Time is CPU time, so
that other processes of the machine count less. About three minutes.

quickstart: its training with `rollout.n` 4, as it is, whose prompts of 9 tokens are too short to be shared, and with a
rule of 200 tokens in the teacher's prompts. A minute a run, and four runs a round.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tests.bench.command import parsed, parser, run_parts
from tests.bench.quickstart_run import train
from tests.bench.teacher_children import Child
from tests.bench.teacher_report import Figure, Part, Table
from tests.random_models import save_random
from tests.service.harness import ServerProcess

if TYPE_CHECKING:
    from teacher_server.engines.base import Engine
    from teacher_server.engines.load import EngineSettings

ENGINES = ("vllm", "hf")
PARTS = (*ENGINES, "quickstart")
_VOCAB, _N_PROMPT, _N_RESPONSE, _N_GREEDY = 4096, 256, 64, 24
_SPEEDUP = {"vllm": 2.0, "hf": 2.5}
_TIMEOUT_S = 300.0


class Task(NamedTuple):
    """Score `n` responses to each of `n_prompts` prompts, or append greedy tokens to the prompts (`n` = 0)."""

    n_prompts: int
    n: int
    seed: int


class Done(NamedTuple):
    seconds: float  # CPU time of the process, which is its time on an idle machine: it has one thread
    n_tokens: int  # of all forward passes, padding included
    checked: np.ndarray  # logprobs of the responses, or the greedy tokens


TASKS = {"n = 8": Task(4, 8, 0), "n = 1": Task(16, 1, 0), "greedy": Task(4, 0, 0)}


def save_model(folder: Path) -> Path:
    """Save a random Qwen3 of 12M parameters: as in a real teacher, its LM head is a small part of the work."""
    layers = {"num_hidden_layers": 10, "hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
    more = {"max_position_embeddings": 1024, "tie_word_embeddings": True, "initializer_range": 0.1}
    return save_random(folder, vocab_size=_VOCAB, **layers, **more)


def serve_engine(pipe: Connection, model: str, name: str, share_prompts: bool) -> None:
    """Load an engine, and perform the tasks that arrive."""
    from teacher_server.engines.base import ScoreParams, TokenSequence
    from teacher_server.engines.load import EngineSettings, load_engine
    from tests.service.engine_host import counted

    settings = EngineSettings(
        model=model, engine=name, device="cpu", dtype="float32", max_tokens=1024, share_prompts=share_prompts
    )
    engine = load_engine(settings)
    pipe.send("ready")
    params = ScoreParams("topk", k=32, with_sampled=True)
    while True:
        task: Task = pipe.recv()
        rng = np.random.default_rng(task)
        prompts = [rng.integers(0, _VOCAB, _N_PROMPT).astype(np.int32) for _ in range(task.n_prompts)]
        batch = [
            TokenSequence(np.concatenate([prompt, rng.integers(0, _VOCAB, _N_RESPONSE).astype(np.int32)]), _N_PROMPT)
            for prompt in prompts
            for _ in range(task.n)
        ]
        with counted(engine) as passes:
            start_s = time.process_time()
            if batch:
                checked = np.concatenate([scored.sampled for scored in engine.score(batch, params)])  # type: ignore[union-attr,misc]
            else:
                for _ in range(_N_GREEDY):
                    asked = [TokenSequence(np.append(ids, np.int32(0)), len(ids)) for ids in prompts]
                    scores = engine.score(asked, ScoreParams("topk", k=1))
                    prompts = [np.append(ids, one.ids[0, 0]) for ids, one in zip(prompts, scores, strict=True)]  # type: ignore[union-attr]
                checked = np.concatenate([ids[_N_PROMPT:] for ids in prompts])
            seconds = time.process_time() - start_s
        pipe.send(Done(seconds, sum(passes), checked))


def measure(name: str, rounds: int) -> Part:
    figures: list[Figure] = []
    rows: list[tuple[str | float, ...]] = []
    with tempfile.TemporaryDirectory(prefix="bench.") as folder, ExitStack() as stack:
        model = str(save_model(Path(folder) / "model"))
        children = {
            share: stack.enter_context(Child(serve_engine, model, name, share, goodbye_s=10.0))
            for share in (False, True)
        }
        for child in children.values():
            child.answer(_TIMEOUT_S)
        tasks = {kind: task for kind, task in TASKS.items() if task.n or name == "vllm"}
        for kind, task in tasks.items():
            found: dict[bool, list[Done]] = {False: [], True: []}
            for seed in range(rounds + 1):
                for share in (False, True) if seed % 2 else (True, False):
                    found[share].append(children[share].ask(task._replace(seed=seed), _TIMEOUT_S))
            figures += _figures(name, kind, found)
            n_sequences = task.n_prompts * (task.n or _N_GREEDY)
            for share, done in found.items():
                per_s = n_sequences / statistics.median(one.seconds for one in done[1:])
                rows.append((f"{kind}, {'shared' if share else 'whole'}", per_s, done[1].n_tokens))
    return Part(
        name,
        f"The engine {name} on one thread, a random Qwen3 of 12M parameters in float32, V = {_VOCAB}; P = {_N_PROMPT}, "
        f"R = {_N_RESPONSE}, top-32 and the sampled token. With and without a common prompt computed once, in turns.",
        figures,
        (Table("Medians of the rounds", ("sequences", "requests per CPU second", "tokens of a round"), rows),),
        {"rounds": rounds},
    )


def _figures(name: str, kind: str, found: dict[bool, list[Done]]) -> list[Figure]:
    pairs = list(zip(found[False], found[True], strict=True))
    speedup = statistics.median(whole.seconds / shared.seconds for whole, shared in pairs[1:])  # the first warms up
    tokens = statistics.median(shared.n_tokens / whole.n_tokens for whole, shared in pairs)
    error = max(float(np.abs(whole.checked - shared.checked).max()) for whole, shared in pairs)
    goal = {"n = 8": _SPEEDUP[name], "n = 1": 0.98}.get(kind)
    unit, limit = ("", 0.0) if kind == "greedy" else ("nats", 0.0 if name == "vllm" else 1e-3)
    return [
        Figure(f"{kind}: sequences per CPU second, shared / whole", speedup, "x", at_least=goal),
        Figure(f"{kind}: computed tokens, shared / whole", tokens, at_most=0.39 if kind == "n = 8" else None),
        Figure(f"{kind}: largest difference", error, unit, at_most=limit),
    ]


def whole(settings: EngineSettings) -> Engine:
    """Load the engine hf without sharing: an `--engine` of the teacher server."""
    from teacher_server.engines.load import load_engine

    return load_engine(replace(settings, engine="hf", share_prompts=False))


_STEPS = 20
_RULE = ("Answer with the sum of both numbers, and write a semicolon behind it. " * 3)[:200]
_LONG = ["data.max_teacher_prompt_length=216", f"teacher.prompt_template='{_RULE}{{prompt}}'"]
_RUNS: dict[str, list[str]] = {"as it is": [], "rule": _LONG}
_FORMS = {"whole": "tests.bench.bench_prefix:whole", "shared": "hf"}


def measure_quickstart(rounds: int) -> Part:
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="bench.") as scratch:
        folder = Path(scratch)
        for i in range(rounds):
            for run, form in itertools.product(_RUNS, _FORMS if i % 2 else reversed(_FORMS)):
                options = ("--engine", _FORMS[form], "--dtype", "float32")
                with ServerProcess(Path("models/quickstart/teacher"), folder, options=options) as server:
                    settings = [*_RUNS[run], "rollout.n=4", f"teacher.server_port={server.port}", "eval.every=0"]
                    lines, cpu = train(folder / "run", settings, _STEPS)
                lines = [line for line in lines if "loss/total" in line]  # not the evaluation before training
                first, last = lines[2], lines[-1]
                used = cpu.between(first["time/unix_s"], last["time/unix_s"])["teacher server"]
                step_s = statistics.median(line["time/step_s"] for line in lines[2:])
                found.setdefault((run, form), []).append((step_s, used / (len(lines) - 3), lines[0]["loss/total"]))
    figures, rows = list[Figure](), list[tuple[str | float, ...]]()
    for run in _RUNS:
        pairs = list(zip(found[run, "whole"], found[run, "shared"], strict=True))
        for at, name in enumerate(("time of a step", "CPU time of the teacher server")):
            ratio = statistics.median(before[at] / after[at] for before, after in pairs)
            figures.append(Figure(f"n = 4, {run}: {name}, whole / shared", ratio, "x"))
        error = max(abs(after[2] / before[2] - 1) for before, after in pairs)
        figures.append(Figure(f"n = 4, {run}: relative difference of the first loss", error, at_most=1e-4))
        for form in _FORMS:
            step_s, used, _ = (statistics.median(column) for column in zip(*found[run, form], strict=True))
            rows.append((f"{run}, {form}", step_s, used))
    columns = ("prompts", "step, s", "CPU seconds of the teacher server a step")
    what = f"{_STEPS} steps of the quickstart, rollout.n = 4, engine hf; the rule has {len(_RULE)} tokens."
    return Part("quickstart", what, figures, (Table("Medians of the rounds", columns, rows),), {"rounds": rounds})


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a goal was missed."""
    args = parsed(parser("tests.bench.bench_prefix", __doc__ or "", PARTS, 5), PARTS, argv)
    return run_parts(
        args, lambda name: measure(name, args.rounds) if name in ENGINES else measure_quickstart(args.rounds)
    )


if __name__ == "__main__":
    sys.exit(main())

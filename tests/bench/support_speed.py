"""Part `speed`: the rate of a teacher server for lists with given ids, and for a list and the sampled token at once."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gkd.scoring.teacher.client import ZmqTeacher
from gkd.types import Rollout
from tests.bench.teacher_report import Figure, Part, Table
from tests.random_models import save_random
from tests.service.harness import ServerProcess, connect, random_rollouts, submit

IN_FLIGHT = 32


class Case(NamedTuple):
    """A teacher, and the sequences that it scores."""

    name: str
    folder: Path
    n_vocab: int
    k: int
    n_sequences: int
    n_prompt: int
    n_response: int


def large_model(folder: Path) -> Path:
    """Save a random Qwen3 of 40M parameters with a vocabulary of 32,768, for which the ids are the usual share."""
    layers = {"num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
    more = {"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    return save_random(folder, vocab_size=32_768, initializer_range=0.02, **layers, **more)


def sequences_of(case: Case) -> list[Rollout]:
    """Return sequences of random tokens with half of K random ids at each position."""
    rng = np.random.default_rng(0)
    length = case.n_prompt + case.n_response
    made = []
    for one in random_rollouts(case.n_sequences, case.n_vocab, seed=1, response=(length, length)):
        # Equal steps from a random start are distinct ids, and cheaper than a permutation for each position.
        start = rng.integers(0, case.n_vocab, (case.n_response, 1))
        ids = (start + np.arange(case.k // 2) * (case.n_vocab // case.k)) % case.n_vocab
        made.append(
            replace(
                one,
                prompt_ids=one.response_ids[: case.n_prompt],
                response_ids=one.response_ids[case.n_prompt :],
                rollout_logprobs=one.rollout_logprobs[case.n_prompt :],
                top_ids=ids.astype(np.int32),
            )
        )
    return made


def requests(teacher: ZmqTeacher, rollouts: Sequence[Rollout]) -> dict[str, Callable[[], list[Future[Any]]]]:
    """Return what to submit by name."""
    plain = [replace(rollout, top_ids=None) for rollout in rollouts]
    return {
        "list": lambda: [submit(teacher, rollout) for rollout in plain],
        "list with ids": lambda: [submit(teacher, rollout) for rollout in rollouts],
        "jsd + k3, one request": lambda: [teacher.submit([rollout], ("topk", "sampled")) for rollout in plain],
        "jsd + k3, two requests": lambda: [
            future
            for rollout in plain
            for future in (submit(teacher, rollout), teacher.submit([rollout], ("sampled",)))
        ],
    }


def rates(case: Case, rounds: int) -> dict[str, list[float]]:
    """Return the tokens per second of each kind of request in each round; the kinds take turns."""
    rollouts = sequences_of(case)
    n_tokens = sum(rollout.n_tokens for rollout in rollouts)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench.")))
        server = stack.enter_context(ServerProcess(case.folder, folder, options=("--engine", "hf")))
        settings = {"k": case.k, "n_vocab": case.n_vocab, "n_in_flight": IN_FLIGHT, "wire": "fp16"}
        teacher = stack.enter_context(connect(server.port, **settings))
        kinds = requests(teacher, rollouts)
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(rounds + 1):  # the first one warms up
            for name in kinds if number % 2 else reversed(kinds):
                began_s = time.perf_counter()
                for future in kinds[name]():
                    future.result()
                if number:
                    found[name].append(n_tokens / (time.perf_counter() - began_s))
    return found


def speed(models: Path, rounds: int) -> Part:
    """Return the rates and their ratios."""
    with tempfile.TemporaryDirectory(prefix="bench.") as folder:
        cases = [
            Case("quickstart's teacher", models / "teacher", 258, 16, 256, 8, 24),
            Case("40M parameters, V = 32,768", large_model(Path(folder) / "model"), 32_768, 64, 24, 40, 200),
        ]
        figures, rows = [], []
        for case in cases:
            found = rates(case, rounds)
            rows.append([case.name, case.k, *(float(f"{statistics.median(each):.4g}") for each in found.values())])
            for name, one, other, goal in (
                ("jsd + k3: one request / two", "jsd + k3, one request", "jsd + k3, two requests", 1.7),
                ("list with ids / without", "list with ids", "list", 0.95),
            ):
                ratios = [a / b for a, b in zip(found[one], found[other], strict=True)]
                note = f"{min(ratios):.3g} to {max(ratios):.3g} over {rounds} rounds"
                figures.append(Figure(f"{name}, {case.name}", statistics.median(ratios), at_least=goal, note=note))
    what = (
        "Tokens per second of a teacher server with the engine hf on one thread, and its client; the kinds of requests "
        "take turns. Of a list with ids half of the K entries are given."
    )
    columns = ["teacher", "K", "list", "with ids", "jsd + k3, one request", "two requests"]
    return Part("speed", what, figures, [Table("tokens per second", columns, rows)], {"rounds": rounds})

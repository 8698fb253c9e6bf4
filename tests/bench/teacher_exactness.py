"""Part `exactness`: what a client gets from the server, next to a float32 forward pass of plain transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from gkd.types import Rollout
from teacher_server.wire.table import TopKTable
from tests.bench.teacher_bare import HIDDEN, N_LAYERS, VOCAB, K, make_rollouts, save_model
from tests.bench.teacher_report import Figure, Part
from tests.service.harness import ServerProcess, connect, score

LIMIT = 1e-3
ENGINES = ("hf", "vllm")


def exactness(n_sequences: int) -> Part:
    rollouts = make_rollouts(n_sequences)
    with tempfile.TemporaryDirectory(prefix="bench.") as folder:
        model = save_model(Path(folder) / "model")
        got = {engine: _ask(engine, model, Path(folder), rollouts) for engine in ENGINES}
        exact = _reference(model, rollouts, got)
    hf, vllm = got["hf"], got["vllm"]
    apart = max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in zip(hf, vllm, strict=True))
    same_ids = np.mean([(a.ids == b.ids).mean() for a, b in zip(hf, vllm, strict=True)])
    figures = [
        figure
        for engine, (logprobs, tail) in exact.items()
        for figure in (
            Figure(
                f"{engine}: logprob off by at most",
                logprobs,
                "nats",
                at_most=LIMIT,
                note="at the ids it listed, and the k-th against the k-th",
            ),
            Figure(f"{engine}: listed mass and tail off by at most", tail, at_most=LIMIT),
        )
    ]
    return Part(
        "exactness",
        f"Top-{K} logprobs of {n_sequences} sequences of mixed lengths, as `ZmqTeacher` returns them (fp32 wire, "
        f"float32 weights, batched by the server), against transformers in float32, one sequence at a time. Random "
        f"Qwen3: {N_LAYERS} layers, H = {HIDDEN}, V = {VOCAB}.",
        [
            *figures,
            Figure("hf and vllm apart by at most", apart, "nats", at_most=LIMIT, note="k-th logprob against k-th"),
            Figure(
                "hf and vllm: same id at the same place",
                float(same_ids),
                note="elsewhere two are as probable up to rounding",
            ),
        ],
        (),
        {"sequences": n_sequences, "positions": sum(len(r.response_ids) for r in rollouts)},
    )


def _ask(engine: str, model: Path, folder: Path, rollouts: list[Rollout]) -> list[TopKTable]:
    """In the order of `rollouts`."""
    with (
        ServerProcess(model, folder, options=("--engine", engine, "--dtype", "float32")) as server,
        connect(server.port, k=K, n_vocab=VOCAB, wire="fp32", request_timeout_s=300.0) as teacher,
    ):
        scores = dict(score(teacher, rollouts))
    return [scores[index] for index in range(len(rollouts))]


def _reference(model: Path, rollouts: list[Rollout], got: dict[str, list[TopKTable]]) -> dict[str, tuple[float, float]]:
    """{engine: (largest |difference| of a logprob, of the tail)}"""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    worst = dict.fromkeys(got, (0.0, 0.0))
    for index, rollout in enumerate(rollouts):
        tokens = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        with torch.inference_mode():
            logits = plain(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
            rows = logits[len(rollout.prompt_ids) - 1 : -1].log_softmax(-1).numpy()  # [R, V]
        largest = -np.sort(np.partition(-rows, K - 1, axis=1)[:, :K], axis=1)
        for engine, scores in got.items():
            one = scores[index]
            listed = np.take_along_axis(rows, one.ids.astype(np.int64), 1)
            # At its ids the values may be right and the ids not the largest; so the k-th value must be the k-th, too.
            off = max(float(np.abs(one.logprobs - wanted).max()) for wanted in (listed, largest))
            tail = float(np.abs(one.tail - (1 - np.exp(listed.astype(np.float64)).sum(1))).max())
            worst[engine] = max(worst[engine][0], off), max(worst[engine][1], tail)
    return worst

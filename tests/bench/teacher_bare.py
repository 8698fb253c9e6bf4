"""A bare engine in a process of its own, fed the way a server feeds it but with nothing around it.

It is loaded by the worker's own loader, batched by the worker's own `take_batch`, and never sees a
socket, a checksum or a client. Also here: the model and the sequences that both sides score.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gkd.types import Rollout
from teacher_server.engines.base import TokenSequence, pads
from teacher_server.wire.worker_protocol import Assignment
from teacher_server.worker.compute import CREDIT_BATCHES, WorkItem, take_batch
from teacher_server.worker.open_request import OpenRequest
from tests.service.messages import make_request

VOCAB, K = 32_768, 64
N_LAYERS, HIDDEN = 4, 256
GPU_LAYERS, GPU_HIDDEN = 24, 2048  # about a billion parameters: on a GPU the tiny model would measure launches only
GPU_SHARE = 0.35  # of the card, for each of the two vLLM engines
GPU_KV_CACHE_MIB = 1024  # five batches; given, because all engines start at the same time
MAX_TOKENS = 1024
_PROMPT, _RESPONSE = (16, 128), (32, 512)  # tokens, both ends included


class Job(NamedTuple):
    n_sequences: int
    max_batch_tokens: int
    # None: every sequence waits from the beginning, so a batch finds many of its own length. Else as at a worker,
    # which holds no more than its credit: (tokens, sequences).
    credit: tuple[int, int] | None


class Done(NamedTuple):
    seconds: float
    n_batches: int
    padding: float  # padded tokens of all batches / real ones


def save_model(folder: Path, device: str = "cpu", *, tiny: bool = True) -> Path:
    """A random Qwen3 with 4 layers, or with 24 wider ones; weights large enough for peaked rows."""
    import torch

    from tests.bench import student_case

    n_layers, hidden = (N_LAYERS, HIDDEN) if tiny else (GPU_LAYERS, GPU_HIDDEN)
    student_case.save_model(
        folder,
        device=device,
        dtype=getattr(torch, dtype_on(device)),
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=n_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    torch.cuda.empty_cache()
    return folder


def make_rollouts(n: int) -> list[Rollout]:
    """Sequences of mixed lengths in no order; the first n are the same for every n."""
    rng = np.random.default_rng(0)
    rollouts = []
    for index in range(n):
        n_prompt, n_response = rng.integers(_PROMPT[0], _PROMPT[1] + 1), rng.integers(_RESPONSE[0], _RESPONSE[1] + 1)
        tokens = rng.integers(0, VOCAB, n_prompt + n_response).astype(np.int32)
        # Only the tokens are sent; the rest is for the trainer.
        unused = np.zeros(n_response, np.float32)
        rollouts.append(Rollout(index, 0, tokens[:n_prompt], tokens[n_prompt:], unused, (), "length"))
    return rollouts


def dtype_on(device: str) -> str:
    return "bfloat16" if device == "cuda" else "float32"


def kv_cache_mib(engine_name: str, device: str) -> int:
    return GPU_KV_CACHE_MIB if (engine_name, device) == ("vllm", "cuda") else 0


def serve_engine(pipe: Connection, model: str, engine_name: str, max_batch_tokens: int, device: str = "cpu") -> None:
    from teacher_server.engines.load import EngineSettings, load_engine
    from tests.bench.engine_case import measure_error

    settings = EngineSettings(
        model=model,
        engine=engine_name,
        device=device,
        dtype=dtype_on(device),
        gpu_memory_utilization=GPU_SHARE,
        kv_cache_mib=kv_cache_mib(engine_name, device),
        threads=1,
        max_tokens=MAX_TOKENS,
        max_batch_tokens=max_batch_tokens,
    )
    engine = load_engine(settings)
    pipe.send("ready")
    while True:
        job: Job | Path = pipe.recv()
        if isinstance(job, Path):  # of `save_reference`
            pipe.send(measure_error(engine, job, VOCAB))
            continue
        items = [_make_item(rollout) for rollout in make_rollouts(job.n_sequences)]
        n_tokens = sum(item.n_tokens for item in items)
        n_batches = n_padded = 0
        start_s = time.perf_counter()
        for batch in _batches(items, job, pads(engine)):
            engine.score([item.sequence for item in batch], batch[0].request.params)
            n_batches += 1
            n_padded += len(batch) * max(item.n_tokens for item in batch)
        pipe.send(Done(time.perf_counter() - start_s, n_batches, n_padded / n_tokens))


def _make_item(rollout: Rollout) -> WorkItem:
    tokens = np.concatenate([rollout.prompt_ids, rollout.response_ids])
    n_prompt = len(rollout.prompt_ids)
    request = make_request(tokens, prompt_length=n_prompt, k=K, deadline_s=120.0)
    job = Assignment(job_id=bytes(16), stream_id=bytes(16), waited_s=0.0, remaining_s=1e9)
    return WorkItem(OpenRequest(job, request, bytes(16), 0.0), 0, TokenSequence(tokens, n_prompt))


def _batches(items: list[WorkItem], job: Job, pads: bool = True) -> Iterator[list[WorkItem]]:
    todo, waiting = deque(items), list[WorkItem]()
    n_computed = n_computed_tokens = 0  # of the batch before: the next ones arrived while it was computed
    while todo or waiting:
        n_tokens = n_computed_tokens + sum(item.n_tokens for item in waiting)
        n_held = n_computed + len(waiting)
        while todo and _has_credit(job.credit, n_tokens + todo[0].n_tokens, n_held + 1):
            n_tokens += todo[0].n_tokens
            n_held += 1
            waiting.append(todo.popleft())
        batch = take_batch(waiting, job.max_batch_tokens, pads=pads)
        n_computed, n_computed_tokens = len(batch), sum(item.n_tokens for item in batch)
        yield batch


def _has_credit(credit: tuple[int, int] | None, n_tokens: int, n_sequences: int) -> bool:
    return credit is None or (n_tokens <= credit[0] and n_sequences <= credit[1])


def worker_credit(max_batch_tokens: int, n_streams: int) -> tuple[int, int]:
    """Return the maximum load of a worker, with a client that respects the server's credit."""
    return CREDIT_BATCHES * max_batch_tokens, n_streams

"""Part `engines`: tokens/s through a real server and client against the same engine called directly; and its error."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from gkd.scoring.teacher.client import ZmqTeacher
from tests.bench.engine_case import error_limit, save_reference
from tests.bench.teacher_bare import (
    GPU_HIDDEN,
    GPU_LAYERS,
    GPU_SHARE,
    HIDDEN,
    MAX_TOKENS,
    N_LAYERS,
    VOCAB,
    Done,
    Job,
    K,
    dtype_on,
    kv_cache_mib,
    make_rollouts,
    save_model,
    serve_engine,
    worker_credit,
)
from tests.bench.teacher_children import Child
from tests.bench.teacher_report import Figure, Part, Table
from tests.service.harness import ServerProcess, connect, score

ENGINES = ("hf", "vllm")
REFERENCE = "reference.npz"
MAX_BATCH_TOKENS = 2048  # a quarter of the default: some forty batches in a run at a CPU's speed
_TRIAL = 64  # sequences, to learn how many make a run of the wanted length


class Round(NamedTuple):
    """Tokens/s of the same sequences, one after the other."""

    bare: float  # batched from all of them
    bare_in_order: float  # batched from what a worker's credit lets wait
    server: float


def engines(rounds: int, seconds: float, device: str, *, tiny: bool) -> Part:
    figures: list[Figure] = []
    rows: list[tuple[str | float, ...]] = []
    sizes: dict[str, int] = {}
    is_small = tiny or device == "cpu"
    with tempfile.TemporaryDirectory(prefix="bench.") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = save_model(folder / "model", device, tiny=is_small)
        # All start at the same time, and are ready before the first measurement.
        pairs = {engine: _started(engine, model, folder, device, stack) for engine in ENGINES}
        plain_error = save_reference(str(model), folder / REFERENCE, device=device, vocab=VOCAB)
        for bare, server in pairs.values():
            bare.answer()
            server.wait_until_ready()
        for engine, (bare, server) in pairs.items():
            found = _compare(bare, server, folder, rounds, seconds)
            best = Round(*map(statistics.median, zip(*found.rounds, strict=True)))
            figures += [
                Figure(
                    f"{engine}: server / bare engine",
                    statistics.median(r.server / r.bare for r in found.rounds),
                    at_least=None if tiny else 0.95,
                    note="the bare engine batches from all sequences at once",
                ),
                Figure(
                    f"{engine}: largest error of a logprob",
                    found.error,
                    "nats",
                    at_most=error_limit(device, plain_error),
                    note="the limit is twice the error of plain transformers" if device == "cuda" else "",
                ),
                Figure(
                    f"{engine}: server / bare engine, batched alike",
                    statistics.median(r.server / r.bare_in_order for r in found.rounds),
                    note="both batch from what a worker's credit lets wait: what is left is the server's own cost",
                ),
            ]
            rows += [
                (f"{engine}, bare, all at once", best.bare, found.bare.n_batches, found.bare.padding),
                (
                    f"{engine}, bare, as at a worker",
                    best.bare_in_order,
                    found.in_order.n_batches,
                    found.in_order.padding,
                ),
                (f"{engine}, server and client", best.server, "", ""),
            ]
            sizes[f"sequences of {engine}"] = found.n_sequences
    columns = ("who", "tokens/s", "batches", "padded / real tokens")
    n_layers, hidden = (N_LAYERS, HIDDEN) if is_small else (GPU_LAYERS, GPU_HIDDEN)
    return Part(
        "engines",
        f"Top-{K} of mixed lengths (48 to 640 tokens, prompt and response) from a random Qwen3: {n_layers} layers, H = "
        f"{hidden}, V = {VOCAB}, {dtype_on(device)}, one thread. The server has one worker and one client, which keeps "
        "the number of sequences in flight that the server asks for. Its time is from the first request to the last "
        "validated answer. The error is the largest difference from unbatched transformers in float32. The bare engine "
        "is the same engine in a process of its own, with the same `take_batch`. Its time is from the first batch to "
        "the last.",
        figures,
        (Table("Medians of the rounds", columns, rows),),
        {"rounds": rounds, "max_batch_tokens": MAX_BATCH_TOKENS, **sizes},
    )


class _Found(NamedTuple):
    error: float
    rounds: list[Round]
    n_sequences: int
    bare: Done
    in_order: Done


def _started(
    engine: str, model: Path, folder: Path, device: str, stack: contextlib.ExitStack
) -> tuple[Child, ServerProcess]:
    """Start a bare engine and a server with one; `stack` ends them. Neither is ready."""
    options = ["--engine", engine, "--device", device, "--dtype", dtype_on(device), "--threads", "1"]
    options += ["--gpu-memory-utilization", str(GPU_SHARE)]
    options += ["--max-tokens", str(MAX_TOKENS), "--max-batch-tokens", str(MAX_BATCH_TOKENS)]
    options += ["--kv-cache-mib", str(kv_cache_mib(engine, device))]
    # vLLM leaves semaphores behind when it is killed.
    bare = stack.enter_context(Child(serve_engine, str(model), engine, MAX_BATCH_TOKENS, device, goodbye_s=10.0))
    server = ServerProcess(model, folder, options=options)
    server.start()
    return bare, stack.push(server)


def _compare(bare: Child, server: ServerProcess, folder: Path, rounds: int, seconds: float) -> _Found:
    error: float = bare.ask(folder / REFERENCE)
    with connect(server.port, k=K) as asking:
        n_streams = asking.info().n_streams
    with connect(
        server.port, k=K, n_vocab=VOCAB, n_in_flight=n_streams, wire="fp16", request_timeout_s=300.0
    ) as teacher:
        trial: Done = bare.ask(Job(_TRIAL, MAX_BATCH_TOKENS, None))
        _score(teacher, _TRIAL)
        n_sequences = max(_TRIAL, round(_TRIAL * seconds / trial.seconds))
        n_tokens = sum(rollout.n_tokens for rollout in make_rollouts(n_sequences))
        at_once = Job(n_sequences, MAX_BATCH_TOKENS, None)
        in_order = Job(n_sequences, MAX_BATCH_TOKENS, worker_credit(MAX_BATCH_TOKENS, n_streams))
        found = []
        for _ in range(rounds):
            first: Done = bare.ask(at_once, 5 * seconds + 60)
            through_server_s = _score(teacher, n_sequences)
            second: Done = bare.ask(in_order, 5 * seconds + 60)
            found.append(Round(n_tokens / first.seconds, n_tokens / second.seconds, n_tokens / through_server_s))
    return _Found(error, found, n_sequences, first, second)


def _score(teacher: ZmqTeacher, n_sequences: int) -> float:
    """Seconds"""
    rollouts = make_rollouts(n_sequences)
    start_s = time.perf_counter()
    n_scored = sum(1 for _ in score(teacher, rollouts))
    if n_scored != n_sequences:
        raise RuntimeError(f"{n_scored} answers to {n_sequences} requests")
    return time.perf_counter() - start_s

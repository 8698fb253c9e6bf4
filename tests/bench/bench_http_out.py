"""Compare requests per second of the HTTP server with `vllm serve` on CPU: same model, sequences, K and client.

    python -m tests.bench.bench_http_out --json docs/results/http_out.json      # about 5 minutes

Both servers run at the same time and take turns: each round sends the same requests to our server in JSON, to vLLM's in
JSON, and to our server in binary. Eight clients send one sequence per request to `/v1/completions` with
`prompt_logprobs`, and read the answer into arrays as TRL's client does. Our worker uses the vllm engine. Both engines
use both cores.

`--small` is the quickstart's teacher, where the forms of the answer decide; `--language` a language model, where the
forward pass decides. Both are folders with a tokenizer, because vLLM decodes each listed token.

The part "memory" has no vLLM: it shows how the peak of the HTTP server's resident memory grows with the prompt.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np

from teacher_server.http.binary import MEDIA_TYPE, read_messages
from teacher_server.wire.payload import TopKScores, unpack_topk
from tests.bench.command import parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table
from tests.dist.helpers import free_port
from tests.service.harness import TRIVIAL, ServerProcess, trivial_model
from tests.service.http_out import HttpProcess, completions, post
from tests.service.http_servers import VllmServer

_K = 64
_CLIENTS = 8
_SPEED = {"small": (240, 64), "language": (320, 16)}  # tokens of a sequence, requests of a round
_PARTS = (*_SPEED, "memory")
_PROMPTS, _N_RESPONSE = (256, 1024, 4000), 64
# Flags and variables of `vllm serve`.
SERVE = ("--served-model-name", "teacher", "--disable-log-stats", "--kv-cache-memory-bytes", "1G")
SERVE_ENV = {
    **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(os.cpu_count()), "VLLM_NO_USAGE_STATS": "1"},
    **{"TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
}
Read = Callable[[httpx.Response, Sequence[int]], TopKScores]


def from_json(answer: httpx.Response, ids: Sequence[int]) -> TopKScores:
    """Read the rows by rank, and the tokens' own logprobs."""
    rows = answer.json()["choices"][0]["prompt_logprobs"][1:]
    best = [sorted(row.items(), key=lambda item: item[1]["rank"])[:_K] for row in rows]
    own = [row[str(token)]["logprob"] for token, row in zip(ids[1:], rows, strict=True)]
    return TopKScores(
        np.array([[int(token) for token, _ in row] for row in best], np.int32),
        np.array([[entry["logprob"] for _, entry in row] for row in best], np.float32),
        np.zeros(len(rows), np.float32),
        sampled=np.array(own, np.float32),
    )


def from_frames(answer: httpx.Response, ids: Sequence[int]) -> TopKScores:
    """Read the frames of the only reply."""
    (message,) = read_messages(answer.content)
    return unpack_topk(*message)


class Lane:
    """One server in one form. `run` returns requests per second."""

    def __init__(self, name: str, url: str, read: Read, model: str, accept: str = "application/json") -> None:
        self.name, self.n_bytes = name, 0
        self._url, self._read, self._model = f"{url}/v1/completions", read, model
        self._client = httpx.Client(trust_env=False, timeout=300.0, headers={"accept": accept})

    def ask(self, ids: Sequence[int]) -> TopKScores:
        answer = self._client.post(self._url, json=completions([ids], _K, self._model))
        answer.raise_for_status()
        self.n_bytes = len(answer.content)
        return self._read(answer, ids)

    def run(self, sequences: Sequence[Sequence[int]], n_requests: int) -> float:
        start_s = time.perf_counter()
        with ThreadPoolExecutor(_CLIENTS) as pool:
            list(pool.map(self.ask, [sequences[i % len(sequences)] for i in range(n_requests)]))
        return n_requests / (time.perf_counter() - start_s)


def agreement(ours: Lane, theirs: Lane, sequences: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the largest difference of a logprob of both answers, and the share of entries with the same id."""
    differences, same = [0.0], []
    for ids in sequences:
        a, b = ours.ask(ids), theirs.ask(ids)
        assert a.sampled is not None and b.sampled is not None  # both readers set them
        differences += [float(np.abs(a.logprobs - b.logprobs).max()), float(np.abs(a.sampled - b.sampled).max())]
        same.append(float((a.ids == b.ids).mean()))
    return max(differences), statistics.mean(same)


def measure(name: str, model: Path, rounds: int) -> Part:
    """Measure one part."""
    n_tokens, n_requests = _SPEED[name]
    n_vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    sequences = np.random.default_rng(0).integers(3, n_vocab, (_CLIENTS, n_tokens)).tolist()
    options = ("--engine", "vllm", "--dtype", "float32", "--threads", str(os.cpu_count()))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with (
            VllmServer(model, folder / "vllm.log", free_port(), *SERVE, lists=_K, env=SERVE_ENV) as vllm,
            ServerProcess(model, folder, options=options) as server,
            HttpProcess(server.port, folder) as http,
        ):
            ours = Lane("ours, JSON", http.url, from_json, "")
            theirs = Lane("vllm serve, JSON", vllm.url, from_json, "teacher")
            binary = Lane("ours, binary", http.url, from_frames, "", MEDIA_TYPE)
            lanes = (ours, theirs, binary)
            for lane in lanes:
                lane.run(sequences, _CLIENTS)
            rates = [[lane.run(sequences, n_requests) for lane in lanes] for _ in range(rounds)]
            difference, same = agreement(ours, theirs, sequences)
    ratios = [statistics.median(own[i] / own[1] for own in rates) for i in (0, 2)]
    n_rows = n_tokens - 1
    return Part(
        name,
        f"{_CLIENTS} clients send sequences of {n_tokens} tokens, one a request, and read {_K} entries of each row; "
        f"V = {n_vocab}, float32, one after the other in each round.",
        [
            Figure("requests/s, ours in JSON / vllm serve", ratios[0], at_least=1.0),
            Figure("requests/s, ours in binary / vllm serve", ratios[1], at_least=2.0),
            Figure("largest difference of a logprob", difference, "nats", at_most=2e-5),
            Figure("entries with the same id at the same rank", same, at_least=0.999, note="ties may be swapped"),
        ],
        [
            Table(
                "Median over the rounds",
                ("server and form", "requests/s", "bytes per row"),
                [
                    (lane.name, statistics.median(own[i] for own in rates), lane.n_bytes / n_rows)
                    for i, lane in enumerate(lanes)
                ],
            )
        ],
        {"K": _K, "clients": _CLIENTS, "requests a round": n_requests, "rounds": rounds},
    )


def peak_mib(folder: Path, port: int, body: Callable[[int], object], path: str, n_prompt: int) -> tuple[float, int]:
    """Return the peak of a fresh HTTP server's resident memory in MiB, and the bytes of an answer.

    Args:
        body: prompt length -> JSON of a request.
    """
    with HttpProcess(port, folder) as http, ThreadPoolExecutor(_CLIENTS) as pool:
        answers = list(pool.map(lambda _: post(http.url + path, body(n_prompt)), range(4 * _CLIENTS)))
        lines = Path(f"/proc/{http.process.pid}/status").read_text().splitlines()
    (peak,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return peak / 1024, max(len(answer.raise_for_status().content) for answer in answers)


def measure_memory() -> Part:
    """Measure the memory of requests for a response's rows, and for all rows, with the engine that has no model."""
    ids = np.random.default_rng(0).integers(0, 1000, _PROMPTS[-1] + _N_RESPONSE).tolist()

    def response_rows(n_prompt: int) -> object:
        sampling = {"max_new_tokens": 0}
        asked = {"return_logprob": True, "top_logprobs_num": _K, "logprob_start_len": n_prompt - 1}
        return {"input_ids": ids[: n_prompt + _N_RESPONSE], "sampling_params": sampling, **asked}

    def all_rows(n_prompt: int) -> object:
        return completions([ids[: n_prompt + _N_RESPONSE]], _K)

    asked = {"response's rows": (response_rows, "/generate"), "all rows": (all_rows, "/v1/completions")}
    figures, rows = list[Figure](), list[tuple[str | float, ...]]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with ServerProcess(trivial_model(folder / "model"), folder, options=TRIVIAL) as server:
            for kind, (body, path) in asked.items():
                found = [peak_mib(folder, server.port, body, path, n_prompt) for n_prompt in _PROMPTS]
                rows += [(kind, n, peak, n_bytes / 2**20) for n, (peak, n_bytes) in zip(_PROMPTS, found, strict=True)]
                growth = found[-1][0] - found[0][0]
                limit = 4.0 if kind == "response's rows" else None
                figures.append(
                    Figure(f"{kind}: growth of the peak from the first prompt", growth, "MiB", at_most=limit)
                )
    return Part(
        "memory",
        f"{_CLIENTS} clients send {4 * _CLIENTS} sequences of P + {_N_RESPONSE} tokens, K = {_K}; a fresh HTTP server "
        "for each P.",
        figures,
        [Table("Peak of the HTTP server's resident memory", ("rows", "P", "peak, MiB", "answer, MiB"), rows)],
        {"K": _K, "clients": _CLIENTS},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts. Exit code: 1 if a figure missed its goal."""
    made = parser("tests.bench.bench_http_out", __doc__ or "", _PARTS, 3)
    made.add_argument("--small", type=Path, default=Path("models/quickstart/teacher"), metavar="DIR")
    made.add_argument("--language", type=Path, default=Path("models/smollm2/12_layers"), metavar="DIR")
    args = parsed(made, _PARTS, argv)
    return run_parts(
        args, lambda name: measure_memory() if name == "memory" else measure(name, getattr(args, name), args.rounds)
    )


if __name__ == "__main__":
    sys.exit(main())

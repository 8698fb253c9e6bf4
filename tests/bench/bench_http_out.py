"""Compare requests per second of the HTTP server with `vllm serve` on CPU: same model, sequences, K and client.

    python -m tests.bench.bench_http_out --json docs/results/http_out.json      # about 5 minutes

Both servers run at the same time and take turns: each round sends the same requests to our server in JSON, to vLLM's in
JSON, and to our server in binary. Eight clients send one sequence per request to `/v1/completions` with
`prompt_logprobs`, and read the answer into arrays as TRL's client does. Our worker uses the vllm engine. Both engines
use both cores.

`--small` is the quickstart's teacher, where the forms of the answer decide; `--language` a language model, where the
forward pass decides. Both are folders with a tokenizer, because vLLM decodes each listed token.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

from teacher_server.http.binary import MEDIA_TYPE, read_messages
from teacher_server.wire.payload import TopKScores, unpack_topk
from tests.bench.command import parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table
from tests.processes import wait_until
from tests.service.harness import ServerProcess
from tests.service.http_out import HttpProcess, completions

_K = 64
_CLIENTS = 8
_PARTS = {"small": (240, 64), "language": (320, 16)}  # tokens of a sequence, requests of a round
_START_S = 240.0
Read = Callable[[httpx.Response, Sequence[int]], TopKScores]


@contextmanager
def vllm_serve(model: Path, folder: Path) -> Iterator[str]:
    """Run vLLM's server and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-logprobs", str(_K), "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", "1G", "--served-model-name", "teacher", "--disable-log-stats"]
    environment = os.environ | {
        **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(os.cpu_count()), "VLLM_NO_USAGE_STATS": "1"},
        **{"TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
    }
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM's server exited:\n{(folder / 'vllm.log').read_text()[-4000:]}")
        try:
            return httpx.get(f"{url}/health", trust_env=False, timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_until(answers, _START_S, "start of vLLM's server")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
    n_tokens, n_requests = _PARTS[name]
    n_vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    sequences = np.random.default_rng(0).integers(3, n_vocab, (_CLIENTS, n_tokens)).tolist()
    options = ("--engine", "vllm", "--dtype", "float32", "--threads", str(os.cpu_count()))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with (
            vllm_serve(model, folder) as url,
            ServerProcess(model, folder, options=options) as server,
            HttpProcess(server.port, folder) as http,
        ):
            ours = Lane("ours, JSON", http.url, from_json, "")
            theirs = Lane("vllm serve, JSON", url, from_json, "teacher")
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts. Exit code: 1 if a figure missed its goal."""
    made = parser("tests.bench.bench_http_out", __doc__ or "", _PARTS, 3)
    made.add_argument("--small", type=Path, default=Path("models/quickstart/teacher"), metavar="DIR")
    made.add_argument("--language", type=Path, default=Path("models/smollm2/12_layers"), metavar="DIR")
    args = parsed(made, _PARTS, argv)
    return run_parts(args, lambda name: measure(name, getattr(args, name), args.rounds))


if __name__ == "__main__":
    sys.exit(main())

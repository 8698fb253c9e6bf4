"""The same information as it is usually sent: torch.save over REQ/REP, and JSON over HTTP in two dresses.

What a peer does is copied in kind, not in code: float32 logprobs and int64 ids, as `torch.topk`
returns them; one batch a message for torch.save, one sequence a request over HTTP.
"""

from __future__ import annotations

import base64
import io
import json
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection

import numpy as np
import zmq

from tests.bench.teacher_children import Child
from tests.bench.teacher_lanes import ChildLane, Run
from tests.bench.teacher_payloads import N_ENTRIES, N_ROWS, N_SEQUENCES, K, make_all_scores
from tests.processes import wait_until


class TorchSave(ChildLane):
    """A batch of 64 sequences a message, {"ids": int64, "logprobs": float32}, one after the other."""

    name = "torch.save over REQ/REP"
    n_sequences = 2 * N_SEQUENCES

    def __init__(self) -> None:
        super().__init__()
        import torch

        torch.set_num_threads(1)
        self._load = torch.load
        child = self._stack.enter_context(Child(_serve_torch))
        port = child.answer()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.destroy, linger=0)
        self._socket = context.socket(zmq.REQ)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def run(self, n_sequences: int) -> Run:
        n_bytes = 0
        start_s = time.perf_counter()
        for _ in range(n_sequences // N_SEQUENCES):
            self._socket.send(b"batch")
            message = self._socket.recv()
            scores = self._load(io.BytesIO(message))
            if scores["ids"].shape != (N_SEQUENCES, N_ROWS, K):
                raise RuntimeError(f"ids of shape {tuple(scores['ids'].shape)}")
            n_bytes += len(message)
        return Run(time.perf_counter() - start_s, n_sequences * N_ENTRIES, n_bytes)


class Base64Json(ChildLane):
    """A sequence a request; both arrays in base64 inside JSON."""

    name = "base64 in JSON over HTTP"
    n_sequences = 8
    _path = "/base64"

    def __init__(self) -> None:
        super().__init__()
        child = self._stack.enter_context(Child(_serve_http))
        self._url = f"http://127.0.0.1:{child.answer()}{self._path}"
        wait_until(lambda: self.run(1).n_entries, 30.0, "the HTTP lane")

    def run(self, n_sequences: int) -> Run:
        n_bytes = 0
        start_s = time.perf_counter()
        for _ in range(n_sequences):
            with urllib.request.urlopen(self._url, timeout=60.0) as response:
                body = response.read()
            self._take(body)
            n_bytes += len(body)
        return Run(time.perf_counter() - start_s, n_sequences * N_ENTRIES, n_bytes)

    def _take(self, body: bytes) -> None:
        content = json.loads(body)
        ids = np.frombuffer(base64.b64decode(content["ids"]), np.int64).reshape(N_ROWS, K)
        logprobs = np.frombuffer(base64.b64decode(content["logprobs"]), np.float32).reshape(N_ROWS, K)
        if not (ids >= 0).all() or not np.isfinite(logprobs).all():
            raise RuntimeError("damaged scores")


class NumbersJson(Base64Json):
    """A sequence a request; for every position a list of {"token_id", "logprob"}, as an inference API answers."""

    name = "numbers in JSON over HTTP"
    n_sequences = 2
    _path = "/numbers"

    def _take(self, body: bytes) -> None:
        rows = json.loads(body)["prompt_logprobs"]
        ids = np.array([[entry["token_id"] for entry in row] for row in rows], np.int64)
        logprobs = np.array([[entry["logprob"] for entry in row] for row in rows], np.float32)
        if ids.shape != (N_ROWS, K) or logprobs.shape != ids.shape:
            raise RuntimeError(f"ids {ids.shape} and logprobs {logprobs.shape}")


# The other end


def _serve_torch(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    scores = make_all_scores()
    ids = torch.from_numpy(np.stack([s.ids for s in scores]).astype(np.int64))  # [64, R, K]
    logprobs = torch.from_numpy(np.stack([s.logprobs for s in scores]))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.REP)
    pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    while True:
        socket.recv()
        buffer = io.BytesIO()
        torch.save({"ids": ids, "logprobs": logprobs}, buffer)
        socket.send(buffer.getvalue())


def _serve_http(pipe: Connection) -> None:
    scores = make_all_scores()[0]
    ids, logprobs = scores.ids.astype(np.int64), scores.logprobs

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server calls
            body = _base64_body(ids, logprobs) if self.path == "/base64" else _numbers_body(ids, logprobs)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """One line a request would be in the way of the figures."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        pipe.send(server.server_port)
        server.serve_forever()


def _base64_body(ids: np.ndarray, logprobs: np.ndarray) -> bytes:
    arrays = {"ids": ids, "logprobs": logprobs}
    return json.dumps({name: base64.b64encode(array.data).decode() for name, array in arrays.items()}).encode()


def _numbers_body(ids: np.ndarray, logprobs: np.ndarray) -> bytes:
    rows = [
        [{"token_id": i, "logprob": logprob} for i, logprob in zip(*row, strict=True)]
        for row in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]
    return json.dumps({"prompt_logprobs": rows}).encode()

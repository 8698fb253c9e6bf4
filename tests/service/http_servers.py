"""HTTP teachers of the tests: a real `vllm serve`, and a server of a few lines whose replies the test writes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gkd.config.schema_teacher import TeacherConfig
from gkd.scoring.teacher.http_client import HttpTeacher
from gkd.scoring.teacher.info import Probe
from tests.processes import wait_until
from tests.second_runner import ENVIRONMENT

START_S = 240.0
Script = Callable[[str, Any], tuple[int, bytes]]  # path and JSON of a request -> status and body; raises to hang up


class VllmServer:
    """`python -m vllm.entrypoints.openai.api_server` on the CPU, as a context manager.

    Args:
        second_runner: use vLLM's second model runner, which alone scores given ids.
        env: additional variables.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        port: int,
        *options: str,
        second_runner: bool = False,
        lists: int = 64,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port, self.url, self._log = port, f"http://127.0.0.1:{port}", log
        module = "tests.service.second_runner_server" if second_runner else "vllm.entrypoints.openai.api_server"
        flags = ("--kv-cache-memory-bytes", "256M", "--enforce-eager", "--enable-scale-out", "--host", "127.0.0.1")
        sizes = ("--max-logprobs", str(lists), "--dtype", "float32", "--port", str(port))
        self._command = [sys.executable, "-m", module, "--model", str(model), *flags, *sizes, *options]
        self._env = os.environ | (ENVIRONMENT if second_runner else {}) | dict(env or {})

    def __enter__(self) -> VllmServer:
        self.start()
        return self.wait_until_ready()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the process only."""
        self._sockets = tempfile.TemporaryDirectory(prefix="vllm.")  # killed processes leave theirs
        env = self._env | {"VLLM_RPC_BASE_PATH": self._sockets.name}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=env, start_new_session=True)

    def wait_until_ready(self) -> VllmServer:
        """Wait until the server has loaded the model; end the process if it fails to start."""
        try:
            exited = self._process.poll
            wait_until(lambda: is_healthy(self.url) or exited() is not None, START_S, "start of vLLM")
            assert exited() is None, self._log.read_text()[-3000:]
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        """End all processes of the server at once, as a crash of its host does."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        self._sockets.cleanup()


def is_healthy(url: str) -> bool:
    """Return whether a server answers on /health."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


class ScriptedHttp:
    """An HTTP server on loopback whose replies a function returns; counts requests and keeps their headers."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.paths: list[str] = []
        self.authorizations: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.paths.append(self.path)
                outer.authorizations.append(self.headers.get("Authorization"))
                try:
                    status, reply = script(self.path, msgspec.json.decode(body) if body else None)
                except ConnectionError:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ScriptedHttp:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def http_teacher(
    *urls: str, k: int = 8, n_vocab: int = 0, n_in_flight: int = 16, probe: Probe | None = None, **settings: Any
) -> HttpTeacher:
    """Open a client with settings for tests; any setting of the section teacher can be given."""
    defaults: dict[str, Any] = {"request_timeout_s": 60.0, "outage_budget_s": 60.0}
    teacher = TeacherConfig(backend="http", url=list(urls), **(defaults | settings))
    return HttpTeacher(teacher, k=k, n_vocab=n_vocab, n_in_flight=n_in_flight, probe=probe)


N_VOCAB = 50  # of the distributions below


def distributions(tokens: Sequence[int], weights: Sequence[int] = ()) -> np.ndarray:
    """Return [len(tokens) - 1, N_VOCAB] float64 logprobs of each token after the first, made of what precedes it."""
    rows = []
    for end in range(1, len(tokens)):
        logits = np.random.default_rng([*tokens[:end], *weights]).normal(0.0, 2.0, N_VOCAB)
        rows.append(logits - np.logaddexp.reduce(logits))
    return np.array(rows)


def valid_reply(path: str, request: Any, weights: Sequence[int] = ()) -> dict[str, Any]:
    """Return what vLLM (/v1/completions) or SGLang (/generate) replies to the request of a sequence."""
    if path == "/generate":
        tokens, start, k = request["input_ids"], request["logprob_start_len"], request["top_logprobs_num"]
        rows = distributions(tokens, weights)[start:]
        own = [[None, tokens[start], None]]
        own += [[row[token], token, None] for row, token in zip(rows, tokens[start + 1 :], strict=True)]
        top: list[Any] = [None, *([[row[i], int(i), None] for i in np.argsort(-row)[:k]] for row in rows)]
        meta = {"input_token_logprobs": own, "input_top_logprobs": top if k else None, "prompt_tokens": len(tokens)}
        return {"text": "", "meta_info": meta}
    tokens, k = request["prompt"], request["prompt_logprobs"]
    listed: list[Any] = [None]
    for row, token in zip(distributions(tokens, weights), tokens[1:], strict=True):
        order = np.argsort(-row)
        rank_of = {int(i): rank for rank, i in enumerate(order, 1)}
        entries = {i: {"logprob": row[i], "rank": rank_of[i]} for i in (token, *map(int, order[:k]))}
        listed.append({str(i): entry | {"decoded_token": "x"} for i, entry in entries.items()})
    return {"id": "1", "choices": [{"index": 0, "text": "", "prompt_logprobs": listed}]}

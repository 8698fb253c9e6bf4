"""The HTTP server as a process, and the requests that three frameworks' clients send to it.

The clients do what TRL 1.16, prime-rl and slime do with an answer, and no more: their errors are errors here, too.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.device import patience
from tests.processes import wait_until
from tests.service.harness import command

_START_S = 30.0
_EXIT_S = 15.0


class HttpProcess:
    """`python -m teacher_server http` as a context manager: ready on entry, ended on exit."""

    def __init__(self, port: int, folder: Path, *options: str, env: Mapping[str, str] | None = None) -> None:
        self.ready_file = folder / f"http-{os.urandom(4).hex()}.json"
        self._log = self.ready_file.with_suffix(".log")
        flags = ("--server", f"127.0.0.1:{port}", "--port", "0", "--ready-file", str(self.ready_file))
        self._command, self._env = command("http", *flags, *options), os.environ | dict(env or {})
        self.url = ""

    def __enter__(self) -> HttpProcess:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._env)
        exited = self.process.poll
        try:
            wait_until(lambda: self.ready_file.exists() or exited() is not None, _START_S * patience(), "HTTP server")
            assert exited() is None, self.log_text()
            self.url = f"http://127.0.0.1:{json.loads(self.ready_file.read_text())['port']}"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout=_EXIT_S)
        finally:
            self.process.kill()
            self.process.wait()

    def log_text(self) -> str:
        return self._log.read_text()


def post(url: str, content: object, **headers: str) -> httpx.Response:
    """Send JSON, without the proxy settings of the environment."""
    with httpx.Client(trust_env=False, timeout=120.0) as client:
        return client.post(url, json=content, headers=headers)


def completions(
    sequences: Sequence[Sequence[int]], k: int, model: str = "", temperature: float = 1.0
) -> dict[str, Any]:
    """Return the JSON that TRL sends."""
    prompts = [[*map(int, ids)] for ids in sequences]
    asked = {"prompt": prompts, "max_tokens": 1, "temperature": temperature, "prompt_logprobs": k}
    return {"model": model, **asked}


def trl_sequence_logprobs(
    url: str, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], k: int, temperature: float = 1.0
) -> list[dict[str, np.ndarray]]:
    """Return {logprobs [R, K], ids [R, K], actual [R]} of each sequence, as TRL's `get_sequence_logprobs` does."""
    answer = post(f"{url}/v1/completions", completions(sequences, k, temperature=temperature))
    answer.raise_for_status()
    found = []
    for choice, ids, start in zip(answer.json()["choices"], sequences, prompt_lengths, strict=True):
        logprobs, tokens, actual = [], [], []
        for position in range(start, len(choice["prompt_logprobs"])):
            row = choice["prompt_logprobs"][position] or {}
            best = sorted(row.items(), key=lambda item: item[1]["rank"])[:k]
            logprobs.append([entry["logprob"] for _, entry in best] + [-math.inf] * (k - len(best)))
            tokens.append([int(token) for token, _ in best] + [0] * (k - len(best)))
            actual.append(row[str(int(ids[position]))]["logprob"])
        arrays = {"logprobs": np.array(logprobs, np.float32), "ids": np.array(tokens)}
        found.append(arrays | {"actual": np.array(actual, np.float32)})
    return found


def prime_prefill_logprobs(url: str, ids: Sequence[int], model: str = "") -> np.ndarray:
    """Return [N] float32, 0 for the first token, as prime-rl's orchestrator reads them."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    asked = {"model": model, "token_ids": [*map(int, ids)], "sampling_params": sampling}
    answer = post(f"{url}/inference/v1/generate", asked, authorization="Bearer EMPTY")
    answer.raise_for_status()
    rows = answer.json()["prompt_logprobs"]
    if len(rows) != len(ids):
        raise ValueError(f"{len(rows)} rows for {len(ids)} tokens")
    return np.array([row[str(int(i))]["logprob"] if row else 0.0 for i, row in zip(ids, rows, strict=True)], np.float32)


def slime_teacher_logprobs(url: str, ids: Sequence[int], n_response: int) -> np.ndarray:
    """Return [R] float32, as slime's reward function and `post_process_rewards` do."""
    sampling = {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False}
    asked = {"input_ids": [*map(int, ids)], "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    answer = post(f"{url}/generate", asked)
    answer.raise_for_status()
    entries = answer.json()["meta_info"]["input_token_logprobs"]
    return np.array([entry[0] for entry in entries[1:]], np.float32)[-n_response:]

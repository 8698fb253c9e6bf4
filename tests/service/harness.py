"""Helpers of the service tests: tiny models, random rollouts, and a real server process."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from gkd.config.schema_teacher import TeacherConfig
from gkd.scoring.teacher.client import ZmqTeacher
from gkd.types import Rollout, TeacherScores, VersionSpan
from teacher_server.wire.table import TopKTable
from tests.device import patience
from tests.processes import is_alive, wait_until
from tests.random_models import save_random

START_TIMEOUT_S = 90.0  # importing torch and transformers on a busy machine; 5 s on an idle one


def save_model(folder: Path, vocab_size: int, seed: int = 0) -> Path:
    """Save a random Qwen3 with a few thousand parameters plus embeddings. Large weights make the rows peaked."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "max_position_embeddings": 1024}
    return save_random(folder, seed=seed, vocab_size=vocab_size, **sizes)


def random_rollouts(n: int, n_vocab: int, seed: int = 0, response: tuple[int, int] = (1, 40)) -> list[Rollout]:
    """Return `n` rollouts of random tokens: prompts of 1 to 30 tokens, responses of `response` (inclusive range)."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for i in range(n):
        n_prompt, n_response = rng.integers(1, 31), rng.integers(response[0], response[1] + 1)
        rollouts.append(
            Rollout(
                prompt_id=i,
                sample_index=0,
                prompt_ids=rng.integers(0, n_vocab, n_prompt).astype(np.int32),
                response_ids=rng.integers(0, n_vocab, n_response).astype(np.int32),
                rollout_logprobs=np.zeros(n_response, np.float32),
                version_spans=(VersionSpan(0, int(n_response), 0),),
                finish_reason="length",
            )
        )
    return rollouts


def with_ids(rollout: Rollout, n_given: int, n_vocab: int) -> Rollout:
    """Return it with random ids for the teacher to list, at each response token."""
    rng = np.random.default_rng(rollout.prompt_id)
    ids = [rng.permutation(n_vocab)[:n_given] for _ in rollout.response_ids]
    return replace(rollout, top_ids=np.stack(ids).astype(np.int32))


def own_turns(rollout: Rollout, seed: int = 0) -> Rollout:
    """Return it as a trajectory: some turns of the student, between them observations; all its own if R < 3."""
    n, rng = len(rollout.response_ids), np.random.default_rng([seed, rollout.prompt_id])
    if n < 3:
        return rollout
    borders = np.sort(rng.choice(np.arange(1, n), min(4, n - 1), replace=False))
    turn = np.searchsorted(borders, np.arange(n), side="right")
    return replace(rollout, own=turn % 2 == rng.integers(2))


def connect(port: int, **settings: Any) -> ZmqTeacher:
    """Connect a client with settings for tests: those of the section `teacher`, and the arguments of `ZmqTeacher`."""
    of_section = {item.name for item in fields(TeacherConfig)} & settings.keys()
    own = {name: settings.pop(name) for name in of_section}
    own = {"request_timeout_s": 20.0, "outage_budget_s": START_TIMEOUT_S, "wire": "fp32"} | own
    return ZmqTeacher(TeacherConfig(server_port=port, **own), **({"k": 8, "n_vocab": 0, "n_in_flight": 16} | settings))


def submit(teacher: ZmqTeacher, rollout: Rollout, *, mass: float = 0.0) -> Future[list[TeacherScores]]:
    """Request the top-k scores of one sequence."""
    return teacher.submit([rollout], ("topk",), mass=mass)


def table_of(scores: list[TeacherScores]) -> TopKTable:
    """Return the top-k scores of a request of one sequence."""
    (only,) = scores
    assert only.topk is not None
    return only.topk


def score(teacher: ZmqTeacher, rollouts: Sequence[Rollout]) -> Iterator[tuple[int, TopKTable]]:
    """Yield (index, top-k scores) of each sequence when it is scored; closing the iterator cancels the others."""
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    futures: list[Future[list[TeacherScores]]] = []
    try:
        for index, rollout in enumerate(rollouts):
            futures.append(submit(teacher, rollout))
            futures[index].add_done_callback(lambda _, at=index: done.put(at))
        for _ in futures:
            index = done.get()
            yield index, table_of(futures[index].result())
    finally:
        for future in futures:
            future.cancel()


TRIVIAL = ("--engine", "tests.service.trivial_engine:load")
PATIENT = (*TRIVIAL, "--worker-timeout-s", "60")  # a stopped worker is not lost


def trivial_model(folder: Path, vocab_size: int = 1000) -> Path:
    """Make a model folder for the engine of TRIVIAL, which needs no weights and starts in half a second."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, "vocab_size": vocab_size}))
    return folder


def command(*words: str) -> list[str]:
    """Return the command line `python -m teacher_server WORDS`."""
    return [sys.executable, "-m", "teacher_server", *words]


def server_command(model: Path | None, *options: str) -> list[str]:
    """Return the command line of a server, by default on CPU. Without a model, the options must name the teachers."""
    models = () if model is None else ("--model", str(model))
    return command(*models, "--device", "cpu", *options)


class ServerProcess:
    """`python -m teacher_server` as a context manager: ready on entry, and ended with all its workers on exit."""

    def __init__(
        self,
        model: Path | None,
        folder: Path,
        *,
        port: int = 0,
        n_workers: int = 1,
        options: Sequence[str] = (),
        run_by: Callable[..., list[str]] = lambda *words: [*words],
    ):
        self._ready_file = folder / f"ready-{os.urandom(4).hex()}.json"
        self._log = folder / f"{self._ready_file.stem}.log"
        flags = ("--port", str(port), "--n-workers", str(n_workers), "--ready-file", str(self._ready_file), *options)
        self._command = run_by(*server_command(model, *flags))
        self.port = port
        self.worker_pids: list[int] = []
        self.ready: dict[str, Any] = {}  # content of the ready file

    def __enter__(self) -> ServerProcess:
        self.start()
        return self.wait_until_ready()

    def start(self) -> None:
        """Start the process only, for several servers that start at the same time."""
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log)

    def wait_until_ready(self) -> ServerProcess:
        """End the process if it fails to start."""
        try:
            exited, limit_s = self.process.poll, START_TIMEOUT_S * patience()
            wait_until(lambda: self._ready_file.exists() or exited() is not None, limit_s, "server start")
            assert self.process.poll() is None, f"the server exited:\n{self.log_text()}"
        except BaseException:
            self.kill()
            raise
        self.ready = json.loads(self._ready_file.read_text())
        self.port, self.worker_pids = self.ready["port"], self.ready["worker_pids"]
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # as a user does, so that the server removes its temporary folder
            self.process.wait(timeout=30)
        self.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in self.worker_pids), 30.0, "exit of the workers")

    def log_text(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        """Send SIGKILL, as in a crash. The kernel then kills the workers."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=30)
        if self.process.stdout is not None:
            self.process.stdout.close()

"""The transformers engine in this process: chunks, models it must refuse, broken weights, and the worker around it."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from teacher_server.backplane import Assignment
from teacher_server.engines import hf
from teacher_server.engines.base import ScoreParams, TokenSequence, TopK
from teacher_server.engines.hf import HfEngine
from teacher_server.errors import ServerError
from teacher_server.protocol import ErrorReply, ScoreRequest, TopKReply, as_frame, checksum, replies, requests
from teacher_server.worker import Worker
from tests.service.conftest import TINY_VOCAB
from tests.service.harness import random_rollouts

CPU = torch.device("cpu")


def load(model: Path) -> HfEngine:
    torch.set_num_threads(1)
    return HfEngine(str(model), dtype="float32", device=CPU, max_tokens=1024)


def sequences(n: int) -> list[TokenSequence]:
    return [
        TokenSequence(np.concatenate([rollout.prompt_ids, rollout.response_ids]), len(rollout.prompt_ids))
        for rollout in random_rollouts(n, TINY_VOCAB)
    ]


def test_chunks_change_nothing(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break if a chunk's rows were lost or shifted; one row a chunk against all rows in one."""
    engine, batch, params = load(tiny_model), sequences(6), ScoreParams(k=5, temperature=1.3, n_vocab=0)
    whole = engine.score_topk(batch, params)
    monkeypatch.setattr(hf, "LOGITS_CHUNK_BYTES", 1)
    for expected, got, sequence in zip(whole, engine.score_topk(batch, params), batch, strict=True):
        np.testing.assert_array_equal(got.ids, expected.ids)
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
        assert got.ids.shape == (sequence.n_response, 5)


def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path) -> None:
    """Would break if the head alone were used for a model that caps its logits after it: wrong without a sign."""
    config = Gemma2Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=1.0,
        initializer_range=0.5,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ServerError, match="changes its logits"):
        load(tmp_path)


def test_a_nan_is_an_error_and_not_a_score(tiny_model: Path) -> None:
    """Would break if overflowing weights produced an answer."""
    engine = load(tiny_model)
    with torch.no_grad():
        engine._head.weight[7] = float("nan")
    with pytest.raises(ArithmeticError):
        engine.score_topk(sequences(1), ScoreParams(k=5, temperature=1.0, n_vocab=0))


class PoisonedEngine:
    """Fails on any batch that holds token 13."""

    name, device, vocab_size, max_tokens = "poisoned", "cpu", 100, 100

    def score_topk(self, batch: Sequence[TokenSequence], params: ScoreParams) -> list[TopK]:
        if any(13 in sequence.token_ids for sequence in batch):
            raise RuntimeError("out of memory")
        shapes = [(sequence.n_response, params.k) for sequence in batch]
        return [TopK(np.zeros(shape, np.int32), np.zeros(shape, np.float32)) for shape in shapes]


class RecordingLink:
    """An inbox filled beforehand, and the answers."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers: dict[int, Any] = {}

    def answer(self, job_id: bytes, frames: Sequence[Any]) -> None:
        self.answers[job_id[0]] = replies.decode(frames[0])


class StoredFrame:
    """What the worker uses of a zmq.Frame."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.buffer = memoryview(data)


def test_a_poisonous_sequence_fails_alone() -> None:
    """Would break if one bad sequence failed its batch, an expired one was computed, or the loop ended."""
    link = RecordingLink()
    for job, (token, remaining_s) in enumerate([(1, 9.0), (13, 9.0), (2, 9.0), (3, -1.0), (200, 9.0)]):
        tokens = np.array([0, token, 5], np.int32)
        request = ScoreRequest(
            request_id=bytes([job] * 16),
            signal="topk",
            k=2,
            temperature=1.0,
            n_vocab=0,
            prompt_length=1,
            total_length=3,
            wire="fp16",
            deadline_s=9.0,
            checksum=checksum(as_frame(tokens)),
        )
        assignment = Assignment(job_id=bytes([job] * 16), waited_s=0.0, remaining_s=remaining_s)
        link.inbox.put((assignment, [StoredFrame(requests.encode(request)), StoredFrame(as_frame(tokens))]))
    worker = Worker(PoisonedEngine(), link, "f", max_batch_tokens=100)  # type: ignore[arg-type]
    assert worker._fill()  # the five that arrived
    worker._score(list(worker._waiting))
    codes = {job: answer.code for job, answer in link.answers.items() if isinstance(answer, ErrorReply)}
    assert codes == {1: "engine", 3: "deadline", 4: "bad_request"}
    assert [job for job, answer in sorted(link.answers.items()) if isinstance(answer, TopKReply)] == [0, 2]

"""Greedy responses of a real teacher server, token by token."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gkd.config.schema_teacher import TeacherConfig
from gkd.scoring.teacher.greedy import _decode, own_logprob, tell_own_logprob
from gkd.scoring.teacher.teacher import open_teacher
from gkd.types import Prompt
from tests.service.harness import ServerProcess

pytestmark = pytest.mark.service
CUT, MOST = 250, 12  # ids that student and teacher share, of the model's 300; tokens of a response


def test_the_teachers_responses_are_those_of_a_greedy_loop(tiny_server: ServerProcess, tiny_model: Path) -> None:
    """Fails if a token is taken from another prompt or position, has an id that the student lacks, or follows an end
    token, or the teacher's own prompt is not used.
    """
    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()

    def greedy(ids: list[int], eos_ids: frozenset[int]) -> list[int]:
        response: list[int] = []
        while len(response) < MOST and not eos_ids & {*response[-1:]}:
            with torch.inference_mode():
                logits = network(input_ids=torch.tensor([ids + response])).logits[0, -1, :CUT]
            response.append(int(logits.argmax()))
        return response

    rng = np.random.default_rng(4)
    own = [rng.integers(0, CUT, rng.integers(1, 20)).astype(np.int32) for _ in range(10)]
    prompts = [
        Prompt(i, ids if i % 3 else np.zeros(1, np.int32), route=i % 2, teacher_ids=None if i % 3 else ids)
        for i, ids in enumerate(own)
    ]
    endless = [greedy(ids.tolist(), frozenset()) for ids in own]
    eos_ids = frozenset({endless[0][3], endless[1][0], endless[5][MOST - 1]})
    expected = [greedy(ids.tolist(), eos_ids) for ids in own]
    assert len({len(response) for response in expected}) > 1, "some end early"
    settings = TeacherConfig(server_port=tiny_server.port)
    with closing(open_teacher(settings, k=1, n_vocab=CUT, n_in_flight=8)) as teacher:
        assert _decode([teacher, teacher], [3, 2], prompts, eos_ids, MOST) == expected
        mean = own_logprob([teacher, teacher], [3, 2], prompts, expected)
    logprobs = []
    for ids, response in zip(own[:8], expected, strict=False):  # of the first prompts alone
        with torch.inference_mode():
            rows = network(input_ids=torch.tensor([[*ids.tolist(), *response]])).logits[0, len(ids) - 1 : -1, :CUT]
        logprobs += rows.log_softmax(dim=1)[range(len(response)), response].tolist()
    assert abs(mean - np.mean(logprobs)) < 1e-3, "scored by the whole path, it is the mean over all tokens"


@pytest.mark.parametrize(("mean", "level"), [(-0.99, logging.INFO), (-1.01, logging.WARNING)])
def test_a_teacher_that_denies_its_own_answers_is_told(
    mean: float, level: int, gkd_log: pytest.LogCaptureFixture
) -> None:
    """Fails if a wrong template or other ids start a run without a warning, or every run has one."""
    tell_own_logprob(mean)
    (record,) = [each for each in gkd_log.records if "greedy answers" in each.message]
    assert record.levelno == level and f"{mean:.2f} nats" in record.message
    assert ("template" in record.message) == (level == logging.WARNING)

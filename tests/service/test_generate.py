"""Requests for answers against a real server: which engines write them, and that they are those of the request."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from teacher_server.client.generate import AnswerSettings, NamedPrompt
from teacher_server.engines.base import Writing
from teacher_server.errors import TeacherRefusal
from tests.service.conftest import TINY_VOCAB, TRIVIAL_VOCAB
from tests.service.engine_host import VOCAB, save_engine_model
from tests.service.harness import ServerProcess, connect, random_rollouts, score
from tests.service.trivial_engine import STEP_S, trivial_answer

pytestmark = pytest.mark.service
STOP_IDS = tuple(range(1, 40))


def settings(**changes: float) -> AnswerSettings:
    values = {"n": 3, "temperature": 1.0, "top_p": 0.95, "max_tokens": 20, "n_vocab": TRIVIAL_VOCAB} | changes
    return AnswerSettings(**values, stop_ids=STOP_IDS)  # type: ignore[arg-type]


def prompts(n: int, n_vocab: int = TRIVIAL_VOCAB) -> list[NamedPrompt]:
    rollouts = random_rollouts(n, n_vocab, seed=4)
    return [NamedPrompt(f"row {i}", rollout.prompt_ids, 100 * i) for i, rollout in enumerate(rollouts)]


def test_answers_are_those_of_their_prompts(trivial_server: ServerProcess) -> None:
    """Fails if an answer goes to another prompt or sample, has other ids, or depends on the request that it is in."""
    asked = prompts(9)
    how = settings()
    writing = Writing(how.n, how.temperature, how.top_p, how.max_tokens, how.n_vocab, STOP_IDS)
    expected = [trivial_answer(prompt.ids, prompt.seed + i, writing).tolist() for prompt in asked for i in range(3)]
    with connect(trivial_server.port) as teacher:
        together = teacher.generate(asked, how).result(60)
        alone = [answer for prompt in asked for answer in teacher.generate([prompt], how).result(60)]
    assert [answer.tolist() for answer in together] == expected
    assert [answer.tolist() for answer in alone] == expected
    assert {len(answer) == 20 for answer in together} == {True, False}


def test_a_cancelled_request_frees_the_worker(trivial_server: ServerProcess) -> None:
    """Fails if a worker continues a cancelled request, or scores nothing after a cancel."""
    long = settings(n=1, max_tokens=4000)
    with connect(trivial_server.port) as teacher:
        started_s = time.monotonic()
        running = teacher.generate(prompts(1), long)
        queued = teacher.generate(prompts(2), long)
        time.sleep(0.5)
        assert running.cancel() and queued.cancel()
        assert len(list(score(teacher, random_rollouts(3, TRIVIAL_VOCAB)))) == 3
        assert len(teacher.generate(prompts(1), settings()).result(60)) == 3
        assert time.monotonic() - started_s < 0.9 * 4000 * STEP_S


def test_what_no_engine_can_write_is_refused(tiny_server: ServerProcess, trivial_server: ServerProcess) -> None:
    """Fails if an engine of Transformers leaves a request unanswered, or a prompt that is too long ends a worker."""
    with connect(tiny_server.port) as teacher, pytest.raises(TeacherRefusal, match="row 0: .*--engine vllm"):
        teacher.generate(prompts(2, TINY_VOCAB), settings(n_vocab=TINY_VOCAB)).result(60)
    with connect(trivial_server.port) as teacher:
        short, tall = prompts(2)
        tall = NamedPrompt("row 1", np.full(4080, 3, np.int32), tall.seed)
        with pytest.raises(TeacherRefusal, match="row 1: .*more than this model's 4096"):
            teacher.generate([short, tall], settings()).result(60)
        with pytest.raises(TeacherRefusal, match="vocabulary of 500"):
            teacher.generate([short], settings(n_vocab=501)).result(60)
        assert len(teacher.generate([short], settings()).result(60)) == 3


def test_vllm_writes_reproducible_answers(tmp_path: Path) -> None:
    """Fails if equal seeds give other answers, samples are copies of one another, a greedy answer is not the most
    probable one, or scores after answers differ from those before.
    """
    model = save_engine_model(tmp_path / "model")
    options = ("--engine", "vllm", "--dtype", "float32", "--max-tokens", "128")
    sampled, greedy = settings(n_vocab=VOCAB - 9), settings(n=1, temperature=0.0, top_p=1.0, n_vocab=VOCAB - 9)
    rollouts = random_rollouts(3, VOCAB)
    with ServerProcess(model, tmp_path, options=options) as server, connect(server.port) as teacher:
        before = dict(score(teacher, rollouts))
        asked = prompts(4, VOCAB)
        first, second, best = (teacher.generate(asked, how).result(120) for how in (sampled, sampled, greedy))
        after = dict(score(teacher, rollouts))
        (alone,) = teacher.generate(asked[2:3], greedy).result(120)
    assert [answer.tolist() for answer in first] == [answer.tolist() for answer in second]
    assert len({tuple(answer) for answer in first}) == 12
    assert alone.tolist() == best[2].tolist()
    for answer in (*first, *best):
        assert len(answer) == 20 or answer[-1] in STOP_IDS
    for index, table in before.items():
        np.testing.assert_allclose(after[index].logprobs, table.logprobs, atol=1e-5)

"""The client of HTTP teachers with servers that err: malformed replies, failures, silence, several servers, keys."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from gkd.config.load import load_config
from gkd.errors import TeacherError, TeacherRefusal, TeacherUnavailable
from gkd.preflight.http_teacher import probed
from gkd.preflight.teacher import request_info
from gkd.scoring.teacher.http_forms import Asked, request_of, scores_of
from gkd.scoring.teacher.info import Probe
from gkd.types import Rollout, TeacherScores
from teacher_server.client.generate import AnswerSettings, NamedPrompt
from tests.dist.helpers import free_port
from tests.e2e.conftest import save_model
from tests.processes import wait_until
from tests.refusals import refuses
from tests.service.harness import own_turns, random_rollouts
from tests.service.http_faults import FAULTS, K
from tests.service.http_servers import N_VOCAB, Script, ScriptedHttp, distributions, http_teacher, valid_reply

pytestmark = pytest.mark.service
BOTH = ("topk", "sampled")
N_FAULTS = 600


def good(path: str, request: Any) -> tuple[int, bytes]:
    """Answer every path as a healthy server does."""
    if path == "/v1/models":
        return 200, json.dumps({"data": [{"id": "m", "max_model_len": 99}]}).encode()
    if path in ("/health", "/tokenize"):
        return (200, b"") if path == "/health" else (404, b"")
    return 200, json.dumps(valid_reply(path, request)).encode()


def scoring_by(answer: Callable[[], tuple[int, bytes] | None]) -> Script:
    """Return a script that gives scores as `answer` does, or after it if it returns nothing; the rest as `good`."""
    return lambda path, request: (path == "/v1/completions" and answer()) or good(path, request)


def rollouts(n: int, seed: int = 0) -> list[Rollout]:
    return random_rollouts(n, N_VOCAB, seed=seed, response=(2, 9))


def likely(n: int) -> list[Rollout]:
    """Return rollouts with probable responses, as a student's are: a list of another row contradicts such a token."""
    found, rng = [], np.random.default_rng(5)
    for rollout in random_rollouts(n, N_VOCAB, seed=3, response=(1, 1)):
        tokens = rollout.prompt_ids.tolist()
        for _ in range(rng.integers(6, 12)):
            tokens.append(int(rng.choice(np.argsort(-distributions([*tokens, 0])[-1])[:4])))
        response = np.array(tokens[len(rollout.prompt_ids) :], np.int32)
        found.append(replace(rollout, response_ids=response, rollout_logprobs=np.zeros(len(response), np.float32)))
    return found


def check(rollout: Rollout, scores: Any) -> None:
    """Compare scores with the distributions that the server made."""
    full = distributions([*rollout.prompt_ids.tolist(), *rollout.response_ids.tolist()])[len(rollout.prompt_ids) - 1 :]
    own = np.take_along_axis(full, rollout.response_ids[:, None].astype(np.int64), 1)[:, 0]
    np.testing.assert_allclose(scores.sampled_logprobs, own, rtol=1e-6)
    np.testing.assert_array_equal(scores.topk.ids, np.argsort(-full)[:, :K])
    np.testing.assert_allclose(scores.topk.logprobs, -np.sort(-full)[:, :K], rtol=1e-6)
    np.testing.assert_allclose(scores.topk.tail, 1 - np.exp(-np.sort(-full)[:, :K]).sum(1), atol=1e-6)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_scores_of_both_dialects(dialect: str) -> None:
    """Fails if a row, an id or a tail of either form is read from a wrong place, rows of observations are kept, or
    an empty mask is sent.
    """
    with ScriptedHttp(good) as server, http_teacher(server.url, dialect=dialect, k=K, n_vocab=N_VOCAB) as teacher:
        for rollout in map(own_turns, rollouts(20)):
            (whole,) = teacher.submit([replace(rollout, own=None)], BOTH).result()
            check(rollout, whole)
            (only,) = teacher.submit([replace(rollout, own=None)], ("sampled",)).result()
            assert only.topk is None
            np.testing.assert_array_equal(only.sampled_logprobs, whole.sampled_logprobs)
            (scores,) = teacher.submit([rollout], BOTH).result()
            own = np.ones(len(rollout.response_ids), bool) if rollout.own is None else rollout.own
            np.testing.assert_array_equal(scores.sampled_logprobs, whole.sampled_logprobs[own])
            for name in ("ids", "logprobs", "tail"):
                np.testing.assert_array_equal(getattr(scores.topk, name), getattr(whole.topk, name)[own])
        info = teacher.info()
        assert (info.fingerprint, info.max_tokens, info.n_streams) == ("m", 98, 32)
        with pytest.raises(TeacherError, match="prompt 0, .*own"):
            teacher.submit([replace(rollouts(1)[0], own=np.zeros(2, bool))], BOTH)


def test_given_ids_of_own_tokens_have_rows_for_all() -> None:
    """Fails if the ids of own tokens are requested for, or read from, the rows of other tokens."""
    own, given = np.array([False, True, False, False, True]), np.array([[3, 1], [2, 7]], np.int32)
    asked = Asked("x", [*range(8)], 3, 2, with_sampled=False, given=given, own=own)
    path, body = request_of("vllm", "m", asked)
    sent = msgspec.json.decode(body)["sampling_params"]["prompt_logprob_token_ids"]
    assert path == "/inference/v1/generate"
    assert len(sent) == 5 and (sent[1], sent[4]) == ([3, 1], [2, 7])
    assert all(ids in given.tolist() for ids in sent), "a server refuses ids that repeat, or that it does not have"
    rows = np.log(np.array([[0.9, 0.1], [0.5, 0.25], [0.9, 0.1], [0.9, 0.1], [0.1, 0.7]], np.float32))

    def read(replied: np.ndarray) -> TeacherScores:
        file = io.BytesIO()
        np.lib.format.write_array(file, replied, (1, 0))
        reply = msgspec.json.encode({"prompt_token_id_logprobs": base64.b64encode(file.getvalue()).decode()})
        return scores_of("vllm", reply, asked, N_VOCAB)

    scores = read(rows)
    assert scores.topk is not None and scores.topk.ids.tolist() == [[3, 1], [7, 2]]
    np.testing.assert_array_equal(scores.topk.logprobs, [rows[1], rows[4][::-1]])
    with pytest.raises(TeacherError, match="x: response position 4 "):
        read(np.where(np.arange(5)[:, None] == 4, np.float32(0.5), rows))


@pytest.mark.parametrize("with_sampled", [False, True])
def test_minus_infinity_is_refused_as_vllm_writes_it(with_sampled: bool) -> None:
    """Fails if a token that the teacher excludes is learned with a loss of 9999 nats."""
    rows = [None, {"5": {"logprob": -0.1, "rank": 1}, "6": {"logprob": -9999.0, "rank": 2}}]
    asked = Asked("x", [4, 6], 1, 1 if with_sampled else 2, with_sampled=with_sampled)
    with pytest.raises(TeacherError, match="x: response position 0 "):
        scores_of("vllm", msgspec.json.encode({"choices": [{"prompt_logprobs": rows}]}), asked, N_VOCAB)


def test_the_last_id_is_scored_as_sglang_writes_it() -> None:
    """Fails if a teacher of SGLang without padding rows is refused, because SGLang writes 0 for its last token."""
    last = N_VOCAB - 1
    asked = Asked("x", [4, last, 6, last], 2, 2, with_sampled=True)
    own: list[list[Any]] = [[None, 0, None], [-0.5, 6, None], [-0.2, 0, None]]
    top = [None, [[-0.5, 6, None], [-1.5, 3, None]], [[-0.2, last, None], [-3.0, 0, None]]]
    meta = {"input_token_logprobs": own, "input_top_logprobs": top}
    scores = scores_of("sglang", msgspec.json.encode({"meta_info": meta}), asked, N_VOCAB)
    assert scores.topk is not None and scores.topk.ids.tolist() == [[6, 3], [last, 0]]
    np.testing.assert_allclose(scores.sampled_logprobs, [-0.5, -0.2])  # type: ignore[arg-type]
    own[1][1] = 0
    with pytest.raises(TeacherError, match="^x: "):
        scores_of("sglang", msgspec.json.encode({"meta_info": meta}), asked, N_VOCAB)


@pytest.mark.parametrize("n_models", [1, 2])
def test_different_models_behind_one_address_are_refused(tmp_path: Path, n_models: int) -> None:
    """Fails if a student learns from two models in turn, because a load balancer has servers of both."""
    save_model(tmp_path, seed=0, layers=1, n_vocab=N_VOCAB)
    served = itertools.count()

    def script(path: str, request: Any) -> tuple[int, bytes]:
        if path != "/v1/completions":
            return good(path, request)
        return 200, json.dumps(valid_reply(path, request, [next(served) % n_models])).encode()

    with ScriptedHttp(script) as server, contextlib.ExitStack() as stack:
        settings = ("teacher.backend=http", f"teacher.url={server.url}", "teacher.signal=sampled", "distill.loss=k1")
        config = load_config(None, ["data.train_files=[t]", "model.path=m", "trainer.run_dir=r", *settings])
        (route,) = config.derived.routes
        if n_models > 1:
            stack.enter_context(refuses("teacher.url"))
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert probed(config, route, request_info(route), tokenizer, [], N_VOCAB).probe is not None


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_no_malformed_reply_is_accepted(dialect: str) -> None:
    """Fails if one of 600 faulty replies is trained on, or if the error does not name its sequence and end alone."""
    sequences = likely(N_FAULTS // 2)
    faults: dict[str, str] = {}

    def script(path: str, request: Any) -> tuple[int, bytes]:
        status, body = good(path, request)
        if path in ("/v1/models", "/health"):
            return status, body
        tokens = str(request.get("prompt") or request["input_ids"])
        rng = random.Random(tokens)
        names = list(FAULTS)
        name = faults[tokens] = names[len(faults) % len(names)]
        reply = json.loads(body)
        before = json.dumps(reply)
        changed = FAULTS[name](reply, rng)
        changed = json.dumps(reply).encode() if changed is None else changed
        assert changed != before.encode(), name
        return 200, changed

    accepted, unnamed = [], []
    with ScriptedHttp(script) as server, http_teacher(server.url, dialect=dialect, k=K, n_vocab=N_VOCAB) as teacher:
        for rollout, future in [(rollout, teacher.submit([rollout], BOTH)) for rollout in sequences]:
            tokens = str([*rollout.prompt_ids.tolist(), *rollout.response_ids.tolist()])
            try:
                future.result()
                accepted.append(faults[tokens])
            except TeacherError as error:
                assert not isinstance(error, TeacherUnavailable)
                if not str(error).startswith(f"prompt {rollout.prompt_id}, sample 0"):
                    unnamed.append(str(error))
    assert not accepted and not unnamed
    assert len(faults) > 250 and set(faults.values()) == set(FAULTS)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_only_answers_that_were_asked_for_are_accepted(dialect: str) -> None:
    """Fails if an answer has another prompt, seed or settings, or lacks ids, an end, or what the student can write."""
    sent: list[Any] = []

    def script(path: str, request: Any) -> tuple[int, bytes]:
        if path in ("/v1/models", "/health"):
            return good(path, request)
        params = request.get("sampling_params", request)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids")
        assert [params[name] for name in names] == [0.7, 0.9, -1, 0, 1, [3, 5]]
        prompt = request.get("input_ids") or request["prompt"]
        ids = sent[0] if sent else [*prompt, params.get("sampling_seed", params.get("seed")), 3]
        reply = {"output_ids": ids} if dialect == "sglang" else {"choices": [{"index": 0, "token_ids": ids}]}
        return 200, json.dumps(reply).encode()

    how = AnswerSettings(2, 0.7, 0.9, 4, N_VOCAB, (3, 5))
    prompts = [NamedPrompt(f"row {i}", np.array([8, 9 + i], np.int32), 20 + 4 * i) for i in range(3)]
    with ScriptedHttp(script) as server, http_teacher(server.url, dialect=dialect) as teacher:
        answers = [answer.tolist() for answer in teacher.generate(prompts, how).result(30)]
        assert answers == [[8, 9 + i, 20 + 4 * i + sample, 3] for i in range(3) for sample in range(2)]
        for wrong in (None, [], ["9"] * 4, [9, 9], [9, 3, 9, 9], [9] * 5, [N_VOCAB] * 4, [-1] * 4, [2**40] * 4):
            sent[:] = [wrong]
            with pytest.raises(TeacherError, match="row 1, answer [01]"):
                teacher.generate(prompts[1:2], how).result(30)


def test_failures_that_pass_are_sent_again() -> None:
    """Fails if a busy server, a proxy without a backend, a lost connection or a failed pass ends the run."""
    failures = [429, 0, 503, 500, 0, 504]

    def answer() -> tuple[int, bytes] | None:
        if not failures:
            return None
        if status := failures.pop(0):
            return status, b"busy"
        raise ConnectionError

    (rollout,) = rollouts(1)
    with ScriptedHttp(scoring_by(answer)) as server, http_teacher(server.url, k=K, n_vocab=N_VOCAB) as teacher:
        (scores,) = teacher.submit([rollout], BOTH).result(timeout=30)
    check(rollout, scores)
    assert server.paths.count("/v1/completions") == 7


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_other_weights_after_an_outage_end_the_run(dialect: str) -> None:
    """Fails if a server that returns with other weights under the same name, in the middle of a batch or between two,
    is trained on; or if the same weights end the run.
    """
    ids = tuple(range(16))
    probe = Probe(ids, tuple(float(row[i]) for row, i in zip(distributions(ids), ids[1:], strict=True)), 0.0)
    weights, returns_with, left = [()], [()], [0]  # the last: requests until the next outage

    def script(path: str, request: Any) -> tuple[int, bytes]:
        if path not in ("/generate", "/v1/completions"):
            return good(path, request)
        left[0] -= 1
        if left[0] == -9:  # the outage ends
            left[0], weights[0] = 1000, returns_with[0]
        if left[0] < 0:
            raise ConnectionError
        return 200, json.dumps(valid_reply(path, request, weights[0])).encode()

    with (
        ScriptedHttp(script) as server,
        http_teacher(server.url, dialect=dialect, k=K, n_vocab=N_VOCAB, probe=probe, n_in_flight=4) as teacher,
    ):
        for n, new in ((40, ()), (40, (7,)), (1, ()), (1, (7,)), (1, ())):
            if n == 1:
                weights[0] = new  # it was restarted while no request waited
            returns_with[0], left[0] = new, 12 if n > 1 else 1000
            futures = [teacher.submit([rollout], BOTH) for rollout in rollouts(n)]
            errors = [future.exception(timeout=60) for future in futures]
            if new:
                assert any(type(error) is TeacherError for error in errors)
            else:
                assert not any(errors)
            for rollout, future, error in zip(rollouts(n), futures, errors, strict=True):
                if error is None:
                    check(rollout, future.result()[0])


@pytest.mark.parametrize("status", [400, 404, 302, 500])
def test_refusals_are_final(status: int) -> None:
    """Fails if a request that no server will answer is repeated for ever, or if its error lacks the server's text."""
    script = scoring_by(lambda: (status, b"too long"))
    with ScriptedHttp(script) as server, http_teacher(server.url, k=K) as teacher:
        with pytest.raises(TeacherRefusal, match="prompt 0, sample 0"):
            teacher.submit(rollouts(1), BOTH).result(timeout=60)
        assert server.paths.count("/v1/completions") == (6 if status == 500 else 1)
        assert teacher.info().fingerprint == "m", "the client remains usable"


def test_a_silent_server_is_an_outage() -> None:
    """Fails if a run waits for ever for a server that is gone, or does not say for how long it has been silent."""
    port = free_port()
    with http_teacher(f"http://127.0.0.1:{port}", k=K, outage_budget_s=1.0) as teacher:
        started_s = time.monotonic()
        with pytest.raises(TeacherUnavailable, match=f"127.0.0.1:{port}"):
            teacher.info()
        assert 0.8 < time.monotonic() - started_s < 60
        with ScriptedHttp(good, port):
            assert teacher.info().fingerprint == "m", "the client remains usable"


def test_a_stuck_server_that_answers_pings_is_an_outage() -> None:
    """Fails if /health alone keeps a run waiting, or if a request without a reply is not sent again."""
    release = threading.Event()
    script = scoring_by(lambda: release.wait(30) and None)
    limits = {"outage_budget_s": 1.5, "request_timeout_s": 0.5}
    with ScriptedHttp(script) as server, http_teacher(server.url, k=K, **limits) as teacher:
        futures = [teacher.submit([rollout], BOTH) for rollout in rollouts(3)]
        wait_until(lambda: teacher.health().n_in_flight == 3, 30.0, "three requests")
        for future in futures:
            with pytest.raises(TeacherUnavailable):
                future.result(timeout=30)
        assert server.paths.count("/v1/completions") > 3
        release.set()


def test_servers_take_turns_and_one_may_be_gone() -> None:
    """Fails if all requests go to one server, or if the loss of one of two ends the run."""
    sequences = rollouts(12)
    gone = f"http://127.0.0.1:{free_port()}"
    with ScriptedHttp(good) as one, ScriptedHttp(good) as two:
        with http_teacher(one.url, two.url, k=K, n_vocab=N_VOCAB) as teacher:
            for rollout in sequences:
                check(rollout, teacher.submit([rollout], BOTH).result()[0])
        counts = [server.paths.count("/v1/completions") for server in (one, two)]
        assert counts == [6, 6]
        with http_teacher(one.url, gone, k=K, n_vocab=N_VOCAB) as teacher:
            for rollout, future in [(r, teacher.submit([r], BOTH)) for r in sequences]:
                check(rollout, future.result(timeout=30)[0])


def test_a_cancelled_or_closed_request_ends() -> None:
    """Fails if the end of a chunk leaves requests at the server, or if `close` leaves a future that never completes."""
    release = threading.Event()
    with ScriptedHttp(scoring_by(lambda: release.wait(30) and None)) as server:
        teacher = http_teacher(server.url, k=K)
        first, second = (teacher.submit([rollout], BOTH) for rollout in rollouts(2))
        wait_until(lambda: teacher.health().n_in_flight == 2, 30.0, "two requests")
        first.cancel()
        wait_until(lambda: teacher.health().n_in_flight == 1, 30.0, "the end of one")
        teacher.close()
        with pytest.raises(TeacherError):
            second.result(timeout=30)
        with pytest.raises(TeacherError):
            teacher.submit(rollouts(1), BOTH)
        release.set()


def test_no_more_than_the_window_is_in_flight() -> None:
    """Fails if a chunk of sequences arrives at the server at once, whatever teacher.max_in_flight is."""
    lock, now, most, three = threading.Lock(), [0], [0], threading.Event()

    def answer() -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        assert three.wait(30)
        with lock:
            now[0] -= 1

    script = scoring_by(answer)
    with ScriptedHttp(script) as server, http_teacher(server.url, k=K, n_vocab=N_VOCAB, n_in_flight=3) as teacher:
        futures = [teacher.submit([rollout], BOTH) for rollout in rollouts(30)]
        wait_until(lambda: most[0] >= 3, 30.0, "three requests")
        three.set()
        for future in futures:
            future.result(timeout=30)
    assert most[0] == 3


def test_the_api_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a server with a key refuses the run, or if the key appears in an error, a log line or the settings."""
    key = "sk-very-secret-0123456789"
    monkeypatch.setenv("HTTP_TEST_KEY", key)

    script = scoring_by(lambda: (401, f"Incorrect API key provided: {key}".encode()))
    caplog.set_level("DEBUG")
    with ScriptedHttp(script) as server, http_teacher(server.url, k=K, api_key_env="HTTP_TEST_KEY") as teacher:
        with pytest.raises(TeacherRefusal) as caught:
            teacher.submit(rollouts(1), BOTH).result(timeout=30)
        assert set(server.authorizations) == {f"Bearer {key}"}
    assert caught.value.code == "http 401" and "Incorrect API key" in str(caught.value)
    assert key not in str(caught.value) + caplog.text + repr(vars(teacher)["_teacher"])
    monkeypatch.delenv("HTTP_TEST_KEY")
    with refuses("teacher.api_key_env"):
        http_teacher("http://127.0.0.1:1", api_key_env="HTTP_TEST_KEY")

"""The HTTP server before a real broker and worker: three frameworks' clients, refusals, tokens, outages, shutdown."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gkd.types import Rollout
from teacher_server.__main__ import main
from teacher_server.engines.base import ScoreParams, TokenSequence
from teacher_server.http.app import MAX_BODY, MEDIA_TYPE
from teacher_server.wire.payload import read_messages, unpack_topk
from teacher_server.wire.table import TopKTable
from tests.processes import wait_until
from tests.service.commands import address, run
from tests.service.conftest import TINY_VOCAB
from tests.service.engine_host import plain_logits, plain_logprobs
from tests.service.harness import PATIENT, TRIVIAL, ServerProcess, connect, random_rollouts, trivial_model
from tests.service.http_out import (
    HttpProcess,
    completions,
    post,
    prime_prefill_logprobs,
    slime_teacher_logprobs,
    trl_sequence_logprobs,
)

pytestmark = pytest.mark.service
K = 8
CLOSE = 2e-5  # nats; float32 in another batch


@pytest.fixture(scope="module")
def http(tiny_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpProcess]:
    with HttpProcess(tiny_server.port, tmp_path_factory.mktemp("http")) as process:
        yield process


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    return random_rollouts(6, TINY_VOCAB, seed=3, response=(2, 40))


def tokens_of(rollout: Rollout) -> list[int]:
    return [*rollout.prompt_ids.tolist(), *rollout.response_ids.tolist()]


def reference(model: Path, ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Return [N - 1, V] float64 logprobs by Transformers; row j predicts token j + 1."""
    (logits,) = plain_logits(model, [TokenSequence(np.array(ids, np.int32), 1)])
    return plain_logprobs(logits, ScoreParams("topk", temperature=temperature))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_trl_s_client_gets_the_teacher_s_scores(
    http: HttpProcess, tiny_server: ServerProcess, tiny_model: Path, rollouts: list[Rollout], temperature: float
) -> None:
    """Fails if TRL distills from shifted rows, from other ids or another temperature, or counts an unlisted token."""
    sequences, starts = [tokens_of(each) for each in rollouts], [len(each.prompt_ids) for each in rollouts]
    found = trl_sequence_logprobs(http.url, sequences, starts, K, temperature)
    with connect(tiny_server.port, k=K, temperature=temperature) as teacher:
        direct = [teacher.submit([each], ("topk", "sampled")).result()[0] for each in rollouts]
    for each, ours, scores in zip(rollouts, found, direct, strict=True):
        assert np.array_equal(ours["ids"], scores.topk.ids)
        assert np.abs(ours["logprobs"] - scores.topk.logprobs).max() <= CLOSE
        assert np.abs(ours["actual"] - scores.sampled_logprobs).max() <= CLOSE
        rows = reference(tiny_model, tokens_of(each), temperature)[len(each.prompt_ids) - 1 :]
        assert np.abs(ours["logprobs"] - np.take_along_axis(rows, ours["ids"], 1)).max() <= CLOSE
        assert np.abs(ours["logprobs"] + np.sort(-rows, 1)[:, :K]).max() <= CLOSE
        assert np.abs(ours["actual"] - rows[np.arange(len(rows)), each.response_ids]).max() <= CLOSE


@pytest.mark.parametrize("k", [0, 1, 64])
def test_the_token_itself_is_first_and_ranks_are_those_of_the_list(http: HttpProcess, k: int) -> None:
    """Fails if a client that takes the first entry, or cuts by rank, reads another token's logprob."""
    ids = tokens_of(random_rollouts(1, TINY_VOCAB, seed=5, response=(40, 40))[0])
    (choice,) = post(f"{http.url}/v1/completions", completions([ids], k)).json()["choices"]
    (wider,) = post(f"{http.url}/v1/completions", completions([ids], 256)).json()["choices"]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(ids)
    inside = []
    for token, row, wide in zip(ids[1:], choice["prompt_logprobs"][1:], wider["prompt_logprobs"][1:], strict=True):
        first, *others = row.items()
        ranks = [entry["rank"] for _, entry in others]
        inside.append(first[1]["rank"] <= k)
        assert first[0] == str(token) and len(row) == k + (not inside[-1]), "K entries, or K and the token"
        assert ranks == sorted(ranks) and set(ranks) | ({first[1]["rank"]} if inside[-1] else set()) == {
            *range(1, k + 1)
        }
        assert inside[-1] == (0 < wide[str(token)]["rank"] <= k) and (inside[-1] or first[1]["rank"] > k)
    assert k < 64 or len(set(inside)) == 2, "rows of both kinds"


def test_prime_rl_s_client_gets_one_logprob_per_token(
    http: HttpProcess, tiny_model: Path, rollouts: list[Rollout]
) -> None:
    """Fails if prime-rl trains on the logprobs of other tokens than its own."""
    for each in rollouts[:3]:
        ids = tokens_of(each)
        rows = reference(tiny_model, ids)
        expected = np.concatenate([[0.0], rows[np.arange(len(rows)), ids[1:]]])
        assert np.abs(prime_prefill_logprobs(http.url, ids) - expected).max() <= CLOSE


def test_slime_s_reward_function_gets_the_response_s_logprobs(
    http: HttpProcess, tiny_model: Path, rollouts: list[Rollout]
) -> None:
    """Fails if slime's rewards belong to other positions, also if it asks for the rows from a start on."""
    each = rollouts[0]
    ids, n_response = tokens_of(each), len(each.response_ids)
    rows = reference(tiny_model, ids)
    expected = rows[np.arange(len(rows)), ids[1:]]
    assert np.abs(slime_teacher_logprobs(http.url, ids, n_response) - expected[-n_response:]).max() <= CLOSE
    asked = {"input_ids": [ids, ids[:-1]], "return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 3}
    answers = post(f"{http.url}/generate", asked | {"sampling_params": {"max_new_tokens": 0}}).json()
    for length, answer in zip((len(ids), len(ids) - 1), answers, strict=True):
        own, top = (answer["meta_info"][f"input_{name}_logprobs"] for name in ("token", "top"))
        assert answer["meta_info"]["prompt_tokens"] == length and len(own) == len(top) == length - 1
        assert own[0] == [None, ids[1], None] and top[0] is None
        assert [token for _, token, _ in own[1:]] == ids[2:length]
        assert np.abs(np.array([entry[0] for entry in own[1:]]) - expected[1 : length - 1]).max() <= CLOSE
        best = np.array([[entry[0] for entry in row] for row in top[1:]])
        assert np.abs(best + np.sort(-rows, 1)[1 : length - 1, :3]).max() <= CLOSE


def json_rows(answer: Any, ids: Sequence[int], k: int) -> TopKTable:
    rows = [sorted(row.items(), key=lambda item: item[1]["rank"])[:k] for row in answer["prompt_logprobs"][1:]]
    own = [row[str(i)]["logprob"] for i, row in zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)]
    return TopKTable(
        np.array([[int(token) for token, _ in row] for row in rows]),
        np.array([[entry["logprob"] for _, entry in row] for row in rows], np.float32),
        np.zeros(len(rows), np.float32),
        sampled=np.array(own, np.float32),
    )


def test_the_binary_form_has_the_same_numbers_at_5_bytes_an_entry(http: HttpProcess, rollouts: list[Rollout]) -> None:
    """Fails if the two forms of one answer differ by more than float16's rounding, or the binary one is larger."""
    sequences = [tokens_of(each) for each in rollouts]
    asked = completions(sequences, K)
    answers = post(f"{http.url}/v1/completions", asked).json()["choices"]
    binary = post(f"{http.url}/v1/completions", asked, accept=MEDIA_TYPE)
    assert binary.headers["content-type"] == MEDIA_TYPE
    n_rows = sum(len(ids) - 1 for ids in sequences)
    assert len(binary.content) < n_rows * (5 * K + 8) + 512 * len(sequences)
    for ids, answer, message in zip(sequences, answers, read_messages(binary.content), strict=True):
        ours, theirs = unpack_topk(*message), json_rows(answer, ids, K)
        assert np.array_equal(ours.ids, theirs.ids) and np.abs(ours.sampled - theirs.sampled).max() <= CLOSE
        assert (np.abs(ours.logprobs - theirs.logprobs) <= CLOSE + np.abs(theirs.logprobs) * 2.0**-11).all()


GOOD = completions([[1, 2, 3]], 4)
GENERATE = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
SGLANG = {
    **{"input_ids": [1, 2, 3], "return_logprob": True, "logprob_start_len": 0},
    **{"sampling_params": {"max_new_tokens": 0}},
}


@pytest.mark.parametrize(
    ("path", "content", "status", "named"),
    [
        ("/v1/completions", GOOD | {"prompt": "text"}, 400, "prompt"),
        ("/v1/completions", GOOD | {"prompt": ["text", "more"]}, 400, "prompt"),
        ("/v1/completions", GOOD | {"prompt": []}, 400, "prompt"),
        ("/v1/completions", GOOD | {"prompt": [[]]}, 400, "prompt, sequence 0"),
        ("/v1/completions", GOOD | {"prompt": [[1, 2], [7]]}, 400, "prompt, sequence 1"),
        ("/v1/completions", GOOD | {"prompt": [1, [2]]}, 400, "prompt"),
        ("/v1/completions", GOOD | {"prompt": [[1, -2]]}, 400, "$.prompt"),
        ("/v1/completions", GOOD | {"prompt": [[1, 1 << 60]]}, 400, "$.prompt"),
        ("/v1/completions", GOOD | {"prompt": [[1, 2.5]]}, 400, "$.prompt"),
        ("/v1/completions", GOOD | {"prompt": [[1, TINY_VOCAB]]}, 400, str(TINY_VOCAB)),
        ("/v1/completions", GOOD | {"prompt": [[1] * 1025]}, 400, "1025"),
        ("/v1/completions", GOOD | {"max_tokens": 16}, 400, "max_tokens = 16"),
        ("/v1/completions", {"prompt": [1, 2], "prompt_logprobs": 1}, 400, "max_tokens = missing"),
        ("/v1/completions", GOOD | {"n": 2}, 400, "n = 2"),
        ("/v1/completions", GOOD | {"stream": True}, 400, "stream = True"),
        ("/v1/completions", GOOD | {"echo": True}, 400, "echo = True"),
        ("/v1/completions", GOOD | {"logprobs": 0}, 400, "logprobs = 0"),
        ("/v1/completions", GOOD | {"prompt_logprobs": 1025}, 400, "prompt_logprobs = 1025"),
        ("/v1/completions", GOOD | {"prompt_logprobs": -1}, 400, "prompt_logprobs = -1"),
        ("/v1/completions", GOOD | {"prompt_logprobs": None}, 400, "prompt_logprobs"),
        ("/v1/completions", GOOD | {"prompt_logprobs": 301}, 400, "301"),  # more than the vocabulary
        ("/v1/completions", GOOD | {"temperature": -1.0}, 400, "temperature"),
        ("/v1/completions", GOOD | {"prompt": [[1] * 1000] * 40, "prompt_logprobs": 1024}, 400, str(40 * 999 * 1024)),
        ("/v1/completions", GOOD | {"model": "gpt"}, 404, "default"),
        ("/inference/v1/generate", {"token_ids": [1, 2]}, 400, "sampling_params"),
        ("/inference/v1/generate", GENERATE | {"token_ids": "text"}, 400, "$.token_ids"),
        ("/inference/v1/generate", GENERATE | {"stream": True}, 400, "stream = True"),
        ("/inference/v1/generate", GENERATE | {"model": "gpt"}, 404, "default"),
        ("/generate", SGLANG | {"input_ids": None, "text": "text"}, 400, "input_ids"),
        ("/generate", SGLANG | {"return_logprob": False}, 400, "return_logprob"),
        ("/generate", SGLANG | {"sampling_params": {"max_new_tokens": 128}}, 400, "max_new_tokens = 128"),
        ("/generate", {**SGLANG, "logprob_start_len": -1}, 400, "logprob_start_len = -1"),
        ("/generate", SGLANG | {"logprob_start_len": 2}, 400, "logprob_start_len = 2"),
        ("/generate", SGLANG | {"top_logprobs_num": 1025}, 400, "top_logprobs_num = 1025"),
        ("/generate", SGLANG | {"token_ids_logprob": [1]}, 400, "token_ids_logprob"),
        ("/generate", SGLANG | {"image_data": ["data:image/png;base64,"]}, 400, "image_data"),
        ("/generate", SGLANG | {"lora_path": "adapter"}, 400, "lora_path"),
        ("/inference/v1/generate", GENERATE | {"features": {"mm_hashes": {}}}, 400, "features"),
        ("/v1/completions", GOOD | {"truncate_prompt_tokens": 2}, 400, "truncate_prompt_tokens"),
        ("/v1/chat/completions", {"messages": []}, 404, "/v1/completions"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    http: HttpProcess, path: str, content: dict[str, Any], status: int, named: str
) -> None:
    """Fails if a request gets numbers that it did not ask for, or a refusal that does not name the field and a fix."""
    answer = post(http.url + path, content)
    error = answer.json()["error"]
    assert answer.status_code == status and named in error["message"] and "Fix:" in error["message"], error
    assert path == "/generate" or error["code"] == status  # vLLM's form
    assert post(f"{http.url}/v1/completions", GOOD).status_code == 200


def test_a_body_that_is_not_json_or_too_large_is_refused(http: HttpProcess) -> None:
    """Fails if one request can fill the memory of the server, or its error is not readable JSON."""
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        answer = client.post(f"{http.url}/v1/completions", content=b"{")
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "BadRequestError"
        answer = client.post(f"{http.url}/generate", content=(b" " * (1 << 20) for _ in range((MAX_BODY >> 20) + 1)))
        assert answer.status_code == 413 and str(MAX_BODY) in answer.json()["error"]["message"]
        assert client.get(f"{http.url}/health").status_code == 200
        assert client.get(f"{http.url}/v1/completions").status_code == 405


def test_requests_need_the_token(tiny_server: ServerProcess, tmp_path: Path) -> None:
    """Fails if the server answers a client without its token, or its health check needs one."""
    token = "a-secret-token"
    with HttpProcess(tiny_server.port, tmp_path, "--bearer-env", "SECRET", env={"SECRET": token}) as http:
        url = f"{http.url}/v1/completions"
        assert post(url, GOOD, authorization=f"Bearer {token}").status_code == 200
        for headers in ({}, {"authorization": "Bearer a-secret-tokem"}, {"authorization": token}):
            assert post(url, GOOD, **headers).status_code == 401
        assert httpx.get(f"{http.url}/v1/models", trust_env=False).status_code == 401
        assert httpx.get(f"{http.url}/health", trust_env=False).status_code == 200
        assert token not in http.log_text()


def test_wrong_settings_end_the_start(
    tiny_server: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the server listens to other machines without a token, or starts without a teacher server."""
    monkeypatch.setenv("SHORT", "abc")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, named in (
            (("--host", "0.0.0.0"), "--bearer-env"),
            (("--bearer-env", "NOT_SET"), "NOT_SET"),
            (("--bearer-env", "SHORT"), "SHORT"),
            (("--server", "127.0.0.1:1"), "127.0.0.1:1"),
            (("--server", "nowhere"), "--server nowhere"),
            (("--keys", "/nowhere"), "/nowhere"),
            ((*address(tiny_server), "--port", port), port),
            ((*address(tiny_server), "--port", "0", "--ready-file", "/proc/no/file"), "--ready-file"),
        ):
            assert main(["http", *words]) == 2
            (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error:")]
            assert named in line and "abc" not in line


def test_the_process_loads_no_torch() -> None:
    """Fails if the HTTP server takes seconds to start and the memory of an engine."""
    code = (
        "import sys, teacher_server.cli.http; print([m for m in ('torch', 'vllm', 'ray', 'gkd') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_eight_clients_at_once_get_their_own_scores(http: HttpProcess, rollouts: list[Rollout]) -> None:
    """Fails if answers of concurrent requests are mixed up, lost, or delay each other without end."""
    sequences = [tokens_of(each) for each in random_rollouts(8, TINY_VOCAB, seed=9, response=(5, 40))]
    alone = [prime_prefill_logprobs(http.url, ids) for ids in sequences]
    with ThreadPoolExecutor(8) as pool:
        rounds = pool.map(lambda ids: [prime_prefill_logprobs(http.url, ids) for _ in range(6)], sequences)
        for expected, found in zip(alone, rounds, strict=True):
            assert max(np.abs(each - expected).max() for each in found) <= CLOSE


def test_the_model_chooses_the_teacher(tmp_path: Path) -> None:
    """Fails if a request is scored by another teacher than it names, or without a name by any of several."""
    teachers = (f"{name}={trivial_model(tmp_path / name, size)}" for name, size in (("math", 1000), ("code", 2000)))
    options = [word for each in teachers for word in ("--teacher", each)]
    with (
        ServerProcess(None, tmp_path, options=(*options, *TRIVIAL)) as server,
        HttpProcess(server.port, tmp_path) as http,
    ):
        listed = httpx.get(f"{http.url}/v1/models", trust_env=False).json()["data"]
        assert {each["id"]: each["root"] for each in listed} == {
            name: str(tmp_path / name) for name in ("math", "code")
        }
        assert {each["max_model_len"] for each in listed} == {4096}
        url, asked = f"{http.url}/v1/completions", completions([[1, 1500]], 1)
        statuses = {name: post(url, asked | {"model": name}).status_code for name in ("math", "code", "", "none")}
        assert statuses == {"math": 400, "code": 200, "": 404, "none": 404}  # only `code` has the token 1500
        assert post(url, asked | {"model": str(tmp_path / "code")}).status_code == 200


@contextmanager
def waiting(server: ServerProcess, http: HttpProcess, **fields: str) -> Iterator[Future[httpx.Response]]:
    """Yield the answer of a request that has arrived, and that the worker, which is stopped here, does not compute."""
    os.kill(server.worker_pids[0], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(post, f"{http.url}/v1/completions", GOOD | fields)
        wait_until(lambda: "1 (3 tokens)" in run("status", *address(server)).stdout, 30.0, "arrival of the request")
        yield pending


def test_a_killed_broker_ends_requests_and_its_successor_is_used(tmp_path: Path) -> None:
    """Fails if a client hangs when the teacher server dies, or the HTTP server has to be restarted with it."""
    model = trivial_model(tmp_path / "m")
    with ServerProcess(model, tmp_path, options=PATIENT) as server, HttpProcess(server.port, tmp_path) as http:
        url = f"{http.url}/v1/completions"
        with waiting(server, http) as pending:
            server.kill()
            answer = pending.result(timeout=30)
        assert answer.status_code == 503 and "Fix:" in answer.json()["error"]["message"]
        assert post(url, GOOD).status_code == 503
        assert httpx.get(f"{http.url}/health", trust_env=False).status_code == 503
        with ServerProcess(model, tmp_path, port=server.port, options=PATIENT):
            wait_until(lambda: post(url, GOOD).status_code == 200, 20.0, "connection to the new server")
        assert "Traceback" not in http.log_text()


@pytest.mark.parametrize(("model", "status"), [("old", 200), ("new", 503)])
def test_a_restarted_broker_gets_the_requests_again(tmp_path: Path, model: str, status: int) -> None:
    """Fails if a restart within seconds costs a client its request, or if a request that names a model gets the scores
    of another one, which took its port meanwhile.
    """
    models = {"old": trivial_model(tmp_path / "old"), "new": trivial_model(tmp_path / "new", vocab_size=2000)}
    with ServerProcess(models["old"], tmp_path, options=PATIENT) as server, HttpProcess(server.port, tmp_path) as http:
        url = f"{http.url}/v1/completions"
        assert post(url, GOOD | {"model": "old"}).status_code == 200
        assert post(url, GOOD).json()["model"] == "default", "the teacher's name, if the request has none"
        with waiting(server, http, model="old") as pending:
            server.kill()
            with ServerProcess(models[model], tmp_path, port=server.port, options=PATIENT):
                assert pending.result(timeout=30).status_code == status
                names = [name for name in models if name != model]
                wait_until(lambda: post(url, GOOD | {"model": names[0]}).status_code == 404, 30.0, "the names")
                assert post(url, GOOD | {"model": model}).status_code == 200


def test_a_client_or_a_server_that_leaves_ends_its_requests(tmp_path: Path) -> None:
    """Fails if the teacher computes for clients that have timed out, or if Ctrl-C leaves a process, a ready file or a
    hanging client behind.
    """
    with ServerProcess(trivial_model(tmp_path / "m"), tmp_path, options=PATIENT) as server:

        def is_idle() -> bool:
            return "0 (0 tokens)" in run("status", *address(server)).stdout

        for number in (signal.SIGINT, signal.SIGTERM):
            with HttpProcess(server.port, tmp_path) as http:
                with waiting(server, http) as pending:
                    http.process.send_signal(number)
                    assert pending.result(timeout=30).status_code == 503
                assert http.process.wait(timeout=30) == 0
                assert not http.ready_file.exists() and "Traceback" not in http.log_text()
            wait_until(is_idle, 30.0, "the end of the request")
        with HttpProcess(server.port, tmp_path) as http:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{http.url}/v1/completions", json=GOOD, timeout=1.0, trust_env=False)
            wait_until(is_idle, 30.0, "cancellation")
        os.kill(server.worker_pids[0], signal.SIGCONT)


def test_a_client_s_keys_open_a_server_with_keys(tmp_path: Path) -> None:
    """Fails if teachers on another host, which require keys, cannot be used over HTTP."""
    run("keygen", str(tmp_path / "keys"), "--client", "c")
    options = (*TRIVIAL, "--keys", str(tmp_path / "keys"))
    with (
        ServerProcess(trivial_model(tmp_path / "m"), tmp_path, options=options) as server,
        HttpProcess(server.port, tmp_path, "--keys", str(tmp_path / "keys/bundles/c")) as http,
    ):
        assert post(f"{http.url}/v1/completions", GOOD).status_code == 200


def peak_mib(pid: int) -> float:
    (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


@pytest.mark.real_card("a stand-in card's memory is memory of the host")
def test_memory_does_not_hold_all_logits_or_all_json(
    wide_model: Path, wide_server: ServerProcess, tmp_path: Path
) -> None:
    """Fails if a long prompt needs the memory of [P + R, V] in the worker, or of its whole JSON in the HTTP server."""
    ids = np.random.default_rng(0).integers(0, 32000, 1000).tolist()
    with HttpProcess(wide_server.port, tmp_path) as http:
        url = f"{http.url}/v1/completions"
        post(url, completions([ids[:20]], 1000))
        pids = (wide_server.worker_pids[0], http.process.pid)
        before = [peak_mib(pid) for pid in pids]
        answer = post(url, completions([ids], 1000))
        worker, server = (peak_mib(pid) - old for pid, old in zip(pids, before, strict=True))
    json_mib, logits_mib = len(answer.content) / 2**20, 999 * 32003 * 4 / 2**20
    assert answer.status_code == 200 and json_mib > 50
    assert server < json_mib and worker < logits_mib, (server, json_mib, worker, logits_mib)

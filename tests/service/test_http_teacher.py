"""The client of HTTP teachers with `vllm serve`: the numbers of the teacher server, probes, a crash, given ids."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.preflight.http_teacher import probed
from gkd.preflight.run import teacher_identity
from gkd.preflight.teacher import check_teacher, request_info
from gkd.run.open import check_same_teacher
from gkd.scoring.endpoint import ScoringEndpoint
from gkd.scoring.teacher.info import TeacherInfo
from gkd.scoring.teacher.window import window_of_group
from gkd.text.comparison import Comparison
from gkd.types import Prompt, Rollout, TeacherScores
from teacher_server.wire.protocol import Signal
from teacher_server.wire.table import TopKTable
from tests.dist.helpers import free_port
from tests.e2e.conftest import save_model
from tests.processes import wait_until
from tests.refusals import refuses
from tests.second_runner import small_student
from tests.service.conftest import on_device
from tests.service.harness import ServerProcess, connect, own_turns, random_rollouts, with_ids
from tests.service.http_servers import VllmServer, http_teacher

pytestmark = [pytest.mark.service, pytest.mark.cpu_only("vllm serve runs on the CPU here")]
N_VOCAB, K = 1000, 16
BOTH: tuple[Signal, ...] = ("topk", "sampled")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("http") / "teacher"
    save_model(folder, seed=0, layers=2, n_vocab=N_VOCAB)
    return folder


@pytest.fixture(scope="module")
def vllm_server(model: Path) -> Iterator[VllmServer]:
    with VllmServer(model, model.parent / "vllm.log", free_port()) as server:
        yield server


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    return random_rollouts(12, N_VOCAB, seed=4, response=(1, 30))


@pytest.fixture(scope="module")
def zmq_port(model: Path) -> Iterator[int]:
    with ServerProcess(model, model.parent, options=on_device()) as server:
        yield server.port


@pytest.fixture(scope="module")
def expected(zmq_port: int, rollouts: list[Rollout]) -> list[TeacherScores]:
    """Return the scores of a teacher server with the same weights, in float32."""
    with connect(zmq_port, k=K) as teacher:
        return [teacher.submit([rollout], BOTH).result()[0] for rollout in rollouts]


def check_equal(scores: Sequence[TeacherScores], expected: Sequence[TeacherScores]) -> None:
    """Compare all tables up to the rounding of float32 in two engines; ids may change places at equal logprobs."""
    for ours, theirs in zip(scores, expected, strict=True):
        np.testing.assert_allclose(ours.topk.logprobs, theirs.topk.logprobs, atol=5e-5)
        np.testing.assert_allclose(ours.topk.tail, theirs.topk.tail, atol=2e-5)
        differ = ours.topk.ids != theirs.topk.ids
        assert differ.mean() < 0.02
        if ours.sampled_logprobs is not None and theirs.sampled_logprobs is not None:
            np.testing.assert_allclose(ours.sampled_logprobs, theirs.sampled_logprobs, atol=5e-5)


def test_scores_equal_those_of_the_teacher_server(
    vllm_server: VllmServer, rollouts: list[Rollout], expected: list[TeacherScores]
) -> None:
    """Fails if a served model trains a student otherwise than the same model on the teacher server."""
    with http_teacher(vllm_server.url, k=K, n_vocab=N_VOCAB) as teacher:
        futures = [teacher.submit([rollout], BOTH) for rollout in rollouts]
        check_equal([future.result()[0] for future in futures], expected)
        own_prompt = replace(rollouts[0], prompt_ids=rollouts[1].prompt_ids, teacher_ids=rollouts[0].prompt_ids)
        check_equal(teacher.submit([own_prompt], BOTH).result(), expected[:1])
        whole = max(range(len(rollouts)), key=lambda i: len(rollouts[i].response_ids))
        trajectory, reference = own_turns(rollouts[whole]), expected[whole]
        assert reference.topk is not None and reference.sampled_logprobs is not None and trajectory.own is not None
        tables = (reference.topk.ids, reference.topk.logprobs, reference.topk.tail)
        rows = TopKTable(*(table[trajectory.own] for table in tables))
        rows_of_own = TeacherScores(rows, reference.sampled_logprobs[trajectory.own])
        check_equal(teacher.submit([trajectory], BOTH).result(), [rows_of_own])


def settings(url: str, *overrides: str) -> Config:
    minimal = ("data.train_files=[t]", "model.path=m", "trainer.run_dir=r", f"teacher.topk={K}")
    short = ("data.max_prompt_length=16", "data.max_response_length=16")
    return load_config(None, [*minimal, *short, "teacher.backend=http", f"teacher.url={url}", *overrides])


def prompts(tokenizer: Any) -> list[Prompt]:
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in rng.integers(2, N_VOCAB, 12)) for _ in range(40)]
    return [Prompt(i, np.array(tokenizer.encode(text), np.int32)) for i, text in enumerate(texts)]


def probe(config: Config, tokenizer: Any, n_vocab: int = N_VOCAB) -> TeacherInfo:
    (route,) = check_config(config).routes
    info = probed(config, route, request_info(route), tokenizer, prompts(tokenizer), n_vocab)
    assert check_teacher(config, route, info, tokenizer, n_vocab) == n_vocab
    return info


def tokenizer_of(folder: Path, target: Path, words: dict[str, int]) -> Any:
    """Return the tokenizer of a model with other words."""
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    file = target / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = words
    file.write_text(json.dumps(content))
    return AutoTokenizer.from_pretrained(target)


def test_the_probes_pass_and_identify_the_weights(
    vllm_server: VllmServer, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if a fitting server is refused, the probes take long, or a resumed run accepts other weights."""
    config, tokenizer = settings(vllm_server.url), AutoTokenizer.from_pretrained(model)
    probe(config, tokenizer)  # vLLM's first passes take longer
    start_s = time.monotonic()
    info = probe(config, tokenizer)
    assert time.monotonic() - start_s < 60
    assert info.fingerprint == str(model) and info.max_tokens == 63 and info.probe is not None
    assert "so it has another tokenizer" in caplog.text, "random weights find no text probable; /tokenize agrees"
    derived = config.derived
    recorded = tmp_path / "teacher.json"
    recorded.write_text(json.dumps(teacher_identity(derived.routes, [info])))
    check_same_teacher(recorded, teacher_identity(derived.routes, [probe(config, tokenizer)]), config)
    assert len(info.probe.token_ids) == 16 and len(info.probe.logprobs) == 15
    moved = info.probe._replace(logprobs=tuple(value + 0.011 for value in info.probe.logprobs))
    for other in (replace(info, probe=moved), replace(info, fingerprint="x"), replace(info, probe=None)):
        with refuses("teacher.url"):
            check_same_teacher(recorded, teacher_identity(derived.routes, [other]), config)


def test_a_server_that_does_not_fit_is_refused_before_the_start(
    vllm_server: VllmServer, model: Path, tmp_path: Path
) -> None:
    """Fails if the limit of vLLM's lists, another tokenizer, or missing support of given ids is found in step 1."""
    tokenizer, url = AutoTokenizer.from_pretrained(model), vllm_server.url
    words = tokenizer.get_vocab()
    moved = {word: (i if i < 500 else 500 + (i - 499) % 500) for word, i in words.items()}
    longer = words | {"more": N_VOCAB}
    cases = [
        (settings(url, "teacher.topk=65"), tokenizer, "teacher.topk", "--max-logprobs 65"),
        (settings(url, "distill.support=union"), tokenizer, "distill.support", "VLLM_USE_V2_MODEL_RUNNER=1"),
        (settings(url), tokenizer_of(model, tmp_path / "moved", moved), "teacher.url", "tokenizer differs"),
        (settings(url), tokenizer_of(model, tmp_path / "longer", longer), "teacher.url", "token ids"),
        (settings(url, "teacher.name=other"), tokenizer, "teacher.name", "its models are"),
        (settings(url, "data.max_response_length=60"), tokenizer, "data.max_response_length", "at most 63"),
        (settings(f"{url}/other"), tokenizer, "teacher.url", "404"),
    ]
    for config, own, key, text in cases:
        with refuses(key) as caught:
            probe(config, own)
        assert text in str(caught.value)


def test_routes_may_mix_teacher_servers_and_http(
    vllm_server: VllmServer, zmq_port: int, rollouts: list[Rollout], expected: list[TeacherScores]
) -> None:
    """Fails if a run cannot have one teacher of its own and one that is served elsewhere."""
    routes = f"teacher.routes={{a: {{backend: http, url: '{vllm_server.url}'}}, b: {{server_port: {zmq_port}}}}}"
    common = ("data.train_files=[t]", "model.path=m", "trainer.run_dir=r", "data.teacher_key=d", "teacher.wire=fp32")
    losses = "distill.losses=[{name: forward_kl}, {name: k1}]"
    config = load_config(None, [*common, f"teacher.topk={K}", routes, losses])
    derived = check_config(config)
    infos = [request_info(route) for route in derived.routes]
    windows = [window_of_group(config.teacher, info, 1) for info in infos]
    endpoint = ScoringEndpoint(config, Comparison(N_VOCAB), [info.fingerprint for info in infos], windows)
    mixed = [replace(rollout, route=i % 2) for i, rollout in enumerate(rollouts)]
    try:
        scores, _ = endpoint.score(mixed)
    finally:
        for teacher in endpoint.clients():
            teacher.close()
    check_equal(scores, expected)


@pytest.mark.slow
def test_given_ids_of_the_second_runner(tmp_path: Path) -> None:
    """Fails if distill.support has other scores over HTTP than from a teacher server."""
    model = small_student(tmp_path / "model")
    n_vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    asked = [with_ids(each, 4, n_vocab) for each in random_rollouts(4, n_vocab, seed=2, response=(2, 12))]
    trajectory = own_turns(asked[3])
    assert trajectory.own is not None and asked[3].top_ids is not None
    asked[3] = replace(trajectory, top_ids=asked[3].top_ids[trajectory.own])
    with (
        ServerProcess(model, tmp_path, options=on_device()) as zmq,
        VllmServer(model, tmp_path / "vllm.log", free_port(), second_runner=True) as server,
    ):
        for k, signals in ((4, ("topk",)), (4, BOTH), (8, BOTH)):
            with connect(zmq.port, k=k) as teacher:
                theirs = [teacher.submit([rollout], signals).result()[0] for rollout in asked]
            with http_teacher(server.url, k=k, n_vocab=n_vocab, request_timeout_s=200.0) as teacher:
                ours = [teacher.submit([rollout], signals).result()[0] for rollout in asked]
            check_equal(ours, theirs)
        tokenizer = AutoTokenizer.from_pretrained(model)
        limits = ("distill.support=union", "teacher.request_timeout_s=200", "trainer.stage_timeout_s=900")
        assert probe(settings(server.url, *limits), tokenizer, n_vocab).probe is not None


@pytest.mark.slow
def test_a_killed_server_may_come_back_in_mid_step(model: Path, rollouts: list[Rollout], tmp_path: Path) -> None:
    """Fails if a crash of the server ends the run within its outage budget, or changes a score."""
    sequences = [*rollouts] * 20
    with VllmServer(model, tmp_path / "vllm.log", free_port()) as server:
        teacher = http_teacher(server.url, k=K, n_vocab=N_VOCAB, n_in_flight=4, outage_budget_s=240.0)
        with teacher:
            before = [teacher.submit([rollout], BOTH).result()[0] for rollout in rollouts]
            futures = [teacher.submit([rollout], BOTH) for rollout in sequences]
            wait_until(lambda: sum(future.done() for future in futures) > 20, 60.0, "some scores")
            server.kill()
            n_done = sum(future.done() for future in futures)
            assert n_done < len(futures)
            wait_until(lambda: teacher.health().silent_s > 2.0, 20.0, "the silence")
            server.start()
            server.wait_until_ready()
            after = [future.result(timeout=120)[0] for future in futures]
    check_equal(after, before * 20)

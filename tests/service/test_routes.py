"""An endpoint with several teachers on real servers: each row has the scores of its own teacher; one of them dies."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gkd.config.load import load_config
from gkd.errors import TeacherUnavailable
from gkd.preflight.teacher import check_reachable, check_teacher, request_info
from gkd.scoring.endpoint import ScoringEndpoint
from gkd.scoring.teacher.window import Window
from gkd.text.comparison import Comparison
from gkd.types import Rollout
from tests.processes import wait_until
from tests.refusals import refuses
from tests.service.conftest import TINY_VOCAB
from tests.service.harness import TRIVIAL, ServerProcess, random_rollouts, save_model, trivial_model

pytestmark = pytest.mark.service
CUT = 250
ALONE = ("--max-batch-tokens", "2")  # one sequence per batch, so that scores do not depend on concurrent requests


@contextmanager
def endpoint(*overrides: str) -> Iterator[ScoringEndpoint]:
    settings = ("teacher.topk=8", "teacher.wire=fp32", "data.teacher_key=d", "teacher.outage_budget_s=1.5")
    config = load_config(None, [*settings, *overrides])
    n_routes = len(config.derived.routes)
    opened = ScoringEndpoint(config, Comparison(CUT), [""] * n_routes, [Window(16, 3)] * n_routes)
    with ExitStack() as stack:
        for client in opened.clients():
            stack.enter_context(client)
        yield opened


def routed(rollouts: list[Rollout], n_routes: int) -> list[Rollout]:
    return [replace(rollout, route=i % n_routes) for i, rollout in enumerate(rollouts)]


def tables(opened: ScoringEndpoint, rollouts: list[Rollout]) -> list[bytes]:
    scores, _ = opened.score(rollouts)
    found = [score.topk for score in scores]
    return [table.ids.tobytes() + table.logprobs.tobytes() for table in found if table is not None]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tiny_model, tmp_path_factory.mktemp("server"), options=ALONE) as server:
        yield server


@pytest.fixture(scope="module")
def other_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("other")
    with ServerProcess(save_model(folder / "model", TINY_VOCAB, seed=5), folder, options=ALONE) as server:
        yield server


def test_each_sequence_is_scored_by_its_own_teacher(server: ServerProcess, other_server: ServerProcess) -> None:
    """Fails if a sequence has the scores of another teacher or temperature, or two routes of one differ from it."""
    rollouts = random_rollouts(10, CUT, seed=3)
    a, b = server.port, other_server.port
    with endpoint(f"teacher.server_port={a}") as one:
        of_a = tables(one, rollouts)
    with endpoint(f"teacher.server_port={b}", "teacher.temperature=0.5") as one:
        of_b = tables(one, rollouts)
    assert len(of_a) == len(of_b) == 10 and not set(of_a) & set(of_b)
    routes = f"teacher.routes={{a: {{}}, b: {{server_port: {b}, temperature: 0.5}}}}"
    with endpoint(f"teacher.server_port={a}", routes) as two:
        assert tables(two, routed(rollouts, 2)) == [of_a[i] if i % 2 == 0 else of_b[i] for i in range(10)]
        names = {computation.worker.split()[0] for computation in two.take_computations()}
        assert names == {"a", "b"}, "the trace has the workers of both"
    with endpoint(f"teacher.server_port={a}", "teacher.routes={a: {}, b: {}}") as twice:
        assert tables(twice, routed(rollouts, 2)) == of_a, "the same teacher twice is one teacher, to the bit"


@pytest.mark.parametrize("signal", [pytest.param("topk", marks=pytest.mark.slow), "logits"])
def test_an_outage_names_its_route(tmp_path: Path, server: ServerProcess, signal: str) -> None:
    """Fails if an outage does not name its route, or a dead one is not an outage within its budget."""
    rollouts = routed(random_rollouts(8, CUT, seed=4), 2)
    model = trivial_model(tmp_path / "model", TINY_VOCAB)  # only its end matters, not its scores
    with ServerProcess(model, tmp_path, options=TRIVIAL) as dying:
        routes = f"teacher.routes={{code: {{server_port: {server.port}}}, math: {{server_port: {dying.port}}}}}"
        with endpoint(routes, f"teacher.signal={signal}") as opened:
            opened.score(rollouts)
            dying.kill()
            began_s = time.monotonic()
            with pytest.raises(TeacherUnavailable, match=r"teacher\.routes\.math.*:" + str(dying.port)):
                opened.score(rollouts)
            assert time.monotonic() - began_s < 60
            health = opened.health()
            assert health is not None and health.budget_s == 1.5
            with pytest.raises(TeacherUnavailable, match=r"routes\.math"):
                opened.score(rollouts[:1])  # the run is ending


def test_a_silent_teacher_is_named_while_the_run_waits(server: ServerProcess) -> None:
    """Fails if the terminal shows a silence without its route, or the queue of one server alone."""
    with socket.socket() as mute:  # accepts connections and never replies
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        port = mute.getsockname()[1]
        routes = f"teacher.routes={{code: {{server_port: {server.port}}}, math: {{server_port: {port}}}}}"
        with endpoint(routes, "teacher.outage_budget_s=4") as opened:
            rollouts = routed(random_rollouts(4, CUT, seed=4), 2)
            failed = threading.Thread(target=lambda: pytest.raises(TeacherUnavailable, opened.score, rollouts))
            failed.start()
            wait_until(lambda: (health := opened.health()) is not None and health.silent_s > 1, 30.0, "the silence")
            health = opened.health()
            assert health is not None and health.route == "math" and health.label == "teacher math"
            assert health.n_workers == 1 and health.n_in_flight == 2
            failed.join(timeout=30)


def test_the_checks_before_the_start_name_the_route(server: ServerProcess, other_server: ServerProcess) -> None:
    """Fails if one of several teachers is not checked, or the error does not name its route or key."""
    base = ["data.teacher_key=d", f"teacher.server_port={server.port}", "data.max_response_length=9000"]
    config = load_config(None, [*base, f"teacher.routes={{a: {{}}, b: {{server_port: {other_server.port}}}}}"])
    for route in config.derived.routes:
        check_reachable(route)
        assert request_info(route).vocab_size == TINY_VOCAB
    closed = load_config(None, [*base, "teacher.routes={a: {}, b: {server_port: 1}}"])
    with pytest.raises(TeacherUnavailable, match=r"teacher\.routes\.b"):
        check_reachable(closed.derived.routes[1])
    named = load_config(None, [*base, "teacher.routes={a: {}, b: {name: nobody}}"])
    with refuses("teacher.routes.b.name"):
        request_info(named.derived.routes[1])
    route = config.derived.routes[1]

    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    info = replace(request_info(route), tokenizer_fingerprint="")
    with refuses("teacher.routes.b.server_port", text=info.model_path):
        check_teacher(config, route, info, Tokenizer(), CUT)


def test_hidden_states_of_two_teachers_share_one_head(server: ServerProcess, other_server: ServerProcess) -> None:
    """Fails if a row of hidden states is multiplied by the LM head of another teacher, or at another temperature."""
    rollouts = random_rollouts(6, CUT, seed=8)
    ports, expected = (server.port, other_server.port), {}
    for route, (port, temperature) in enumerate(zip(ports, (0.5, 2.0), strict=True)):
        settings = (f"teacher.server_port={port}", f"teacher.temperature={temperature}", "teacher.signal=hidden")
        with endpoint(*settings) as one:
            head, (scores, _) = one.lm_head(), one.score(rollouts)
            for i in range(route, 6, 2):
                expected[i] = scores[i].hidden @ head.T / temperature
    routes = f"teacher.routes={{a: {{}}, b: {{server_port: {ports[1]}, temperature: 2}}}}"
    with endpoint(f"teacher.server_port={ports[0]}", "teacher.temperature=0.5", "teacher.signal=hidden", routes) as two:
        head, (scores, summary) = two.lm_head(), two.score(routed(rollouts, 2))
    assert head.shape == (CUT, 64) and summary
    for i, score in enumerate(scores):
        assert score.hidden is not None and score.hidden.shape == (len(rollouts[i].response_ids), 64)
        np.testing.assert_allclose(score.hidden @ head.T / 0.5, expected[i], rtol=1e-5, atol=1e-5)


def test_hidden_states_of_the_same_teacher_twice_are_those_of_one(server: ServerProcess) -> None:
    """Fails if two routes to one model hold its LM head twice, or a row differs in a bit from that of one route; or if
    the logits are divided by teacher.temperature where the loss divides by that of the route.
    """
    rollouts = random_rollouts(6, CUT, seed=8)
    settings = (f"teacher.server_port={server.port}", "teacher.signal=hidden", "teacher.temperature=0.5")
    with endpoint(*settings) as one:
        head, (scores, _) = one.lm_head(), one.score(rollouts)
    for own, scale in (("{}", 1.0), ("{temperature: 0.25}", 2.0)):
        with endpoint(*settings, f"teacher.routes={{a: {{}}, b: {own}}}") as two:
            np.testing.assert_array_equal(two.lm_head(), head)
            twice, _ = two.score(routed(rollouts, 2))
        for i, (score, expected) in enumerate(zip(twice, scores, strict=True)):
            np.testing.assert_array_equal(score.hidden, expected.hidden * (scale if i % 2 else 1.0))
    with endpoint(*settings, "teacher.routes={a: {temperature: 0.25}}") as alone:
        for score, expected in zip(alone.score(rollouts)[0], scores, strict=True):
            np.testing.assert_array_equal(score.hidden, 2 * expected.hidden)

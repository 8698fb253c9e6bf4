"""Lists of units at a real server: exact sums over sets of tokens, by a map that a worker asks the client for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gkd.errors import TeacherRefusal
from gkd.types import TeacherScores
from teacher_server.engines.base import ScoreParams
from teacher_server.wire.payload import pack_units
from teacher_server.wire.protocol import ErrorReply, as_frame, checksum, replies, requests, token_digest
from tests.processes import wait_until
from tests.service.conftest import TINY_VOCAB, TRIVIAL_VOCAB
from tests.service.engine_host import plain_logits, plain_logprobs, sequences_of
from tests.service.harness import ServerProcess, command, connect, random_rollouts
from tests.service.messages import make_request
from tests.service.test_given_ids import raw

pytestmark = pytest.mark.service
N_UNITS, N_MAPPED, K = 90, TINY_VOCAB - 7, 12
UNITS = np.random.default_rng(0).integers(0, N_UNITS, N_MAPPED).astype(np.int32)
UNITS[UNITS == 17] = 18  # no token belongs to unit 17
ROLLOUTS = random_rollouts(12, N_MAPPED, seed=3)


def check(model: Path, scores: list[TeacherScores]) -> None:
    """Compare the lists with sums over the model's distribution, in float64."""
    plain = plain_logits(model, sequences_of(ROLLOUTS))
    for rollout, found, logits in zip(ROLLOUTS, scores, plain, strict=True):
        p = np.exp(plain_logprobs(logits, ScoreParams("topk", n_vocab=N_MAPPED)))
        sums = np.stack([p[:, unit == UNITS].sum(axis=1) for unit in range(N_UNITS)], axis=1)
        table, rows = found.topk, np.arange(len(p))
        listed = np.take_along_axis(sums, table.ids.astype(np.int64), axis=1)
        np.testing.assert_allclose(np.exp(table.logprobs), listed, rtol=1e-4)
        np.testing.assert_allclose(listed.sum(axis=1), np.sort(sums, axis=1)[:, -K:].sum(axis=1), rtol=1e-6)
        np.testing.assert_allclose(table.tail, 1 - listed.sum(axis=1), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(np.exp(found.sampled_logprobs), sums[rows, UNITS[rollout.response_ids]], rtol=1e-4)


def test_lists_have_the_sums_of_the_whole_distribution(tiny_server: ServerProcess, tiny_model: Path) -> None:
    """Fails if a reply is of another map or of tokens, or if each request has the map."""
    with connect(tiny_server.port, k=K, n_vocab=N_UNITS, units=UNITS) as teacher:
        found = [teacher.submit([each], ("topk", "sampled")).result(timeout=30)[0] for each in ROLLOUTS]
        assert teacher.stats.n_sent <= len(ROLLOUTS) + 1
        status = subprocess.check_output(command("status", "--port", str(tiny_server.port), "--json"), text=True)
        assert "units" not in json.loads(status)["n_errors"], "a question of a worker is no error"
        check(tiny_model, found)
        shorter = teacher.submit(ROLLOUTS[:3], ("topk", "sampled"), mass=0.5).result(timeout=30)
    for whole, short in zip(found, shorter, strict=False):
        first = np.exp(whole.topk.logprobs, dtype=np.float64).cumsum(axis=1)
        np.testing.assert_array_equal(short.topk.counts, np.minimum((first < 0.5).sum(axis=1) + 1, K))


def test_the_requests_of_a_window_send_the_map_once(
    tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if each request that a worker refuses brings the map: megabytes for each of them."""
    packed = list[int]()
    monkeypatch.setattr(
        "teacher_server.client.requests.pack_units", lambda units: packed.append(len(units)) or pack_units(units)
    )
    units = UNITS[::-1].copy()  # no other test has sent this map
    with connect(tiny_server.port, k=K, n_vocab=N_UNITS, units=units) as teacher:
        futures = [teacher.submit([each], ("topk", "sampled")) for each in ROLLOUTS]
        assert all(len(future.result(timeout=60)) == 1 for future in futures)
    assert packed == [N_MAPPED]


def test_a_new_worker_learns_the_map(tiny_model: Path, tmp_path: Path) -> None:
    """Fails if requests fail after a worker was replaced, which does not know the map."""
    options = ("--engine", "hf", "--dtype", "float32")
    with (
        ServerProcess(tiny_model, tmp_path, options=options) as server,
        connect(server.port, k=K, n_vocab=N_UNITS, units=UNITS) as teacher,
    ):
        teacher.submit(ROLLOUTS[:1], ("topk", "sampled")).result(timeout=30)
        os.kill(server.worker_pids[0], signal.SIGKILL)
        found = teacher.submit(ROLLOUTS, ("topk", "sampled")).result(timeout=60)
        check(tiny_model, found)
        wait_until(lambda: teacher.info().n_workers == 1, 60.0, "the new worker")


def test_an_engine_of_ones_own_that_knows_no_units_refuses_them(trivial_server: ServerProcess) -> None:
    """Fails if such an engine lists tokens, which the loss takes for units."""
    units = np.zeros(TRIVIAL_VOCAB, np.int32)
    with (
        connect(trivial_server.port, k=1, n_vocab=1, units=units) as teacher,
        pytest.raises(TeacherRefusal, match="bad_request"),
    ):
        teacher.submit(random_rollouts(1, TRIVIAL_VOCAB), ("topk", "sampled")).result(timeout=30)


@pytest.mark.parametrize(
    ("case", "code"), [("unknown", "units"), ("digest", "damaged"), ("above", "damaged"), ("long", "bad_request")]
)
def test_the_server_refuses_a_bad_map(tiny_server: ServerProcess, case: str, code: str) -> None:
    """Fails if a faulty client gets sums of another map, or makes the engine fail."""
    units = UNITS.copy() + 1  # no other test has sent this map
    if case == "above":
        units[5] = N_UNITS + 1
    elif case == "long":
        units = np.zeros(TINY_VOCAB + 1, np.int32)
    tokens = np.array([1, 2, 3, 4], np.int32)
    request = make_request(tokens, prompt_length=2, k=3, n_vocab=N_UNITS + 1, units=token_digest(units))
    frames = [] if case == "unknown" else pack_units(units)
    if case == "digest":
        frames = pack_units(units[::-1].copy())
    fields = {"n_mapped": len(units) if frames else 0, "given_checksums": [checksum(frame) for frame in frames]}
    header = requests.encode(msgspec.structs.replace(request, **fields))
    reply = replies.decode(raw(tiny_server.port, [header, *(bytes(f) for f in (as_frame(tokens), *frames))])[0])
    assert isinstance(reply, ErrorReply) and reply.code == code


def test_a_known_map_is_not_used_with_fewer_units(tiny_server: ServerProcess) -> None:
    """Fails if a request of a known digest can make the engine write beyond its sums."""
    with connect(tiny_server.port, k=K, n_vocab=N_UNITS, units=UNITS) as teacher:
        teacher.submit(ROLLOUTS[:1], ("topk", "sampled")).result(timeout=30)
    with connect(tiny_server.port, k=3, n_vocab=int(UNITS.max()), units=UNITS) as teacher:
        future = teacher.submit([replace(ROLLOUTS[0])], ("topk", "sampled"))
        with pytest.raises(Exception, match="damaged"):
            future.result(timeout=30)

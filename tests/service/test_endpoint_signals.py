"""Every signal of a real teacher through a scoring endpoint, compared with a plain float32 forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gkd.config.load import load_config
from gkd.data.score_checks import validate_scores
from gkd.errors import TeacherError
from gkd.scoring.endpoint import ScoringEndpoint
from gkd.scoring.group_endpoint import ScoreSummary
from gkd.scoring.teacher.client import ZmqTeacher
from gkd.scoring.teacher.window import Window
from gkd.text.comparison import Comparison
from gkd.types import SIGNAL_FIELDS, Rollout, TeacherScores
from teacher_server.engines.base import ScoreParams
from teacher_server.wire.protocol import ScoreRequest, Signal
from tests.processes import wait_until
from tests.service.engine_host import plain_logits, plain_logprobs, sequences_of
from tests.service.harness import ServerProcess, random_rollouts, with_ids
from tests.service.scripted import N_VOCAB as SCRIPTED_VOCAB
from tests.service.scripted import Message, ScriptedServer, error, valid_reply

pytestmark = pytest.mark.service
CUT = 250  # ids that student and teacher share, of the tiny model's 300
HIDDEN = 32
TEMPERATURE = 0.7


@contextmanager
def endpoint(
    port: int, *overrides: str, n_vocab: int = CUT, window: tuple[int, ...] = (6, 3)
) -> Iterator[tuple[ScoringEndpoint, ZmqTeacher]]:
    """Open an endpoint and its client, which is closed at the end."""
    settings = (f"teacher.server_port={port}", "teacher.topk=8", "teacher.wire=fp32", "teacher.request_timeout_s=20")
    temperature = f"teacher.temperature={TEMPERATURE}"
    opened = ScoringEndpoint(
        load_config(None, [*settings, temperature, *overrides]), Comparison(n_vocab), [""], [Window(*window)]
    )
    with opened.clients()[0] as client:
        yield opened, client


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    return random_rollouts(12, CUT, seed=11)


@pytest.fixture(scope="module")
def references(tiny_model: Path, rollouts: list[Rollout]) -> list[np.ndarray]:
    return references_of(tiny_model, rollouts)


def references_of(tiny_model: Path, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Compute [R, CUT] float64 log_softmax(logits / TEMPERATURE) of each rollout: one sequence, no padding."""
    params = ScoreParams("topk", temperature=TEMPERATURE, n_vocab=CUT)
    return [plain_logprobs(logits, params) for logits in plain_logits(tiny_model, sequences_of(rollouts))]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def scored(
    port: int, rollouts: Sequence[Rollout], signals: tuple[Signal, ...], *overrides: str
) -> tuple[list[TeacherScores], ScoreSummary]:
    """Return scores after the actor's check. They must contain exactly the tables `signals`."""
    with endpoint(port, *overrides) as (opened, _):
        scores, summary = opened.score(rollouts)
    assert len(scores) == len(rollouts)
    for rollout, score in zip(rollouts, scores, strict=True):
        validate_scores(score, rollout, CUT, signals, f"prompt {rollout.prompt_id}", HIDDEN)
        assert {name for name, field in SIGNAL_FIELDS.items() if getattr(score, field) is not None} == set(signals)
    return scores, ScoreSummary.decode(summary)


def check_sampled(scores: Sequence[TeacherScores], rollouts: Sequence[Rollout], references: list[np.ndarray]) -> None:
    for score, rollout, reference in zip(scores, rollouts, references, strict=True):
        expected = np.take_along_axis(reference, rollout.response_ids[:, None].astype(np.int64), axis=1)[:, 0]
        np.testing.assert_allclose(score.sampled_logprobs, expected, atol=1e-4)


def check_topk(scores: Sequence[TeacherScores], references: list[np.ndarray], mass: float = 0.0) -> list[int]:
    """Check that each row is the reference's top 8, or the part of it that reaches `mass`, and return the lengths."""
    lengths = []
    for score, reference in zip(scores, references, strict=True):
        for row, full in enumerate(reference):
            n = 8 if score.topk.counts is None else int(score.topk.counts[row])
            largest = -np.sort(-full)[:8]
            ids = score.topk.ids[row, :n]
            np.testing.assert_allclose(score.topk.logprobs[row, :n], full[ids], atol=1e-4)
            np.testing.assert_allclose(full[ids], largest[:n], atol=1e-4)
            np.testing.assert_allclose(score.topk.tail[row], 1 - np.exp(full[ids]).sum(), atol=1e-4)
            if mass:
                assert n == 8 or np.exp(largest[:n]).sum() >= mass - 1e-4, "the list is too short for its mass"
                assert np.exp(largest[: n - 1]).sum() < mass + 1e-4, "the list is longer than needed for its mass"
            lengths.append(n)
    return lengths


@pytest.mark.parametrize(
    ("loss", "signals"),
    [
        ("distill.loss=jsd", ("topk",)),
        ("distill.loss=k3", ("sampled",)),
        ("distill.losses=[{name: forward_kl}, {name: k1}]", ("topk", "sampled")),
    ],
)
def test_topk_and_further_signals_of_the_loss(
    tiny_server: ServerProcess,
    rollouts: list[Rollout],
    references: list[np.ndarray],
    loss: str,
    signals: tuple[Signal, ...],
) -> None:
    """Fails if a mixture gets one table of two, if a table is sent without need, or if sequences are swapped."""
    scores, summary = scored(tiny_server.port, rollouts, signals, loss)
    n_rows = sum(len(r.response_ids) for r in rollouts)
    n_bytes = 0
    if "topk" in signals:
        assert set(check_topk(scores, references)) == {8}
        masses = [np.exp(-np.sort(-reference)[:, :8]).sum(axis=1).mean() for reference in references]
        assert summary.masses.sum() == pytest.approx(sum(masses), abs=1e-3)
        n_bytes += n_rows * (8 * (4 + 4) + 4)
    else:
        assert np.isnan(summary.masses).all()
    if "sampled" in signals:
        check_sampled(scores, rollouts, references)
        n_bytes += n_rows * 4
    assert summary.n_bytes.sum() == n_bytes


@pytest.mark.parametrize("own_prompt", [False, True], ids=["", "own-prompt"])
@pytest.mark.parametrize(("support", "n_given"), [("student", 8), ("union", 4)])
def test_the_list_contains_the_students_ids(
    tiny_server: ServerProcess, tiny_model: Path, rollouts: list[Rollout], support: str, n_given: int, own_prompt: bool
) -> None:
    """Fails if ids of another position or sequence are scored, if the list is not filled with the teacher's next
    ones, if its tail is not the rest, or if a dataset response needs ids.
    """
    rng = np.random.default_rng(2)
    given = [
        replace(
            rollout,
            on_policy=bool(i % 4),
            top_ids=with_ids(rollout, n_given, CUT).top_ids if i % 4 else None,
            teacher_ids=rng.integers(0, CUT, 3 + i).astype(np.int32) if own_prompt else None,
        )
        for i, rollout in enumerate(rollouts)
    ]
    mixture = "distill.losses=[{name: reverse_kl}, {name: k3}]"
    scores, _ = scored(tiny_server.port, given, ("topk", "sampled"), mixture, f"distill.support={support}")
    expected = references_of(tiny_model, [rollout.for_teacher() for rollout in given])
    check_sampled(scores, given, expected)
    for rollout, score, reference in zip(given, scores, expected, strict=True):
        assert score.topk is not None and score.topk.ids.shape == (len(reference), 8)
        for row, full in enumerate(reference):
            own = set() if rollout.top_ids is None else set(rollout.top_ids[row].tolist())
            ids = score.topk.ids[row]
            others = sorted(set(ids.tolist()) - own, key=lambda i: -full[i])
            best = -np.sort(-np.delete(full, list(own)))[: 8 - len(own)]
            assert own <= set(ids.tolist()) and len(others) == 8 - len(own)
            np.testing.assert_allclose(full[others], best, atol=1e-4)
            np.testing.assert_allclose(score.topk.logprobs[row], full[ids], atol=1e-4)
            np.testing.assert_allclose(score.topk.tail[row], 1 - np.exp(full[ids]).sum(), atol=1e-4)


@pytest.mark.parametrize("top_ids", [None, np.zeros((1, 3), np.int32)], ids=["none", "too few"])
def test_a_rollout_without_the_students_ids_is_refused(top_ids: np.ndarray | None) -> None:
    """Fails if a rollout that was recorded without ids is scored with the teacher's list instead."""
    (rollout,) = random_rollouts(1, SCRIPTED_VOCAB, response=(1, 1))
    rollout = replace(rollout, top_ids=top_ids)
    with (
        ScriptedServer(lambda request, tokens, n: [valid_reply(request, tokens)]) as server,
        endpoint(server.port, "distill.support=union", n_vocab=SCRIPTED_VOCAB) as (opened, _),
        pytest.raises(TeacherError, match="prompt 0, sample 0"),
    ):
        opened.score([rollout])


def test_topk_with_a_mass_target(
    tiny_server: ServerProcess, rollouts: list[Rollout], references: list[np.ndarray]
) -> None:
    """Fails if teacher.mass is not sent, or the padding of a row is counted as mass."""
    scores, summary = scored(tiny_server.port, rollouts, ("topk",), "teacher.mass=0.6")
    lengths = check_topk(scores, references, mass=0.6)
    assert 1 <= min(lengths) < max(lengths) <= 8
    listed = sum(float((1 - s.topk.tail).mean()) for s in scores if s.topk is not None)
    assert summary.masses.sum() == pytest.approx(listed, rel=1e-3)


@pytest.mark.parametrize(("wire", "dtype", "atol"), [("fp32", np.float32, 1e-4), ("fp16", np.float16, 2e-2)])
def test_logits(
    tiny_server: ServerProcess,
    rollouts: list[Rollout],
    references: list[np.ndarray],
    wire: str,
    dtype: type[np.floating],
    atol: float,
) -> None:
    """Fails if pieces of a stream are misplaced, or float16 rows are stored as float32."""
    scores, summary = scored(tiny_server.port, rollouts, ("logits",), "teacher.signal=logits", f"teacher.wire={wire}")
    for score, reference in zip(scores, references, strict=True):
        assert score.logits is not None and score.logits.dtype == dtype
        np.testing.assert_allclose(log_softmax(score.logits), reference, atol=atol)
    n_rows = sum(len(r.response_ids) for r in rollouts)
    assert np.isnan(summary.masses).all() and summary.n_bytes.sum() == n_rows * CUT * np.dtype(dtype).itemsize


def test_a_mixture_asks_once_for_each_sequence_and_within_the_window() -> None:
    """Fails if the second table of a sequence costs a request of its own, more sequences are in flight than the window
    allows, or a refused sequence is skipped, or the teacher still computes the rest of its chunk.
    """
    seen: list[ScoreRequest] = []

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        seen.append(request)
        return []

    def refuse() -> None:
        for identity in server.identities:
            server.send(identity, [error(seen[1], "engine")])

    mixture = "distill.losses=[{name: forward_kl}, {name: k1}]"
    with (
        ThreadPoolExecutor(1) as pool,
        ScriptedServer(script) as server,
        endpoint(server.port, mixture, n_vocab=SCRIPTED_VOCAB) as (opened, client),
    ):
        scores = pool.submit(opened.score, random_rollouts(15, SCRIPTED_VOCAB))
        wait_until(lambda: len(seen) >= 2 and client.health().n_in_flight == 15, 30.0, "all requests of the chunk")
        assert client.info(), "a third request would arrive before this one"
        found = [(request.signal, request.with_sampled, len(request.sequences)) for request in seen]
        assert found == [("topk", True, 3)] * 2
        server.do(refuse)
        with pytest.raises(TeacherError, match=r"prompt 3, sample 0.*engine"):
            scores.result(timeout=30)
        wait_until(lambda: client.stats.n_cancelled == 4, 30.0, "cancellation of the other four requests")


@pytest.mark.parametrize("signal", ["topk", "sampled", "hidden", "logits"])
def test_the_teacher_scores_after_its_own_prompt(
    tiny_server: ServerProcess, tiny_model: Path, rollouts: list[Rollout], signal: Signal
) -> None:
    """Fails if row j is not the teacher's row P'-1+j, if a row without a prompt of its own gets another's, or if a
    prompt equal to the student's changes a bit of the scores.
    """
    rng = np.random.default_rng(5)
    own = [rng.integers(0, CUT, n).astype(np.int32) for n in rng.integers(1, 50, len(rollouts))]
    mixed = [
        replace(r, teacher_ids=ids if i % 3 else None) for i, (r, ids) in enumerate(zip(rollouts, own, strict=True))
    ]
    same = [replace(r, teacher_ids=r.prompt_ids.copy()) for r in rollouts]
    loss = "distill.loss=k3" if signal == "sampled" else "distill.loss=jsd"
    settings = (loss, f"teacher.signal={signal}")
    # One sequence at a time: bits depend on which sequences the server batches.
    with endpoint(tiny_server.port, *settings, window=(1,)) as (opened, _):
        plain, equal, scores = (opened.score(each)[0] for each in (rollouts, same, mixed))
        head = opened.lm_head() if signal == "hidden" else np.zeros((0, HIDDEN))
    assert [table_bytes(score) for score in plain] == [table_bytes(score) for score in equal]
    for i, (rollout, score) in enumerate(zip(mixed, scores, strict=True)):
        assert (table_bytes(score) == table_bytes(plain[i])) == (rollout.teacher_ids is None)
    expected = references_of(tiny_model, [rollout.for_teacher() for rollout in mixed])
    if signal == "topk":
        check_topk(scores, expected)
    elif signal == "sampled":
        check_sampled(scores, mixed, expected)
    else:
        for score, reference in zip(scores, expected, strict=True):
            logits = score.logits if signal == "logits" else score.hidden @ head.T / TEMPERATURE
            np.testing.assert_allclose(log_softmax(logits), reference, atol=1e-4)


def table_bytes(score: TeacherScores) -> bytes:
    """Return all values of a sequence's tables."""
    found = [score.sampled_logprobs, score.logits, score.hidden]
    if score.topk is not None:
        found += [score.topk.ids, score.topk.logprobs, score.topk.tail]
    return b"".join(table.tobytes() for table in found if table is not None)

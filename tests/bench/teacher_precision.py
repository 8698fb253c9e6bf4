"""Measure the error of the compact wire format in the divergence: fp16 logprobs against the same KL in float64.

For teacher logits l and student logits s over V ids at a temperature, with the teacher's top-64 and one
more class for all other ids,

    KL = sum_k p_k (log p_k - log q_k) + p_tail (log p_tail - log q_tail)

once with everything in float64, once with p and p_tail as they come off the wire. The student's side
is exact in both, so the difference is the wire's alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from teacher_server.wire.payload import TopKScores, unpack_topk
from teacher_server.wire.protocol import Wire
from tests.bench.teacher_payloads import VOCAB, K, make_topk_head, pack
from tests.bench.teacher_report import Table

TEMPERATURES = (0.5, 0.7, 1.0, 1.5, 2.0)
_ROWS = 32  # of a chunk: 40 MB of float64 a side
_BULK_SD = 2.0  # of the logits of most ids
_N_CANDIDATES = 200


def kl_errors(n_rows: int, wire: Wire) -> tuple[np.ndarray, np.ndarray, Table]:
    """([N] |error| with the tail as sent, [N] with the tail as 1 - listed mass, by temperature)."""
    all_sent, all_rest, rows = [], [], []
    for temperature in TEMPERATURES:
        parts = [_errors(t, s, wire) for t, s in _logits(n_rows, temperature)]
        sent, rest, kl, entropy = (np.concatenate(column) for column in zip(*parts, strict=True))
        rows.append([f"{temperature:g}", entropy.mean(), kl.mean(), sent.mean(), sent.max(), rest.mean(), rest.max()])
        all_sent.append(sent)
        all_rest.append(rest)
    table = Table(
        f"KL(teacher || student) of top-{K} and a bucket, V = {VOCAB}, {n_rows} positions a temperature; "
        f"|error| of {wire} against float64, nats",
        ("temperature", "entropy", "KL", "mean", "max", "mean, tail from listed", "max, tail from listed"),
        [[cell if isinstance(cell, str) else float(cell) for cell in row] for row in rows],
    )
    return np.concatenate(all_sent), np.concatenate(all_rest), table


def _logits(n_rows: int, temperature: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Teacher's and student's [rows, V] float64, divided by the temperature.

    A bell of ids that are not possible here, and above it 200 candidates that fall off like a power law, from almost
    certain rows to wide open ones. The student has learned something: it is the teacher with noise.
    """
    rng = np.random.default_rng(0)
    bulk = np.log(VOCAB) + _BULK_SD**2 / 2  # log of the sum of exp over the bell
    for start in range(0, n_rows, _ROWS):
        n = min(_ROWS, n_rows - start)
        teacher = rng.normal(0.0, _BULK_SD, (n, VOCAB))
        margin, slope = rng.uniform(-2.0, 8.0, (n, 1)), rng.uniform(0.5, 3.0, (n, 1))
        candidates = bulk + margin - slope * np.log1p(np.arange(_N_CANDIDATES))
        places = (
            rng.permutation(VOCAB)[:_N_CANDIDATES] + rng.integers(VOCAB, size=(n, 1))
        ) % VOCAB  # distinct in a row
        np.put_along_axis(teacher, places, candidates + rng.normal(0.0, 0.3, candidates.shape), axis=1)
        student = teacher + rng.normal(0.0, 0.5, teacher.shape)
        yield teacher / temperature, student / temperature


def _errors(
    teacher: np.ndarray, student: np.ndarray, wire: Wire
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """[N] each: |error|, |error| with the tail from the listed mass, KL, entropy of the teacher."""
    log_p, log_q = _log_softmax(teacher), _log_softmax(student)
    ids = np.argpartition(-log_p, K, axis=1)[:, :K]
    ids = np.take_along_axis(ids, np.argsort(-np.take_along_axis(log_p, ids, 1), axis=1), 1)
    top_p, top_q = np.take_along_axis(log_p, ids, 1), np.take_along_axis(log_q, ids, 1)
    tail_p, tail_q = _tail(log_p, ids), _tail(log_q, ids)
    exact = _kl(top_p, top_q, tail_p, tail_q)
    got = _over_the_wire(TopKScores(ids.astype(np.int32), top_p.astype(np.float32), tail_p.astype(np.float32)), wire)
    sent = _kl(got.logprobs.astype(np.float64), top_q, got.tail.astype(np.float64), tail_q)
    # The trainer's loss takes it so, with the same floor.
    mass = np.exp(got.logprobs).sum(-1, dtype=np.float32)
    listed = 1.0 - np.minimum(mass, 1.0 - np.finfo(np.float32).eps).astype(np.float64)
    rest = _kl(got.logprobs.astype(np.float64), top_q, listed, tail_q)
    return np.abs(sent - exact), np.abs(rest - exact), exact, -(np.exp(log_p) * log_p).sum(-1)


def _kl(top_p: np.ndarray, top_q: np.ndarray, tail_p: np.ndarray, tail_q: np.ndarray) -> np.ndarray:
    inside = (np.exp(top_p) * (top_p - top_q)).sum(-1)
    return inside + tail_p * (np.log(tail_p) - np.log(tail_q))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _tail(logprobs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[N] float64: added up over the others, so that a tiny one keeps its digits."""
    p = np.exp(logprobs)
    np.put_along_axis(p, ids, 0.0, axis=1)
    return p.sum(-1)


def _over_the_wire(scores: TopKScores, wire: Wire) -> TopKScores:
    head = make_topk_head(*scores.ids.shape, wire=wire)
    return unpack_topk(*pack(head, scores))

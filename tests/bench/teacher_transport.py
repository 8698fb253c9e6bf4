"""Part `transport`: how fast answers travel, next to raw TCP and to what others do, and what they lose on the way."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence

from tests.bench.teacher_broker_lanes import BrokerClient, BrokerMessages
from tests.bench.teacher_lanes import Lane, Memcpy, Messages, RawTcp, Run, Scores
from tests.bench.teacher_payloads import N_ENTRIES, N_ROWS, N_SEQUENCES, VOCAB, WINDOW, K, make_all_packed
from tests.bench.teacher_precision import kl_errors
from tests.bench.teacher_report import Figure, Part, Table
from tests.bench.teacher_rivals import Base64Json, NumbersJson, TorchSave

LANES: tuple[type[Lane], ...] = (
    Memcpy,
    RawTcp,
    Messages,
    Scores,
    BrokerMessages,
    BrokerClient,
    TorchSave,
    Base64Json,
    NumbersJson,
)
_ZMTP_BYTES = 9  # before each long frame
_PRECISION_ROWS = 512


def transport(rounds: int) -> Part:
    runs = _run_all(rounds)
    medians = {kind: statistics.median(_rate(run) for run in of_kind) for kind, of_kind in runs.items()}

    def ratio(kind: type[Lane], other: type[Lane]) -> float:
        """Return the median ratio of entries/s over the rounds."""
        pairs = zip(runs[kind], runs[other], strict=True)
        return statistics.median(_rate(run) / _rate(base) for run, base in pairs)

    rows = []
    for kind, of_kind in runs.items():
        n_bytes = of_kind[0].n_bytes / of_kind[0].n_entries
        gb_per_s = medians[kind] * n_bytes / 1e9
        rows.append((kind.name, gb_per_s, medians[kind] / 1e6, n_bytes, ratio(kind, RawTcp)))
    table = Table("Lanes", ("lane", "GB/s", "M entries/s", "bytes/entry", "entries/s of raw TCP"), rows)
    sent, rest, errors = kl_errors(_PRECISION_ROWS, "fp16")
    return Part(
        "transport",
        f"Top-{K} of {N_SEQUENCES} sequences of {N_ROWS} response tokens (V = {VOCAB}) from one process to another on "
        f"loopback, a message a sequence, {WINDOW} under way. Raw TCP carries the same frames as one buffer.",
        (
            Figure(
                "protocol messages / raw TCP",
                ratio(Messages, RawTcp),
                at_least=0.8,
                note="one ZMQ hop: send, receive, header, checksums, finite check",
            ),
            *_sizes(),
            Figure("KL error of fp16, mean", float(sent.mean()), "nats", at_most=1e-4),
            Figure("KL error of fp16, largest", float(sent.max()), "nats", at_most=1e-3),
            Figure(
                "the same with the tail as 1 - listed mass, mean", float(rest.mean()), "nats", note="the loss's way"
            ),
            Figure("the same with the tail as 1 - listed mass, largest", float(rest.max()), "nats"),
            Figure(
                "torch.save over REQ/REP is slower than messages", ratio(Messages, TorchSave), "x", note="expected: 5"
            ),
            Figure(
                "torch.save is slower than packing, messages, unpacking",
                ratio(Scores, TorchSave),
                "x",
                note="both from arrays to arrays",
            ),
            Figure(
                "base64 JSON over HTTP is slower than messages", ratio(Messages, Base64Json), "x", note="expected: 100"
            ),
            Figure("JSON numbers over HTTP are slower than messages", ratio(Messages, NumbersJson), "x"),
        ),
        (table, errors),
        {"rounds": rounds},
    )


def _run_all(rounds: int) -> dict[type[Lane], list[Run]]:
    """Every lane once a round, so that a slow moment of the machine hits them all."""
    with contextlib.ExitStack() as stack:
        lanes: list[Lane] = []
        for kind in LANES:
            lane = kind()
            stack.callback(lane.close)
            lane.run(lane.n_sequences)  # connections, caches and memory as they will be
            lanes.append(lane)
        runs: dict[type[Lane], list[Run]] = {kind: [] for kind in LANES}
        for _ in range(rounds):
            for lane in lanes:
                runs[type(lane)].append(lane.run(lane.n_sequences))
    return runs


def _rate(run: Run) -> float:
    """Entries/s"""
    return run.n_entries / run.seconds


def _sizes() -> Sequence[Figure]:
    packed = make_all_packed()
    n_frames = sum(1 + len(one.frames) for one in packed)
    n_bytes = sum(one.n_bytes for one in packed) + _ZMTP_BYTES * n_frames
    n_positions, n_entries = N_SEQUENCES * N_ROWS, N_SEQUENCES * N_ENTRIES
    per_position = sum(one.frames[-1].nbytes for one in packed) / n_positions
    return (
        Figure(
            "bytes an entry",
            (n_bytes - 4 * n_positions) / n_entries,
            at_most=5.01,
            note="headers and ZMTP framing included, 4 a position not",
        ),
        Figure("bytes a position", per_position, at_most=4.0, note="the tail"),
    )

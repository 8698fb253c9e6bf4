"""Files of rollouts and scores: bit-exact round trips, damaged files, restoring for other group counts."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from gkd.config.load import load_config
from gkd.data.chunks import chunk_sizes, decode_sizes
from gkd.errors import CheckpointError
from gkd.metrics.step import store_numbers
from gkd.run.rollout_file import read_sequences, write_sequences
from gkd.scoring.endpoint import ScoringEndpoint
from gkd.scoring.group_endpoint import ScoreSummary
from gkd.scoring.teacher.window import Window
from gkd.text.comparison import Comparison
from gkd.types import Rollout, ScoredChunk, ScoreTimes, TeacherScores, VersionSpan
from teacher_server.wire.table import TopKTable

RNG = np.random.default_rng(7)


def rollout(
    prompt_index: int, sample: int = 0, *, n: int = 2, on_policy: bool = True, version: int = 3, length: int = 0
) -> Rollout:
    p, r = int(RNG.integers(1, 6)), length or int(RNG.integers(2, 9))
    return Rollout(
        prompt_id=100 + prompt_index,
        sample_index=prompt_index * n + sample,
        prompt_ids=RNG.integers(0, 99, p).astype(np.int32),
        response_ids=RNG.integers(0, 99, r).astype(np.int32),
        rollout_logprobs=-RNG.random(r, np.float32) if on_policy else np.zeros(r, np.float32),
        version_spans=(VersionSpan(0, 1, version), VersionSpan(1, r, version + 1)) if on_policy else (),
        finish_reason="stop" if prompt_index % 2 else "length",
        on_policy=on_policy,
        route=prompt_index % 3,
    )


def trajectory(of: Rollout, reason: str) -> Rollout:
    """Return it with an observation in the middle of its response."""
    own = np.ones(len(of.response_ids), bool)
    own[len(own) // 2] = False
    return replace(of, own=own, rollout_logprobs=of.rollout_logprobs[own], finish_reason=reason)


def scores(of: Rollout, kind: str) -> TeacherScores:
    r = of.n_own
    if kind == "logits":
        return TeacherScores(logits=RNG.random((r, 7)).astype(np.float16))
    if kind == "hidden":
        return TeacherScores(hidden=RNG.random((r, 5), np.float32))
    table = TopKTable(
        RNG.integers(0, 99, (r, 4)).astype(np.int32),
        np.where(RNG.random((r, 4)) < 0.2, -np.inf, -RNG.random((r, 4))).astype(np.float32),
        RNG.random(r, np.float32),
        RNG.integers(1, 5, r).astype(np.int32) if kind == "mass" else None,
    )
    return TeacherScores(topk=table, sampled_logprobs=-RNG.random(r, np.float32) if kind == "mass" else None)


def top_ids(of: Rollout) -> np.ndarray:
    return RNG.integers(0, 99, (of.n_own, 3)).astype(np.int32)


def written(file: Path, rollouts: list[Rollout], scored: list[TeacherScores] | None) -> Path:
    with file.open("wb") as opened:
        write_sequences(opened, rollouts, scored)
    return file


def same(one: Any, other: Any) -> bool:
    """Return whether the values are bit-identical, including the dtypes of arrays."""
    if hasattr(one, "__slots__") and not isinstance(one, np.ndarray):
        return type(one) is type(other) and all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("kind", ["topk", "mass", "logits", "hidden", None])
def test_a_file_is_read_bit_exact(tmp_path: Path, kind: str | None) -> None:
    """Fails if tokens, versions or scores change in a file."""
    rollouts = [rollout(i, on_policy=i != 2) for i in range(5)]
    if kind in ("topk", "hidden"):  # an environment: trajectories of several turns, and of one
        rollouts[1], rollouts[2] = trajectory(rollouts[1], "environment_error"), trajectory(rollouts[2], "stop")
    if kind == "mass":  # a teacher with a prompt of its own
        rollouts[1] = replace(rollouts[1], teacher_ids=np.array([4, 5], np.int32))
    if kind == "topk":  # distill.support: ids of the rollouts, none of the dataset's response
        rollouts = [replace(r, top_ids=top_ids(r) if r.on_policy else None) for r in rollouts]
    scored = [scores(r, kind) for r in rollouts] if kind else None
    again = read_sequences(written(tmp_path / "x.npz", rollouts, scored))
    assert same(again[0], rollouts)
    assert same(again[1], scored)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    """Fails if a truncated or foreign file is accepted or raises an untyped error."""
    file = written(tmp_path / "x.npz", [rollout(0)], None)
    data = file.read_bytes()
    single_array = io.BytesIO()
    np.save(single_array, np.arange(9))
    for bad in (b"", data[:-30], b"PK\x03\x04" + data[40:], single_array.getvalue()):
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"x\.npz"):
            read_sequences(file)
    with pytest.raises(CheckpointError, match=r"gone\.npz"):
        read_sequences(tmp_path / "gone.npz")


def test_scores_that_do_not_match_are_not_written() -> None:
    """Fails if scores of other sequences are written."""
    a, b = rollout(0), rollout(1)
    with pytest.raises(CheckpointError):
        write_sequences(io.BytesIO(), [], None)
    with pytest.raises(CheckpointError):
        write_sequences(io.BytesIO(), [a, b], [scores(a, "topk"), scores(b, "hidden")])
    longer = TeacherScores(sampled_logprobs=np.zeros(len(a.response_ids) + 1, np.float32))
    with pytest.raises(CheckpointError):
        write_sequences(io.BytesIO(), [a], [longer])


def endpoint() -> ScoringEndpoint:
    """Return an endpoint that only writes and reads files; it contacts no server."""
    return ScoringEndpoint(load_config(None, ["rollout.n=2"]), Comparison(99), fingerprints=["f"], windows=[Window(1)])


def chunks_of(items: Iterator[Any]) -> list[tuple[list[Rollout], list[TeacherScores] | None, Any, bytes]]:
    """Return (rollouts, scores, sizes, summary) per chunk."""
    flat = list(items)
    return [(flat[i], flat[i + 1], decode_sizes(flat[i + 2], None)[1], flat[i + 3]) for i in range(0, len(flat), 4)]


@pytest.mark.parametrize(("dp_size", "chunk_size"), [(1, 16), (2, 3), (3, 1)])
def test_an_endpoint_restores_the_sequences_of_its_group(tmp_path: Path, dp_size: int, chunk_size: int) -> None:
    """Fails if a resume with another number of groups loses or duplicates sequences."""
    written: dict[int, tuple[Rollout, TeacherScores | None]] = {}
    for group in (0, 1):  # of two
        chunks = [[rollout(i, j) for j in range(2)] for i in (group, group + 2, group + 4)]
        chunks.append([rollout(group + 6, on_policy=False)])
        scored = [[scores(r, "topk") for r in chunk] for chunk in chunks]
        file = tmp_path / f"x_group_{group}.npz"
        (digest,) = endpoint().record(str(file), [None] * len(chunks), *chunks, *scored).items()
        assert digest[0] == file.name and digest[1].n_bytes == file.stat().st_size
        for chunk, chunk_scores in zip(chunks, scored, strict=True):
            written |= {r.sample_index: (r, s) for r, s in zip(chunk, chunk_scores, strict=True)}
    files = [str(path) for path in sorted(tmp_path.glob("*.npz"))]
    seen: dict[int, tuple[Rollout, TeacherScores]] = {}
    for rank in range(dp_size):
        for rollouts, scored, sizes, summary in chunks_of(endpoint().restore(files, rank, dp_size, chunk_size)):
            assert scored is not None and len(scored) == len(rollouts)
            indices = {r.sample_index // 2 for r in rollouts}
            assert {index % dp_size for index in indices} == {rank} == {sizes.dp_rank}
            assert len(rollouts) <= chunk_size
            assert len({r.on_policy for r in rollouts}) == 1 and sizes.on_policy == rollouts[0].on_policy
            assert sizes.versions.min() == (3 if sizes.on_policy else 0)
            assert ScoreSummary.decode(summary).n_bytes.min() > 0
            for r, s in zip(rollouts, scored, strict=True):
                assert r.sample_index not in seen
                seen[r.sample_index] = (r, s)
    assert seen.keys() == written.keys()
    assert all(same(seen[i], written[i]) for i in seen)


def test_unscored_rollouts_are_restored_without_scores(tmp_path: Path) -> None:
    """Fails if rollouts recorded without scores, during an outage of the teacher, count as scored."""
    file = str(tmp_path / "x_group_0.npz")
    endpoint().record(file, [None], [rollout(0), rollout(1)])
    ((rollouts, scored, sizes, summary),) = chunks_of(endpoint().restore([file], 0, 1, 16))
    assert (len(rollouts), scored, sizes.n_sequences, summary) == (2, None, 2, b"")


def test_files_that_cannot_be_written_or_read_are_typed_errors(tmp_path: Path) -> None:
    """Fails if a full disk or a missing file raises an error without its name."""
    with pytest.raises(CheckpointError):
        endpoint().record(str(tmp_path / "nowhere" / "x.npz"), [None], [rollout(0)])
    with pytest.raises(CheckpointError):
        list(endpoint().restore([str(tmp_path / "gone.npz")], 0, 1, 16))


def test_scores_that_the_teacher_computed_do_not_count_as_stored() -> None:
    """Fails if a sequence whose result is seen before the time of its completion is noted counts as found in
    teacher.store, or if scores that a checkpoint had lower the share.
    """

    class SlowNote:
        """A teacher whose client has something to do before the endpoint's own callback."""

        def submit(self, rollouts: list[Rollout], signals: Any, *, mass: float) -> Future[list[TeacherScores]]:
            future: Future[list[TeacherScores]] = Future()
            future.add_done_callback(lambda done: time.sleep(0.2))
            threading.Timer(0.05, future.set_result, [[scores(each, "topk") for each in rollouts]]).start()
            return future

    opened = endpoint()
    opened.clients = lambda: [cast(Any, SlowNote())]  # type: ignore[method-assign]
    rollouts = [replace(rollout(i, length=3), route=0) for i in range(2)]
    sizes = chunk_sizes(0, rollouts, 0)
    times = ScoreSummary.decode(opened.score(rollouts)[1]).times
    assert times.submitted_s + 0.04 < times.completed_s.min()
    from_store = ScoreTimes(1.0, np.array([1.0, 1.0]))
    config = load_config(None, ["teacher.store=somewhere", "rollout.n=2"])
    batch = [ScoredChunk(sizes, None, None, 0, each) for each in (times, from_store, None)]
    assert store_numbers(batch, config) == {"teacher/stored_share": 0.5}
    assert store_numbers(batch[-1:], config) == {}

"""Rollouts and scores in a file, and out of it again: to the bit, and nothing that is not whole."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gkd.config.load import load_config
from gkd.data.chunks import decode_sizes
from gkd.data.rollout_file import read_sequences, write_sequences
from gkd.errors import CheckpointError
from gkd.teacher.endpoint import ScoringEndpoint
from gkd.teacher.records import ScoreSummary
from gkd.types import Rollout, TeacherScores, TeacherTopK, VersionSpan

RNG = np.random.default_rng(7)


def rollout(place: int, sample: int = 0, *, n: int = 2, on_policy: bool = True, version: int = 3) -> Rollout:
    p, r = int(RNG.integers(1, 6)), int(RNG.integers(2, 9))
    return Rollout(
        prompt_id=100 + place,
        sample_index=place * n + sample,
        prompt_ids=RNG.integers(0, 99, p).astype(np.int32),
        response_ids=RNG.integers(0, 99, r).astype(np.int32),
        rollout_logprobs=-RNG.random(r, np.float32) if on_policy else np.zeros(r, np.float32),
        version_spans=(VersionSpan(0, 1, version), VersionSpan(1, r, version + 1)) if on_policy else (),
        finish_reason="stop" if place % 2 else "length",
        on_policy=on_policy,
    )


def scores(of: Rollout, kind: str) -> TeacherScores:
    r = len(of.response_ids)
    if kind == "logits":
        return TeacherScores(logits=RNG.random((r, 7)).astype(np.float16))
    if kind == "hidden":
        return TeacherScores(hidden=RNG.random((r, 5), np.float32))
    table = TeacherTopK(
        RNG.integers(0, 99, (r, 4)).astype(np.int32),
        np.where(RNG.random((r, 4)) < 0.2, -np.inf, -RNG.random((r, 4))).astype(np.float32),
        RNG.random(r, np.float32),
        RNG.integers(1, 5, r).astype(np.int32) if kind == "mass" else None,
    )
    return TeacherScores(topk=table, sampled_logprobs=-RNG.random(r, np.float32) if kind == "mass" else None)


def written(file: Path, rollouts: list[Rollout], scored: list[TeacherScores] | None) -> Path:
    with file.open("wb") as opened:
        write_sequences(opened, rollouts, scored)
    return file


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, arrays with their dtypes."""
    if hasattr(one, "__slots__") and not isinstance(one, np.ndarray):
        return type(one) is type(other) and all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("kind", ["topk", "mass", "logits", "hidden", None])
def test_what_is_read_is_what_was_written(tmp_path: Path, kind: str | None) -> None:
    """Fails if a resumed run trains on other tokens, versions or scores than the run before would have."""
    rollouts = [rollout(place, on_policy=place != 2) for place in range(5)]
    scored = [scores(r, kind) for r in rollouts] if kind else None
    again = read_sequences(written(tmp_path / "x.npz", rollouts, scored))
    assert same(again[0], rollouts)
    assert same(again[1], scored)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    """Fails if half a file, or another one, becomes rollouts or an untyped error."""
    file = written(tmp_path / "x.npz", [rollout(0)], None)
    data = file.read_bytes()
    bare = io.BytesIO()
    np.save(bare, np.arange(9))
    for bad in (b"", data[:-30], data[: len(data) // 2], b"PK\x03\x04" + data[40:], b"x" * 100, bare.getvalue()):
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"x\.npz is no whole file"):
            read_sequences(file)
    with pytest.raises(CheckpointError, match=r"gone\.npz cannot be read"):
        read_sequences(tmp_path / "gone.npz")


def test_scores_of_other_sequences_are_not_written() -> None:
    """Fails if a mix-up of chunks becomes a file whose scores are shifted against its tokens."""
    a, b = rollout(0), rollout(1)
    with pytest.raises(CheckpointError, match="none"):
        write_sequences(io.BytesIO(), [], None)
    with pytest.raises(CheckpointError, match="not all the same tables"):
        write_sequences(io.BytesIO(), [a, b], [scores(a, "topk"), scores(b, "hidden")])
    longer = TeacherScores(sampled_logprobs=np.zeros(len(a.response_ids) + 1, np.float32))
    with pytest.raises(CheckpointError, match="cannot be of a response"):
        write_sequences(io.BytesIO(), [a], [longer])


def endpoint() -> ScoringEndpoint:
    """No server is asked: it writes and reads files only."""
    return ScoringEndpoint(load_config(None, ["rollout.n=2"]), n_vocab=99, fingerprint="f", n_in_flight=1)


def taken(items: Iterator[Any]) -> list[tuple[list[Rollout], list[TeacherScores] | None, Any, bytes]]:
    """By chunk: rollouts, scores, sizes, summary."""
    flat = list(items)
    return [(flat[i], flat[i + 1], decode_sizes(flat[i + 2], None), flat[i + 3]) for i in range(0, len(flat), 4)]


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("chunk_size", [0, 3, 16])
def test_an_endpoint_restores_its_group_s_part(tmp_path: Path, dp_size: int, chunk_size: int) -> None:
    """Fails if a run that goes on with other groups loses sequences in flight or trains on them twice; or a stream's
    prompt comes back in several chunks.
    """
    written: dict[int, tuple[Rollout, TeacherScores | None]] = {}
    for group in (0, 1):  # of two
        chunks = [[rollout(place, j) for j in range(2)] for place in (group, group + 2, group + 4)]
        chunks.append([rollout(group + 6, on_policy=False)])
        scored = [[scores(r, "topk") for r in chunk] for chunk in chunks]
        file = tmp_path / f"x_group_{group}.npz"
        (digest,) = endpoint().record(str(file), len(chunks), *chunks, *scored).items()
        assert digest[0] == file.name and digest[1].n_bytes == file.stat().st_size
        for chunk, its in zip(chunks, scored, strict=True):
            written |= {r.sample_index: (r, s) for r, s in zip(chunk, its, strict=True)}
    files = [str(path) for path in sorted(tmp_path.glob("*.npz"))]
    seen: dict[int, tuple[Rollout, TeacherScores]] = {}
    for rank in range(dp_size):
        for rollouts, scored, sizes, summary in taken(endpoint().restore(files, rank, dp_size, chunk_size)):
            assert scored is not None and len(scored) == len(rollouts)
            places = {r.sample_index // 2 for r in rollouts}
            assert {place % dp_size for place in places} == {rank} == {sizes.dp_rank}
            assert len(rollouts) <= chunk_size if chunk_size else len(places) == 1
            assert len({r.on_policy for r in rollouts}) == 1 and sizes.on_policy == rollouts[0].on_policy
            assert sizes.policy_version == (3 if sizes.on_policy else 0)
            assert ScoreSummary.decode(summary).n_bytes > 0
            for r, s in zip(rollouts, scored, strict=True):
                assert r.sample_index not in seen
                seen[r.sample_index] = (r, s)
    assert seen.keys() == written.keys()
    assert all(same(seen[i], written[i]) for i in seen)


def test_what_was_not_scored_comes_back_unscored(tmp_path: Path) -> None:
    """Fails if rollouts that were recorded without scores, because the teacher was gone, are taken for scored ones."""
    file = str(tmp_path / "x_group_0.npz")
    endpoint().record(file, 1, [rollout(0), rollout(1)])
    ((rollouts, scored, sizes, summary),) = taken(endpoint().restore([file], 0, 1, 16))
    assert (len(rollouts), scored, sizes.n_sequences, summary) == (2, None, 2, b"")


def test_files_that_cannot_be_written_or_read_are_typed_errors(tmp_path: Path) -> None:
    """Fails if a full disk or a lost file shows as an OSError without a name, or half a file is left."""
    with pytest.raises(CheckpointError, match=r"nowhere.*cannot be written"):
        endpoint().record(str(tmp_path / "nowhere" / "x.npz"), 1, [rollout(0)])
    with pytest.raises(CheckpointError, match=r"gone\.npz cannot be read"):
        list(endpoint().restore([str(tmp_path / "gone.npz")], 0, 1, 16))
    half = written(tmp_path / "half.npz", [rollout(0)], None)
    half.write_bytes(half.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"half\.npz is no whole file"):
        list(endpoint().restore([str(half)], 0, 1, 16))

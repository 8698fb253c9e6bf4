"""Chunks of rollouts and scores cross processes by column, see `gkd.data.chunks`."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gkd.data.chunks import ColumnList
from gkd.types import Rollout, TeacherScores, VersionSpan
from teacher_server.wire.table import TopKTable

LENGTHS = st.lists(st.integers(1, 9), max_size=6)


def _rollout(i: int, n: int, *, on_policy: bool = True, n_ids: int | None = None) -> Rollout:
    return Rollout(
        prompt_id=i,
        sample_index=2 * i,
        prompt_ids=np.arange(i, dtype=np.int32),
        response_ids=np.arange(n, dtype=np.int32) + i,
        rollout_logprobs=-np.arange(n, dtype=np.float32) / 7,
        version_spans=(VersionSpan(0, 1, i), VersionSpan(1, n, i + 1)) if on_policy else (),
        finish_reason="stop" if n % 2 else "length",
        on_policy=on_policy,
        route=n % 3,
        teacher_ids=np.arange(3, dtype=np.int32) if n > 4 else None,
        top_ids=None if n_ids is None else np.full((n, n_ids), i, np.int32),
    )


def _scores(n: int, k: int, *, counts: bool) -> TeacherScores:
    table = np.arange(n * k).reshape(n, k)
    n_listed = np.full(n, k, np.int32) if counts else None
    top = TopKTable(table.astype(np.int32), -table.astype(np.float32), np.zeros(n, np.float32), n_listed)
    return TeacherScores(top, -np.ones(n, np.float32), logits=np.zeros((n, 4), np.float16))


def _sent(items: list[Any]) -> tuple[list[Any], int]:
    """Return the list as another process gets it, and the number of arrays that travelled."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(ColumnList(items), protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers]), len(buffers)


def _differs(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return True
    if isinstance(a, np.ndarray):
        return a.dtype != b.dtype or a.shape != b.shape or bool((a != b).any())
    if is_dataclass(a):
        return any(_differs(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, list | tuple):
        return len(a) != len(b) or any(map(_differs, a, b))
    return bool(a != b)


@given(LENGTHS, st.integers(1, 4), st.booleans(), st.sampled_from([None, 3]))
def test_rollouts_and_scores_arrive_as_they_were_sent(
    lengths: list[int], k: int, flag: bool, n_ids: int | None
) -> None:
    """Fails if tokens, or the scores towards which they are trained, become those of another sequence."""
    rollouts = [_rollout(i, n, on_policy=flag, n_ids=n_ids) for i, n in enumerate(lengths)]
    for sent in (rollouts, [_scores(n, k, counts=flag) for n in lengths]):
        assert not _differs(_sent(sent)[0], ColumnList(sent))


def test_columns_that_do_not_fit_together_stay_apart() -> None:
    """An array of another width, a missing table or a plain object must not be lost or converted."""
    sent = [_scores(3, 2, counts=True), _scores(3, 4, counts=False), TeacherScores(), _rollout(1, 3), None, "text"]
    for part in (sent, sent[:2], sent[1:3], [np.zeros((), np.float32)] * 2):
        assert not _differs(_sent(part)[0], ColumnList(part))


def test_the_number_of_arrays_does_not_grow_with_the_sequences() -> None:
    """If it did, the processes between engine and ranks would pay for each sequence again."""
    for chunk in ([_rollout(i, 3) for i in range(200)], [_scores(3, 4, counts=True) for _ in range(200)]):
        assert _sent(chunk)[1] == _sent(chunk[:2])[1] <= 6


def test_large_arrays_are_not_copied() -> None:
    """A copy of the teacher's logits would take the host memory that `teacher.signal: logits` is planned with."""
    large = [TeacherScores(logits=np.zeros((64, 1024), np.float32)) for _ in range(3)]
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(ColumnList(large), protocol=5, buffer_callback=buffers.append)
    places = [np.frombuffer(buffer.raw(), np.uint8).__array_interface__["data"][0] for buffer in buffers]
    assert places == [score.logits.__array_interface__["data"][0] for score in large if score.logits is not None]

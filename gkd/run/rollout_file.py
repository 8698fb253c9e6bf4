"""Write and read files of rollouts and their scores: data in flight in a checkpoint, and input of a replay.

A file is a `.npz` (NumPy's format, without pickle). Per-sequence values are tables with one row per sequence; per-token
arrays are concatenated along the tokens, those with M rows (`Rollout.own`) along these. Reading returns bit-exact what
was written.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from gkd.errors import CheckpointError
from gkd.run.disk import naming
from gkd.types import FINISH_REASONS, SIGNAL_FIELDS, Rollout, TeacherScores, VersionSpan
from teacher_server.vision.images import EncodedImage
from teacher_server.wire.table import TopKTable

_FORMAT = 2
_OPTIONAL = ("teacher_ids", "own", "top_ids", "messages")  # arrays or bytes that not every sequence has
# Name in a file -> field of the table.
_TOPK = {"topk_ids": "ids", "topk_logprobs": "logprobs", "tail_mass": "tail", "counts": "counts"}
_SCORES = (*(name for signal, name in SIGNAL_FIELDS.items() if signal != "topk"), "response_ids")  # one array each
_TABLES = ("format", "sequences", "spans", "prompt_ids", "response_ids", "rollout_logprobs")


def write_sequences(file: IO[bytes], rollouts: Sequence[Rollout], scores: Sequence[TeacherScores] | None) -> None:
    """Write sequences to a file; temporarily needs a second copy of their scores.

    Args:
        scores: of the rollouts, in the same order, all with the same tables; None if they are not scored yet.

    Raises:
        CheckpointError: no sequences, or the scores do not match them.
        OSError: the file cannot be written.
    """
    if not rollouts:
        raise CheckpointError("cannot record an empty list of rollouts")
    columns = [
        (
            r.prompt_id,
            r.sample_index,
            len(r.prompt_ids),
            len(r.response_ids),
            FINISH_REASONS.index(r.finish_reason),
            r.on_policy,
            r.route,
        )
        for r in rollouts
    ]
    spans = [(i, s.start, s.stop, s.policy_version) for i, r in enumerate(rollouts) for s in r.version_spans]
    tables: dict[str, np.ndarray] = {
        "format": np.array([_FORMAT]),
        "sequences": np.array(columns, np.int64),
        "spans": np.array(spans, np.int64).reshape(-1, 4),
        "prompt_ids": np.concatenate([r.prompt_ids for r in rollouts]),
        "response_ids": np.concatenate([r.response_ids for r in rollouts]),
        "rollout_logprobs": np.concatenate([r.rollout_logprobs for r in rollouts]),
    }
    for name in _OPTIONAL:
        values = [getattr(r, name) for r in rollouts]
        flat = [np.frombuffer(v, np.uint8) if isinstance(v, bytes) else v.ravel() for v in values if v is not None]
        if flat:
            sizes = iter(map(len, flat))
            tables[f"{name}_sizes"] = np.array([-1 if value is None else next(sizes) for value in values])
            tables[name] = np.concatenate(flat)
    if any(r.reward is not None for r in rollouts):
        tables["rewards"] = np.array([np.nan if r.reward is None else r.reward for r in rollouts])
    if images := list(dict.fromkeys(image for r in rollouts for image in r.images)):
        places = {image: i for i, image in enumerate(images)}
        tables["image_lengths"] = np.array([image.n_bytes for image in images])
        tables["images"] = np.frombuffer(b"".join(image.data for image in images), np.uint8)
        tables["image_counts"] = np.array([len(r.images) for r in rollouts])
        tables["image_indices"] = np.array([places[image] for r in rollouts for image in r.images])
    if scores is not None:
        tables |= _score_tables(rollouts, scores)
    np.savez(file, allow_pickle=False, **tables)


def read_sequences(path: Path) -> tuple[list[Rollout], list[TeacherScores] | None]:
    """Read a file of `write_sequences`.

    Raises:
        CheckpointError: the file is unreadable, truncated, or not a recording.
    """
    with naming(path, "read"):
        opened = path.open("rb")
    try:
        with opened:
            loaded = np.load(opened, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):  # np.load also accepts a single array
                raise ValueError("it holds a single array")
            tables = {key: loaded[key] for key in loaded.files}
        missing = [key for key in _TABLES if key not in tables]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}")
        if tables["format"].tolist() != [_FORMAT]:
            raise ValueError(f"it has the format {tables['format'].tolist()}, and this version reads [{_FORMAT}]")
        rollouts = _rollouts(tables)
        return rollouts, _scores(tables, [r.n_own for r in rollouts])
    except (ValueError, KeyError, IndexError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is not a complete recording of rollouts: {error}") from error


def _rollouts(tables: dict[str, np.ndarray]) -> list[Rollout]:
    rows = tables["sequences"].tolist()
    lengths = [row[3] for row in rows]
    spans: list[list[VersionSpan]] = [[] for _ in rows]
    for sequence, start, stop, version in tables["spans"].tolist():
        spans[sequence].append(VersionSpan(start, stop, version))
    columns: dict[str, Sequence[Any]] = {
        "prompt_id": [row[0] for row in rows],
        "sample_index": [row[1] for row in rows],
        "prompt_ids": _split(tables["prompt_ids"], [row[2] for row in rows]),
        "response_ids": _split(tables["response_ids"], lengths),
        "version_spans": list(map(tuple, spans)),
        "finish_reason": [FINISH_REASONS[row[4]] for row in rows],
        "on_policy": [bool(row[5]) for row in rows],
        "route": [row[6] for row in rows],
    }
    for name in _OPTIONAL:
        if name in tables:
            sizes = tables[f"{name}_sizes"]
            pieces = _split(tables[name], sizes.clip(0).tolist())
            columns[name] = [piece if size >= 0 else None for piece, size in zip(pieces, sizes.tolist(), strict=True)]
    own = columns.get("own", [None] * len(rows))
    n_rows = [n if mask is None else int(mask.sum()) for n, mask in zip(lengths, own, strict=True)]
    columns["rollout_logprobs"] = _split(tables["rollout_logprobs"], n_rows)
    if "top_ids" in columns:
        pairs = zip(columns["top_ids"], n_rows, strict=True)
        columns["top_ids"] = [None if ids is None else ids.reshape(n, -1) for ids, n in pairs]
    if "messages" in columns:
        columns["messages"] = [None if text is None else text.tobytes() for text in columns["messages"]]
    if "rewards" in tables:
        columns["reward"] = [None if math.isnan(reward) else reward for reward in tables["rewards"].tolist()]
    if "images" in tables:
        images = [EncodedImage(part.tobytes()) for part in _split(tables["images"], tables["image_lengths"].tolist())]
        pieces = _split(tables["image_indices"], tables["image_counts"].tolist())
        columns["images"] = [tuple(images[i] for i in part) for part in pieces]
    return [Rollout(**{name: column[i] for name, column in columns.items()}) for i in range(len(rows))]


def _score_tables(rollouts: Sequence[Rollout], scores: Sequence[TeacherScores]) -> dict[str, np.ndarray]:
    """Return all score tables, concatenated along the own tokens."""
    joined: dict[str, list[np.ndarray]] = {}
    for rollout, score in zip(rollouts, scores, strict=True):
        by_key = {f"score_{key}": getattr(score, key) for key in _SCORES}
        n_rows = rollout.n_own if score.response_ids is None else len(score.response_ids)
        if score.topk is not None:
            by_key |= {f"score_{key}": getattr(score.topk, field) for key, field in _TOPK.items()}
        for key, table in by_key.items():
            if table is not None:
                if len(table) != n_rows:
                    raise CheckpointError(f"scores of {len(table)} tokens for a response of {n_rows} tokens")
                joined.setdefault(key, []).append(table)
    if not joined or any(len(arrays) != len(rollouts) for arrays in joined.values()):
        names = ", ".join(sorted(joined)) or "none"
        raise CheckpointError(f"cannot record scores with different tables in one file: {names}")
    tables = {key: np.concatenate(arrays) for key, arrays in joined.items()}
    if "score_response_ids" in joined:  # a teacher with another tokenizer
        tables["score_lengths"] = np.array([len(ids) for ids in joined["score_response_ids"]])
    return tables


def _scores(tables: dict[str, np.ndarray], lengths: Sequence[int]) -> list[TeacherScores] | None:
    lengths = tables["score_lengths"].tolist() if "score_lengths" in tables else lengths
    pieces = {key: _split(tables[f"score_{key}"], lengths) for key in (*_TOPK, *_SCORES) if f"score_{key}" in tables}
    if not pieces:
        return None
    scores = []
    for i in range(len(lengths)):
        row_tables = {key: part[i] for key, part in pieces.items()}
        topk = {field: row_tables.pop(key) for key, field in _TOPK.items() if key in row_tables}
        scores.append(TeacherScores(topk=TopKTable(**topk) if topk else None, **row_tables))
    return scores


def _split(table: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    if sum(lengths) != len(table):
        raise ValueError(f"a table has {len(table)} rows, expected {sum(lengths)}")
    return np.split(table, np.cumsum(lengths)[:-1])

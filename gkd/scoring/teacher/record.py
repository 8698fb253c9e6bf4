"""Write the scores of one sequence as the reply of a teacher server, and read them: 5 bytes an entry with wire fp16.

The number of the header's bytes, the header, and the frames, one after the other. What the wire has rounded is not
rounded again, so scores that were read are those that arrived.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from gkd.errors import CheckpointError
from gkd.types import Rollout, TeacherScores, TeacherTopK
from teacher_server.wire.payload import (
    TopKScores,
    cut_planes,
    mark_own,
    pack_sampled,
    pack_topk,
    rows_planes,
    score_planes,
    split_frames,
    unpack_rows,
    unpack_sampled,
    unpack_topk,
)
from teacher_server.wire.protocol import (
    NO_REQUEST,
    ProtocolError,
    RowsReply,
    ScoreReply,
    Wire,
    checksum,
    replies,
    token_digest,
)

_SIZE = struct.Struct("<I")


def packed(rollout: Rollout, scores: TeacherScores, wire: Wire) -> bytes:
    """Return the record of a sequence, whose scores arrived in the precision `wire`."""
    n_rows, matrix = rollout.n_own, scores.hidden if scores.logits is None else scores.logits
    common: dict[str, Any] = {"request_id": NO_REQUEST, "token_digest": _digest(rollout), "n_rows": n_rows}
    common |= {"model_fingerprint": "", "worker": "", "checksums": [], "queue_s": 0.0, "compute_s": 0.0}
    header: ScoreReply | RowsReply
    if matrix is not None:
        common |= {"signal": "hidden" if scores.logits is None else "logits", "dtype": matrix.dtype.name}
        common |= {"stream_id": NO_REQUEST, "index": 0, "start": 0, "stop": n_rows, "n_cols": matrix.shape[1]}
        header = RowsReply(**common)
        frames = cut_planes(rows_planes(header), {"rows": matrix})
    else:
        table, sampled = scores.topk, scores.sampled_logprobs
        counts = None if table is None else table.counts
        k = 0 if table is None else table.topk_ids.shape[1]
        header = ScoreReply(
            signal="topk" if k else "sampled",
            k=k,
            n_entries=n_rows * k if counts is None else int(counts.sum()),
            adaptive=counts is not None,
            wire=wire,
            with_sampled=k > 0 and sampled is not None,
            **common,
        )
        if table is not None:
            rows = TopKScores(table.topk_ids, table.topk_logprobs, table.tail_mass, counts, sampled)
            frames = pack_topk(rows, header)
        else:
            assert sampled is not None, "scores have at least one table"
            frames = pack_sampled(sampled, header)
    header.checksums = [checksum(frame) for frame in frames]
    head = replies.encode(header)
    return b"".join([_SIZE.pack(len(head)), head, *frames])


def unpacked(body: bytes, rollout: Rollout) -> TeacherScores:
    """Return the scores in a record. Raises CheckpointError: it is damaged, or of another sequence."""
    try:
        (n_head,) = _SIZE.unpack_from(body)
        header, rest = replies.decode(body[_SIZE.size : _SIZE.size + n_head]), memoryview(body)[_SIZE.size + n_head :]
        if not isinstance(header, ScoreReply | RowsReply):
            raise ProtocolError(f"a record holds {type(header).__name__}")
        if header.token_digest != _digest(rollout) or header.n_rows != rollout.n_own:
            raise ProtocolError("a record has another sequence")
        if isinstance(header, RowsReply):
            rows = unpack_rows(header, split_frames(rows_planes(header), rest))
            rows = rows.astype(header.dtype, copy=False)
            return TeacherScores(hidden=rows) if header.signal == "hidden" else TeacherScores(logits=rows)
        frames = split_frames(score_planes(header), rest)
        if header.signal == "sampled":
            return TeacherScores(sampled_logprobs=unpack_sampled(header, frames))
        found = unpack_topk(header, frames)
        return TeacherScores(TeacherTopK(found.ids, found.logprobs, found.tail, found.counts), found.sampled)
    except (ProtocolError, struct.error) as error:
        raise CheckpointError(str(error)) from error


def _digest(rollout: Rollout) -> bytes:
    sequence = rollout.for_teacher()
    return token_digest(np.concatenate([sequence.prompt_ids, mark_own(sequence.response_ids, sequence.own)]))

"""Keep the teacher's scores of dataset responses in files, so that a later epoch or run does not ask for them again.

    <folder>/<time>-<host>-<process>.scores     records, one after the other

A record is a header (key, bytes, checksum) and the reply of a teacher server to the request of one sequence: its header
and its frames, 5 bytes an entry with `teacher.wire: fp16`. It is written in one call. Each process appends to a file of
its own and reads all files, so nothing is locked. What a killed process has left incomplete, and a record whose bytes
have changed, is never returned.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import xxhash

from gkd.config.schema import Derived
from gkd.config.schema_teacher import HTTP, TeacherConfig
from gkd.errors import CheckpointError, ConfigError
from gkd.log import get_logger
from gkd.types import Rollout, TeacherScores
from teacher_server.wire.payload import (
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
    Signal,
    Wire,
    checksum,
    replies,
    token_digest,
)

log = get_logger("store")

SUFFIX = ".scores"
_MAGIC = b"gkd2"
_HEADER = struct.Struct("<4s16sQQ")  # magic, key, bytes of the body, xxh3-64 of the body


class _Place(NamedTuple):
    file: Path
    start: int  # place of the body
    n_bytes: int
    checksum: int


class ScoreStore:
    """Scores by `score_key` in a folder. Thread-safe; several processes may use one folder.

    Args:
        folder: is made if it is missing.
        wire: precision in which the scores arrive.

    Raises:
        OSError: the folder cannot be made or listed.
    """

    def __init__(self, folder: Path, wire: Wire = "fp32") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._wire = wire
        self._lock = threading.Lock()
        self._places: dict[bytes, _Place] = {}
        self._ends: dict[Path, int] = {}  # file -> place of its next record
        self._own = folder / f"{time.time_ns()}-{socket.gethostname()}-{os.getpid()}{SUFFIX}"  # of this process
        self._is_writable = True
        self._remarks: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """Learn of the records that other processes have written."""
        with self._lock:
            for file in sorted(self._folder.glob(f"*{SUFFIX}")):
                size = file.stat().st_size
                if self._ends.get(file, 0) < size:
                    self._index(file, size)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def get(self, key: bytes, rollout: Rollout) -> TeacherScores | None:
        """Return the scores of a sequence; None if the store has none, or only damaged ones."""
        place = self._places.get(key)
        if place is None:
            return None
        try:
            with place.file.open("rb") as opened:
                opened.seek(place.start)
                body = opened.read(place.n_bytes)
            if xxhash.xxh3_64_intdigest(body) != place.checksum:
                raise CheckpointError("the checksum of a record does not match")
            return unpacked(body, rollout)
        except (OSError, CheckpointError) as error:
            self._remark(f"{place.file}: {error}; what is missing is requested from the teacher again")
            self._places.pop(key, None)
            return None

    def put(self, key: bytes, rollout: Rollout, scores: TeacherScores) -> None:
        """Append the scores of a sequence. After an error of the disk, which is logged, the store only reads."""
        if key in self._places or not self._is_writable:
            return
        data = packed(rollout, scores, self._wire)
        checksum = xxhash.xxh3_64_intdigest(data)
        record = _HEADER.pack(_MAGIC, key, len(data), checksum) + data
        with self._lock:
            try:
                with self._own.open("ab", buffering=0) as opened:
                    start = opened.tell() + _HEADER.size
                    if opened.write(record) < len(record):
                        raise OSError("the disk is full")
            except OSError as error:
                self._is_writable = False  # the file may end in the middle of a record
                self._remark(f"{self._folder} gets no further scores: {error}")
                return
            self._ends[self._own] = start + len(data)
            self._places[key] = _Place(self._own, start, len(data), checksum)

    def _index(self, file: Path, size: int) -> None:
        """Add the complete records behind those that are known."""
        start = self._ends.get(file, 0)
        with file.open("rb") as opened:
            while start + _HEADER.size <= size:
                opened.seek(start)
                magic, key, n_bytes, checksum = _HEADER.unpack(opened.read(_HEADER.size))
                if magic != _MAGIC:
                    self._remark(f"{file} is damaged at byte {start}; what follows is not used")
                    self._ends[file] = size
                    return
                if start + _HEADER.size + n_bytes > size:  # another process is writing it, or was killed while it did
                    break
                self._places[key] = _Place(file, start + _HEADER.size, n_bytes, checksum)
                start += _HEADER.size + n_bytes
        self._ends[file] = start

    def _remark(self, text: str) -> None:
        """Log a text the first time."""
        if text not in self._remarks:
            self._remarks.add(text)
            log.warning("%s", text)


def open_store(teacher: TeacherConfig) -> ScoreStore:
    """Return the store of a run. Raises ConfigError: the folder cannot be made or read."""
    try:
        return ScoreStore(Path(teacher.store), cast(Wire, teacher.wire))
    except OSError as error:
        raise ConfigError("teacher.store", teacher.store, f"is unusable ({error}).", "name another folder.") from error


def dataset_keys(
    rollouts: Sequence[Rollout],
    derived: Derived,
    fingerprints: Sequence[str],
    n_vocab: int,
    numerics: Sequence[str],
) -> dict[int, bytes]:
    """Return the key by position; none of the student's own responses, which never return.

    Args:
        fingerprints: by route. That of an HTTP teacher is its name, which other weights may have, too: no key.
        n_vocab: size of the common vocabulary.
        numerics: by route, see `TeacherInfo`.
    """
    routes = derived.routes
    models = [f"{weights} {engine}" for weights, engine in zip(fingerprints, numerics, strict=True)]
    return {
        i: score_key(r, routes[r.route].teacher, models[r.route], derived.signals, n_vocab)
        for i, r in enumerate(rollouts)
        if not r.on_policy and routes[r.route].teacher.backend != HTTP
    }


def score_key(rollout: Rollout, teacher: TeacherConfig, model: str, signals: Sequence[Signal], n_vocab: int) -> bytes:
    """Return the 16 bytes under which the scores of a sequence are kept: a digest of all that they depend on."""
    sequence = rollout.for_teacher()
    asked = model, list(signals), teacher.topk, teacher.mass, teacher.temperature, teacher.wire, n_vocab
    digest = xxhash.xxh3_128(msgspec.json.encode([*asked, len(sequence.prompt_ids)]))
    for ids in (sequence.prompt_ids, mark_own(sequence.response_ids, sequence.own)):
        digest.update(np.ascontiguousarray(ids, "<i4").tobytes())
    for image in sequence.images:
        digest.update(image.digest)
    return digest.digest()


# Write the scores of one sequence as the reply of a teacher server, and read them: 5 bytes an entry with wire fp16.
#
# The number of the header's bytes, the header, and the frames, one after the other. What the wire has rounded is not
# rounded again, so scores that were read are those that arrived.


_SIZE = struct.Struct("<I")


def packed(rollout: Rollout, scores: TeacherScores, wire: Wire) -> bytes:
    """Return the record of a sequence, whose scores arrived in the precision `wire`."""
    n_rows = rollout.n_own
    matrix = scores.hidden if scores.logits is None else scores.logits
    common: dict[str, Any] = {"request_id": NO_REQUEST, "token_digest": _digest(rollout), "n_rows": n_rows}
    common |= {"model_fingerprint": "", "worker": "", "checksums": [], "queue_s": 0.0, "compute_s": 0.0}
    header: ScoreReply | RowsReply
    if matrix is not None:
        common |= {"signal": "hidden" if scores.logits is None else "logits", "dtype": matrix.dtype.name}
        common |= {"stream_id": NO_REQUEST, "index": 0, "start": 0, "stop": n_rows, "n_cols": matrix.shape[1]}
        header = RowsReply(**common)
        frames = cut_planes(rows_planes(header), {"rows": matrix})
    else:
        table = scores.topk
        sampled = scores.sampled_logprobs
        counts = None if table is None else table.counts
        k = 0 if table is None else table.ids.shape[1]
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
            frames = pack_topk(replace(table, sampled=sampled), header)
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
        header = replies.decode(body[_SIZE.size : _SIZE.size + n_head])
        rest = memoryview(body)[_SIZE.size + n_head :]
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
        table = unpack_topk(header, frames)
        return TeacherScores(replace(table, sampled=None), table.sampled)
    except (ProtocolError, struct.error) as error:
        raise CheckpointError(str(error)) from error


def _digest(rollout: Rollout) -> bytes:
    sequence = rollout.for_teacher()
    ids = np.concatenate([sequence.prompt_ids, mark_own(sequence.response_ids, sequence.own)])
    return token_digest(ids, (image.digest for image in sequence.images))

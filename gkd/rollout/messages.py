"""Calls between the driver and the processes of the engines: their types, and encoded prompts.

A prompt has at most 24 bytes, and 4 per token, much less than pickled objects. The driver sends its tokens once, for
all its samples, the teacher's prompt if there is one, and the row that environments read. Reference answers and
dataset responses are not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from gkd.errors import DataError
from gkd.types import Prompt
from teacher_server.vision.images import EncodedImage


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a batch or a stream."""

    n: int  # samples per prompt
    temperature: float  # 0 = greedy
    top_p: float
    max_tokens: int
    seed: int
    n_top_ids: int = 0  # most probable ids to return of each position
    top_k: int = 0
    min_p: float = 0.0
    max_turns: int = 1  # with an environment


@dataclass(frozen=True, slots=True)
class Job:
    """A batch or a stream of prompts that engines answer."""

    id: int
    sampling: Sampling
    linger_s: float  # a finished sequence waits at most this long for others of its chunk, while the engine is busy


@dataclass(frozen=True, slots=True)
class Pulse:
    """Sign of life of a rollout engine."""

    n_passes: int  # forward passes since its start
    is_idle: bool  # no pass is due: no sequence is unfinished, or the engine executes another call


def _encoded(value: Any) -> bytes:
    """Return the bytes of an image, or of token ids as int32."""
    return value.data if isinstance(value, EncodedImage) else value.astype(np.int32).tobytes()


def _decoded(kind: type, data: bytes) -> Any:
    """Do the inverse of `_encoded` for a field of this type."""
    return EncodedImage(data) if kind is EncodedImage else np.frombuffer(data, np.int32)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)
_DECODER = msgspec.msgpack.Decoder(list[tuple[int, Prompt]], dec_hook=_decoded)


def encode_prompts(prompts: Sequence[Prompt], prompt_indices: Sequence[int]) -> bytes:
    """Encode prompts with their indices in the batch, without what only the driver needs."""
    sent = [msgspec.structs.replace(prompt, answer=None, response_ids=None, own=None) for prompt in prompts]
    return _ENCODER.encode(list(zip(prompt_indices, sent, strict=True)))


def decode_prompts(data: bytes) -> tuple[list[Prompt], list[int]]:
    """Return (prompts, prompt indices) from `encode_prompts`. Raises DataError: truncated or malformed data."""
    try:
        rows = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise DataError(f"malformed prompt data: {error}") from error
    return [prompt for _, prompt in rows], [index for index, _ in rows]

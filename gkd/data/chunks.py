"""Chunks of rollouts of one data-parallel group: encoded sizes, pickled columns, and dataset responses as chunks.

The driver reads only the sizes of a chunk. They are sent as raw bytes, 16 per chunk and 32 per sequence: a pickled
object or array has an overhead of at least 100 bytes, and a chunk may hold a single sequence.

Rollouts and scores of a chunk are pickled by column: pickling a short array costs as much as copying 100 kB, and each
sequence has three to six arrays that cross processes twice.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import accumulate, chain
from typing import Any, TypeVar

import numpy as np

from gkd.config.schema import Config
from gkd.errors import DataError
from gkd.types import FINISH_REASONS, Prompt, Rollout, RolloutChunk

# job, dp_rank, n_sequences, on_policy; then `RolloutChunk.sizes`, all int32.
_HEAD = struct.Struct("<4i")
_N_SIZES = 8
# Least sequences per full chunk: few objects for the driver, and scoring starts long before the rollout ends.
CHUNK_SIZE = 16
_LARGEST_CHUNK = 256
_MOST_TOKENS = 1 << 18
_CHUNKS_PER_BATCH = 8
# Passing on a chunk takes longer than generating and scoring fewer tokens than this with a small model.
_LEAST_TOKENS = 2048
# Finished sequences wait for others of their chunk for a share of the time of a step, which grows with the batch.
_LINGER_S_PER_SEQUENCE = 500e-6
_LINGER_S = 0.02, 2.5  # least and most
_RESERVE = 1 / 2, 1.0  # least and most, of the sequences that an engine runs
_RESERVE_OF_SHARE = 1 / 4  # larger chunks of a large batch; the rest evens out the engines' times

T = TypeVar("T")
_MOST_BYTES = 1 << 16  # limit of the mean bytes of an array; larger ones are not copied
# Makes the values of a column again: (function, arguments).
_Column = tuple[Callable[..., list[Any]], tuple[Any, ...]]


def reserve_size(max_running: int, n_sequences: int, n_engines: int) -> int:
    """Return how many of a batch's sequences each of several engines gets in addition to `max_running`, which it runs.

    It starts them while the driver does not yet have its finished ones.
    """
    least, most = (max_running * share for share in _RESERVE)
    return max(CHUNK_SIZE, math.ceil(min(max(n_sequences / n_engines * _RESERVE_OF_SHARE, least), most)))


def chunk_size(config: Config) -> int:
    """Return the sequences per full chunk of rollouts: more in larger batches or if responses are short.

    A scoring endpoint holds the scores of whole chunks. One of several engines sends a chunk before its reserve is used
    up. With functions that get all responses to a prompt it is a multiple of their number.
    """
    derived = config.derived
    limits = [_LARGEST_CHUNK, _MOST_TOKENS // config.data.max_response_length]
    n_sequences = config.trainer.global_batch_size * config.rollout.n
    if derived.n_engines > 1:
        limits.append(reserve_size(config.rollout.sequence_limit, n_sequences, derived.n_engines))
    of_short = min(n_sequences // derived.dp_size // 2, _LEAST_TOKENS // config.data.max_response_length)
    size = max(CHUNK_SIZE, min(max(n_sequences // _CHUNKS_PER_BATCH, of_short), *limits))
    return whole_groups(config, size)


def whole_groups(config: Config, size: int) -> int:
    """Return the size of chunks, rounded up to whole groups of responses to a prompt if functions get these."""
    n = config.rollout.n if config.derived.groups else 1
    return -(-size // n) * n


def linger_s(n_sequences: int, *, soon: bool) -> float:
    """Return how long a finished sequence waits at most for others of its chunk.

    Soon means in proportion to the batch; otherwise it is the longest time, as of a single engine outside of a stream.
    """
    least, most = _LINGER_S
    return min(max(_LINGER_S_PER_SEQUENCE * n_sequences, least), most) if soon else most


def chunk_sizes(dp_rank: int, rollouts: Sequence[Rollout], policy_version: int | None = None) -> RolloutChunk:
    """Return the sizes of rollouts with equal `on_policy`, of `policy_version` or, with None, their own; no `ref`."""
    n_response = [r.n_own for r in rollouts]
    rows = (
        [r.sample_index for r in rollouts],
        [r.n_tokens for r in rollouts],
        n_response,
        [FINISH_REASONS.index(r.finish_reason) for r in rollouts],
        [r.policy_version if policy_version is None else policy_version for r in rollouts],
        [max(0, n - 3) - distinct_4grams(r.own_ids) for n, r in zip(n_response, rollouts, strict=True)],
        [len(r.response_ids) - n for n, r in zip(n_response, rollouts, strict=True)],
        [r.n_turns for r in rollouts],
    )
    return RolloutChunk(dp_rank, None, np.array(rows, "<i4"), rollouts[0].on_policy)


def part_of(chunk: RolloutChunk, positions: Sequence[int] | np.ndarray) -> RolloutChunk:
    """Return these sequences of a chunk, or of a part of one.

    Args:
        positions: in the chunk's own order, distinct and ascending.
    """
    if len(positions) == chunk.n_sequences:
        return chunk
    kept = np.asarray(positions, np.int64)
    indices = kept if chunk.sequence_indices is None else chunk.sequence_indices[kept]
    return RolloutChunk(chunk.dp_rank, chunk.ref, chunk.sizes[:, kept], chunk.on_policy, indices)


def distinct_4grams(ids: np.ndarray) -> int:
    """Return the number of distinct sequences of 4 consecutive ids, which are [R] int32 and not negative."""
    if len(ids) < 4:
        return 0
    wide = ids.astype(np.int64)
    _, pairs = np.unique(wide[:-1] << 32 | wide[1:], return_inverse=True)  # numbers the distinct pairs from 0
    return len(np.unique(pairs[:-2] * len(ids) + pairs[2:]))


def encode_sizes(chunk: RolloutChunk, job: int = 0) -> bytes:
    """Encode all fields of a whole chunk except `ref`, and the id of the job that the rollouts were generated for."""
    return _HEAD.pack(job, chunk.dp_rank, chunk.n_sequences, chunk.on_policy) + chunk.sizes.tobytes()


def decode_sizes(data: bytes, ref: Any) -> tuple[int, RolloutChunk]:
    """Decode `encode_sizes`; return (job, chunk) with `ref` as the handle of the rollouts.

    Raises:
        DataError: truncated or malformed data.
    """
    if len(data) < _HEAD.size:
        raise DataError(f"the sizes of a chunk of rollouts are {len(data)} bytes, expected at least {_HEAD.size}")
    job, dp_rank, n, on_policy = _HEAD.unpack_from(data)
    expected = _HEAD.size + 4 * _N_SIZES * n
    if n < 1 or len(data) != expected:
        raise DataError(f"the sizes of a chunk of {n} rollouts are {len(data)} bytes, expected {expected}")
    sizes = np.frombuffer(data, "<i4", offset=_HEAD.size).reshape(_N_SIZES, n)
    return job, RolloutChunk(dp_rank, ref, sizes, bool(on_policy))


def dataset_chunks(
    prompts: Sequence[Prompt],
    prompt_indices: Sequence[int],
    *,
    n: int,
    dp_size: int,
    chunk_size: int,
    policy_version: int,
    eos_ids: Collection[int],
) -> Iterator[tuple[list[Rollout], RolloutChunk]]:
    """Yield the dataset's responses, one per prompt, as finished chunks; ordered by group, then by prompt index.

    Args:
        prompt_indices: index of each prompt in the whole batch; modulo dp_size it is the data-parallel group.
        n: `rollout.n`; sample_index = prompt_index * n, as for the first rollout of the prompt.
        policy_version: the current one, because dataset responses are never stale.
        eos_ids: a response that does not end with one of these was truncated.

    Raises:
        DataError: a prompt was loaded without its response.
    """
    groups: dict[int, list[Rollout]] = defaultdict(list)
    for prompt, prompt_index in zip(prompts, prompt_indices, strict=True):
        groups[prompt_index % dp_size].append(_dataset_rollout(prompt, prompt_index * n, eos_ids))
    for dp_rank, rollouts in sorted(groups.items()):
        for start in range(0, len(rollouts), chunk_size):
            chunk = rollouts[start : start + chunk_size]
            yield chunk, chunk_sizes(dp_rank, chunk, policy_version)


def dataset_rollouts(prompts: Sequence[Prompt], eos_ids: Collection[int]) -> list[Rollout]:
    """Return the dataset's response to each prompt, as `dataset_chunks`."""
    return [_dataset_rollout(prompt, i, eos_ids) for i, prompt in enumerate(prompts)]


def _dataset_rollout(prompt: Prompt, sample_index: int, eos_ids: Collection[int]) -> Rollout:
    response = prompt.response_ids
    if response is None:
        raise DataError(f"prompt {prompt.prompt_id} has no dataset response: it was loaded without data.response_key")
    return Rollout(
        prompt_id=prompt.prompt_id,
        sample_index=sample_index,
        prompt_ids=prompt.token_ids,
        response_ids=response,
        rollout_logprobs=np.zeros(len(response) if prompt.own is None else prompt.own.sum(), np.float32),
        version_spans=(),
        finish_reason="stop" if int(response[-1]) in eos_ids else "length",
        on_policy=False,
        route=prompt.route,
        teacher_ids=prompt.teacher_ids,
        own=prompt.own,
        images=prompt.images,
    )


class ColumnList(list[T]):
    """A list of dataclasses that is pickled by column. Unpickled, the arrays of its items are views of joined ones."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _column_list, (_column(self),)


def _column_list(column: _Column) -> ColumnList[Any]:
    return ColumnList(_values(column))


def _values(column: _Column) -> list[Any]:
    restore, arguments = column
    return restore(*arguments)


def _column(values: Sequence[Any]) -> _Column:
    """Return the column of values, whatever they are."""
    kinds = set(map(type, values))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is np.ndarray and _can_join(values):
        return _split, (np.concatenate(values), [len(value) for value in values])
    if kind is tuple:
        return _tuples, (_column(list(chain(*values))), [len(value) for value in values])
    if kind is not None and is_dataclass(kind):
        return _records, (kind, [_column([getattr(v, field.name) for v in values]) for field in fields(kind)])
    return list, (list(values),)


def _can_join(arrays: Sequence[np.ndarray]) -> bool:
    alike = len({(array.dtype, array.shape[1:]) for array in arrays}) == 1 and arrays[0].ndim > 0
    return alike and sum(array.nbytes for array in arrays) <= _MOST_BYTES * len(arrays)


def _tuples(column: _Column, lengths: Sequence[int]) -> list[tuple[Any, ...]]:
    return [tuple(part) for part in _split(_values(column), lengths)]


def _records(kind: type, columns: Sequence[_Column]) -> list[Any]:
    return list(map(kind, *map(_values, columns)))


def _split(joined: Any, lengths: Sequence[int]) -> list[Any]:
    return [joined[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]

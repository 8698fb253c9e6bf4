"""Chunks of rollouts of one data-parallel group: encoded sizes, and dataset responses as chunks.

The driver reads only the sizes of a chunk. They are sent as raw bytes, 48 per chunk and 8 per sequence: a pickled
object or array has an overhead of at least 100 bytes, and a chunk may hold a single sequence.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from gkd.errors import DataError
from gkd.handles import RolloutChunk
from gkd.types import Prompt, Rollout

# dp_rank, n_sequences, n_truncated, on_policy, n_prompt_tokens, n_response_tokens, policy_version, n_4grams,
# n_repeated_4grams; then sample_index and n_tokens of the sequences, all int32.
_SIZES = struct.Struct("<iii?3xqqqii")
# Sequences per chunk: large enough that the driver handles few bytes per sequence, and small enough that scoring
# starts long before the rollout ends.
CHUNK_SIZE = 16


def chunk_sizes(dp_rank: int, rollouts: Sequence[Rollout], policy_version: int) -> RolloutChunk:
    """Return the sizes of rollouts with equal `on_policy`; `ref` is None."""
    n_4grams = [max(0, len(r.response_ids) - 3) for r in rollouts]
    n_distinct = [distinct_4grams(r.response_ids) for r in rollouts]
    return RolloutChunk(
        dp_rank=dp_rank,
        ref=None,
        n_sequences=len(rollouts),
        n_prompt_tokens=sum(len(r.prompt_ids) for r in rollouts),
        n_response_tokens=sum(len(r.response_ids) for r in rollouts),
        n_truncated=sum(r.finish_reason == "length" for r in rollouts),
        policy_version=policy_version,
        on_policy=rollouts[0].on_policy,
        sample_index=np.array([r.sample_index for r in rollouts], "<i4"),
        n_tokens=np.array([r.n_tokens for r in rollouts], "<i4"),
        n_4grams=sum(n_4grams),
        n_repeated_4grams=sum(n_4grams) - sum(n_distinct),
    )


def distinct_4grams(ids: np.ndarray) -> int:
    """Return the number of distinct sequences of 4 consecutive ids.

    Args:
        ids: [R] int32, not negative.
    """
    if len(ids) < 4:
        return 0
    wide = ids.astype(np.int64)
    _, pairs = np.unique(wide[:-1] << 32 | wide[1:], return_inverse=True)  # numbers the distinct pairs from 0
    return len(np.unique(pairs[:-2] * len(ids) + pairs[2:]))


def encode_sizes(chunk: RolloutChunk) -> bytes:
    """Encode all fields except `ref`."""
    head = _SIZES.pack(
        chunk.dp_rank,
        chunk.n_sequences,
        chunk.n_truncated,
        chunk.on_policy,
        chunk.n_prompt_tokens,
        chunk.n_response_tokens,
        chunk.policy_version,
        chunk.n_4grams,
        chunk.n_repeated_4grams,
    )
    return head + chunk.sample_index.tobytes() + chunk.n_tokens.tobytes()


def decode_sizes(data: bytes, ref: Any) -> RolloutChunk:
    """Decode `encode_sizes` and add the handle of the rollouts.

    Raises:
        DataError: truncated or malformed data.
    """
    if len(data) < _SIZES.size:
        raise DataError(f"the sizes of a chunk of rollouts are {len(data)} bytes, expected at least {_SIZES.size}")
    dp_rank, n, n_truncated, on_policy, n_prompt_tokens, n_response_tokens, *rest = _SIZES.unpack_from(data)
    version, n_4grams, n_repeated_4grams = rest
    if len(data) != _SIZES.size + 8 * n:
        raise DataError(f"the sizes of a chunk of {n} rollouts are {len(data)} bytes, expected {_SIZES.size + 8 * n}")
    sample_index, n_tokens = np.frombuffer(data, "<i4", offset=_SIZES.size).reshape(2, n)
    return RolloutChunk(
        dp_rank=dp_rank,
        ref=ref,
        n_sequences=n,
        n_prompt_tokens=n_prompt_tokens,
        n_response_tokens=n_response_tokens,
        n_truncated=n_truncated,
        policy_version=version,
        on_policy=on_policy,
        sample_index=sample_index,
        n_tokens=n_tokens,
        n_4grams=n_4grams,
        n_repeated_4grams=n_repeated_4grams,
    )


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
        response = prompt.response_ids
        if response is None:
            raise DataError(
                f"prompt {prompt.prompt_id} has no dataset response: it was loaded without data.response_key"
            )
        groups[prompt_index % dp_size].append(
            Rollout(
                prompt_id=prompt.prompt_id,
                sample_index=prompt_index * n,
                prompt_ids=prompt.token_ids,
                response_ids=response,
                rollout_logprobs=np.zeros(len(response), np.float32),
                version_spans=(),
                finish_reason="stop" if int(response[-1]) in eos_ids else "length",
                on_policy=False,
            )
        )
    for dp_rank, rollouts in sorted(groups.items()):
        for start in range(0, len(rollouts), chunk_size):
            chunk = rollouts[start : start + chunk_size]
            yield chunk, chunk_sizes(dp_rank, chunk, policy_version)

"""What an engine is asked to answer, as raw bytes: 12 a prompt and 4 a token, instead of a pickled object each.

The driver reads the prompt files, so a prompt's tokens leave it once, whatever rollout.n is. They are all that leaves
it: reference answers and the dataset's responses stay there, an engine needs neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gkd.errors import DataError
from gkd.types import Prompt

_MAX = 2**31 - 1


def encode_prompts(prompts: Sequence[Prompt], prompt_indices: Sequence[int]) -> bytes:
    """Ids and tokens of some prompts, and the place of each in the whole batch; int32.

    Raises:
        DataError: no prompts, or a number that is negative or over int32.
    """
    if not prompts:
        raise DataError("an engine was to be asked for nothing: a list of prompts is empty")
    rows = [(p.prompt_id, index, len(p.token_ids)) for p, index in zip(prompts, prompt_indices, strict=True)]
    numbers = np.concatenate([[len(rows)], np.ravel(rows), *(p.token_ids for p in prompts)])
    if int(numbers.min()) < 0 or int(numbers.max()) > _MAX:
        span = f"[{int(numbers.min())}, {int(numbers.max())}]"
        raise DataError(f"ids, indices and tokens of prompts span {span}; they travel as numbers from 0 to {_MAX}.")
    return numbers.astype("<i4").tobytes()


def decode_prompts(data: bytes) -> tuple[list[Prompt], list[int]]:
    """(prompts, their indices) that `encode_prompts` was given.

    Raises:
        DataError: the data end too early or too late, or are no such numbers.
    """
    numbers = np.frombuffer(data, "<i4", count=len(data) // 4)
    n = int(numbers[0]) if len(numbers) else 0
    head, ids = numbers[1 : 1 + 3 * n], numbers[1 + 3 * n :]
    rows = head[: len(head) // 3 * 3].reshape(-1, 3)
    n_tokens = int(rows[:, 2].sum(dtype=np.int64))
    if n < 1 or len(rows) != n or int(numbers.min()) < 0 or 4 * (1 + 3 * n + n_tokens) != len(data):
        raise DataError(f"{n} prompts and their tokens are not {len(data)} bytes")
    tokens = np.split(ids, np.cumsum(rows[:-1, 2]))
    prompts = [Prompt(prompt_id, ids) for prompt_id, ids in zip(rows[:, 0].tolist(), tokens, strict=True)]
    return prompts, rows[:, 1].tolist()

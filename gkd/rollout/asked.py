"""What an engine is asked to answer, as raw bytes: 12 a prompt and 4 a token, instead of a pickled object each.

The driver reads the prompt files, so a prompt's tokens leave it once, whatever rollout.n is. They are all that leaves
it: reference answers and the dataset's responses stay there, an engine needs neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gkd.errors import DataError
from gkd.types import Prompt


def encode_prompts(prompts: Sequence[Prompt], places: Sequence[int]) -> bytes:
    """Ids and tokens of some prompts, and the place of each in the whole batch; int32."""
    rows = [(p.prompt_id, place, len(p.token_ids)) for p, place in zip(prompts, places, strict=True)]
    numbers = np.concatenate([[len(rows)], np.ravel(rows), *(p.token_ids for p in prompts)])
    return numbers.astype("<i4").tobytes()


def decode_prompts(data: bytes) -> tuple[list[Prompt], list[int]]:
    """(prompts, their places) that `encode_prompts` was given.

    Raises:
        DataError: the data end too early or too late.
    """
    numbers = np.frombuffer(data, "<i4", count=len(data) // 4)
    n = int(numbers[0]) if len(numbers) else 0
    head, ids = numbers[1 : 1 + 3 * n], numbers[1 + 3 * n :]
    rows = head[: len(head) // 3 * 3].reshape(-1, 3)
    if len(rows) != n or 4 * (1 + 3 * n + int(rows[:, 2].sum())) != len(data):
        raise DataError(f"{n} prompts and their tokens are not {len(data)} bytes")
    tokens = np.split(ids, np.cumsum(rows[:-1, 2]))
    prompts = [Prompt(prompt_id, ids) for prompt_id, ids in zip(rows[:, 0].tolist(), tokens, strict=True)]
    return prompts, rows[:, 1].tolist()

"""Keep rows of a prompt file for the functions that judge responses: one block of bytes, which processes can share.

The driver reads the files. A row travels to the hosts once, at the start, and is found by the prompt's id.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gkd.errors import DataError
from gkd.types import Prompt


def encode_row(where: str, row: Mapping[str, Any]) -> bytes:
    """Encode a row and its file and line; parquet has values that JSON does not have."""
    return pickle.dumps((where, dict(row)), protocol=5)


def decode_row(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return file and line of a row, and its columns."""
    where, row = pickle.loads(data)
    return where, row


@dataclass(frozen=True, slots=True)
class RowTable:
    """Encoded rows by prompt id. Arrays, so that Ray maps them into each process without a copy."""

    prompt_ids: np.ndarray  # [n] int64, ascending
    ends: np.ndarray  # [n] int64, of each row in `data`
    data: np.ndarray  # [bytes] uint8

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> RowTable:
        """Return the rows of prompts that were loaded with them, in the order of their ids."""
        rows = [prompt.row or b"" for prompt in prompts]
        ids = np.array([prompt.prompt_id for prompt in prompts], np.int64)
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return cls(ids, ends, np.frombuffer(b"".join(rows), np.uint8))

    def row(self, prompt_id: int) -> bytes:
        """Return the encoded row of a prompt. Raises DataError: there is none."""
        at = bisect_left(self.prompt_ids, prompt_id)  # np.searchsorted releases the GIL, which other threads then take
        if at == len(self.prompt_ids) or self.prompt_ids[at] != prompt_id:
            raise DataError(
                f"prompt {prompt_id} has no row in the data of this run, and a reward function needs it. "
                "Fix: replay batches with the data.train_files of the run that recorded them"
            )
        start = int(self.ends[at - 1]) if at else 0
        return self.data[start : int(self.ends[at])].tobytes()

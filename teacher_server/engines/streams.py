"""Row streams of the engines: compute or convert a large matrix a few rows at a time.

Letters: R rows, C columns, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from teacher_server.wire.protocol import RowDtype, Wire

_MAX_FP16 = 65504.0
_ROW_DTYPES: dict[torch.dtype, RowDtype] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}


def row_dtype(dtype: torch.dtype, wire: Wire) -> RowDtype:
    """Return the dtype on the wire: two-byte dtypes unchanged, float32 as float16 if the wire is compact."""
    return "float16" if wire == "fp16" and dtype == torch.float32 else _ROW_DTYPES[dtype]


def to_numpy(rows: torch.Tensor) -> np.ndarray:
    """Return [R, C], contiguous, of a dtype of `payload.WIRE_DTYPES`; bfloat16 as uint16 of the same bits."""
    if rows.dtype == torch.bfloat16:
        rows = rows.contiguous().view(torch.uint16)
    return rows.contiguous().cpu().numpy()


class MatrixStream:
    """A `RowStream` of a matrix in memory: hidden states, or the LM head.

    Args:
        matrix: [R, C] in the engine's dtype; kept until `close`.
    """

    def __init__(self, matrix: torch.Tensor, wire: Wire) -> None:
        self.n_rows, self.n_cols = matrix.shape
        self.dtype = row_dtype(matrix.dtype, wire)
        self._matrix: torch.Tensor | None = matrix

    @torch.inference_mode()
    def rows(self, start: int, stop: int) -> np.ndarray:
        """See `RowStream.rows`. Also raises ArithmeticError for a float32 number above the float16 range."""
        if self._matrix is None:
            raise RuntimeError("rows() of a closed stream")
        piece = self._matrix[start:stop]
        largest = float(piece.abs().amax())
        if not np.isfinite(largest):
            raise ArithmeticError("a NaN or an infinity in the hidden states or the LM head")
        if self.dtype == "float16" and piece.dtype == torch.float32:
            if largest > _MAX_FP16:
                raise ArithmeticError(f"{largest:g} is above float16's maximum {_MAX_FP16:g}. Fix: use wire fp32.")
            piece = piece.half()
        return to_numpy(piece)

    def close(self) -> None:
        """See `RowStream.close`."""
        self._matrix = None


class LogitsStream:
    """A `RowStream` of logits / temperature, each row shifted so that its maximum is 0.

    The LM head runs on the requested rows at each call; a CPU is efficient from about 50 rows on.

    Args:
        hidden: [R, H], kept until `close`.
        logits_of: `signals.LogitsOf`.
        n_vocab: number of columns that are kept.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        temperature: float,
        n_vocab: int,
        wire: Wire,
    ) -> None:
        self.n_rows, self.n_cols = len(hidden), n_vocab
        self.dtype: RowDtype = "float16" if wire == "fp16" else "float32"
        self._hidden: torch.Tensor | None = hidden
        self._logits_of = logits_of
        self._temperature = temperature

    @torch.inference_mode()
    def rows(self, start: int, stop: int) -> np.ndarray:
        """See `RowStream.rows`."""
        if self._hidden is None:
            raise RuntimeError("rows() of a closed stream")
        logits = self._logits_of(self._hidden[start:stop])[:, : self.n_cols].float()
        logits.sub_(logits.amax(-1, keepdim=True))
        if self._temperature != 1.0:
            logits.div_(self._temperature)
        # A row with maximum +inf becomes NaN, so the minimum detects every fault.
        if not np.isfinite(float(logits.amin())):
            raise ArithmeticError("the model's logits contain a NaN or an infinity")
        if self.dtype == "float16":
            logits = logits.clamp_(min=-_MAX_FP16).half()
        return to_numpy(logits)

    def close(self) -> None:
        """See `RowStream.close`."""
        self._hidden = None

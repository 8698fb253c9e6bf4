"""Run the two passes over rows of logits that every loss needs.

    statistics      read the logits: log-sum-exp and mean logit of each row
    write_gradient  read the logits, write the gradient

`TorchRows` runs on any device. It processes pieces that fit a core's cache, so that only the logits
themselves go through memory. `gkd.loss.triton_rows.TritonRows` does the same in two CUDA kernels.

Letters: n rows, v vocabulary columns of this rank (no padding), C ids per row.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gkd.errors import ConfigError

# Float32 elements of one piece. On CPU they should fit the cache together with their logits; on a GPU there should be
# enough of them to occupy the device.
_PIECE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 22}

# exp(z) can replace exp(z - log_normalizer) below this: nothing overflows, and no share above 1e-16 is a denormal.
_SAFE_NORMALIZER = 50.0


class RowGradient(NamedTuple):
    """Hold what the gradient of rows is made of."""

    columns: Tensor  # [n, C] int64 in [0, v); -1 = none. Repeated columns are summed
    column_grad: Tensor  # [n, C] statistics dtype; ignored where the column is -1
    row_grad: Tensor  # [n]
    log_normalizer: Tensor  # [n] norm, the log-sum-exp of z over the whole vocabulary, all ranks
    temperature: float


class RowKernels(Protocol):
    name: str

    def statistics(self, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return, for each row of z = logits / temperature, log sum_v exp z_v and sum_v softmax(z)_v z_v.

        Args:
            logits: [n, v] any float dtype, v > 0, rows may be strided; -inf allowed. A row of only -inf (all mass
                is in another shard) gives -inf and 0.

        Returns:
            [n] and [n], float32 (float64 for float64 logits).
        """

    def write_gradient(self, logits: Tensor, out: Tensor, by: RowGradient) -> None:
        """Set out[n, v] = (sum_c [columns[n, c] == v] column_grad[n, c] - row_grad[n] exp(z[n, v] - norm[n])) / T.

        Args:
            logits: [n, v].
            out: [n, v], dtype of the logits; may be `logits` itself.
        """


class TorchRows:
    """The passes in torch operations."""

    name = "torch"

    def statistics(self, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits, dtype = logits.detach(), statistics_dtype(logits)
        plain = temperature == 1.0 and logits.dtype == dtype
        slices = pieces(logits)
        log_sum = torch.empty(len(logits), dtype=dtype, device=logits.device)
        mean = torch.empty_like(log_sum)
        buffer = _scratch(logits, slices)
        scaled = None if plain else torch.empty_like(buffer)
        for rows in slices:
            z = logits[rows] if scaled is None else scaled[: _length(rows)].copy_(logits[rows]).div_(temperature)
            # softmax has a fast exp, but the sum it divides by is off by 5e-6 in a long row. That factor is the same in
            # the whole row, so it cancels in ratios to sums of `weights`.
            weights = torch.softmax(z, dim=-1, out=buffer[: _length(rows)])
            total = weights.sum(dim=-1)
            row_max = z.amax(dim=-1)
            log_sum[rows] = row_max + (total / weights.amax(dim=-1)).log()
            dot = weights.mul_(z).sum(dim=-1)
            if dot.isnan().any():  # 0 * -inf: an impossible token does not contribute to the mean
                dot = weights.nansum(dim=-1)
                nothing = row_max == -torch.inf
                log_sum[rows] = log_sum[rows].masked_fill(nothing, -torch.inf)
                dot = dot.masked_fill(nothing, 0.0)
                total = total.masked_fill(nothing, 1.0)
            mean[rows] = dot / total
        return log_sum, mean

    def write_gradient(self, logits: Tensor, out: Tensor, by: RowGradient) -> None:
        logits, dtype = logits.detach(), statistics_dtype(logits)
        columns, column_grad, row_grad, log_normalizer, temperature = by
        plain = temperature == 1.0 and logits.dtype == dtype and out.is_contiguous()
        # Column -1 adds zero to column 0, which does not change a real entry there.
        index = columns.clamp(min=0)
        added = column_grad.masked_fill(columns < 0, 0.0) / temperature
        share = SoftmaxShare(logits)
        scaled = None if plain else torch.empty_like(share.zeros)
        for rows in pieces(logits):
            if scaled is None:
                z = logits[rows]
                piece = out[rows]
            else:
                z = piece = scaled[: _length(rows)].copy_(logits[rows]).div_(temperature)
            share.write(z, piece, row_grad[rows] / -temperature, log_normalizer[rows])
            piece.scatter_add_(1, index[rows], added[rows])
            if scaled is not None:
                out[rows] = piece


class SoftmaxShare:
    """Compute factor[n] * exp(z[n, v] - log_normalizer[n]) for successive pieces of the same logits."""

    def __init__(self, logits: Tensor) -> None:
        self.zeros = _scratch(logits, pieces(logits)).zero_()

    def write(self, z: Tensor, out: Tensor, factor: Tensor, log_normalizer: Tensor) -> None:
        """Write one piece to `out`.

        Args:
            z, out: [n, v], n at most that of a piece; `out` contiguous, may be `z`.
            factor, log_normalizer: [n].
        """
        if out.is_cuda or not bool((log_normalizer.abs() <= _SAFE_NORMALIZER).all()):
            torch.sub(z, log_normalizer[:, None], out=out).exp_().mul_(factor[:, None])
            return
        # The backward of log_softmax, grad - exp(z) * sum_v grad_v, is the one torch operation that multiplies an exp
        # while it is in a register. If grad is zero except in column 0, that sum can be set to any value. After the
        # sum it is elementwise, so `out` may be `z`. Column 0 is corrected afterwards.
        grad = self.zeros[: len(z)]
        first = factor * (z[:, 0] - log_normalizer).exp()
        grad[:, 0] = -factor * (-log_normalizer).exp()
        torch.ops.aten._log_softmax_backward_data.out(grad, z, 1, z.dtype, out=out)
        out[:, 0] = first


def statistics_dtype(logits: Tensor) -> torch.dtype:
    """Return float64 for float64 logits (used by tests), else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def row_kernels(device: torch.device) -> RowKernels:
    """Return the kernels of a device: Triton's on CUDA, else torch's. Raises ConfigError: no triton on CUDA."""
    if device.type != "cuda":
        return TorchRows()
    try:
        from gkd.loss.triton_rows import TritonRows
    except ImportError as error:
        problem = f"triton, which computes the losses there, cannot be imported ({error})."
        raise ConfigError("trainer.device", "cuda", problem, "install triton.") from error
    return TritonRows()


def pieces(logits: Tensor) -> list[slice]:
    """Return slices of rows to process one after the other; on CPU each has at least one row per thread."""
    n, v = logits.shape
    elements = _PIECE_ELEMENTS.get(logits.device.type, _PIECE_ELEMENTS["cuda"])
    step = max(1, elements // max(v, 1))
    if logits.device.type == "cpu":  # softmax assigns whole rows to threads
        threads = torch.get_num_threads()
        step = max(step // threads, 1) * threads
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _scratch(logits: Tensor, slices: list[slice]) -> Tensor:
    """Return memory for the largest piece, which is the first."""
    shape = (_length(slices[0]) if slices else 0, logits.shape[1])
    return torch.empty(shape, dtype=statistics_dtype(logits), device=logits.device)

"""The two passes over rows of logits that every loss needs, and who runs them.

    statistics      read the logits: log-sum-exp and mean logit of each row
    write_gradient  read the logits, write the gradient

`TorchRows` runs anywhere; it walks over pieces that fit a core's cache, so that only the logits
themselves go through memory. `gkd.loss.triton_rows.TritonRows` is the same in two CUDA kernels.

Letters: n rows, v vocabulary columns of this rank (no padding), C ids of a row.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gkd.errors import ConfigError
from gkd.log import get_logger

log = get_logger("loss")

# Float32 working memory of one piece. On CPU it should stay in the cache with the logits it is made of; on a GPU it
# should be large enough to fill the machine.
_PIECE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 22}

# exp(z) instead of exp(z - log_normalizer) is safe where nothing overflows and no share above 1e-16 is a denormal.
_SAFE_NORMALIZER = 50.0


class RowKernels(Protocol):
    name: str

    def statistics(self, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Of z = logits / temperature, each row: log sum_v exp z_v, and sum_v softmax(z)_v z_v.

        Args:
            logits: [n, v] any float dtype, v > 0, rows may be strided; -inf allowed; a whole row of
                it, all of whose mass is in another shard, gives -inf and 0.

        Returns:
            [n] and [n], float32 (float64 for float64 logits).
        """
        ...

    def write_gradient(
        self,
        logits: Tensor,
        out: Tensor,
        *,
        columns: Tensor,
        column_grad: Tensor,
        row_grad: Tensor,
        log_normalizer: Tensor,
        temperature: float,
    ) -> None:
        """out[n, v] = (sum_c [columns[n, c] == v] column_grad[n, c] - row_grad[n] exp(z[n, v] - norm[n])) / T.

        Args:
            logits: [n, v].
            out: [n, v], dtype of the logits; may be `logits` itself.
            columns: [n, C] int64 in [0, v); -1 = none. Repeats add up.
            column_grad: [n, C] statistics dtype; ignored where the column is -1.
            row_grad: [n].
            log_normalizer: [n] norm, the log-sum-exp of z over the whole vocabulary, all ranks.
        """
        ...


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
            # One operation that is fast at exp; but its sum, which is in `weights` as a factor, is 5e-6 off in a long
            # row. That factor is the same in all of the row, so it goes away in ratios to sums that are good.
            weights = torch.softmax(z, dim=-1, out=buffer[: _length(rows)])
            total = weights.sum(dim=-1)
            row_max = z.amax(dim=-1)
            log_sum[rows] = row_max + (total / weights.amax(dim=-1)).log()
            dot = weights.mul_(z).sum(dim=-1)
            if dot.isnan().any():  # 0 * -inf: a token that cannot be has no share in the mean
                dot = weights.nansum(dim=-1)
                nothing = row_max == -torch.inf
                log_sum[rows] = log_sum[rows].masked_fill(nothing, -torch.inf)
                dot, total = dot.masked_fill(nothing, 0.0), total.masked_fill(nothing, 1.0)
            mean[rows] = dot / total
        return log_sum, mean

    def write_gradient(
        self,
        logits: Tensor,
        out: Tensor,
        *,
        columns: Tensor,
        column_grad: Tensor,
        row_grad: Tensor,
        log_normalizer: Tensor,
        temperature: float,
    ) -> None:
        logits, dtype = logits.detach(), statistics_dtype(logits)
        plain = temperature == 1.0 and logits.dtype == dtype and out.is_contiguous()
        # A column that is elsewhere adds zero to column 0: a scatter that adds loses nothing beside a real one there.
        index = columns.clamp(min=0)
        added = column_grad.masked_fill(columns < 0, 0.0) / temperature
        share = SoftmaxShare(logits)
        scaled = None if plain else torch.empty_like(share.zeros)
        for rows in pieces(logits):
            if scaled is None:
                z, piece = logits[rows], out[rows]
            else:
                z = piece = scaled[: _length(rows)].copy_(logits[rows]).div_(temperature)
            share.write(z, piece, row_grad[rows] / -temperature, log_normalizer[rows])
            piece.scatter_add_(1, index[rows], added[rows])
            if scaled is not None:
                out[rows] = piece


class SoftmaxShare:
    """factor[n] * exp(z[n, v] - log_normalizer[n]), for piece after piece of the same logits."""

    def __init__(self, logits: Tensor) -> None:
        self.zeros = _scratch(logits, pieces(logits)).zero_()

    def write(self, z: Tensor, out: Tensor, factor: Tensor, log_normalizer: Tensor) -> None:
        """
        Args:
            z, out: [n, v], n at most that of a piece; `out` contiguous, may be `z`.
            factor, log_normalizer: [n].
        """
        if out.is_cuda or not bool((log_normalizer.abs() <= _SAFE_NORMALIZER).all()):
            torch.sub(z, log_normalizer[:, None], out=out).exp_().mul_(factor[:, None])
            return
        # The backward of log_softmax, grad - exp(z) * sum_v grad_v, is the one operation that multiplies an exp while
        # it is in a register. With a grad that is zero but for column 0, that sum is ours to choose. It works element
        # by element after the sum, so `out` may be `z`; column 0 is put right afterwards.
        grad = self.zeros[: len(z)]
        first = factor * (z[:, 0] - log_normalizer).exp()
        grad[:, 0] = -factor * (-log_normalizer).exp()
        torch.ops.aten._log_softmax_backward_data.out(grad, z, 1, z.dtype, out=out)
        out[:, 0] = first


def statistics_dtype(logits: Tensor) -> torch.dtype:
    """float32, whatever the logits are; float64 for float64, which is for tests."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def row_kernels(choice: str, device: torch.device) -> RowKernels:
    """The kernels of `actor.loss_kernel`: auto | torch | triton. What was chosen is logged.

    Raises:
        ConfigError: triton where there is no CUDA device, or no triton.
    """
    if choice not in ("auto", "torch", "triton"):
        raise ConfigError("actor.loss_kernel", choice, "is not a kernel.", "use auto, torch or triton.")
    wanted = ("triton" if device.type == "cuda" else "torch") if choice == "auto" else choice
    kernels: RowKernels = TorchRows()
    if wanted == "triton":
        if device.type != "cuda":
            raise ConfigError("actor.loss_kernel", "triton", f"the student is on {device.type}.", "use auto or torch.")
        try:
            from gkd.loss.triton_rows import TritonRows
        except ImportError as error:
            fix = "use torch, or install triton."
            raise ConfigError("actor.loss_kernel", choice, f"triton cannot be imported ({error}).", fix) from error
        kernels = TritonRows()
    log.info("softmax kernels of the loss: %s (actor.loss_kernel: %s)", kernels.name, choice)
    return kernels


def pieces(logits: Tensor) -> list[slice]:
    """Slices of rows to work on one after the other; on CPU each has a row or more for every thread."""
    n, v = logits.shape
    elements = _PIECE_ELEMENTS.get(logits.device.type, _PIECE_ELEMENTS["cuda"])
    step = max(1, elements // max(v, 1))
    if logits.device.type == "cpu":  # softmax gives whole rows to threads
        threads = torch.get_num_threads()
        step = max(step // threads, 1) * threads
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _scratch(logits: Tensor, slices: list[slice]) -> Tensor:
    """Memory for the largest of the pieces: the first."""
    shape = (_length(slices[0]) if slices else 0, logits.shape[1])
    return torch.empty(shape, dtype=statistics_dtype(logits), device=logits.device)

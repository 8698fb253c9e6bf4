"""Implement `RowKernels` as two Triton kernels that each traverse the logits once in GPU memory.

    statistics      reads the logits once
    write_gradient  reads them once and writes the gradient once, optionally over the logits

One program per row. Both kernels are memory-bound, so they need 16-byte loads per thread with enough of them in
flight. All arithmetic is float32.

For tests: with TRITON_INTERPRET=1 in the environment before triton is first imported, the same code runs on CPU.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from gkd.errors import NumericsError

if TYPE_CHECKING:
    from gkd.loss.row_kernels import RowGradient

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# log2 of a share that is zero in float32. -inf instead would give 0 * -inf in the mean.
_NOTHING = tl.constexpr(-200.0)
_LN_2 = tl.constexpr(math.log(2.0))
_COMPARED_AT_ONCE = 4096  # pairs of ids; 16 per thread with 8 warps


class TritonRows:
    """The passes as CUDA kernels. See `gkd.loss.row_kernels.RowKernels`.

    Args:
        block: columns per iteration of a program, a power of two. 8192 with 8 warps gives a thread 32 elements: four
            16-byte loads of bf16 or eight of float32, issued before the first is used. Fewer do not saturate the
            memory bandwidth; more use registers that limit how many programs run on a multiprocessor.
        num_warps: warps per program, a power of two.

    Raises:
        ConfigError: in both methods, if tensors are not on a CUDA device.
        NumericsError: in both methods, for a dtype other than float32, bfloat16 and float16, or for rows whose
            columns are not adjacent in memory.
    """

    name = "triton"

    def __init__(self, block: int = 8192, num_warps: int = 8) -> None:
        self._block = block
        self._num_warps = num_warps

    def statistics(self, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        _check(logits)
        n, v = logits.shape
        log_sum = torch.empty(n, dtype=torch.float32, device=logits.device)
        mean = torch.empty_like(log_sum)
        vector = 16 // logits.element_size()
        lanes = 32 * self._num_warps
        if n:
            with torch.cuda.device_of(logits):  # triton launches on the current device, not on that of the tensors
                _statistics[(n,)](
                    logits,
                    log_sum,
                    mean,
                    logits.stride(0),
                    v,
                    1.0 / (temperature * math.log(2.0)),
                    LOADS=max(self._block // (lanes * vector), 1),
                    LANES=lanes,
                    VECTOR=vector,
                    num_warps=self._num_warps,
                )
        return log_sum, mean

    def write_gradient(self, logits: Tensor, out: Tensor, by: RowGradient) -> None:
        _check(logits)
        _check(out)
        n, v = logits.shape
        n_ids = by.columns.shape[1]
        ids = max(triton.next_power_of_2(n_ids), 16) if n_ids else 0
        if n:
            with torch.cuda.device_of(logits):
                _write_gradient[(n,)](
                    logits,
                    out,
                    by.columns.contiguous(),
                    by.column_grad.contiguous(),
                    by.row_grad.contiguous(),
                    by.log_normalizer.contiguous(),
                    logits.stride(0),
                    out.stride(0),
                    v,
                    n_ids,
                    1.0 / by.temperature,
                    1.0 / (by.temperature * math.log(2.0)),
                    BLOCK=self._block,
                    IDS=ids,
                    COMPARED=max(min(ids, _COMPARED_AT_ONCE // ids), 1) if ids else 0,
                    num_warps=self._num_warps,
                )


def _check(logits: Tensor) -> None:
    interpreted = not isinstance(_statistics, triton.runtime.JITFunction)
    if not (logits.is_cuda or interpreted):
        raise NumericsError(f"Triton's loss kernels: the logits are on {logits.device}. Fix: move them to a GPU")
    if logits.dtype not in _DTYPES:
        raise NumericsError(
            f"Triton's loss kernels: the logits are {logits.dtype}. Fix: use float32, bfloat16 or float16"
        )
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise NumericsError(
            f"Triton's loss kernels: columns must be adjacent in memory; the strides are {logits.stride()}."
        )


# The caller passes torch tensors and numbers. Inside a kernel they are pointers and scalars, both typed `tl.tensor`.
# In both kernels `scale` is log2(e) / T, so that exp2((x - m) * scale) is exp((x - m) / T). The difference is computed
# first: it is small where the share is large, so the rounding error of the product is small, too.


@triton.jit
def _statistics(
    logits: tl.tensor,
    log_sum: tl.tensor,
    mean: tl.tensor,
    row_stride: tl.tensor,
    v: tl.tensor,
    scale: tl.tensor,
    LOADS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    # One lane is one thread, which loads VECTOR elements at once, LOADS times per iteration. Each lane has its own
    # maximum and sums, so threads do not synchronize inside the loop; the lanes are reduced once, at the end.
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride  # a batch of rows has more than 2^31 elements
    load = tl.arange(0, LOADS)
    lane = tl.arange(0, LANES)
    place = tl.arange(0, VECTOR)
    within = (load[:, None, None] * LANES + lane[None, :, None]) * VECTOR + place[None, None, :]
    run_max = tl.full([LANES], -float("inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    dot = tl.zeros([LANES], tl.float32)
    for start in range(0, v, LOADS * LANES * VECTOR):
        offsets = start + within
        x = tl.load(logits + offsets, mask=offsets < v, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(run_max, tl.max(tl.max(x, axis=2), axis=0))
        # While a lane has seen only -inf, any finite base is correct.
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
        # These maxima propagate NaN, so that a NaN among the logits shows in the results.
        kept_log = tl.maximum((run_max - base) * scale, _NOTHING, propagate_nan=tl.PropagateNan.ALL)
        share_log = tl.maximum((x - base[None, :, None]) * scale, _NOTHING, propagate_nan=tl.PropagateNan.ALL)
        kept = tl.exp2(kept_log)
        share = tl.exp2(share_log)
        dot = kept * (dot + total * kept_log) + tl.sum(tl.sum(share * share_log, axis=2), axis=0)
        total = kept * total + tl.sum(tl.sum(share, axis=2), axis=0)
        run_max = new_max
    row_max = tl.max(run_max, axis=0)
    base_row = tl.where(row_max == -float("inf"), 0.0, row_max)
    lane_log = tl.maximum((run_max - base_row) * scale, _NOTHING, propagate_nan=tl.PropagateNan.ALL)
    lane_share = tl.exp2(lane_log)
    dot_row = tl.sum(lane_share * (dot + total * lane_log), axis=0)
    total_row = tl.sum(lane_share * total, axis=0)
    row_max = row_max * (scale * _LN_2)  # now in units of z
    tl.store(log_sum + row, row_max + tl.log(total_row))
    # A row of only -inf has no mean; the 0 has no weight when the shards of a vocabulary are combined.
    tl.store(mean + row, tl.where(total_row == 0.0, 0.0, row_max + dot_row / total_row * _LN_2))


@triton.jit
def _write_gradient(
    logits: tl.tensor,
    out: tl.tensor,
    columns: tl.tensor,
    column_grad: tl.tensor,
    row_grad: tl.tensor,
    log_normalizer: tl.tensor,
    logits_stride: tl.tensor,
    out_stride: tl.tensor,
    v: tl.tensor,
    n_ids: tl.tensor,
    inv_temperature: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
    IDS: tl.constexpr,
    COMPARED: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    logits += row.to(tl.int64) * logits_stride
    out += row.to(tl.int64) * out_stride
    columns += row.to(tl.int64) * n_ids
    column_grad += row.to(tl.int64) * n_ids
    factor = -tl.load(row_grad + row).to(tl.float32) * inv_temperature
    normalizer = tl.load(log_normalizer + row).to(tl.float32) / inv_temperature  # in units of the logits

    if IDS > 0:
        ids = tl.arange(0, IDS)
        column = tl.load(columns + ids, mask=ids < n_ids, other=-1).to(tl.int32)
        x_at_ids = tl.load(logits + column, mask=column >= 0, other=0.0).to(tl.float32)
        # All entries of one column store the column's sum, so their order does not matter.
        added = tl.zeros([IDS], tl.float32)
        for first in range(0, n_ids, COMPARED):
            indices = first + tl.arange(0, COMPARED)
            other = tl.load(columns + indices, mask=indices < n_ids, other=-1).to(tl.int32)
            grad = tl.load(column_grad + indices, mask=indices < n_ids, other=0.0).to(tl.float32)
            added += tl.sum(tl.where(column[:, None] == other[None, :], grad[None, :], 0.0), axis=1)
        at_ids = added * inv_temperature + factor * tl.exp2((x_at_ids - normalizer) * scale)
        tl.debug_barrier()  # `out` may be the logits: all threads must have read before one writes

    within = tl.arange(0, BLOCK)
    for start in range(0, v, BLOCK):
        offsets = start + within
        x = tl.load(logits + offsets, mask=offsets < v, other=0.0).to(tl.float32)
        gradient = factor * tl.exp2((x - normalizer) * scale)
        tl.store(out + offsets, gradient.to(out.dtype.element_ty), mask=offsets < v)

    if IDS > 0:
        tl.debug_barrier()  # the loop has also written these columns; replace them after that
        tl.store(out + column, at_ids.to(out.dtype.element_ty), mask=column >= 0)

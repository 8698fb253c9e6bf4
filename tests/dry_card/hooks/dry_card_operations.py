"""Give values to torch, and to operations without a CPU form: some of torch's, and vLLM's attention.

torch and vLLM call `after_torch` and `after_vllm` in each process, as the entry points in this folder name them.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

VALUES = os.environ.get("DRY_CARD_VALUES") == "1"
KEPT: list[torch.library.Library] = []  # A library that is collected takes its operations with it.


def register(namespace: str, *calls: Any) -> None:
    """Make functions the CUDA form of the operations of their names; `mm_dtype` is mm.dtype."""
    KEPT.append(library := torch.library.Library(namespace, "IMPL"))
    for call in calls:
        library.impl(call.__name__.replace("m_dtype", "m.dtype"), call, "CUDA", allow_override=True)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> Tensor:
    """Compute attention of one sequence on the CPU.

    Args:
        q, k, v: [tokens, heads, size]; k and v may have fewer heads. With `causal` the last rows of q and k match.
    """
    q, k, v = (t.cpu().transpose(0, 1) for t in (q, k, v))
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1]) if causal else None
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).transpose(0, 1)


# ---- torch


def packed_attention(q, k, v, cu_q, cu_k, causal, scale, window):  # type: ignore
    assert cu_q is not None, "[dry_card] padded flash attention has no values"
    parts = zip(*(t.split(cu.diff().tolist()) for t, cu in ((q, cu_q), (k, cu_k), (v, cu_k))), strict=True)
    return torch.cat([attention(*part, scale, causal or window["window_size_right"] == 0) for part in parts])


def _flash_attention_forward(q, k, v, cu_q, cu_k, m, n, dropout, causal, debug, *, scale=None, **window):  # type: ignore
    sums, seed = torch.zeros(q.shape[1], len(q), device=q.device), torch.zeros(2, dtype=torch.uint64, device=q.device)
    out = packed_attention(q, k, v, cu_q, cu_k, causal, scale, window).to(q.device)
    return out, sums, seed, seed[0].clone(), torch.empty(0, device=q.device)


def _flash_attention_backward(g, q, k, v, o, sums, cu_q, cu_k, m, n, dropout, causal, *_, scale=None, **window):  # type: ignore
    leaves = [t.cpu().requires_grad_() for t in (q, k, v)]
    # Within an operation autograd is off.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        out = packed_attention(*leaves, cu_q, cu_k, causal, scale, window)
        return tuple(grad.to(q.device) for grad in torch.autograd.grad(out, leaves, g.cpu()))


def _fused_rms_norm_backward(g, x, shape, rstd, weight, mask):  # type: ignore
    """Compute aten::_fused_rms_norm_backward."""
    dims, wide, normed = tuple(range(-len(shape), 0)), g.float(), x.float() * rstd
    weighted = wide if weight is None else wide * weight.float()
    dx = (weighted - normed * (weighted * normed).mean(dims, keepdim=True)) * rstd
    wanted = weight is not None and mask[1]
    dw = (wide * normed).flatten(0, x.ndim - len(shape) - 1).sum(0).to(weight.dtype) if wanted else None
    return dx.to(x.dtype) if mask[0] else None, dw


def mm_dtype(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.to(dtype) @ b.to(dtype)


def addmm_dtype(c: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return c.to(dtype) * beta + a.to(dtype) @ b.to(dtype) * alpha


def addmm_dtype_out(c, a, b, dtype, *, beta=1, alpha=1, out):  # type: ignore
    return out.copy_(addmm_dtype(c, a, b, dtype, beta=beta, alpha=alpha))


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Compute aten::histc of integers, which the CPU's kernel refuses."""
    assert not x.dtype.is_floating_point, "[dry_card] histc has values for integers alone"
    return torch.histc(x.cpu().double(), bins, float(min), float(max)).to(x.dtype).to(x.device)


def after_torch() -> None:
    """Load the values of all operations that have a CPU form, and add the others."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's graphs have no stand-in.
    if VALUES:
        torch.ops.load_library(os.path.join(os.environ["DRY_CARD_BUILD"], "values.so"))
        register("aten", _flash_attention_forward, _flash_attention_backward, _fused_rms_norm_backward)
        register("aten", mm_dtype, addmm_dtype, addmm_dtype_out, histc)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)


# ---- vLLM in eager mode


def reshape_and_cache_flash(key, value, key_cache, value_cache, slots, *_):  # type: ignore
    rows = slots >= 0
    at = slots[rows] // key_cache.shape[1], slots[rows] % key_cache.shape[1]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache[at] = new[: len(slots)][rows].to(cache.dtype)


def paged_attention(q, k, v, out, cu_q, used_k, scale, blocks):  # type: ignore
    """Compute attention over caches [blocks, block size, heads, size]."""
    for i, ((first, last), m) in enumerate(zip(pairwise(cu_q.tolist()), used_k.tolist(), strict=False)):
        if last > first and m > 0:
            of = blocks[i, : -(-m // k.shape[1])].long()
            keys, values = (cache[of].flatten(0, 1)[:m] for cache in (k, v))
            out[first:last] = attention(q[first:last], keys, values, scale, True).to(out.device)
    return out


# vLLM passes the arguments of these two by name.
def unified_attention(q, k, v, out, *, cu_seqlens_q, seqused_k, softmax_scale, block_table, **_):  # type: ignore
    paged_attention(q, k, v, out, cu_seqlens_q, seqused_k, softmax_scale, block_table)


def varlen_attention(q, k, v, *, cu_seqlens_q, seqused_k, softmax_scale, block_table, out=None, **_):  # type: ignore
    result = torch.empty_like(q) if out is None else out
    return paged_attention(q, k, v, result, cu_seqlens_q, seqused_k, softmax_scale, block_table)


def add_lora_linear(self, y, x, lora_a, lora_b, scale, widths, *_, **__):  # type: ignore
    rows, out, first = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1]), 0
    adapter = self.token_lora_indices[: len(rows)]
    for a, b, width in zip(lora_a, lora_b, widths, strict=True):
        for k in adapter[adapter >= 0].unique().tolist():
            on = adapter == k
            delta = rows[on].float() @ a[k, 0].float().T @ b[k, 0].float().T * scale
            out[on, first : first + width] += delta.to(out.dtype)
        first += width


def refuse(name: str) -> None:
    """Make an operation on CUDA raise an error, because its kernel would leave the result as it is."""

    def no_values(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"[dry_card] {name} has no values. Fix: write it in {__file__}")

    namespace, _, call = name.partition("::")
    KEPT.append(library := torch.library.Library(namespace, "IMPL"))
    library.impl(call, no_values, "CUDA", allow_override=True)


def after_vllm() -> None:
    """Register vLLM's operations, and replace the kernels that it calls as functions."""
    if not VALUES:
        return
    from vllm import _custom_ops  # noqa: F401  It defines the operations.
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    from vllm.ir.op import IrOp
    from vllm.lora.punica_wrapper import punica_gpu
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash, triton_unified_attention
    from vllm.vllm_flash_attn import flash_attn_interface

    # Layers compute with operations of torch. An operation of vLLM that is called nevertheless ends the run.
    CustomOp.enabled = classmethod(lambda cls: False)
    IrOp.dispatch = lambda self, *_, **__: self.impls["native"]
    VocabParallelEmbedding.use_fused_embedding = property(lambda self: False, lambda self, value: None)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("_C") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            refuse(name)
    register("_C_cache_ops", reshape_and_cache_flash)
    for old, new in (
        (triton_unified_attention.unified_attention, unified_attention),
        (triton_reshape_and_cache_flash.triton_reshape_and_cache_flash, reshape_and_cache_flash),
        (flash_attn_interface.flash_attn_varlen_func, varlen_attention),
    ):
        for module in [m for name, m in sys.modules.items() if name.startswith("vllm")]:
            for name in [name for name, value in vars(module).items() if value is old]:
                setattr(module, name, new)  # Modules that were imported before have the function, too.
    punica_gpu.PunicaWrapperGPU.add_lora_linear = add_lora_linear
    # Its kernels have no values: NCCL is used instead.
    CustomAllreduce.__init__ = lambda self, *_, **__: setattr(self, "disabled", True)

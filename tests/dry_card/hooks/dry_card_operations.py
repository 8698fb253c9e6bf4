"""Give values to torch, and to operations without a CPU form: some of torch's, and vLLM's attention.

torch and vLLM call `after_torch` and `after_vllm` in each process, as the entry points in this folder name them.
"""

from __future__ import annotations

import inspect
import os
import sys
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

VALUES = os.environ.get("DRY_CARD_VALUES") == "1"
KEPT: list[torch.library.Library] = []  # A library that is collected takes its operations with it.


def register(name: str, call: Any) -> None:
    """Make a function the CUDA form of an operation, such as aten::mm.dtype."""
    namespace, _, operation = name.partition("::")
    KEPT.append(library := torch.library.Library(namespace, "IMPL"))
    library.impl(operation, call, "CUDA", allow_override=True)


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
    causal = causal or window["window_size_right"] == 0
    return torch.cat([attention(*part, scale=scale, causal=causal) for part in parts])


def flash_forward(q, k, v, cu_q, cu_k, m, n, dropout, causal, debug, *, scale=None, **window):  # type: ignore
    sums, seed = torch.zeros(q.shape[1], len(q), device=q.device), torch.zeros(2, dtype=torch.uint64, device=q.device)
    out = packed_attention(q, k, v, cu_q, cu_k, causal, scale, window).to(q.device)
    return out, sums, seed, seed[0].clone(), torch.empty(0, device=q.device)


def flash_backward(g, q, k, v, o, sums, cu_q, cu_k, m, n, dropout, causal, *_, scale=None, **window):  # type: ignore
    leaves = [t.cpu().requires_grad_() for t in (q, k, v)]
    # Within an operation autograd is off.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        out = packed_attention(*leaves, cu_q=cu_q, cu_k=cu_k, causal=causal, scale=scale, window=window)
        return tuple(grad.to(q.device) for grad in torch.autograd.grad(out, leaves, g.cpu()))


def rms_norm_backward(*arguments: Any) -> Any:
    from torch._decomp import decomposition_table  # It takes a second to import.

    return decomposition_table[torch.ops.aten._fused_rms_norm_backward.default](*arguments)


def mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.to(dtype) @ b.to(dtype)


def addmm(c, a, b, dtype, *, beta=1, alpha=1, out=None):  # type: ignore
    result = c.to(dtype) * beta + mm(a, b, dtype) * alpha
    return result if out is None else out.copy_(result)


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Compute aten::histc of integers, which the CPU's kernel refuses."""
    assert not x.dtype.is_floating_point, "[dry_card] histc has values for integers alone"
    return torch.histc(x.cpu().double(), bins, float(min), float(max)).to(x.dtype).to(x.device)


def after_torch() -> None:
    """Load the values of all operations that have a CPU form, and add the others."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's graphs have no stand-in.
    if VALUES:
        torch.ops.load_library(os.path.join(os.environ["DRY_CARD_BUILD"], "values.so"))
        register("aten::_flash_attention_forward", flash_forward)
        register("aten::_flash_attention_backward", flash_backward)
        register("aten::_fused_rms_norm_backward", rms_norm_backward)
        register("aten::mm.dtype", mm)
        register("aten::addmm.dtype", addmm)
        register("aten::addmm.dtype_out", addmm)
        register("aten::histc", histc)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)


# ---- vLLM in eager mode


def reshape_and_cache_flash(key, value, key_cache, value_cache, slots, *_):  # type: ignore
    rows = slots >= 0
    at = slots[rows] // key_cache.shape[1], slots[rows] % key_cache.shape[1]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache[at] = new[: len(slots)][rows].to(cache.dtype)


def paged_attention(q, k, v, *, out=None, cu_seqlens_q, seqused_k, softmax_scale, block_table, **_):  # type: ignore
    """Compute attention over caches [blocks, block size, heads, size]. vLLM passes the arguments by name."""
    out = torch.empty_like(q) if out is None else out
    for i, ((first, last), m) in enumerate(zip(pairwise(cu_seqlens_q.tolist()), seqused_k.tolist(), strict=False)):
        if last > first and m > 0:
            of = block_table[i, : -(-m // k.shape[1])].long()
            keys, values = (cache[of].flatten(0, 1)[:m] for cache in (k, v))
            out[first:last] = attention(q[first:last], keys, values, softmax_scale, True).to(out.device)
    return out


def add_lora_linear(self, y, x, lora_a, lora_b, scale, *_, **__):  # type: ignore
    rows, out = x.flatten(0, -2).float(), y.flatten(0, -2)
    adapter = self.token_lora_indices[: len(rows)]
    used = (adapter >= 0)[:, None]  # -1: without an adapter
    products = zip((a[adapter, 0].float() for a in lora_a), (b[adapter, 0].float() for b in lora_b), strict=True)
    out += torch.cat([torch.einsum("ti,tri,tor->to", rows, a, b) for a, b in products], 1).mul(used * scale).to(y.dtype)


def refuse(name: str, *_: Any, **__: Any) -> None:
    """Take the place of an operation whose kernel would leave the result as it is."""
    raise NotImplementedError(f"[dry_card] {name} has no values. Fix: write it in {__file__}")


def after_vllm() -> None:
    """Register vLLM's operations, and replace the kernels that it calls as functions."""
    from vllm.distributed.device_communicators import cuda_wrapper

    cuda_wrapper.find_loaded_library = lambda name: None  # It would find the real libcudart that torchvision has.
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
            register(name, partial(refuse, name))
    register("_C_cache_ops::reshape_and_cache_flash", reshape_and_cache_flash)
    calls = {
        triton_unified_attention.unified_attention: paged_attention,
        triton_reshape_and_cache_flash.triton_reshape_and_cache_flash: reshape_and_cache_flash,
        flash_attn_interface.flash_attn_varlen_func: paged_attention,
    }
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm")]:
        # A module that was imported before may have the function, too.
        vars(module).update({k: calls[v] for k, v in vars(module).items() if inspect.isfunction(v) and v in calls})
    punica_gpu.PunicaWrapperGPU.add_lora_linear = add_lora_linear
    # Its kernels have no values: NCCL is used instead.
    CustomAllreduce.__init__ = lambda self, *_, **__: setattr(self, "disabled", True)

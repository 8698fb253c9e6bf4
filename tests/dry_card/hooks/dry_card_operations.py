"""Give values to torch's operations on CUDA tensors and vLLM's attention: each calls its entry point in here."""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial, partialmethod
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

VALUES = os.environ.get("DRY_CARD_VALUES") == "1"
CPU, CPU_KEYS = torch.device("cpu"), torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# These operations compute nothing, or they copy memory, which is real.
LEFT = """empty empty_strided _efficientzerotensor resize_ set_ record_stream _local_scalar_dense _fused_sdp_choice
    view view_as_real view_as_complex as_strided unfold _reshape_alias _nested_view_from_buffer"""
# Without CUDA code, which would take a shape from values on the card, or make a number there that Python cannot get.
MOVED = ("aten::pow.Scalar", "aten::searchsorted.Scalar", "aten::bucketize.Scalar")  # and of dynamic shape
use_stream = ctypes.CDLL(None).dry_card_use_stream  # libcards.so is in LD_PRELOAD
use_stream.argtypes = [ctypes.c_void_p]
# A Python function gets a number where C++ code passes it as a tensor. This makes call_boxed accept it, in a thread.
# It is the constructor of torch::jit::ToIValueAllowNumbersAsTensors, which has no name in Python.
allow_numbers = ctypes.PyDLL("libtorch_python.so")._ZN5torch3jit29ToIValueAllowNumbersAsTensorsC1Eb


@cache  # A library that is collected takes its operations with it.
def library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "IMPL")


def register(name: str, call: Callable[..., Any], **options: bool) -> None:
    """Make a function the CUDA form of an operation, such as aten::mm.dtype."""
    library(name.partition("::")[0]).impl(name, call, "CUDA", **options)


def refuse(name: str, *_: Any, **__: Any) -> None:
    """Take the place of an operation whose kernel would leave the result as it is."""
    raise NotImplementedError(f"[dry_card] {name} has no values. Fix: write it in {__file__}")


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: int = -1, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention of one sequence, [tokens, heads, size]. With `causal` the last rows of q and k match.

    Args:
        window: positions to the left that a position attends to; -1: all.
        sinks: of each head the score of one more position, which has no value; with `scale` and `causal`.
    """
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=CPU)
    own = k.shape[1] - q.shape[1]
    mask = mask.tril(own) if causal else None
    if mask is not None and window >= 0:
        mask = mask.triu(own - window)
    if sinks is not None:  # One more key, which has the value 0: its last number and those of queries make the score.
        k, v = (pad(t.repeat_interleave(len(q) // len(k), 0), (0, more, 1, 0)) for t, more in ((k, 1), (v, 0)))
        k[:, 0, -1] = sinks / scale
        q, mask = pad(q, (0, 1), value=1.0), pad(mask, (1, 0), value=True)
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).transpose(0, 1)


# ---- torch: the CPU's kernel of an operation computes, on the same memory. Then its real CUDA code runs: checks,
# allocations, launches that do nothing. Then the CPU's results are written over the CUDA results. An operation without
# such a kernel is refused, unless FORMS has one.


def on_cpu(value: Any, copied: bool = False) -> Any:
    """Return an argument for the CPU. A tensor keeps its memory unless it is to be copied."""
    if isinstance(value, list | tuple):
        return [on_cpu(part, copied) for part in value]
    if isinstance(value, torch.device):
        return CPU
    if isinstance(value, torch.Generator):
        return None  # That of a card has no CPU form.
    if isinstance(value, Tensor) and value.is_cuda:
        empty, storage = torch.empty(0, dtype=value.dtype, device=CPU), value.untyped_storage()
        memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
        value = empty.set_(memory, value.storage_offset(), value.shape, value.stride())
    return value.clone() if copied and isinstance(value, Tensor) else value


def written(result: Any, value: Any, name: str) -> Any:
    """Return the result of CUDA code with the value of the CPU. The value None leaves a result as it is."""
    if isinstance(result, list | tuple):
        return tuple(written(*pair, name) for pair in zip(result, value, strict=True))
    if isinstance(result, Tensor) and result.is_cuda and value is not None:
        assert result.shape == value.shape, f"[dry_card] {name}: CUDA made {result.shape}, the CPU {value.shape}"
        on_cpu(result).copy_(value)
    return value if isinstance(result, bool | int | float) else result


def copies_memory(to: Tensor, source: Tensor, non_blocking: bool = False) -> bool:
    """Return whether aten::copy_ copies memory as it is; between devices its last part does."""
    plain = all(t.is_contiguous() and not t.is_neg() for t in (to, source))
    same = plain and to.dtype == source.dtype and to.shape == source.shape
    return same or not (to.is_cuda and source.is_cuda)


def with_values(name: str) -> Callable[..., Any]:
    """Return a form of an operation of torch on a card that has the values of the CPU."""
    cuda, values_of = torch.library.get_kernel(name, "CUDA"), FORMS.get(name)
    values_of = values_of or partial(torch.library.get_kernel(name, "CPU").call_boxed, CPU_KEYS)
    schema = cuda.op_handle.schema()
    tags = torch._C._get_operation_overload(schema.name, schema.overload_name)[2]
    is_moved = torch.Tag.dynamic_output_shape in tags or name in MOVED
    writes = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}

    def compute(keys: torch._C.DispatchKeySet, *args: Any, **named: Any) -> Any:
        if name == "aten::copy_" and copies_memory(*args):
            return cuda.call_boxed(keys, *args)
        given = {parameter.name: value for parameter, value in zip(schema.arguments, args, strict=False)} | named
        cards = [value.get_device() for value in given.values() if isinstance(value, Tensor) and value.is_cuda]
        card = cards[0] if cards else torch.cuda.current_device()
        use_stream(torch._C._cuda_getCurrentRawStream(card))
        allow_numbers(ctypes.byref(ctypes.c_bool()), True)
        given_cpu = {key: on_cpu(value, copied=key in writes) for key, value in given.items()}
        values = values_of(**given_cpu)
        if is_moved:
            return tree_map_only(Tensor, lambda t: t.to(card), values)
        results = cuda.call_boxed(keys, *args, **named)
        for key in writes & given.keys():
            written(given[key], given_cpu[key], name)
        return written(results, values, name)

    return compute


def packed_attention(  # type: ignore
    query, key, value, cum_seq_q, cum_seq_k, is_causal, scale=None, window_size_left=None, window_size_right=None, **_
):
    assert cum_seq_q is not None, "[dry_card] padded flash attention has no values"
    of_all = ((query, cum_seq_q), (key, cum_seq_k), (value, cum_seq_k))
    parts = zip(*(tokens.split(cu.diff().tolist()) for tokens, cu in of_all), strict=True)
    causal = is_causal or window_size_right == 0
    window = -1 if window_size_left is None else window_size_left
    return torch.cat([attention(*part, scale=scale, causal=causal, window=window) for part in parts])


def flash_backward(grad_out, query, key, value, **rest):  # type: ignore
    leaves = [t.requires_grad_() for t in (query, key, value)]
    # Within an operation autograd is off.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        return torch.autograd.grad(packed_attention(*leaves, **rest), leaves, grad_out)


def rms_norm_backward(**given: Any) -> Any:
    from torch._decomp import decomposition_table  # It takes a second to import.

    return decomposition_table[torch.ops.aten._fused_rms_norm_backward.default](*given.values())


def histc(self, bins=100, min=0, max=0):  # type: ignore
    return self.double().histc(bins, float(min), float(max)).to(self.dtype)


def addmm(self, mat1, mat2, out_dtype, out, beta=1, alpha=1):  # type: ignore
    return out.copy_(self.to(out_dtype) * beta + mat1.to(out_dtype) @ mat2.to(out_dtype) * alpha)


# Operations without a kernel for the CPU, or whose kernel refuses integers (histc). Names and parameters are torch's.
FORMS: dict[str, Callable[..., Any]] = {
    "aten::_flash_attention_forward": lambda **given: (packed_attention(**given), None, None, None, None),
    "aten::_flash_attention_backward": flash_backward,
    "aten::_fused_rms_norm_backward": rms_norm_backward,
    "aten::mm.dtype": lambda self, mat2, out_dtype: self.to(out_dtype) @ mat2.to(out_dtype),
    "aten::mm.dtype_out": lambda self, mat2, out_dtype, out: out.copy_(self.to(out_dtype) @ mat2.to(out_dtype)),
    "aten::addmm.dtype_out": addmm,
    "aten::histc": histc,
}


def add_values(namespace: str) -> None:
    """Give values to all operations of namespaces that begin so and compute on a card."""
    warnings.filterwarnings("ignore", "Warning only once for all operators")  # that another kernel takes its place
    for name in torch._C._dispatch_get_all_op_names():
        on_card = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") or name == "aten::copy_"
        if name.startswith(namespace) and on_card and name.partition("::")[2].partition(".")[0] not in LEFT.split():
            has_values = name in FORMS or torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")
            register(name, with_values(name) if has_values else partial(refuse, name), with_keyset=has_values)


def convolve(name: str, *given: Any) -> Any:
    """Compute a convolution or its gradients on the CPU: cuDNN's engines have no stand-in, and are not operations."""
    card = torch.cuda.current_device()
    return tree_map_only(Tensor, lambda t: t.to(card), getattr(torch.ops.aten, name)(*map(on_cpu, given)))


def after_torch() -> None:
    """Give values to the operations of torch, and choose attention that has them."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's graphs have no stand-in.
    if VALUES:
        add_values("aten::")
        for name in ("convolution", "convolution_backward"):
            register(f"aten::{name}", partial(convolve, name))
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        if os.environ.get("TORCHDYNAMO_DISABLE") == "0":
            adapt_inductor()


def adapt_inductor() -> None:
    """Give values to the functions of CUDA's library that Inductor's kernels call; Triton's interpreter has none."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    def on_arrays(compute: Callable[..., Any], x: Any, *more: Any) -> Any:
        values = compute(*(part.handle.data for part in (x, *more))).astype(x.handle.data.dtype)
        return tl.core.tensor(TensorHandle(values, x.handle.dtype), x.type)

    for name in ("exp", "log", "sqrt", "tanh", "log1p", "expm1", "floor"):
        setattr(libdevice, name, partial(on_arrays, getattr(np, name)))
    libdevice.rsqrt = partial(on_arrays, lambda x: 1 / np.sqrt(x))
    libdevice.pow = partial(on_arrays, np.power)


# ---- vLLM in eager mode


def reshape_and_cache_flash(key, value, key_cache, value_cache, slots, *_):  # type: ignore
    rows = slots >= 0
    at = slots[rows] // key_cache.shape[1], slots[rows] % key_cache.shape[1]
    for to, new in ((key_cache, key), (value_cache, value)):
        to[at] = new[: len(slots)][rows].to(to.dtype)


def concat_and_cache_mla(latent, rotated, cache, slots, *_):  # type: ignore
    rows = slots >= 0
    cache.flatten(0, 1)[slots[rows]] = torch.cat([latent, rotated.flatten(1)], -1)[: len(slots)][rows].to(cache.dtype)


def varlen_attention(q, k, v, *, softmax_scale, causal, cu_seqlens_q, out=None, window_size=None, q_v=None, **given):  # type: ignore
    """Compute attention over caches [blocks, block size, heads, size]. vLLM passes the arguments by name."""
    assert not given.get("softcap") and not given.get("return_softmax_lse"), "[dry_card] caps and sums have no values"
    out = q.new_empty(*q.shape[:2], v.shape[-1]) if out is None else out
    window = -1 if window_size is None else int(window_size[0])
    sinks = next((t.cpu().to(q.dtype) for t in map(given.get, ("s_aux", "sinks")) if t is not None), None)
    ends, used = pairwise(cu_seqlens_q.tolist()), given["seqused_k"].tolist()
    for i, ((first, last), m) in enumerate(zip(ends, used, strict=False)):
        if last > first and m > 0:
            of = given["block_table"][i, : -(-m // k.shape[1])].long()
            own = q[first:last].cpu()
            keys, values = (cached[of].flatten(0, 1)[:m].cpu() for cached in (k, v))
            if q_v is not None:  # Latents are keys, too.
                own, keys = torch.cat([own, q_v[first:last].cpu()], -1), torch.cat([keys, values], -1)
            out[first:last] = attention(own, keys, values, softmax_scale, causal, window, sinks).to(out.device)
    return out


def align_experts(topk_ids, n_experts, block_size, sorted_ids, block_experts, n_padded, *unused):  # type: ignore
    assert not any(each is not None for each in unused), "[dry_card] experts on several cards have no values"
    chosen = topk_ids.flatten().cpu()
    own = [(chosen == expert).nonzero()[:, 0] for expert in range(n_experts)]
    rows = torch.cat([pad(each, (0, -len(each) % block_size), value=len(chosen)) for each in own])
    blocks = torch.tensor([i for i, each in enumerate(own) for _ in each[::block_size]], device=CPU)
    for to, values, empty in ((sorted_ids, rows, len(chosen)), (block_experts, blocks, -1)):
        to.fill_(empty)[: len(values)] = values.to(to)
    n_padded.fill_(len(rows))


def choose_experts(scores_of, weights, ids, _, logits, renormalize, bias, *rest):  # type: ignore
    scores = scores_of(logits.float())
    ids.copy_((scores if bias is None else scores + bias).topk(ids.shape[1])[1])
    chosen = scores.gather(1, ids.long())
    weights.copy_(chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen)
    weights.mul_(rest[0] if rest[1:] else 1.0)  # With sigmoids there is a scale.


def set_to(values_of, out, x, *_):  # type: ignore
    out.copy_(values_of(x))


def layers_of_vllm() -> dict[str, Callable[..., Any]]:
    """Return the operations that a model calls although its layers compute with operations of torch."""
    from vllm.model_executor.layers.activation import SiluAndMul, SwigluOAIAndMul

    oai = SimpleNamespace(alpha=1.702, limit=7.0)
    return {
        "_C::silu_and_mul": partial(set_to, SiluAndMul.forward_native),
        "_C::swigluoai_and_mul": partial(set_to, partial(SwigluOAIAndMul.forward_native, oai)),
        "_C_cache_ops::concat_and_cache_mla": concat_and_cache_mla,
        "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache_flash,
        "_moe_C::moe_align_block_size": align_experts,
        "_moe_C::moe_sum": lambda x, out, *_: set_to(lambda t: t.float().sum(1), out, x),
        "_moe_C::topk_sigmoid": partial(choose_experts, torch.sigmoid),
        "_moe_C::topk_softmax": partial(choose_experts, partial(torch.softmax, dim=-1)),
    }


def adapt_triton() -> None:
    """Let Triton's interpreter compute in bfloat16, and run the kernels of recurrent layers of vLLM and of fla."""
    import ast

    import triton.language as tl
    from triton.language.extra import cuda
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import ASTTransformer, GridExecutor, InterpreterBuilder, TensorHandle, _implicit_cvt

    def widened(self, *given, compute):  # type: ignore
        """Compute bfloat16 in float32. The interpreter would compute with the bits."""
        narrow = [isinstance(part, TensorHandle) and part.dtype.scalar == tl.bfloat16 for part in given]
        wide = [self.cast_impl(part, tl.float32) if n else part for part, n in zip(given, narrow, strict=True)]
        result = compute(self, *wide)
        back = all(narrow[:2]) and not isinstance(given[2], TensorHandle) and result.data.dtype == "float32"
        return self.cast_impl(result, tl.bfloat16) if back else result

    def with_grid(self, fn, names, grid, *rest, start=GridExecutor.__init__):  # type: ignore
        def sizes(given: dict[str, Any]) -> Any:
            size = grid(given)  # It may replace arguments by tensors.
            given |= {name: _implicit_cvt(value) for name, value in given.items() if isinstance(value, Tensor)}
            return size

        start(self, fn, names, sizes if callable(grid) else grid, *rest)

    def run_first(self, *given, run=Autotuner.run, **named):  # type: ignore
        self.configs = self.configs[:1]  # To measure them takes minutes.
        return run(self, *given, **named)

    def with_tensor(self, loop):  # type: ignore
        """Make the variable of a loop over `range` a tensor, as in compiled code. The interpreter has a number."""
        self.generic_visit(loop)
        if ast.unparse(loop.iter).startswith("range("):
            name = ast.unparse(loop.target)
            loop.body = ast.parse(f"{name} = interpreter_semantic.to_tensor({name}, False)").body + loop.body
        return loop

    ASTTransformer.visit_For = with_tensor
    for name in ("binary_op", "create_dot"):
        setattr(InterpreterBuilder, name, partialmethod(widened, compute=getattr(InterpreterBuilder, name)))
    InterpreterBuilder.get_bf16 = lambda self, value: self.cast_impl(self.get_fp32(value), tl.bfloat16)
    GridExecutor.__init__, Autotuner.run = with_grid, run_first
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None  # One kernel runs after the other.


def after_vllm() -> None:
    """Give values to vLLM's operations, and replace the kernels that it calls as functions."""
    from vllm.distributed.device_communicators import cuda_wrapper

    cuda_wrapper.find_loaded_library = lambda name: None  # It would find the real libcudart that torchvision has.
    if not VALUES:
        return
    from vllm import _custom_ops  # noqa: F401  It defines the operations.
    from vllm.ir.op import IrOp
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.kernels.linear.cute_dsl import ll_bf16
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash, triton_unified_attention
    from vllm.vllm_flash_attn import flash_attn_interface

    adapt_triton()
    # Layers compute with operations of torch. An operation of vLLM that is called nevertheless ends the run.
    CustomOp.enabled = classmethod(lambda cls: False)
    IrOp.dispatch = lambda self, *_, **__: self.impls["native"]
    ll_bf16._cutedsl_available = False  # It compiles for a card.
    VocabParallelEmbedding.use_fused_embedding = property(lambda self: False, lambda self, value: None)
    for namespace in ("_C", "_moe_C"):
        add_values(namespace)
    for name, call in layers_of_vllm().items():
        register(name, call)
    kernel = triton_unified_attention.unified_attention

    def unified_attention(*args, **named):  # type: ignore
        # Tokens of images that attend to later ones are left to Triton's interpreter, which is slow.
        both_ways = named.get("mm_prefix_range") is not None and named["max_seqlen_q"] > 1
        return (kernel if both_ways else varlen_attention)(*args, **named)

    calls: dict[Any, Any] = {
        kernel: unified_attention,
        triton_reshape_and_cache_flash.triton_reshape_and_cache_flash: reshape_and_cache_flash,
        flash_attn_interface.flash_attn_varlen_func: varlen_attention,
    }
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm")]:
        # A module that was imported before may have the function, too.
        vars(module).update({k: calls[v] for k, v in vars(module).items() if inspect.isfunction(v) and v in calls})
    type(current_platform).get_punica_wrapper = lambda *_: "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"

"""Patch Megatron-core to run without CUDA, on gloo and CPU tensors. If CUDA is available, only for the products of 6.

Megatron-core has no CPU switch. Six kinds of code assume CUDA. Each kind is handled in one way, so that an
upgrade that adds another one fails a test instead of a run:

    1. functions of torch.cuda, and Tensor.cuda     replaced by their CPU meaning
    2. Megatron's own accessors of the CUDA RNG     replaced by the CPU generator
    3. literals such as device="cuda"               rewritten in the code objects of `_MODULES`
    4. streams and compiled functions of the        replaced by plain Python functions
       mixture-of-experts layer
    5. collectives that NCCL does in place          left out in a group of one rank: gloo copies the whole buffer
    6. apex's products that add to a gradient       replaced by torch's, and the embedding's gradient is added likewise;
                                                    the products also on CUDA

A TorchFunctionMode would be tidier for 3, but modes are inactive in the backward pass of
recomputed layers, which runs on autograd's threads.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch

from gkd.loss.chunked import add_product

_MODULES = (
    "megatron.core.utils",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
)
_LITERALS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
_touched: tuple[str, ...] | None = None


def install_cpu_shim() -> tuple[str, ...]:
    """Make Megatron-core usable without CUDA and apex in this process. Idempotent; affects the whole process.

    Returns:
        The dotted names of what was replaced or rewritten, sorted.
    """
    global _touched
    if _touched is None:
        for_cpu = (_replace_functions, _rewrite_literals, _replace_moe, _replace_collectives, _replace_embedding)
        kinds = (_replace_products, *(() if torch.cuda.is_available() else for_cpu))
        _touched = tuple(sorted(name for kind in kinds for name in kind()))
    return _touched


def _replace_functions() -> Iterator[str]:
    """Replace kinds 1 and 2: functions of the current CUDA device by functions of the CPU."""
    from megatron.core.tensor_parallel import random as megatron_random

    def get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(new_state)

    replacements: list[tuple[Any, str, str, Any]] = [
        (torch.cuda, "torch.cuda", "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "torch.cuda", "synchronize", lambda device=None: None),
        (torch.cuda, "torch.cuda", "manual_seed", torch.manual_seed),
        (torch.cuda, "torch.cuda", "get_rng_state", get_rng_state),
        (torch.cuda, "torch.cuda", "set_rng_state", set_rng_state),
        (torch.Tensor, "torch.Tensor", "cuda", lambda tensor, *_, **__: tensor.cpu()),
        (megatron_random, megatron_random.__name__, "_get_cuda_rng_state", get_rng_state),
        (megatron_random, megatron_random.__name__, "_set_cuda_rng_state", set_rng_state),
    ]
    for owner, owner_name, name, replacement in replacements:
        yield _replace(owner, owner_name, name, replacement)


def _replace(owner: Any, owner_name: str, name: str, replacement: Any) -> str:
    getattr(owner, name)  # raise if an upgrade has renamed it
    setattr(owner, name, replacement)
    return f"{owner_name}.{name}"


def _replace_moe() -> Iterator[str]:
    """Replace kind 4: the dispatcher copies its counts to the host on a stream; the router compiles a function."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    def counts_to_numpy(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                if isinstance(counts := getattr(self, name), torch.Tensor):
                    setattr(self, name, counts.numpy())
        return tokens_per_expert

    for cls, name, replacement in (
        (Dispatcher, "cuda_dtoh_stream", "none on the CPU"),  # None would create a stream
        (Dispatcher, "_maybe_dtoh_and_synchronize", counts_to_numpy),
        (TopKRouter, "_apply_expert_bias", inspect.unwrap(TopKRouter._apply_expert_bias)),
    ):
        yield _replace(cls, f"{cls.__module__}.{cls.__qualname__}", name, replacement)


def _replace_collectives() -> Iterator[str]:
    """Replace kind 5. The only rank's part is the whole buffer, so the result is where it belongs."""
    from megatron.core.distributed import param_and_grad_buffer

    def unless_alone(collective: Any) -> Any:
        def call(output: torch.Tensor, source: torch.Tensor, *, group: Any, **options: Any) -> Any:
            return collective(output, source, group=group, **options) if group.size() > 1 else None

        return call

    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        collective = getattr(param_and_grad_buffer, name)
        yield _replace(param_and_grad_buffer, param_and_grad_buffer.__name__, name, unless_alone(collective))


def _replace_products() -> Iterator[str]:
    """Replace kind 6, products. A layer's gradient needs no memory of its own, and one pass over the sum, not two."""
    from megatron.core.tensor_parallel import layers

    def accumulate(inputs: torch.Tensor, grads: torch.Tensor, total: torch.Tensor) -> None:
        add_product(total, grads.T, inputs)

    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    yield f"{layers.__name__}.fused_weight_gradient_mlp_cuda"
    yield _replace(layers, layers.__name__, "_grad_accum_fusion_available", True)


def _replace_embedding() -> Iterator[str]:
    """Replace kind 6, the embedding."""
    from megatron.core.tensor_parallel import layers

    functional = types.SimpleNamespace(**vars(layers.F) | {"embedding": _embedding})
    yield _replace(layers, layers.__name__, "F", functional)


def _embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if getattr(weight, "adds_gradient_in_place", False) and torch.is_grad_enabled():
        return _Embedding.apply(ids, weight)
    return torch.nn.functional.embedding(ids, weight)


class _Embedding(torch.autograd.Function):
    """Adds the gradient to the rows of `main_grad`. Autograd's is a matrix of all rows, nearly all of them zero."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.ids = ids
        ctx.main_grad = weight.main_grad  # type: ignore[attr-defined]
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        ctx.main_grad.index_add_(0, ctx.ids.flatten(), grads[0].flatten(0, -2).to(ctx.main_grad.dtype))
        return None, None


def _rewrite_literals() -> Iterator[str]:
    """Replace kind 3: give functions with CUDA literals new code objects with CPU literals."""
    for module_name in _MODULES:
        module = importlib.import_module(module_name)
        for name, function in _functions_of(module):
            code = _rewritten(function.__code__)
            if code is not function.__code__:
                function.__code__ = code
                yield f"{module_name}.{name}"


def _functions_of(module: types.ModuleType) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield (qualified name, function) of functions and methods that `module` defines, without their decorators."""
    members: list[Any] = list(vars(module).values())
    for cls in [m for m in members if isinstance(m, type) and m.__module__ == module.__name__]:
        members += vars(cls).values()
    for member in members:
        function = inspect.unwrap(getattr(member, "__func__", member))  # staticmethod, classmethod
        if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
            yield function.__qualname__, function


def _rewritten(code: types.CodeType) -> types.CodeType:
    """Return `code` with `_LITERALS` replaced in constants, nested tuples and functions; `code` itself if unchanged."""
    constants = tuple(_rewritten_constant(constant) for constant in code.co_consts)
    if all(new is old for new, old in zip(constants, code.co_consts, strict=True)):
        return code
    return code.replace(co_consts=constants)


def _rewritten_constant(constant: object) -> object:
    if isinstance(constant, str):
        return _LITERALS.get(constant, constant)
    if isinstance(constant, types.CodeType):
        return _rewritten(constant)
    if isinstance(constant, tuple):
        items = tuple(_rewritten_constant(item) for item in constant)
        return constant if all(new is old for new, old in zip(items, constant, strict=True)) else items
    return constant

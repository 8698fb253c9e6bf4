"""Compile the layers of a sharded student, and compare them at the start with the layers of transformers.

A layer launches a kernel for each of its elementwise operations. torch.compile computes neighboring ones together.
fully_shard's gathers stay outside: hooks of the layer call them, and what is compiled is its forward method. Layers
with the same code and settings share what is compiled, for any number of tokens.

What cannot be compiled as one graph is not compiled at all. That is decided here, once: torch.compile with fullgraph
raises an error instead of running parts of a layer uncompiled, also when it meets too many variants later in a run.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from gkd.actor.fsdp.attention import is_recurrent
from gkd.actor.fsdp.model import LossModel, layer_list, passes_of, reshard
from gkd.actor.fsdp.optim import local_grads
from gkd.actor.fsdp.probe import logits_of_pack
from gkd.errors import ConfigError
from gkd.log import get_logger

log = get_logger("actor.fsdp")

# Sequences of the compared packs, or rows of batches: primes, so that no size equals another one by chance, in which
# case the code would be compiled for equal sizes alone.
_LENGTHS = ((41, 26), (17, 31, 5))
_VARIANTS = 64  # limit of a method's variants: kinds of layers, with and without gradients, adapters and masks
_BACKEND = "inductor"
# Largest difference, relative to all logits or all gradients (Frobenius norm).
_LARGEST = 1e-3
_LARGEST_16 = 0.3  # the limit for models in 16 bits, whose rounding is 0.02 to 0.1 in deep ones


def compile_layers(root: LossModel, *, must: bool, packing: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the layers of a model with weights, unless they break or compute something else. Collective.

    Args:
        must: raise an error instead of leaving the layers uncompiled.
        packing: compile for packs, else for padded batches.
        dtype: of activations.

    Raises:
        ConfigError: with `must`, the layers do not run compiled; the key is actor.compile.
    """
    start = time.monotonic()
    before = counters["stats"]["unique_graphs"]
    modules = [part for layer in layer_list(root.hf) for part in _parts(layer, dtype)]
    plain_forward = [module.forward for module in modules]
    why = "" if modules else "no layer has a part without loops that depend on data"
    if root.columns.group is not None:
        why = "ranks exchange columns in the attention (actor.cp)"
    if torch.compile(_norm) is _norm:
        why = "TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE is set, with which torch.compile returns its argument"
    failures: list[str] = []
    compiled_forward: list[Any] = []
    if not why:
        plain = _pass(root, packing, device)
        for module in modules:
            options: Any = {"backend": _BACKEND, "recompile_limit": _VARIANTS}
            compiled_forward.append(torch.compile(module.forward, fullgraph=True, dynamic=True, **options))
            module.forward = _or_plain(compiled_forward[-1], module.forward, failures)
        try:
            # Also derivatives are compiled in the forward pass, where a failure of one rank can be made up for. A
            # backward pass that fails on one rank alone, as of memory, leaves the others in fully_shard's collectives.
            with functorch_config.patch(force_non_lazy_backward_lowering=True):
                compiled = _pass(root, packing, device)
            why = next(iter(failures), "") or _difference(compiled, plain)
        except Exception as error:  # the code of models may raise anything
            why = _reason(error)
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, why)
    why = next(filter(None, reasons), "")
    if not why:
        seconds = time.monotonic() - start
        n_variants = counters["stats"]["unique_graphs"] - before
        for module, forward in zip(modules, compiled_forward, strict=True):
            module.forward = forward
        log.info("layers: %d modules, compiled in %d variants, %.0f s", len(modules), n_variants, seconds)
        return
    for module, forward in zip(modules, plain_forward, strict=True):
        module.forward = forward
    reshard(root)
    root.zero_grad()
    if must:
        raise ConfigError("actor.compile", "on", f"the layers cannot be compiled: {why}.", "use auto or off.")
    log.warning("layers: not compiled: %s", why)


def _or_plain(compiled: Any, plain: Any, failures: list[str]) -> Any:
    """Return a function that computes `plain` if `compiled` fails, so that its rank joins the collectives that follow.

    After a failure anywhere, only what has run compiled goes on to: recomputation must compute what the forward pass
    did.
    """
    compiled_with = set[bool]()  # gradients

    def forward(*args: Any, **options: Any) -> Any:
        with_gradients = torch.is_grad_enabled()
        if with_gradients in compiled_with or not failures:
            try:
                output = compiled(*args, **options)
            except Exception as error:  # the compiler, and the model's code in it, may raise anything
                failures.append(_reason(error))
                compiled_with.discard(with_gradients)
            else:
                compiled_with.add(with_gradients)
                return output
        return plain(*args, **options)

    return forward


def _reason(error: Exception) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {shorten(str(cause), 200)}"


def uncompiled(*, when: bool) -> AbstractContextManager[object]:
    """Run the layers in the block uncompiled: one token alone would be another variant."""
    return torch.compiler.set_stance("force_eager") if when else nullcontext()


def _parts(module: nn.Module, dtype: torch.dtype) -> list[nn.Module]:
    """Return the largest parts of a layer that can be one graph."""
    if not any(_is_left_out(part, dtype) for part in module.modules()):
        return [module] if next(module.children(), None) is not None else []  # one operation has nothing to fuse
    if _is_left_out(module, dtype):
        return []
    return [part for child in module.children() for part in _parts(child, dtype)]


def _is_left_out(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether a module's loops depend on data: over the lengths of a pack, or over experts in float32."""
    has_experts = any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
    return is_recurrent(module) or (has_experts and dtype == torch.float32)


def _pass(root: LossModel, packing: bool, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Return logits of a few batches without and with gradients, and the gradients of a loss of them."""
    logits = []
    with passes_of(root), warnings.catch_warnings():
        # The logits are a view of what the head returns. fully_shard warns of changes in place, and none follows.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        for with_gradients in (False, True):
            for lengths in _LENGTHS:
                with torch.set_grad_enabled(with_gradients):
                    of_batch = _logits(root, lengths, packing, device)
                    logits.append(of_batch.detach())
                    if with_gradients:
                        of_batch.float().log_softmax(-1)[:, ::7].mean().backward()
    gradients = local_grads([*root.parameters()])
    root.zero_grad()  # sets them to None
    return logits, gradients


def _logits(root: LossModel, lengths: Sequence[int], packing: bool, device: torch.device) -> Tensor:
    n_ids = min(int(root.hf.config.get_text_config().vocab_size), 1000)
    sizes = lengths if packing else [max(lengths)] * len(lengths)
    tokens = torch.arange(sum(sizes), device=device) * 7 % n_ids
    if packing:
        return logits_of_pack(root, tokens.split(list(sizes)))
    padded: Tensor = root(tokens.view(len(sizes), -1), torch.arange(len(tokens), device=device))
    return padded


def _difference(compiled: Any, plain: Any) -> str:
    for name, ours, theirs in zip(("logits", "gradients"), compiled, plain, strict=True):
        limit = _LARGEST if plain[0][0].dtype == torch.float32 else _LARGEST_16
        distance = _norm(a - b for a, b in zip(ours, theirs, strict=True))
        error = distance / max(_norm(theirs), 1e-30)
        if not error <= limit:
            return f"compiled {name} differ by {error:.1e} of their size"
    return ""


def _norm(tensors: Iterable[Tensor]) -> float:
    return sum(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 for tensor in tensors) ** 0.5

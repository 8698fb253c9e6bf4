"""Bridge what differs between torch 2.11 and the pinned 2.13, for the student. torch 2.13 runs its own code throughout.

Clusters are often behind, and vLLM up to 0.26 requires torch 2.11. Every function here looks for the newer name, not
for a version number. Its fallback does the same with the older torch. vLLM's differences are in
`teacher_server.engines.vllm_versions`, because the student's ranks must not import vLLM.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch


@lru_cache
def _accepts(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


def gqa_option(attention: Callable[..., Any], shared: bool) -> dict[str, Any]:
    """Return the arguments with which `attention` accepts heads that share keys and values.

    torch 2.11's varlen_attn has no such argument; its kernel takes the ratio of the heads from the shapes.
    """
    return {"enable_gqa": shared} if _accepts(attention, "enable_gqa") else {}


def param_groups(module: Any) -> list[Any]:
    """Return fully_shard's parameter groups of one module: since torch 2.12 a list, before one or None."""
    return _groups(module._get_fsdp_state())


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in (state._fsdp_param_group,) if group is not None]


def reduce_unused_params(module: Any) -> None:
    """Let parameters without gradient join the reduction as zeros, so that all ranks reduce the same ones.

    torch 2.11 and 2.12 leave them out; there they get a gradient of zeros before the group is reduced.
    """
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in param_groups(module):
        group.post_backward = partial(_with_zeros, group, group.post_backward)


def _with_zeros(group: Any, post_backward: Callable[..., Any], *unused: Any) -> Any:
    if group.reduce_grads:
        for shard in group.fsdp_params:
            param = getattr(shard, "_unsharded_param", None)  # None: never gathered
            if param is None or not param.requires_grad or shard.unsharded_accumulated_grad is not None:
                continue
            if param.grad is None:
                param.grad = torch.zeros_like(param)
    return post_backward(*unused)


def reset(root: Any) -> None:
    """Free all gathered parameters after an error inside a forward or backward pass. Gradients are lost.

    Before torch 2.13 this function itself waits for what is in flight and removes the traces of the failed pass.
    """
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    root_state = root._get_fsdp_state()
    context, comm = root_state._state_ctx, root_state._comm_ctx
    if not context.all_states:
        return  # before the first forward pass
    for state in context.all_states:
        for group in _groups(state):
            group.finalize_backward()  # waits for what is in flight
            group._partial_reduce_output = None
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    comm.all_gather_state = comm.reduce_scatter_state = None
    comm.reduce_scatter_states = []
    comm.post_forward_order.clear()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False

"""Build the student's optimizer.

Megatron builds it (float32 main weights for bfloat16 models, state sharded over DP). This file provides an AdamW
with torch's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    clip_grads,
    distrib_optimizer,
    get_megatron_optimizer,
)
from megatron.core.utils import local_multi_tensor_applier
from torch import Tensor
from torch.optim.adamw import adamw

from gkd.actor.common.optim_spec import OptimSpec
from gkd.actor.common.step import total_norm


class GroupStepAdamW(torch.optim.Optimizer):
    """AdamW with torch's arithmetic and the step count in the parameter group instead of each parameter's state.

    Megatron relies on this contract of apex's FusedAdam: every state tensor of a parameter then has the length of the
    parameter's range, and checkpoints need nothing else.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("GroupStepAdamW decouples the weight decay; adam_w_mode=False is not supported")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Closures are not supported."""
        if closure is not None:
            raise ValueError("GroupStepAdamW does not support closures")
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if not self.state[param]:
                    self.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            adamw(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                _steps(float(group["step"]), params),
                fused=_is_fused(params) or None,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            group["step"] += 1


def _is_fused(params: Sequence[Tensor]) -> bool:
    """Return whether one kernel computes the whole update: it needs no temporary as large as the parameters."""
    return all(param.is_cuda for param in params)


def _steps(step: float, params: Sequence[Tensor]) -> list[Tensor]:
    """Return the steps before this one; adamw() adds 1 to each. The fused kernel reads them on the device."""
    device = params[0].device if params else None
    return list(torch.full((len(params),), step, device=device).unbind())


def build_optimizer(
    ddps: Sequence[DistributedDataParallel], spec: OptimSpec, *, dtype: torch.dtype
) -> MegatronOptimizer:
    """Build Megatron's optimizer over the parameters of all chunks. Collective over the world.

    Args:
        ddps: this stage's model chunks, built with `use_distributed_optimizer`.
        dtype: of the parameters; bfloat16 parameters get float32 main weights.
    """
    _install_adamw()
    config = OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.betas[0],
        adam_beta2=spec.betas[1],
        adam_eps=spec.eps,
        clip_grad=spec.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(config, list(ddps), use_gloo_process_groups=False)


def _install_adamw() -> None:
    """Use `GroupStepAdamW` in place of apex's FusedAdam, also where apex or Transformer Engine is installed.

    Megatron's own norm waits for the GPU once for each tensor, and its copy to the model is one launch for each.
    """
    clip_grads.l2_norm_impl = _l2_norm
    clip_grads.multi_tensor_applier = local_multi_tensor_applier
    megatron_optimizer.Adam = distrib_optimizer.Adam = GroupStepAdamW
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
    distrib_optimizer.DistributedOptimizer._copy_main_params_to_model_params = _copy_main_params


def _l2_norm(
    chunk_size: int, overflow: Tensor, tensors: Sequence[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Return the [1] float32 norm of all tensors together, with the signature of apex's kernel."""
    del chunk_size, overflow, per_tensor
    return total_norm(tensors[0]).float().reshape(1), None


def _copy_main_params(optimizer: distrib_optimizer.DistributedOptimizer) -> None:
    """Cast this rank's main weights into the buffers that `start_param_sync` gathers, all in one launch."""
    mains = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
    targets: list[Tensor] = []
    for param in chain(*optimizer.model_float16_groups, *optimizer.model_fp32_groups):
        span = optimizer._get_model_param_range_map(param)["gbuf_world_in_bucket"]
        buffer, _, bucket = optimizer.model_param_gbuf_map[param]
        data = optimizer.buffers[buffer].buckets[bucket].param_data.detach()
        targets.append(data.view(-1)[span.start : span.end])
    if targets:
        torch._foreach_copy_(targets, [*chain(*mains)])


class VectorGrads:
    """Add the gradients of norms and biases to `main_grad` at the end of a batch, all together.

    Megatron adds each of them when autograd has it, four times a layer. The sums have the same bits.
    """

    def __init__(self, params: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Take the gradients of the vectors among (name, parameter). Not for reductions that overlap with autograd."""
        self._grads: dict[Any, Tensor] = {}
        for _, param in params:
            if param.ndim == 1 and param.requires_grad:
                param.register_post_accumulate_grad_hook(self._keep)

    def _keep(self, param: Any) -> None:
        if param in self._grads:
            self.add()
        self._grads[param] = param.grad
        param.grad = None  # Megatron's hook, which is called next, then adds nothing

    def add(self) -> None:
        """Add what has been kept since the last call."""
        if not self._grads:
            return
        sums = [param.main_grad for param in self._grads]
        grads = torch.cat([*self._grads.values()]).to(sums[0].dtype)
        torch._foreach_add_(sums, [*grads.split([len(total) for total in sums])])
        self._grads.clear()

"""Run forward and backward passes of one rank's micro-batches through Megatron's pipeline schedule.

    micro-batches -> hidden states of the loss rows -> LM head and loss -> gradients, reduced and
    divided by the global number of loss tokens

The schedule is 1F1B if PP > 1, and interleaved if a stage has several model chunks.

Letters: B sequences, S padded or packed length, N loss rows, H hidden size, V_local vocabulary / TP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from gkd.actor.common.agree import same_error
from gkd.actor.common.step import (
    BatchSums,
    check_before,
    empty_micro_batch,
    sum_over_group,
    token_counts,
    with_next_tokens,
)
from gkd.actor.megatron.model import StudentModel
from gkd.data.collate import parts_of, without_targets
from gkd.errors import DataError
from gkd.loss.distill_loss import DistillLoss, logprobs_of_hidden, logprobs_of_logits
from gkd.loss.row_kernels import statistics_dtype
from gkd.types import MicroBatch


def run_batch(
    ddps: Sequence[DistributedDataParallel],
    model: StudentModel,
    micro_batches: Sequence[MicroBatch],
    loss: DistillLoss,
    *,
    fused: bool,
    forward_only: bool,
) -> BatchSums:
    """Run one global batch; gradients are left in the parameters' `main_grad`. Collective over the world.

    Args:
        ddps: the model chunks of this stage, in the order of `model.chunks`.
        micro_batches: see `Student.train_step`. TP, CP and PP ranks of one DP rank pass the same ones, except that only
            the last stage reads `targets`.
        fused: compute LM head and loss together; else all logits of a micro-batch first.
        forward_only: compute no gradients.

    Raises:
        NumericsError, DataError: see `Student.train_step`.
    """
    device = model.device
    shapes = []
    # Do not convert this to a list: `MicroBatches` builds each one on access, so that only some of the teacher's tables
    # exist at a time.
    with same_error(device):
        for batch in without_targets(micro_batches):
            check_before(loss, batch, micro_batches, needs_scores=model.layout.is_last_stage)
            shapes.append(batch.tokens.shape)
    head_and_sum = _head_and_sum(model, ddps[-1]) if fused and model.layout.is_last_stage else None
    loss_function = partial(_loss_sums, model=model, loss=loss, head_and_sum=head_and_sum)
    forward = partial(_forward_step, device=device, fused=fused, loss_function=loss_function)
    outputs = _schedule(ddps, model, micro_batches, shapes, forward, forward_only=forward_only)
    names = loss.report_names
    sums = torch.zeros(2 + len(names), dtype=torch.float64, device=device)
    if model.layout.is_last_stage:
        sums = sum_over_group(torch.stack(outputs).sum(dim=0), model.groups.dp_cp)
    n_tokens, n_on_policy, *values = _from_last_stage(sums, model).tolist()
    return BatchSums(round(n_tokens), round(n_on_policy), dict(zip(names, values, strict=True)))


def run_logprobs(
    ddps: Sequence[DistributedDataParallel],
    model: StudentModel,
    micro_batches: Sequence[MicroBatch],
    loss: DistillLoss,
    *,
    fused: bool,
) -> list[Tensor]:
    """Compute `Student.compute_logprobs` on every stage. Collective over the world. Arguments as for `run_batch`."""
    device = model.device
    batches = []
    with same_error(device):
        for batch in without_targets(micro_batches):
            check_before(loss, batch, micro_batches, needs_scores=False)
            batches.append(with_next_tokens(batch))

    def next_token_logprobs(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        assert batch.targets is not None
        ids = batch.targets.sampled_ids.to(device)
        log_q = logprobs_of_hidden(loss, output, model.lm_head, ids) if fused else logprobs_of_logits(loss, output, ids)
        return torch.zeros((), device=device), torch.ones((), dtype=torch.int, device=device), log_q.float()

    forward = partial(_forward_step, device=device, fused=fused, loss_function=next_token_logprobs)
    shapes = [batch.tokens.shape for batch in batches]
    outputs = _schedule(ddps, model, batches, shapes, forward, forward_only=True)
    sizes = [len(model.columns.rows(batch)) for batch in batches]
    log_q = torch.cat(outputs)[: sum(sizes)] if model.layout.is_last_stage else torch.empty(sum(sizes), device=device)
    return model.columns.whole(_from_last_stage(log_q, model).cpu().split(sizes), batches)


def _from_last_stage(tensor: Tensor, model: StudentModel) -> Tensor:
    """Return the last stage's tensor on every stage; the others pass one of the same shape, which is overwritten."""
    if model.layout.pp > 1:
        dist.broadcast(tensor, src=dist.get_global_rank(model.groups.pp, model.layout.pp - 1), group=model.groups.pp)
    return tensor


def _schedule(
    ddps: Sequence[DistributedDataParallel],
    model: StudentModel,
    batches: Sequence[MicroBatch],
    shapes: Sequence[torch.Size],
    forward_step: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Tensor]:
    """Run Megatron's schedule and return the results of the loss function; empty except on the last stage.

    Micro-batches without loss are appended if this rank has too few.
    """
    n_batches = _n_common(len(batches), model)
    rank_batches = parts_of(batches, model.columns)
    fillers = [model.columns.part_of(empty_micro_batch())] * (n_batches - len(batches))
    # Only the chunk with the LM head reads the teacher's tables.
    holds_head = [model.layout.holds_head(chunk) for chunk in range(len(ddps))]
    iterators = [chain(rank_batches if holds else without_targets(rank_batches), fillers) for holds in holds_head]
    with torch.set_grad_enabled(not forward_only):
        outputs: list[Tensor] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(ddps) > 1 else iterators[0],
            model=list(ddps),
            num_microbatches=n_batches,
            # These are upper bounds: stages exchange the shape of each micro-batch.
            seq_length=max((shape[1] for shape in shapes), default=1),
            micro_batch_size=max((shape[0] for shape in shapes), default=1),
            forward_only=forward_only,
        )
    return outputs


def _forward_step(
    batches: Iterator[MicroBatch],
    module: DistributedDataParallel,
    *,
    device: torch.device,
    fused: bool,
    loss_function: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    """Run one micro-batch through this stage; return its output and the function of the last stage's output.

    Args:
        loss_function: of the last stage's output and, by keyword, the batch; returns what Megatron requires of a loss.
    """
    batch = next(batches)
    output = module(
        batch.tokens.to(device),
        batch.position_ids.to(device),
        batch.loss_index.to(device),
        cu_seqlens=None if batch.cu_seqlens is None else batch.cu_seqlens.cpu(),
        with_logits=not fused,
    )
    return output, partial(loss_function, batch=batch)


def _loss_sums(
    output: Tensor,
    *,
    batch: MicroBatch,
    model: StudentModel,
    loss: DistillLoss,
    head_and_sum: tuple[Tensor, Tensor | None] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sum to differentiate, its int token count, numbers to report), as Megatron requires of a loss function.

    Args:
        output: of the last stage: [N, V_local] logits, or with `head_and_sum` [N, H] hidden states.
        head_and_sum: see `_head_and_sum`.
    """
    targets = batch.targets
    if targets is None:
        raise DataError("the last pipeline stage got a micro-batch without targets")
    if head_and_sum is not None:
        # The backward pass of the gather under sequence parallelism sums the gradient of the hidden states.
        reduce_hidden_grad = not model.config.sequence_parallel
        head, head_grad_sum = head_and_sum
        loss_sum, values = loss.from_hidden(
            output, head, targets, reduce_hidden_grad=reduce_hidden_grad, head_grad_sum=head_grad_sum
        )
    else:
        loss_sum, values = loss.from_logits(output, targets)
    n_tokens = torch.tensor(batch.n_loss_tokens, dtype=torch.int, device=output.device)
    return loss_sum, n_tokens, torch.cat([token_counts(batch, targets, output.device), values])


def _head_and_sum(model: StudentModel, ddp: DistributedDataParallel) -> tuple[Tensor, Tensor | None]:
    """Return this rank's rows of the LM head, and their `main_grad` if the loss can add the gradient there in place.

    Megatron starts each backward pass with a gradient of 1, which `head_grad_sum` of the loss requires. The float32
    `main_grad` then has no rounding of a micro-batch's gradient to the weights' dtype, and the gradient no memory.
    """
    head = model.lm_head
    main_grad: Tensor | None = getattr(head, "main_grad", None)  # a frozen head has none
    if main_grad is None or main_grad.dtype != statistics_dtype(head):
        return head, None
    shares_embedding = model.dims.tied_embeddings and model.layout.pp == 1
    if shares_embedding or not ddp.ddp_config.overlap_grad_reduce:
        return head.detach(), main_grad
    # The gradient's hook starts the reduction. It must run for the head, and add nothing.
    head.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return head, main_grad


def _n_common(n_batches: int, model: StudentModel) -> int:
    """Return the number of micro-batches that this rank has to run.

    At least one, because every rank must join the gradient reduction. A multiple of PP in an interleaved pipeline. With
    expert parallelism the same number on all ranks of the stage, which exchange tokens in each forward pass.
    """
    group = model.layout.pp if model.layout.vpp > 1 else 1
    n_common = max(1, -(-n_batches // group)) * group
    if model.layout.ep > 1:
        longest = torch.tensor(n_common, device=model.device)
        # Over DP, not EP: TP peers may be in different EP groups, and must run the same micro-batches.
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=model.groups.dp)
        n_common = int(longest)
    return n_common

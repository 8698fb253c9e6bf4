"""Run forward and backward passes of a sharded student over the micro-batches of one rank.

Every rank joins every gather and reduction of fully_shard. So all ranks run the same number of passes, and a rank with
fewer micro-batches runs some without loss.

Letters: N loss rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.actor.common.agree import same_error
from gkd.actor.common.step import (
    IMAGE_SUMS,
    BatchSums,
    check_before,
    empty_micro_batch,
    sum_over_group,
    token_counts,
    with_next_tokens,
)
from gkd.actor.fsdp.attention import Pack
from gkd.actor.fsdp.compiled import uncompiled
from gkd.actor.fsdp.model import LossModel, passes_of
from gkd.data.collate import parts_of, without_targets
from gkd.errors import DataError
from gkd.loss.distill_loss import DistillLoss, logprobs_of_hidden, logprobs_of_logits
from gkd.types import MicroBatch
from teacher_server.vision.images import ImageError
from teacher_server.vision.rows import Span, image_rows


def run_batch(
    model: LossModel,
    micro_batches: Sequence[MicroBatch],
    loss: DistillLoss,
    device: torch.device,
    *,
    backward: bool,
) -> BatchSums:
    """Run one global batch. With `backward`, gradients of the loss *sum* are added to the parameters. Collective.

    Args:
        micro_batches: see `Student.train_step`.

    Raises:
        NumericsError, DataError: see `Student.train_step`. Gradients may be incomplete afterwards.
    """
    with same_error(device, count=len(micro_batches)) as agreement:
        for batch in without_targets(micro_batches):
            _check(model, batch, micro_batches, loss, needs_scores=True)
    totals = torch.zeros(2 + len(loss.report_names), dtype=torch.float64, device=device)
    reader = model.image_processor
    waited_s = 0.0 if reader is None else -reader.waited_s
    rank_batches = parts_of(micro_batches, model.columns)
    filler = model.columns.part_of(empty_micro_batch())
    with passes_of(model):
        for i in range(max(1, agreement.largest)):
            has_work = i < len(rank_batches)
            batch = rank_batches[i] if has_work else filler
            targets = batch.targets
            assert targets is not None  # checked
            later = without_targets(rank_batches[i + 1 : i + 2]) if reader is not None else ()
            with uncompiled(when=not has_work):
                loss_sum, values = forward(model, batch, device, later, targets=targets, loss=loss, fused=model.fused)
                totals += torch.cat([token_counts(batch, targets, device), values])
                if backward:
                    loss_sum.backward()
    names = loss.report_names
    if reader is not None:
        n_image_tokens = sum(int((b.tokens == reader.token_id).sum()) for b in without_targets(micro_batches))
        waited_s += reader.waited_s
        totals = torch.cat([totals, totals.new_tensor([n_image_tokens, waited_s / dist.get_world_size()])])
        names = (*names, *IMAGE_SUMS)
    n_tokens, n_on_policy, *sums = sum_over_group(totals, dist.group.WORLD).tolist()
    return BatchSums(round(n_tokens), round(n_on_policy), dict(zip(names, sums, strict=True)))


@torch.no_grad()
def run_logprobs(
    model: LossModel, micro_batches: Sequence[MicroBatch], loss: DistillLoss, device: torch.device
) -> list[Tensor]:
    """Compute `Student.compute_logprobs`. Collective."""
    with same_error(device, count=len(micro_batches)) as agreement:
        batches = []
        for batch in without_targets(micro_batches):
            _check(model, batch, micro_batches, loss, needs_scores=False)
            batches.append(with_next_tokens(batch))
    rank_batches = parts_of(batches, model.columns)
    filler = model.columns.part_of(empty_micro_batch())
    outputs = []
    with passes_of(model):
        for i in range(agreement.largest):
            batch = rank_batches[i] if i < len(rank_batches) else filler
            later = rank_batches[i + 1 : i + 2]
            assert batch.targets is not None
            ids = batch.targets.sampled_ids.to(device)
            with uncompiled(when=i >= len(rank_batches)):
                if model.fused:
                    logprobs = forward(model, batch, device, later, use=partial(logprobs_of_hidden, loss, ids=ids))
                else:
                    logprobs = logprobs_of_logits(loss, forward(model, batch, device, later), ids)
            outputs += [logprobs.float().cpu()] if i < len(rank_batches) else []
    return model.columns.whole(outputs, batches)


def _check(
    model: LossModel,
    batch: MicroBatch,
    micro_batches: Sequence[MicroBatch],
    loss: DistillLoss,
    *,
    needs_scores: bool,
) -> None:
    """Raise DataError or NumericsError for a malformed micro-batch, one of `without_targets(micro_batches)`."""
    check_before(loss, batch, micro_batches, needs_scores=needs_scores)
    if batch.cu_seqlens is not None and not model.packing:
        raise DataError("the student was built with actor.packing=false and got a packed micro-batch")
    if batch.images:
        if model.image_processor is None:
            raise DataError("the student was built without a vision tower and got sequences with images")
        with _as_data_error():  # the tokens of each sequence are those of its images
            for (row, columns), images in zip(_spans(batch), batch.images, strict=True):
                model.image_processor.check(batch.tokens[row, columns].numpy(), images)


def forward(
    model: LossModel,
    batch: MicroBatch,
    device: torch.device,
    later: Sequence[MicroBatch] = (),
    **arguments: Any,
) -> Any:
    """Run the model on its columns of a micro-batch; for `arguments` and result see `LossModel.forward`.

    Args:
        later: micro-batches whose images a thread prepares meanwhile.
    """
    pack = None
    positions = None
    group = model.columns.group
    if batch.cu_seqlens is not None:
        lengths = batch.cu_seqlens.diff().tolist()
        pack = Pack(batch.cu_seqlens.to(device), lengths, max(lengths), group=group)
    elif group is not None:
        pack = Pack(None, group=group)
    if pack is not None:
        positions = batch.position_ids.to(device)
    processor = model.image_processor
    if processor is not None:
        if batch.images:
            with _as_data_error():
                arguments["images"] = image_rows(model.hf, processor, batch.tokens, _spans(batch), batch.images, device)
        processor.prepare(image for ahead in later for images in ahead.images for image in images)
    tokens = batch.tokens.to(device)
    rows = batch.loss_index.to(device)
    return model(tokens, rows, position_ids=positions, pack=pack, **arguments)


@contextmanager
def _as_data_error() -> Iterator[None]:
    try:
        yield
    except ImageError as error:
        raise DataError(f"a sequence cannot be trained on: {error}") from error


def _spans(batch: MicroBatch) -> list[Span]:
    if batch.cu_seqlens is None:
        return [(row, slice(None)) for row in range(len(batch.tokens))]
    borders = batch.cu_seqlens.tolist()
    return [(0, slice(start, stop)) for start, stop in zip(borders[:-1], borders[1:], strict=True)]

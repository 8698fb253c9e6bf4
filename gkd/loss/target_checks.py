"""Check the targets of a micro-batch before a forward pass, which is a collective that other ranks would hang in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gkd.errors import DataError
from gkd.types import TokenTargets

if TYPE_CHECKING:
    from gkd.loss.distill_loss import DistillLoss


def check_targets(loss: DistillLoss, targets: TokenTargets) -> None:
    """Raise as `DistillLoss.check`."""
    loss.shard.check(targets.sampled_ids)
    if targets.topk_ids is not None:
        loss.shard.check(targets.topk_ids, lowest=-1)
    if len(targets) == 0:  # a rank without data; its tables may be missing
        return
    spec = loss.spec
    needs = {
        "reference_logprobs": spec.has_reference,
        "advantages": spec.has_rewards,
        "routes": spec.domains,
        "sequences": spec.token_weight != "none",
    }
    for name, is_needed in needs.items():
        if is_needed and getattr(targets, name) is None:
            raise DataError(f"the loss needs {name}, and the micro-batch has none")
    if loss.is_full_vocab:
        _check_distribution(loss, targets)
        return
    for signal, table in (("topk", targets.topk_ids), ("sampled", targets.sampled_logprobs)):
        if signal in loss.signals and table is None:
            raise DataError(f"the loss needs the teacher's {signal!r} table, and the micro-batch has none")


def _check_distribution(loss: DistillLoss, targets: TokenTargets) -> None:
    hidden, logits, head = targets.hidden, targets.logits, loss.teacher_head
    if hidden is not None:
        if head is None:
            raise DataError("the teacher sent hidden states, but its LM head is not set (set_teacher_head)")
        if hidden.shape[1] != head.shape[1]:
            raise DataError(
                f"the teacher sent hidden states of size {hidden.shape[1]}, its LM head has {head.shape[1]}"
            )
    elif logits is None:
        names = " and ".join(map(repr, loss.signals))
        raise DataError(f"the loss needs the teacher's {names}, and the micro-batch has none")
    elif logits.shape[1] < loss.shard.n_valid:
        raise DataError(f"the teacher sent {logits.shape[1]} logits per token, the student has {loss.shard.n_valid}")

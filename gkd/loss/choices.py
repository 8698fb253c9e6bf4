"""Return the teacher's most probable tokens of each row, with the student's probability of each, for inspection.

Only evaluations that keep tokens compute this.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.loss.vocab_parallel import VocabShard
from gkd.types import TokenTargets

N_CHOICES = 5


@torch.no_grad()
def listed_choices(targets: TokenTargets, student_topk: Tensor) -> Tensor:
    """Return the first entries of the teacher's list.

    Args:
        student_topk: [N, K] the student's logprobs of `targets.topk_ids`, nats.

    Returns:
        [N, min(K, N_CHOICES), 3]: token id (-1: none), the teacher's probability, the student's; descending.
    """
    assert targets.topk_ids is not None and targets.topk_logprobs is not None  # checked by the loss
    log_q = student_topk[:, :N_CHOICES].detach()
    ids, log_p = (table[:, :N_CHOICES].to(log_q.dtype) for table in (targets.topk_ids, targets.topk_logprobs))
    return torch.stack([ids, log_p.exp(), log_q.exp()], dim=2)


@torch.no_grad()
def full_vocab_choices(
    logits: Tensor, teacher_logits: Tensor, norm_q: Tensor, norm_p: Tensor, temperature: float, shard: VocabShard
) -> Tensor:
    """Return the most probable tokens of the teacher's distribution. Collective over the shard's group.

    Args:
        logits: [n, v] the student's, before the temperature.
        teacher_logits: [n, v] divided by the temperature.
        norm_q: [n] log normalizer of logits / temperature; norm_p: of the teacher's logits.

    Returns:
        [n, N_CHOICES, 3] as `listed_choices`; fewer columns if the vocabulary is smaller.
    """
    log_p, columns = teacher_logits.topk(min(N_CHOICES, teacher_logits.shape[1]), dim=1)
    log_q = logits.gather(1, columns).to(norm_q.dtype) / temperature - norm_q[:, None]
    ids = (columns + shard.start).to(norm_q.dtype)
    choices = torch.stack([ids, (log_p - norm_p[:, None]).exp(), log_q.exp()], dim=2)
    if shard.group is None:
        return choices
    padded = choices.new_full((len(choices), N_CHOICES, 3), -1.0)  # a rank may have fewer columns
    padded[:, : choices.shape[1]] = choices
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(gathered, padded, group=shard.group)
    merged = torch.cat(gathered, dim=1)
    best = merged[:, :, 1].topk(N_CHOICES, dim=1).indices
    return merged.take_along_dim(best[:, :, None], dim=1)

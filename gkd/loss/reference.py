"""The divergences between teacher and student in one screen: dense, in probabilities, with plain autograd.

Training computes the same numbers from chunks of rows, split vocabularies and logprobs; the tests compare the two. Only
tests and readers use this file.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gkd.config.loss_spec import LossTerm, Tail


def kl(a: Tensor, b: Tensor) -> Tensor:
    """Return sum a log(a / b) over the last dimension, nats, for positive a and b."""
    return (a * (a / b).log()).sum(dim=-1)


def jsd(q: Tensor, p: Tensor, term: LossTerm) -> Tensor:
    """Return the generalized Jensen-Shannon divergence. arXiv:2306.13649, section 3."""
    m = term.beta * p + (1 - term.beta) * q
    return term.beta * kl(p, m) + (1 - term.beta) * kl(q, m)


# Probabilities of student q and teacher p, both [N, M] over the same outcomes -> [N], nats. See docs/losses.md.
DIVERGENCES: dict[str, Callable[[Tensor, Tensor, LossTerm], Tensor]] = {
    "forward_kl": lambda q, p, term: kl(p, q),
    "reverse_kl": lambda q, p, term: kl(q, p),
    "jsd": jsd,
    "skew_kl": lambda q, p, term: kl(p, term.alpha * p + (1 - term.alpha) * q),
    "skew_reverse_kl": lambda q, p, term: kl(q, (1 - term.alpha) * p + term.alpha * q),
}


def outcomes(listed: Tensor, tail: Tail) -> Tensor:
    """Return the outcomes that are compared, given the [N, K] probabilities of a list: [N, K] or [N, K + 1]."""
    if tail == "bucket":
        return torch.cat([listed, 1 - listed.sum(dim=-1, keepdim=True)], dim=-1)
    return listed / listed.sum(dim=-1, keepdim=True) if tail == "renorm" else listed


def token_losses(
    logits: Tensor, teacher: Tensor, term: LossTerm, *, temperature: float = 1.0, k: int = 0, tail: Tail = "bucket"
) -> Tensor:
    """Return the divergence of each token, [N], nats.

    Args:
        logits: [N, V] of the student.
        teacher: [N, V] logits of the teacher.
        k: compare only the teacher's k most probable tokens and what `tail` makes of the others; 0: all tokens.
    """
    q = (logits / temperature).softmax(dim=-1)
    p = (teacher / temperature).softmax(dim=-1)
    if k:
        listed, ids = p.topk(k)
        q = outcomes(q.gather(1, ids), tail)
        p = outcomes(listed, tail)
    return DIVERGENCES[term.name](q, p, term)

"""A loss of your own: a divergence between teacher and student, named by its import path. docs/losses.md has the rules.

gkd train --config X.yaml distill.loss=examples.own_loss:alpha_divergence distill.alpha=0.5
"""

from torch import Tensor

from gkd.config.loss_spec import LossTerm


def alpha_divergence(log_q: Tensor, log_p: Tensor, term: LossTerm) -> Tensor:
    """Return Amari's alpha-divergence, sum (a p + (1 - a) q - p^a q^(1 - a)) / (a (1 - a)), nats, [N].

    It tends to the reverse KL for a = distill.alpha -> 0, and to the forward KL for a -> 1.

    Args:
        log_q: [N, M] logprobs of the student.
        log_p: [N, M] logprobs of the teacher for the same outcomes.
        term: has distill.alpha and distill.beta.
    """
    a = term.alpha
    product = (a * log_p + (1 - a) * log_q).exp()
    return (a * log_p.exp() + (1 - a) * log_q.exp() - product).sum(dim=-1) / (a * (1 - a))

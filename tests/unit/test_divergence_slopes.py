"""Compare the closed forms of full-vocabulary losses with the reference divergences and their derivatives."""

from __future__ import annotations

import pytest
import torch

from gkd.config.loss_spec import DIVERGENCE_NAMES, LossTerm
from gkd.loss.divergence import DIVERGENCES
from gkd.loss.divergence_slopes import SLOPES, value_and_slope

TERMS = [
    LossTerm(name, beta=beta, alpha=alpha) for name in DIVERGENCE_NAMES for beta, alpha in ((0.5, 0.0), (0.1, 0.4))
]


def _logprobs(seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn((5, 40), generator=generator, dtype=torch.float64) * scale).log_softmax(-1)


def test_closed_forms_have_the_names_of_divergences() -> None:
    """Fails if a misspelled name makes a divergence slow over a whole vocabulary: autograd would differentiate it."""
    assert set(SLOPES) <= set(DIVERGENCE_NAMES)


@pytest.mark.parametrize("term", TERMS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_equal_to_autograd_of_the_reference(term: LossTerm, scale: float) -> None:
    """Fails if a closed form is wrong, or drops tokens that are nearly impossible (scale 60: down to 1e-150)."""
    log_p, log_q = _logprobs(0, scale), _logprobs(1, scale).requires_grad_()
    expected = DIVERGENCES[term.name](log_q, log_p, term)
    (expected_slope,) = torch.autograd.grad(expected.sum(), log_q)
    value, slope = value_and_slope(term.name)(log_q.detach(), log_p, term)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(slope, expected_slope, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("term", TERMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_tokens_make_no_nan(term: LossTerm, dtype: torch.dtype) -> None:
    """Fails if 0 * inf enters a sum where a probability is 0 or underflows in float32."""
    log_p = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=dtype).log()
    log_q = torch.tensor([[0.25, 0.25, 0.5, 0.0]], dtype=dtype).log()
    value, slope = value_and_slope(term.name)(log_q, log_p, term)
    torch.testing.assert_close(value, DIVERGENCES[term.name](log_q, log_p, term))
    is_reverse = term.name == "reverse_kl" or (term.name == "skew_reverse_kl" and term.alpha == 0)
    assert value.isinf().item() == is_reverse, (
        "infinite only where the student has mass on a token with teacher probability 0"
    )
    assert slope[:, [0, 1, 3]].isfinite().all() and not slope.isnan().any()
    far = torch.tensor([[0.0, -300.0]], dtype=dtype)
    value, slope = value_and_slope(term.name)(far, far.flip(-1), term)
    torch.testing.assert_close(value, DIVERGENCES[term.name](far, far.flip(-1), term))
    assert value.isfinite().all() and slope.isfinite().all()

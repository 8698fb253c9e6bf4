"""Check, before the start, that a loss function of the user returns what training needs. Imports torch."""

from __future__ import annotations

import sys
from itertools import product

import torch
from torch import Tensor

from gkd.config.declare import is_path
from gkd.config.loss_spec import LossTerm
from gkd.config.schema import Config
from gkd.errors import ConfigError
from gkd.loss.divergence import divergence_of
from gkd.loss.divergence_slopes import value_and_slope
from gkd.user_code import search_path

# Sizes of the tables.
_TOKENS = 4
_OUTCOMES = 6
_STEP = 1e-5  # finite difference, nats
_FIX = "correct the function; docs/losses.md has the rules under A loss of your own."


def check_loss_functions(config: Config) -> None:
    """Raise ConfigError if a function cannot be imported, or is not a differentiable sum over outcomes."""
    sys.path[:0] = [folder for folder in search_path() if folder not in sys.path]
    for i, term in enumerate(config.derived.loss.terms):
        if not is_path(term.name):
            continue
        key = f"distill.losses[{i}].name" if config.distill.losses else "distill.loss"
        try:
            problem = _problem(term)
        except ConfigError as error:
            raise ConfigError(key, error.value, error.problem, error.fix) from error
        if problem:
            raise ConfigError(key, term.name, problem, _FIX)


def _problem(term: LossTerm) -> str:
    """Return what is wrong with the function of a term, in one sentence; empty if nothing is."""
    divergence = divergence_of(term.name)
    log_q, log_p = _tables(2.0, torch.float64)
    halves = slice(_OUTCOMES // 2), slice(_OUTCOMES // 2, None)
    try:
        value: object = divergence(log_q, log_p, term)
        if not isinstance(value, Tensor) or value.shape != (_TOKENS,):
            returned = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            return f"it returns {returned} for tables of {[_TOKENS, _OUTCOMES]}, not a number per token, {[_TOKENS]}."
        summed = torch.zeros_like(value)
        for token, half in product(range(_TOKENS), halves):
            summed[token] += divergence(log_q[token : token + 1, half], log_p[token : token + 1, half], term)[0]
        impossible = torch.full((_TOKENS, 1), -torch.inf, dtype=torch.float64)
        padded = divergence(torch.cat([log_q, impossible], dim=1), torch.cat([log_p, impossible], dim=1), term)
        _, slope = value_and_slope(term.name)(log_q, log_p, term)
        steps = torch.eye(_OUTCOMES, dtype=torch.float64) * _STEP
        ahead, behind = ([divergence(log_q + sign * step, log_p, term) for step in steps] for sign in (1, -1))
        expected = (torch.stack(ahead, dim=1) - torch.stack(behind, dim=1)) / (2 * _STEP)
        spread = value_and_slope(term.name)(*_tables(10.0, torch.float32), term)
    except Exception as error:  # a user's function may raise any error
        return f"it raises {type(error).__name__}: {error}."
    if not all(table.isfinite().all() for table in (value, slope, *spread)):
        return f"its values or slopes are not finite, for example {[*value.tolist(), *spread[0].tolist()]}."
    if not torch.allclose(value, summed, rtol=1e-9, atol=1e-12):
        return f"it is not a sum over the outcomes of each token: {value.tolist()}, and in parts {summed.tolist()}."
    if not torch.allclose(value, padded, rtol=1e-9, atol=1e-12):
        added = (padded - value).tolist()
        return f"an outcome that is impossible for teacher and student adds {added}, not 0."
    if not torch.allclose(slope, expected, rtol=1e-5, atol=1e-7):
        row, column = divmod(int((slope - expected).abs().argmax()), _OUTCOMES)
        actual = float(slope[row, column])
        wanted = float(expected[row, column])
        return f"its slope in log q is {actual:.6g} where finite differences of its value give {wanted:.6g}."
    return ""


def _tables(scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logprobs of student and teacher, [tokens, outcomes] each, of normal logits with this deviation."""
    logits = torch.randn((2, _TOKENS, _OUTCOMES), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_q, log_p = (logits * scale).log_softmax(dim=-1).to(dtype)
    return log_q, log_p

"""Inputs of the simulation: rates of the stages, response lengths, and the work of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gkd.config.schema import Config


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds. A GPU works at the same rate in a pool of another size."""

    # An engine's pass that decodes b sequences and prefills p tokens takes pass_s + sequence_s b + prefill_s p.
    pass_s: float
    sequence_s: float
    prefill_s: float
    hand_over_s: float  # of an engine between two passes, per finished sequence
    batch_s: float  # of a batch's generation in addition to its engines' time; not of a stream
    score_s: float  # of a teacher worker, per sequence
    score_token_s: float  # and per token of it, prompt and response
    train_s: float  # per step
    train_token_s: float  # and per token of the largest data-parallel group
    sync_s: float  # a weight sync
    other_s: float  # of a step outside the stages of the pools


@dataclass(frozen=True, slots=True)
class Lengths:
    """Response lengths, as quantiles per step."""

    percent: np.ndarray  # [Q] float64, ascending, from 0 to 100
    tokens: np.ndarray  # [steps, Q] float64: length at each quantile
    mean: float  # tokens; samples are scaled to it, since lengths between quantiles are interpolated

    def draw(self, rng: np.random.Generator, n: int, step: int) -> np.ndarray:
        """Draw [n] int64 >= 1, the response lengths of one step. The rows are used in turns.

        A draw is a permutation of a step's responses: independent draws would contain the longest one, which the
        engines wait for, too rarely.
        """
        percent = 100.0 * rng.permutation(n) / max(1, n - 1)
        usual = float(np.interp(percent, self.percent, self.tokens.mean(0)).mean())
        drawn = np.interp(percent, self.percent, self.tokens[step % len(self.tokens)]) * (self.mean / usual)
        return np.maximum(np.rint(drawn), 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Independent(Lengths):
    """Independent draws from one distribution, the only row of `tokens`."""

    def draw(self, rng: np.random.Generator, n: int, step: int) -> np.ndarray:
        del step
        drawn = np.interp(rng.uniform(0.0, 100.0, n), self.percent, self.tokens[0])
        return np.maximum(np.rint(drawn), 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of a step, independent of the split."""

    n_prompts: int  # trainer.global_batch_size
    n_on_policy: float  # prompts per step with rollouts, on average; the others take the dataset's response
    n: int  # rollout.n
    max_num_seqs: int
    chunk_size: int  # sequences per full chunk of an engine, see `gkd.data.chunks.chunk_size`
    prompt_tokens: float  # mean
    dataset_tokens: float  # mean of a dataset response
    overlap: bool  # responses are scored as they finish
    balance: bool  # the tokens of the groups are evened out
    early_parts: bool  # see `gkd.config.derived.Derived`
    lengths: Lengths

    def on_policy(self, step: int) -> int:
        """Return the number of prompts of this step with rollouts."""
        return int((step + 1) * self.n_on_policy + 1e-9) - int(step * self.n_on_policy + 1e-9)

    @property
    def n_sequences(self) -> float:
        """Sequences per step, on average."""
        return self.n_on_policy * self.n + self.n_prompts - self.n_on_policy


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a split that the simulation needs."""

    dp: int  # data-parallel groups of the actor
    engines: int
    workers: int  # of the teacher


def independent(values: np.ndarray, counts: np.ndarray | None = None) -> Independent:
    """Return the distribution of these lengths.

    Args:
        values: [k] tokens.
        counts: [k] how often each occurs; None: equally often.
    """
    percent = np.concatenate([np.arange(100.0), 100.0 - np.logspace(0, -3, 20), [100.0]])  # finer for the few long ones
    tokens = np.percentile(values, percent, weights=counts, method="inverted_cdf")
    return Independent(percent, tokens[None], float(np.average(values, weights=counts)))


def lognormal(mean: float, sigma: float, longest: float) -> Independent:
    """Return lognormal lengths with this mean before truncation at `longest`; `sigma` is that of the logarithm."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, 100_000)
    return independent(np.clip(drawn, 1.0, longest))


def max_staleness(config: Config, scheduler: str) -> int:
    """Return the staleness bound of a run with this scheduler and otherwise these settings."""
    return replace(config.trainer, scheduler=scheduler).staleness_bound

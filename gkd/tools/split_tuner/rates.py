"""What the simulation must know: how fast each stage is, how long the answers are, and what a step is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gkd.config.schedulers import staleness_bound
from gkd.config.schema import Config


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds. A GPU of another pool size works at the same rate as the measured one's."""

    # A pass of an engine in which b sequences move by a token each and p tokens of prompts are read:
    # pass_s + sequence_s b + prefill_s p.
    pass_s: float
    sequence_s: float
    prefill_s: float
    chunk_s: float  # an engine, beside its passes, for each chunk that it hands over, and for the call of a batch
    score_s: float  # a worker of the teacher, a sequence
    score_token_s: float  # and a token of it, prompt and response
    train_s: float  # a step, whatever its size
    train_token_s: float  # and a token of the data-parallel group that has most
    sync_s: float  # a weight sync
    other_s: float  # of a step that no stage explains, or a stage without a pool


@dataclass(frozen=True, slots=True)
class Lengths:
    """Response lengths, as a step's quantiles."""

    percent: np.ndarray  # [Q] float64, ascending, from 0 to 100
    tokens: np.ndarray  # [steps, Q] float64: each step's length at each of them
    mean: float  # tokens; what is drawn is scaled to it, since points between quantiles are guessed

    def draw(self, rng: np.random.Generator, n: int, step: int) -> np.ndarray:
        """[n] int64, at least 1: the lengths of one step's responses. The rows take turns.

        A row is all of a step's responses, and a draw is them again in another order: drawn one by one they would have
        the longest one, which the engines wait for, too rarely.
        """
        percent = 100.0 * rng.permutation(n) / max(1, n - 1)
        usual = float(np.interp(percent, self.percent, self.tokens.mean(0)).mean())
        drawn = np.interp(percent, self.percent, self.tokens[step % len(self.tokens)]) * (self.mean / usual)
        return np.maximum(np.rint(drawn), 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Lognormal(Lengths):
    """Each response drawn for itself; the row of quantiles is for who asks what is typical."""

    uncut_mean: float  # tokens
    sigma: float  # of the logarithm
    longest: float  # tokens

    def draw(self, rng: np.random.Generator, n: int, step: int) -> np.ndarray:
        del step
        return np.rint(_lognormal(rng, n, self.uncut_mean, self.sigma, self.longest)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step is, whatever the split."""

    n_prompts: int  # trainer.global_batch_size
    n_answered: float  # of them by the student, on average; the others take the dataset's response
    n: int  # rollout.n
    max_num_seqs: int
    prompt_tokens: float  # mean
    dataset_tokens: float  # mean of a dataset response
    overlap: bool  # teacher.overlap_rollout
    balance: bool  # actor.balance
    lengths: Lengths

    def answered(self, step: int) -> int:
        """Prompts of this step that the student answers."""
        return int((step + 1) * self.n_answered + 1e-9) - int(step * self.n_answered + 1e-9)

    @property
    def n_sequences(self) -> float:
        """Of a step, on average."""
        return self.n_answered * self.n + self.n_prompts - self.n_answered


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many of each: what the simulation needs of a split."""

    dp: int  # data-parallel groups of the actor
    engines: int
    workers: int  # of the teacher


def lognormal(mean: float, sigma: float, longest: float) -> Lognormal:
    """Lognormal with this mean before it is cut at `longest`; `sigma` is of the logarithm."""
    drawn = _lognormal(np.random.default_rng(0), 100_000, mean, sigma, longest)
    percent = np.concatenate([np.arange(100.0), 100.0 - np.logspace(0, -3, 20), [100.0]])  # fine where few are long
    return Lognormal(percent, np.percentile(drawn, percent)[None], float(drawn.mean()), mean, sigma, longest)


def _lognormal(rng: np.random.Generator, n: int, mean: float, sigma: float, longest: float) -> np.ndarray:
    """[n] float64."""
    return np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, n), 1.0, longest)


def max_staleness(config: Config, scheduler: str) -> int:
    """Of a run with this scheduler and otherwise these settings."""
    return staleness_bound(replace(config.trainer, scheduler=scheduler))

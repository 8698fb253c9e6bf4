"""Types of the calls between the driver and the processes of the engines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a batch or a stream."""

    n: int  # samples per prompt
    temperature: float  # 0 = greedy
    top_p: float
    max_tokens: int
    seed: int
    n_top_ids: int = 0  # most probable ids to return of each position
    top_k: int = 0
    min_p: float = 0.0
    max_turns: int = 1  # with an environment


@dataclass(frozen=True, slots=True)
class Job:
    """A batch or a stream of prompts that engines answer."""

    id: int
    sampling: Sampling
    linger_s: float  # a finished sequence waits at most this long for others of its chunk, while the engine is busy


@dataclass(frozen=True, slots=True)
class Pulse:
    """Sign of life of a rollout engine."""

    n_passes: int  # forward passes since its start
    is_idle: bool  # no pass is due: no sequence is unfinished, or the engine executes another call

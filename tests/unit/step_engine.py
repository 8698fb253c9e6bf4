"""An engine that only counts steps, for tests of the loops around one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gkd.errors import DataError
from gkd.rollout.messages import Sampling
from gkd.types import Prompt, Rollout, VersionSpan

TIMEOUT_S = 20.0  # of operations that would otherwise hang


@dataclass
class Engine:
    """Sample j of prompt i takes `length(i, j)` steps; only the first `slots` sequences advance.

    `step`, a refusal and `synchronize` wait while their gate is closed. Prompts with ids above 10^6 are refused.
    """

    slots: int = 1000
    length: Callable[[int, int], int] = lambda prompt_id, j: prompt_id + j
    gate: threading.Event = field(default_factory=threading.Event)
    refusal: threading.Event = field(default_factory=threading.Event)
    sync_gate: threading.Event = field(default_factory=threading.Event)
    syncing: threading.Event = field(default_factory=threading.Event)
    errors: dict[str, Exception] = field(default_factory=dict)  # "abort" | "synchronize" -> error
    started: list[tuple[int, int]] = field(default_factory=list)  # (steps before it, prompt id) of each sequence
    ended: list[tuple[int, int]] = field(default_factory=list)  # (step, prompt id)
    peak: int = 0  # sequences at a time
    steps: int = 0
    error: Exception | None = None  # of the next steps
    active_calls: int = 0
    running: list[list[Any]] = field(default_factory=list)  # owner, rollout, steps left
    done: list[tuple[Hashable, Rollout]] = field(default_factory=list)
    has_weights: bool = True
    n_passes: int = 0

    def __post_init__(self) -> None:
        for gate in (self.gate, self.refusal, self.sync_gate):
            gate.set()

    @property
    def n_running(self) -> int:
        return len(self.running)

    @property
    def n_generating(self) -> int:
        return self.n_running

    def add(
        self, owner: Hashable, prompts: Sequence[Prompt], sampling: Sampling, prompt_indices: Sequence[int]
    ) -> None:
        assert self.has_weights
        for prompt, prompt_index in zip(prompts, prompt_indices, strict=True):
            if prompt.prompt_id > 10**6:
                assert self.refusal.wait(TIMEOUT_S)
                raise DataError(f"prompt {prompt.prompt_id} is refused")
            for j in range(sampling.n):
                ids, index = np.array([prompt.prompt_id, j], np.int32), prompt_index * sampling.n + j
                span = (VersionSpan(0, 2, 0),)
                made = Rollout(prompt.prompt_id, index, ids[:1], ids, np.zeros(2, np.float32), span, "stop")
                self.running.append([owner, made, self.length(prompt.prompt_id, j)])
                self.started.append((self.steps, prompt.prompt_id))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do nothing: this engine is never asleep."""

    def step(self) -> None:
        assert self.gate.wait(TIMEOUT_S)
        if self.error:
            raise self.error
        self.active_calls += 1
        assert self.active_calls == 1 and self.running and self.has_weights
        self.steps += 1
        self.peak = max(self.peak, len(self.running))
        for item in self.running[: self.slots]:
            item[2] -= 1
        self.done += [(owner, made) for owner, made, left in self.running if left <= 0]
        self.ended += [(self.steps, made.prompt_id) for _, made, left in self.running if left <= 0]
        self.running = [item for item in self.running if item[2] > 0]
        self.active_calls -= 1

    def pop_finished(self, owner: Hashable) -> list[Rollout]:
        finished = [made for its_owner, made in self.done if its_owner is owner]
        self.done = [(its_owner, made) for its_owner, made in self.done if its_owner is not owner]
        return finished

    def abort(self, owner: Hashable) -> None:
        if "abort" in self.errors:
            raise self.errors["abort"]
        self.pop_finished(owner)
        self.running = [item for item in self.running if item[0] is not owner]

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": 0, "kv_cache": 0}

    def process_memory(self) -> dict[str, int]:
        return {}

    def synchronize(self) -> None:
        self.syncing.set()
        assert self.sync_gate.wait(TIMEOUT_S)
        if "synchronize" in self.errors:
            raise self.errors["synchronize"]
        assert not self.running, "sequences are left in the engine"

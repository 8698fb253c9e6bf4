"""Compute the learning rate of each step, for the optimizers of both backends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gkd.config.schema_actor import OptimConfig
from gkd.errors import ConfigError


@dataclass(frozen=True)
class OptimSpec(OptimConfig):
    """`actor.optim` and the number of steps of the run. Raises ConfigError: the decay does not fit into them."""

    total_steps: int = 1  # the decay ends at the last of them

    def __post_init__(self) -> None:
        if self.schedule == "wsd" and self.warmup_steps + self.decay_steps > self.total_steps:
            problem = f"with actor.optim.warmup_steps = {self.warmup_steps} exceeds the run's {self.total_steps} steps."
            raise ConfigError("actor.optim.decay_steps", self.decay_steps, problem, "Reduce one of them.")

    def lr_at(self, step: int) -> float:
        """Return the learning rate of update `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "wsd":
            decayed = max(0, step + 1 - (self.total_steps - self.decay_steps))  # decay steps made, this one included
            return self.lr * (1.0 - (1.0 - self.min_lr_ratio) * min(1.0, decayed / self.decay_steps))
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - 1 - self.warmup_steps))
        remaining = 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * remaining)


def clip_factor(grad_norm: float, clip_grad: float) -> float:
    """Return the factor that reduces a norm to `clip_grad`; 1 if it is below or clipping is off (0)."""
    return min(1.0, clip_grad / (grad_norm + 1e-6)) if clip_grad > 0 else 1.0

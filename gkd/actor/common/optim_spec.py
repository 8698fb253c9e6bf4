"""Check `actor.optim` and compute the learning rate of each step, for the optimizers of both backends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gkd.config.check_values import check_value
from gkd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OptimSpec:
    """`actor.optim` and the number of steps of the run. The constructor raises ConfigError for invalid values."""

    lr: float = 1e-6  # peak
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01  # decoupled; not applied to biases and norms
    clip_grad: float = 1.0  # limit of the global gradient norm; 0 = off
    schedule: str = "constant"
    warmup_steps: int = 0  # linear; the peak is reached at this step
    total_steps: int = 1  # the decay ends at the last of them
    decay_steps: int = 0  # wsd: number of final steps with a linear decay
    min_lr_ratio: float = 0.0  # learning rate at the last step, as a fraction of the peak

    def __post_init__(self) -> None:
        def refuse(name: str, problem: str, fix: str) -> None:
            raise ConfigError(f"actor.optim.{name}", getattr(self, name), problem, fix)

        for name in ("schedule", "min_lr_ratio"):
            check_value(f"actor.optim.{name}", getattr(self, name))
        for name in ("lr", "eps", "weight_decay", "clip_grad", "warmup_steps", "decay_steps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                refuse(name, "must be a finite number >= 0.", "Remove it for the default.")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            refuse("betas", "Adam requires two, each in [0, 1).", "Use e.g. [0.9, 0.95].")
        if self.decay_steps and self.schedule != "wsd":
            problem = f"applies to the schedule wsd only, and actor.optim.schedule is {self.schedule}."
            refuse("decay_steps", problem, "Use 0, or actor.optim.schedule=wsd.")
        if self.schedule == "wsd":
            if not self.decay_steps:
                refuse("decay_steps", "the schedule wsd requires decay steps.", "Use at least 1.")
            if self.warmup_steps + self.decay_steps > self.total_steps:
                problem = (
                    f"with actor.optim.warmup_steps = {self.warmup_steps} exceeds the run's {self.total_steps} steps."
                )
                refuse("decay_steps", problem, "Reduce one of them.")

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

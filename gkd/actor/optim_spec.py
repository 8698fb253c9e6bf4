"""`actor.optim`, checked, and the learning rate of each step: what every backend's optimizer is built from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gkd.errors import ConfigError

_SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class OptimSpec:
    """`actor.optim` plus the two things it is resolved with. Checked when it is made."""

    lr: float = 1e-6  # peak
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01  # decoupled; not applied to biases and norms
    clip_grad: float = 1.0  # limit of the global gradient norm; 0 = off
    schedule: str = "constant"  # constant | linear | cosine
    warmup_steps: int = 0  # linear, reaching the peak at this step
    total_steps: int = 1  # the decay ends at the last of them
    min_lr_ratio: float = 0.0  # of the peak, at the last step
    shard_over_dp: bool = True  # keep 1/DP of the optimizer state on each rank

    def __post_init__(self) -> None:
        if self.schedule not in _SCHEDULES:
            raise ConfigError(
                "actor.optim.schedule", self.schedule, "is not a schedule.", f"Choose one of {', '.join(_SCHEDULES)}."
            )
        for name in ("lr", "eps", "weight_decay", "clip_grad", "warmup_steps", "min_lr_ratio"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"actor.optim.{name}", value, "must be a finite number >= 0.", "Remove it for the default."
                )

    def lr_at(self, step: int) -> float:
        """Learning rate of update number `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - 1 - self.warmup_steps))
        remaining = 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * remaining)

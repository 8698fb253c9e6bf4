"""`actor.optim`, checked, and the learning rate of each step: what every backend's optimizer is built from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gkd.errors import ConfigError

_SCHEDULES = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True, slots=True)
class OptimSpec:
    """`actor.optim` plus the two things it is resolved with. Checked when it is made."""

    lr: float = 1e-6  # peak
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01  # decoupled; not applied to biases and norms
    clip_grad: float = 1.0  # limit of the global gradient norm; 0 = off
    schedule: str = "constant"  # constant | linear | cosine | wsd
    warmup_steps: int = 0  # linear, reaching the peak at this step
    total_steps: int = 1  # the decay ends at the last of them
    decay_steps: int = 0  # wsd: the last so many steps go down, linearly
    min_lr_ratio: float = 0.0  # of the peak, at the last step

    def __post_init__(self) -> None:
        if self.schedule not in _SCHEDULES:
            raise ConfigError(
                "actor.optim.schedule", self.schedule, "is not a schedule.", f"Choose one of {', '.join(_SCHEDULES)}."
            )
        for name in ("lr", "eps", "weight_decay", "clip_grad", "warmup_steps", "decay_steps", "min_lr_ratio"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"actor.optim.{name}", value, "must be a finite number >= 0.", "Remove it for the default."
                )
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError("actor.optim.betas", self.betas, "Adam takes two, each in [0, 1).", "e.g. [0.9, 0.95].")
        if self.min_lr_ratio > 1.0:
            raise ConfigError("actor.optim.min_lr_ratio", self.min_lr_ratio, "is a share of lr.", "Use 0 to 1.")
        if self.decay_steps and self.schedule != "wsd":
            raise ConfigError(
                "actor.optim.decay_steps",
                self.decay_steps,
                f"only the schedule wsd reads it, and this is {self.schedule}.",
                "Use 0, or actor.optim.schedule=wsd.",
            )
        if self.schedule == "wsd":
            if not self.decay_steps:
                raise ConfigError("actor.optim.decay_steps", 0, "wsd needs steps to decay in.", "Use at least 1.")
            if self.warmup_steps + self.decay_steps > self.total_steps:
                raise ConfigError(
                    "actor.optim.decay_steps",
                    self.decay_steps,
                    f"with actor.optim.warmup_steps {self.warmup_steps} these are more than the run's "
                    f"{self.total_steps} steps.",
                    "Shorten one of them.",
                )

    def lr_at(self, step: int) -> float:
        """Learning rate of update number `step`, counted from 0."""
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

"""Choose the step whose evaluation is the best so far, by `trainer.keep_best`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gkd.config.schema_trainer import SMALLER_IS_BETTER
from gkd.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from gkd.config.schema_trainer import TrainerConfig


@dataclass(frozen=True, slots=True)
class Best:
    """Content of `checkpoints/best`."""

    step: int
    metric: str
    value: float

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return (json.dumps(asdict(self)) + "\n").encode()

    @classmethod
    def of_bytes(cls, data: bytes) -> Best:
        """Return the content of the file. Raises CheckpointError: it is damaged."""
        try:
            found = cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"checkpoints/best is damaged ({error}). Fix: delete it") from error
        return found


class BestStep:
    """The best of the steps that were evaluated; a later step with an equal number does not replace it.

    Attributes:
        best: None means keep_best is off, or no step was evaluated.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._metric, self._smallest = config.keep_best, config.keep_best in SMALLER_IS_BETTER
        self.best: Best | None = None

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Note the numbers of an evaluation. The untrained student, step 0, is not a candidate.

        Raises:
            ConfigError: the evaluation does not have the number.
        """
        if not self._metric:
            return
        if self._metric not in numbers:
            listed = ", ".join(sorted(name for name in numbers if name.startswith(("eval/", "domain/"))))
            problem = "the evaluations of this run do not have it."
            raise ConfigError("trainer.keep_best", self._metric, problem, f"use one of {listed}.")
        value = numbers[self._metric]
        if step and (self.best is None or (value < self.best.value if self._smallest else value > self.best.value)):
            self.best = Best(step, self._metric, value)

    def restore(self, best: Best | None, step: int) -> None:
        """Continue from a checkpoint of this step, with the best one that was saved before it.

        Args:
            best: what the run folder has; not used if it is later than the step, or chosen by another number.
        """
        if best is not None and best.step <= step and best.metric == self._metric:
            self.best = best

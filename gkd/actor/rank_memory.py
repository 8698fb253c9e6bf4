"""What one rank's memory was in each phase of its work, and an explanation where it did not suffice."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from gkd.cluster.progress import Phases
from gkd.config.schema import Config
from gkd.memory.advice import advice
from gkd.memory.fragmentation import FragmentationWatch
from gkd.memory.oom import diagnosed
from gkd.memory.timeline import Timeline


class RankMemory:
    """Looks on while a rank works.

    Args:
        run_dir: the run's folder, where explanations are kept.
        who: the rank, "actor rank 0".
        phases: are told each phase, too, for whoever asks what the rank is at.
    """

    def __init__(
        self, config: Config, device: torch.device, run_dir: Path, who: str, phases: Phases, log: logging.Logger
    ) -> None:
        self._config, self._device, self._folder = config, device, run_dir / "memory"
        self._who, self._phases = who, phases
        self.timeline = Timeline(device) if config.memory.timeline else None
        self._fragmentation = FragmentationWatch(device, config.memory.fragmentation_warn, log)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """In this phase, for whoever asks, and on the time-line. Raises OutOfMemory."""
        noted = nullcontext() if self.timeline is None else self.timeline.phase(phase.replace(" ", "_"))
        with self._phases.during(phase), self.diagnosed(phase), noted:
            yield

    def diagnosed(self, phase: str) -> AbstractContextManager[None]:
        """Memory that runs out here is explained."""
        return diagnosed(
            self._folder,
            device=self._device,
            who=self._who,
            phase=phase,
            advice=lambda shortage: advice(self._config, shortage, os.environ),
        )

    def after_step(self) -> None:
        """A training step has left its memory as it is now."""
        self._fragmentation.after_step()

    def take(self) -> dict[str, float]:
        """What the phases took since the last call, see `Timeline.take`, and how the memory is cut."""
        phases = {} if self.timeline is None else self.timeline.take()
        return phases | self._fragmentation.take()

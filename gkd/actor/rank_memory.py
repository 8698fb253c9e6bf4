"""Measure one rank's memory in each phase of its work, and diagnose out-of-memory errors."""

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
from gkd.memory.allocator_counts import CountMeter
from gkd.memory.fragmentation import FragmentationWatch
from gkd.memory.oom import diagnosed
from gkd.memory.timeline import Timeline


class RankMemory:
    """Memory time-line, fragmentation and out-of-memory diagnosis of one rank.

    Args:
        run_dir: the run's folder; diagnoses are written to `memory/` in it.
        name: the rank's name, "actor rank 0".
        phases: also receives the name of each phase, for progress reports.
    """

    def __init__(
        self, config: Config, device: torch.device, run_dir: Path, name: str, phases: Phases, log: logging.Logger
    ) -> None:
        self._config, self._device, self._folder = config, device, run_dir / "memory"
        self._name, self._phases = name, phases
        self.timeline = Timeline(device) if config.memory.timeline else None
        self._fragmentation = FragmentationWatch(device, config.memory.fragmentation_warn, log)
        self._counts = CountMeter(device)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record progress and memory of a phase. Raises OutOfMemory."""
        recorded = nullcontext() if self.timeline is None else self.timeline.phase(phase.replace(" ", "_"))
        with self._phases.during(phase), self.diagnosed(phase), recorded:
            yield

    def diagnosed(self, phase: str) -> AbstractContextManager[None]:
        """Turn an out-of-memory error of the block into a diagnosis, see `gkd.memory.oom`. Raises OutOfMemory."""
        return diagnosed(
            self._folder,
            device=self._device,
            who=self._name,
            phase=phase,
            advice=lambda shortage: advice(self._config, shortage, os.environ),
        )

    def after_step(self) -> None:
        """Measure fragmentation; call it at the end of a training step."""
        self._fragmentation.after_step()

    def take(self) -> dict[str, float]:
        """Return and reset the metrics of the phases since the last call, see `Timeline.take`, of fragmentation, and of
        the allocator's calls.
        """
        phases = {} if self.timeline is None else self.timeline.take()
        return phases | self._fragmentation.take() | self._counts.take()

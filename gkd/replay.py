"""What each step was trained on, kept (`trainer.record_batches`) and trained on again (`trainer.replay`).

Under `trainer.scheduler: stream` a batch depends on timing, so a run cannot be made again from its seed. From its
batches it can: same settings, same layout, same numbers, to the bit. Any other run's batches make an off-policy run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gkd.checkpoints import TrainerState
from gkd.config import Config
from gkd.disk import make_folder, naming
from gkd.errors import CheckpointError, ConfigError
from gkd.metrics import StageTimers
from gkd.roles import Recording, ScoredChunk, ScoringRole
from gkd.run_folder import BATCHES
from gkd.schedule import STREAM
from gkd.sources import InFlight


class BatchRecorder:
    """Writes each batch beside the step that trains on it, into `folder`/step_N_group_G.npz; N is the step it makes."""

    def __init__(self, folder: Path, scoring: ScoringRole) -> None:
        self._folder, self._scoring = folder, scoring
        self._under_way: Recording | None = None

    def begin(self, step: int, batch: Sequence[ScoredChunk]) -> None:
        with naming(self._folder):
            make_folder(self._folder)
        self._under_way = self._scoring.record(batch, self._folder, _label(step), scored=True)

    def finish(self) -> None:
        """Wait until what was begun is on the disk. Raises CheckpointError: it cannot be written."""
        if self._under_way is not None:
            self._scoring.recorded(self._under_way, wait=True)
            self._under_way = None


class Replay:
    """Implements `gkd.sources.BatchSource`: the batches of another run, in its order; nothing is answered."""

    def __init__(self, config: Config, scoring: ScoringRole) -> None:
        self._folder, self._size = Path(config.trainer.replay), config.trainer.global_batch_size
        self._scoring = scoring
        self._per_prompt = config.trainer.scheduler == STREAM  # the chunks that it was trained on, and their versions

    def restore(self, folder: Path, state: TrainerState) -> None:
        """Nothing was in flight: all batches are in the folder."""

    def begin(self, step: int) -> None:
        """All were answered long ago."""

    def next(self, step: int, timers: StageTimers) -> list[ScoredChunk]:
        with timers("rollout"):
            pending = self._scoring.restore(self._folder, _label(step + 1), per_prompt=self._per_prompt)
        if not pending:
            raise CheckpointError(f"{self._folder} has no batch of step {step + 1}; it had one when the run began")
        with timers("teacher"):
            return self._scoring.collect(pending)

    def trained(self) -> None:
        """The file stays."""

    def settle(self, timers: StageTimers) -> None:
        """No engine is busy."""

    def in_flight(self, step: int) -> InFlight:
        return InFlight(step * self._size)

    def close(self) -> None:
        """Nothing was begun."""


def check_replay(config: Config, total_steps: int) -> None:
    """Has the folder that trainer.replay names a batch of every step? Raises ConfigError."""
    folder = Path(config.trainer.replay)
    if not config.trainer.replay:
        return
    fix = "name the batches folder of a run that had trainer.record_batches: true."
    if folder.resolve() == (Path(config.trainer.run_dir) / BATCHES).resolve():
        raise ConfigError("trainer.replay", config.trainer.replay, "this run's own batches are written there.", fix)
    if not folder.is_dir():
        raise ConfigError("trainer.replay", config.trainer.replay, "there is no such folder.", fix)
    missing = [step for step in range(1, total_steps + 1) if not any(folder.glob(f"{_label(step)}_group_*.npz"))]
    if missing:
        problem = f"it has no batch of {len(missing)} of the {total_steps} steps, the first is step {missing[0]}."
        raise ConfigError("trainer.replay", config.trainer.replay, problem, f"lower trainer.total_steps, or {fix}")


def _label(step: int) -> str:
    return f"step_{step:08d}"

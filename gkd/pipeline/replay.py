"""What each step was trained on, kept (`trainer.record_batches`) and trained on again (`trainer.replay`).

    batches/config.yaml, teacher.json          of the run that recorded them
            step_N/{batch_group_G.npz, manifest.json}    the batch that made step N

Under `trainer.scheduler: stream` a batch depends on timing, so a run cannot be made again from its seed. From its
batches it can: same settings, same layout, same numbers, to the bit. With other settings a replay learns off-policy,
from what another student wrote; its staleness is what it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from gkd.config.schedulers import STREAM
from gkd.config.schema import Config
from gkd.handles import InFlight, PendingScores, Recording, ScoredChunk
from gkd.metrics.writer import StageTimers
from gkd.roles import ScoringRole
from gkd.run.checkpoints import TrainerState, step_folder
from gkd.run.disk import TMP, fsync, make_folder, naming, remove, replace_file, write_synced
from gkd.run.folder import RunFolder
from gkd.run.manifest import NAME as MANIFEST
from gkd.run.manifest import Manifest, verify

_LABEL = "batch"


class BatchRecorder:
    """Writes each batch beside the step that trains on it. A batch is there whole, under its step's name, or not."""

    def __init__(self, folder: RunFolder, scoring: ScoringRole) -> None:
        self._run, self._root, self._scoring = folder, folder.batches, scoring
        self._under_way: tuple[int, Path, Recording] | None = None

    def begin(self, step: int, batch: Sequence[ScoredChunk]) -> None:
        """Args: step: the one that training on this batch makes."""
        with naming(self._root):
            if not self._root.exists():
                make_folder(self._root)
                for name, data in self._run.identity().items():
                    replace_file(self._root / name, data)
            # A name of its own: whoever outlives a killed run must not write into the next one's.
            work = self._root / f"{TMP}{step_folder(step)}_{secrets.token_hex(4)}"
            work.mkdir()
        self._under_way = step, work, self._scoring.record(batch, work, _LABEL, scored=True)

    def finish(self) -> None:
        """Wait until what was begun is on the disk. Raises CheckpointError: it cannot be written."""
        if self._under_way is None:
            return
        (step, work, recording), self._under_way = self._under_way, None
        files = self._scoring.record_finished(recording, wait=True) or {}
        final = self._root / step_folder(step)
        with naming(final):
            write_synced(work / MANIFEST, Manifest(step, files).to_bytes())
            fsync(work)
            remove(final)  # of a future that was given up
            work.rename(final)
            fsync(self._root)


class ReplayedBatches:
    """Implements `gkd.pipeline.source.BatchSource`: the batches of another run, in its order; nothing is answered."""

    max_staleness = None

    def __init__(self, config: Config, scoring: ScoringRole) -> None:
        self._folder, self._size = Path(config.trainer.replay), config.trainer.global_batch_size
        self._scoring = scoring
        self._per_prompt = config.trainer.scheduler == STREAM  # the chunks that it was trained on, and their versions

    def restore(self, folder: Path, state: TrainerState) -> None:
        """Nothing was in flight: all batches are in the folder."""

    def begin(self, step: int) -> None:
        """All were answered long ago."""

    def next(self, step: int) -> list[PendingScores]:
        """Raises CheckpointError: the batch is damaged, or there is none."""
        folder = self._folder / step_folder(step + 1)
        verify(folder)
        return self._scoring.restore(folder, _LABEL, per_prompt=self._per_prompt)

    def trained(self) -> None:
        """The file stays."""

    def settle(self, timers: StageTimers) -> None:
        """No engine is busy, but the stage has its time in the metrics."""

    def in_flight(self, step: int) -> InFlight:
        return InFlight(step * self._size)

    def close(self, *, wait: bool) -> None:
        """Nothing was begun."""

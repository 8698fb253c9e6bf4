"""Record the batch of each step (`trainer.record_batches`), and train on recorded batches again (`trainer.replay`).

    batches/config.yaml, teacher.json          of the run that recorded them
            step_N/{batch_group_G.npz, manifest.json}    the batch that made step N
                   early_I_group_G.npz                   its parts before the last one, if it has any: I = 0, 1, ...

Under `trainer.scheduler: stream` a batch depends on timing, so a seed cannot repeat a run. Its recorded batches can:
with the same settings and layout the replay is bitwise identical. With other settings a replay learns off-policy, from
another student's rollouts, and its staleness is not bounded.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gkd.config.schema import Config
from gkd.metrics.run_metrics import StepMetrics
from gkd.pipeline.batches import BatchSource
from gkd.roles import ScoringRole
from gkd.run.checkpoints import step_folder
from gkd.run.disk import TMP, fsync, make_folder, naming, remove, replace_file, write_synced
from gkd.run.folder import RunFolder
from gkd.run.manifest import NAME as MANIFEST
from gkd.run.manifest import Manifest, verify
from gkd.types import FileDigest, InFlight, PendingScores, Recording, ScoredChunk

_LABEL = "batch"


class BatchRecorder:
    """Records batches, if `enabled`. A batch exists completely, under its step's name, or not at all."""

    def __init__(self, folder: RunFolder, scoring: ScoringRole, *, enabled: bool) -> None:
        self._run = folder
        self._root = folder.batches
        self._scoring = scoring
        self._enabled = enabled

    @contextmanager
    def recording(self, step: int, batch_parts: Sequence[Sequence[ScoredChunk]], m: StepMetrics) -> Iterator[None]:
        """Write the batch while the block trains on it; leave the block when it is on disk.

        Args:
            step: the optimizer step that the block makes.
            batch_parts: of the batch, in the order of training.
            m: receives the wait after training as stage `record`.

        Raises CheckpointError: it cannot be written.
        """
        if not self._enabled:
            yield
            return
        with naming(self._root):
            if not self._root.exists():
                make_folder(self._root)
                for name, data in self._run.identity().items():
                    replace_file(self._root / name, data)
            # A new name each time: processes that outlive a killed run must not write into the next recording.
            work = self._root / f"{TMP}{step_folder(step)}_{secrets.token_hex(4)}"
            work.mkdir()
        labels = [*map(_early, range(len(batch_parts) - 1)), _LABEL]
        named = zip(labels, batch_parts, strict=True)
        recordings = [self._scoring.record(part, work, label, scored=True) for label, part in named]
        yield
        with m.stage("record"):
            self._publish(step, work, recordings)

    def _publish(self, step: int, work: Path, recordings: Sequence[Recording]) -> None:
        files: dict[str, FileDigest] = {}
        for recording in recordings:
            files |= self._scoring.record_finished(recording, wait=True) or {}
        final = self._root / step_folder(step)
        with naming(final):
            write_synced(work / MANIFEST, Manifest(step, files).to_bytes())
            fsync(work)
            remove(final)  # left by a step that a rewind has discarded
            work.rename(final)
            fsync(self._root)


class ReplayedBatches(BatchSource):
    """Another run's batches, in its order; generates nothing, and all are in the recorded folder."""

    max_staleness = None
    generates = False

    def __init__(self, config: Config, scoring: ScoringRole) -> None:
        self._folder = Path(config.trainer.replay)
        self._size = config.trainer.global_batch_size
        self._scoring = scoring
        self._in_parts = config.derived.early_parts  # False: these settings need whole batches
        self._n_read = 0  # early parts of the current batch that were looked for

    def early_part(self, step: int) -> list[PendingScores]:
        """Return the next part of the batch but the last one, if any. Raises CheckpointError: as `next_batch`."""
        return self._next_early(step) if self._in_parts else []

    def next_batch(self, step: int) -> list[PendingScores]:
        """Return the rest of the batch. Raises CheckpointError: it is damaged or missing."""
        rest: list[PendingScores] = []
        while part := self._next_early(step):
            rest += part
        self._n_read = 0
        return rest + self._scoring.restore(self._folder_of(step), _LABEL)

    def _next_early(self, step: int) -> list[PendingScores]:
        folder = self._folder_of(step)
        if not self._n_read:
            verify(folder)
        self._n_read += 1
        return self._scoring.restore(folder, _early(self._n_read - 1))

    def _folder_of(self, step: int) -> Path:
        return self._folder / step_folder(step + 1)

    def in_flight(self, step: int) -> InFlight:
        return InFlight(step * self._size)


def _early(number: int) -> str:
    return f"early_{number}"

"""A run's folder: what a run writes, and where.

run_dir/config.yaml            resolved settings
        teacher.json           who scores: name and fingerprint of the teacher's weights
        metrics.jsonl          one line per step
        tuner.jsonl            one line per step: sums that only the split tuner reads
        gpus.json              which rank sat on which GPU at the last start; see `gkd.cluster.gpu_table`
        stacks.txt             where every rank stood the last time that some did not answer
        checkpoints/           see `gkd.run.checkpoints`
        branched_from          the checkpoint of another run that this one began with, if it did
        going_back             the earlier checkpoint of its own that it was told to go back to, until that is loaded
        memory/                reports of ranks that ran out of memory; see `gkd.memory.oom`
        samples/step_N.jsonl   greedy answers to held-out prompts
        token_losses/step_N.jsonl  the numbers of each token of an evaluation, with eval.keep_token_losses
        batches/step_N/        what each step was trained on, with trainer.record_batches; see `gkd.pipeline.replay`
        export/                the trained student in Hugging Face format; see `gkd.run.export_folder`
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from gkd.config.load import config_yaml
from gkd.config.schema import Config
from gkd.handles import FileDigest, Sample, TokenRecord
from gkd.log import get_logger
from gkd.run import export_folder
from gkd.run.checkpoints import ACTOR, STATE, CheckpointStore, TrainerState, read_state
from gkd.run.disk import TMP, fsync, make_folder, naming, replace_file
from gkd.run.manifest import Manifest

log = get_logger("run_folder")

BATCHES = "batches"
CHECKPOINTS = "checkpoints"
PLACES = "gpus.json"
STACKS = "stacks.txt"
LOCK, ORIGIN, GOING_BACK = ".lock", "branched_from", "going_back"
_BY_STEP = ("samples", "token_losses", BATCHES)  # folders with files of each evaluation or step


class RunFolder:
    """Paths and checkpoints of one run. Made by `gkd.run.open.open_run_folder`, which decides whether it may be used.

    Args:
        start: the checkpoint that the run goes on from, of this run or of another; None: it begins at step 0.
    """

    def __init__(
        self, root: Path, config: Config, teacher: Mapping[str, str], lock: TextIO, start: Path | None
    ) -> None:
        self.root, self.config, self.start = root, config, start
        self._teacher = teacher
        self._lock = lock  # held while this object lives
        self.metrics_file = root / "metrics.jsonl"
        self.tuner_file = root / "tuner.jsonl"
        self.new_export = export_folder.new_export(root)
        self.batches = root / BATCHES
        self.store = CheckpointStore(root / CHECKPOINTS)

    def write_places(self, table: bytes) -> None:
        """Which rank sits on which GPU, of this start. Raises CheckpointError: it cannot be written."""
        with naming(self.root / PLACES):
            replace_file(self.root / PLACES, table)

    def write_stacks(self, text: str) -> Path:
        """Where every rank stood when some did not answer; its place. Raises CheckpointError: it cannot be written."""
        file = self.root / STACKS
        with naming(file):
            replace_file(file, text.encode())
        return file

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """One JSON line a greedy answer. Raises CheckpointError: it cannot be written."""
        self._write_of_step("samples", step, [asdict(sample) for sample in samples])

    def write_token_losses(self, step: int, records: Sequence[TokenRecord]) -> None:
        """One JSON line a sequence of an evaluation; see `TokenRecord`. Infinities are null, as in the metrics.

        Raises CheckpointError: it cannot be written.
        """
        rows = []
        for record in records:
            values = {name: [v if math.isfinite(v) else None for v in row] for name, row in record.values.items()}
            rows.append(asdict(record) | {"values": values})
        self._write_of_step("token_losses", step, rows)

    def forget_after(self, step: int) -> None:
        """Delete what was kept of later steps: the run went back, and makes those steps anew.

        Raises CheckpointError: one cannot be deleted.
        """
        for file in [file for name in _BY_STEP for file in (self.root / name).glob("*")]:
            named = re.match(r"step_(\d+)", file.name)
            if file.name.startswith(TMP) or (named and int(named[1]) > step):
                with naming(file, "deleted"):
                    shutil.rmtree(file) if file.is_dir() else file.unlink()

    def commit_checkpoint(self, state: TrainerState, written: Mapping[str, FileDigest]) -> Manifest:
        """Make a finished save the newest checkpoint, then delete those that trainer.keep_last and keep_every let go.

        Args:
            written: the files of everybody but the driver, relative to the checkpoint's folder.

        Raises:
            CheckpointError: the disk is full or read-only; earlier checkpoints are untouched.
        """
        documents = {STATE: state.to_bytes(), **self.identity()}
        manifest = self.store.commit(state.step, documents, written)
        self.store.prune(self.config.trainer.keep_last, self.config.trainer.keep_every)
        return manifest

    def identity(self) -> dict[str, bytes]:
        """Whose run it is: file name -> content, of the settings and the teacher."""
        return {
            "config.yaml": config_yaml(self.config).encode(),
            "teacher.json": teacher_json(self._teacher).encode(),
        }

    def starts_from_its_own(self) -> bool:
        """Is what the run goes on from one of its own checkpoints?"""
        return self.start is not None and self.start.parent == self.store.root

    def resume(self, load_actor: Callable[[Path], None]) -> TrainerState | None:
        """Load the checkpoint that the run goes on from; None: it begins at step 0.

        Of the run's own checkpoints later ones are given up as soon as this one is loaded.
        """
        if self.start is None:
            return None
        state = read_state(self.start)
        load_actor(self.start / ACTOR)
        if self.starts_from_its_own():
            self.store.go_on_from(self.start)
            with naming(self.root / GOING_BACK, "deleted"):
                (self.root / GOING_BACK).unlink(missing_ok=True)
                fsync(self.root)  # or a power cut brings it back, and the run would go back once more
        return state

    def publish_export(self) -> Path:
        """Put the whole folder at `new_export` in the place of an export of an earlier end of this run; that place.

        Raises:
            CheckpointError: it cannot be renamed; the earlier one stays.
        """
        return export_folder.publish(self.root)

    def _write_of_step(self, folder: str, step: int, rows: Sequence[object]) -> None:
        file = self.root / folder / f"step_{step:08d}.jsonl"
        with naming(file):
            make_folder(file.parent)
            replace_file(file, "".join(json.dumps(row) + "\n" for row in rows).encode())


def teacher_json(teacher: Mapping[str, str]) -> str:
    """What teacher.json says."""
    return json.dumps(teacher, indent=2) + "\n"

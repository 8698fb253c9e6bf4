"""Paths and files of a run folder.

run_dir/config.yaml            resolved settings
        teacher.json           name, fingerprint and dtype of the teacher; of an HTTP teacher, logprobs of a probe
        metrics.jsonl          one line per step
        spans.jsonl            what each process did when; see `gkd.metrics.span_file`
        profile/               traces of torch's profiler, with trainer.profile_steps; see `gkd.actor.worker`
        gpus.json              which rank was on which GPU at the last start, and whether the run reached its end;
                               see `gkd.cluster.gpu_table`
        trackers.json          with trainer.loggers: id of the trackers' run, this folder; see `gkd.metrics.trackers`
        log.txt                what all starts of the run have logged, with the lines of ranks and engines
        environment.jsonl      one line per start: command, versions, commit, machine, seeds, data, models; see
                               `gkd.preflight.environment`
        stacks.txt             stacks of all ranks at the last timeout
        checkpoints/           see `gkd.run.checkpoints`
        branched_from          checkpoint of another run that this run started from, if any
        going_back             earlier checkpoint that a rewind was asked for, until it is loaded
        memory/                snapshots of allocators that ran out of memory; see `gkd.memory.oom`
        samples/step_N.jsonl   responses as text, see `Sample`
        token_losses/step_N.jsonl  each token of some responses of an evaluation, see `TokenRecord`
        images/                images of the prompts of both, once each, named by their digests
        batches/step_N/        with trainer.record_batches: the batch of each step; see `gkd.pipeline.replay`
        export/                the newest complete export: the trained student in Hugging Face format
        .new_export/           the next one while it is written; `publish_export` renames it
        .trash_export/         the previous one while it is deleted

`export/` is complete or absent, whenever the process is killed.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from gkd.config.load import config_yaml
from gkd.config.schema import Config
from gkd.log import log_to
from gkd.run.checkpoints import ACTOR, STATE, Best, CheckpointStore, TrainerState, read_state
from gkd.run.disk import TMP, fsync, make_folder, naming, remove, replace_file
from gkd.run.manifest import Manifest
from gkd.types import FileDigest, Sample, TokenRecord
from teacher_server.vision.images import EncodedImage

BATCHES = "batches"
CHECKPOINTS = "checkpoints"
ENVIRONMENT = "environment.jsonl"
LOG = "log.txt"
PLACES = "gpus.json"
STACKS = "stacks.txt"
IMAGES = "images"
EXPORT = "export"
_NEW = ".new_export"
_OLD = ".trash_export"
LOCK = ".lock"
ORIGIN = "branched_from"
GOING_BACK = "going_back"
_BY_STEP = ("samples", "token_losses", "profile", BATCHES)  # folders with files of each evaluation or step
SHOWN_RESPONSES = 20  # the first of a step, which the report shows: images of others are not written
_SHOWN_IMAGES = 8  # the first of a prompt, which may have 64
Images = Mapping[int, Sequence[EncodedImage]]  # prompt id -> images of the prompt


class RunFolder:
    """Paths and checkpoints of one run; `gkd.run.open.open_run_folder` creates it.

    Args:
        start: the checkpoint to resume from, of this run or another; None means the run starts at step 0.

    Attributes:
        goes_back: this start, or one that ended before it loaded the checkpoint, was told to rewind to it.
    """

    def __init__(
        self, root: Path, config: Config, teacher: Mapping[str, Any], lock: TextIO, start: Path | None
    ) -> None:
        self.root = root
        self.config = config
        self.start = start
        self.goes_back = (root / GOING_BACK).exists()
        self.teacher = teacher
        self._lock = lock  # held while this object lives
        self.metrics_file = root / "metrics.jsonl"
        self.spans_file = root / "spans.jsonl"
        self.new_export = root / _NEW  # folder to write the next export to; it does not exist yet
        self.batches = root / BATCHES
        self.store = CheckpointStore(root / CHECKPOINTS)

    def add_start(self, facts: Mapping[str, object]) -> None:
        """Append one start of the run to environment.jsonl. Raises CheckpointError: it cannot be written."""
        file = self.root / ENVIRONMENT
        with naming(file):
            before = file.read_bytes() if file.exists() else b""
        self.write(ENVIRONMENT, before + json.dumps(facts).encode() + b"\n")

    @contextmanager
    def logged(self, header: str) -> Iterator[None]:
        """Append a header, and what the block logs, to log.txt. Raises CheckpointError: it cannot be written."""
        with ExitStack() as stack:
            with naming(self.root / LOG):
                stack.enter_context(log_to(self.root / LOG, header))
            yield

    def write(self, name: str, data: bytes) -> Path:
        """Write a file of the folder, and return its path. Raises CheckpointError: it cannot be written."""
        file = self.root / name
        with naming(file):
            replace_file(file, data)
        return file

    def read_places(self) -> bytes:
        """Return the content of gpus.json. Raises CheckpointError: it cannot be read."""
        with naming(self.root / PLACES, "read"):
            return (self.root / PLACES).read_bytes()

    def write_samples(self, step: int, samples: Sequence[Sample], images: Images | None = None) -> None:
        """Write one JSON line per response, and the images that the first ones name.

        Raises CheckpointError: a file cannot be written; ImageError: an image has changed.
        """
        self._write_of_step("samples", step, [asdict(sample) for sample in samples], images or {})

    def write_token_losses(self, step: int, records: Sequence[TokenRecord], images: Images | None = None) -> None:
        """Write one JSON line per `TokenRecord`, infinities as null; images and errors as for `write_samples`."""
        rows = []
        for record in records:
            values = {name: [v if math.isfinite(v) else None for v in row] for name, row in record.values.items()}
            row = asdict(record) | {"values": values}
            if not record.observed:  # without an environment
                del row["observed"]
            rows.append(row)
        self._write_of_step("token_losses", step, rows, images or {})

    def forget_after(self, step: int) -> None:
        """Delete samples, token losses, profiles and recorded batches of later steps, which the run makes again.

        Raises CheckpointError: one cannot be deleted.
        """
        for file in [file for name in _BY_STEP for file in (self.root / name).glob("*")]:
            named = re.match(r"step_(\d+)", file.name)
            if file.name.startswith(TMP) or (named and int(named[1]) > step):
                with naming(file, "deleted"):
                    shutil.rmtree(file) if file.is_dir() else file.unlink()

    def commit_checkpoint(
        self, state: TrainerState, written: Mapping[str, FileDigest], *, best: Best | None = None
    ) -> Manifest:
        """Make a finished save the newest checkpoint, then delete the checkpoints that no key of `trainer` keeps.

        Args:
            written: the files of the ranks, relative to the checkpoint's folder.
            best: step of trainer.keep_best, saved or not.

        Raises:
            CheckpointError: the disk is full or read-only; earlier checkpoints are untouched.
        """
        manifest = self.store.commit(state.step, {STATE: state.to_bytes(), **self.identity()}, written)
        self.prune_checkpoints(best)
        return manifest

    def prune_checkpoints(self, best: Best | None) -> None:
        """Name the best step, and delete the checkpoints that no key of `trainer` keeps; see `CheckpointStore.prune`.

        Raises CheckpointError: the name cannot be written.
        """
        self.store.prune(self.config.trainer.keep_last, best)

    def identity(self) -> dict[str, bytes]:
        """Return the documents that identify the run, settings and teacher: file name -> content."""
        return {
            "config.yaml": config_yaml(self.config).encode(),
            "teacher.json": teacher_json(self.teacher).encode(),
        }

    def resumes_own_checkpoint(self) -> bool:
        """Return whether the run resumes from one of its own checkpoints."""
        return self.start is not None and self.start.parent == self.store.root

    def resume(self, load_actor: Callable[[Path], None]) -> TrainerState | None:
        """Load the checkpoint that the run resumes from. Return None if it starts at step 0.

        Later checkpoints of the run are discarded as soon as this one is loaded.
        """
        if self.start is None:
            return None
        state = read_state(self.start)
        load_actor(self.start / ACTOR)
        if self.resumes_own_checkpoint():
            self.store.rewind_to(self.start)
            with naming(self.root / GOING_BACK, "deleted"):
                (self.root / GOING_BACK).unlink(missing_ok=True)
                fsync(self.root)  # otherwise a power cut can restore it, and the run would rewind again
        return state

    def publish_export(self) -> Path:
        """Replace an earlier export with the complete folder at `new_export`, and return its final path.

        Not every file system can exchange two folders in one operation. After a kill between the two renames
        `tidy_export` restores the earlier export.

        Raises:
            CheckpointError: it cannot be renamed; the earlier export stays.
        """
        final = self.root / EXPORT
        old = self.root / _OLD
        with naming(final):
            if final.exists():
                final.rename(old)
            try:
                self.new_export.rename(final)
            except OSError:
                if old.exists():
                    old.rename(final)
                raise
            fsync(self.root)
        remove(old)
        return final

    def _write_of_step(self, folder: str, step: int, rows: Sequence[dict[str, Any]], images: Images) -> None:
        for row in rows[:SHOWN_RESPONSES]:
            if shown := images.get(row["prompt_id"]):
                row["images"] = [self._image_file(item) if i < _SHOWN_IMAGES else None for i, item in enumerate(shown)]
        file = self.root / folder / f"step_{step:08d}.jsonl"
        with naming(file):
            make_folder(file.parent)
            replace_file(file, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def _image_file(self, image: EncodedImage) -> str:
        """Write an image, unless it is there already, and return the name of its file."""
        data = image.data
        kind = "png" if data.startswith(b"\x89PNG") else "webp" if data.startswith(b"RIFF") else "jpg"
        file = self.root / IMAGES / f"{image.digest.hex()}.{kind}"
        with naming(file):
            make_folder(file.parent)
            if not file.exists():
                replace_file(file, data)
        return file.name


def teacher_json(teacher: Mapping[str, Any]) -> str:
    """Return the content of teacher.json."""
    return json.dumps(teacher, indent=2) + "\n"


def tidy_export(root: Path) -> None:
    """Undo a replacement that was killed halfway, and delete leftovers of a killed export. Raises OSError."""
    final = root / EXPORT
    old = root / _OLD
    if old.exists() and not final.exists():
        old.rename(final)
        fsync(root)
    for leftover in (old, *root.glob(f"{_NEW}*")):
        remove(leftover)

"""Store a run's checkpoints on disk: complete or absent, however the process or the machine stops.

checkpoints/step_N/{actor/..., in_flight/..., trainer.json, config.yaml, teacher.json, manifest.json}
            latest            name of the newest committed checkpoint
            best              with trainer.keep_best: name of the best one
            .tmp_step_N_*/    being written; each save has a new name, see `CheckpointStore.begin`
            .trash_step_N/    being deleted

    begin -> ranks write .tmp_step_N_*/{actor,in_flight} -> commit: documents, manifest, flush, rename, flush, `latest`

A checkpoint is committed if `latest` names its step or a later one. A folder of a later step is left over from a save
that was killed after the rename, or from steps that a rewind discarded. It is not used; the next commit removes it.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from gkd.config.schema_sections import SMALLER_IS_BETTER, TrainerConfig
from gkd.errors import CheckpointError, ConfigError, DamagedCheckpoint
from gkd.log import get_logger
from gkd.run.disk import TMP, fsync, make_folder, naming, remove, replace_file, write_synced
from gkd.run.manifest import NAME as MANIFEST
from gkd.run.manifest import Manifest, check_sizes, digest_bytes, verify
from gkd.types import FileDigest

log = get_logger("checkpoints")

ACTOR = "actor"
IN_FLIGHT = "in_flight"
STATE = "trainer.json"
_POINTER = "latest"
_BEST = "best"
_TRASH = ".trash_"


_Count = Annotated[int, msgspec.Meta(ge=0)]


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State that the driver needs to resume; the rest is in the actor's part of the checkpoint."""

    step: _Count
    # On-policy prompts before this position of the sampler's order are trained on, in flight, or unfinished.
    sampler_position: _Count
    # Positions before it that have to be generated again.
    unfinished: tuple[_Count, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the content of trainer.json."""
        return msgspec.json.encode(self) + b"\n"


def read_state(folder: Path) -> TrainerState:
    """Return the driver's part of a checkpoint. Raises CheckpointError: it is missing, damaged or of another step."""
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=TrainerState)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{folder}: {STATE} cannot be read ({error})") from error
    if state.step != step_of(folder):
        raise CheckpointError(f"{folder}: {STATE} is of step {state.step}")
    return state


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder, or None if the name is not one of a checkpoint."""
    digits = folder.name.removeprefix("step_")
    is_one = re.fullmatch("[0-9]{8,}", digits) and folder.name == step_folder(int(digits))
    return int(digits) if is_one else None


def step_folder(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step_{step:08d}"


def verified(folder: Path) -> tuple[TrainerState, Manifest]:
    """Read and compare every byte of a checkpoint, and return its state and manifest.

    Raises:
        DamagedCheckpoint: a file differs from what was saved; names it.
        CheckpointError: a file cannot be read now, or another version wrote it; names it.
    """
    manifest = verify(folder)
    if manifest.step != step_of(folder):
        raise DamagedCheckpoint(f"{folder}: {MANIFEST} is of step {manifest.step}")
    return read_state(folder), manifest


class CheckpointStore:
    """The checkpoints of one run; one process at a time may write. Nothing is created before the first `begin`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._begun: tuple[int, Path] | None = None  # the pending save

    def begin(self, step: int) -> Path:
        """Create and return an empty folder for a save; `commit` makes it a checkpoint. Raises CheckpointError.

        Its name is new each time: the ranks of a killed run live on for seconds, and must not write into a save of the
        next run.
        """
        work = self.root / f"{TMP}{step_folder(step)}_{secrets.token_hex(4)}"
        with naming(work):
            make_folder(self.root)
            self.remove_leftovers()
            work.mkdir()
        self._begun = step, work
        return work

    def commit(self, step: int, documents: Mapping[str, bytes], written: Mapping[str, FileDigest]) -> Manifest:
        """Make the files written since `begin` the newest checkpoint; remove them on an error. Blocks on the disk.

        Args:
            documents: file name -> content of the driver's files.
            written: file name, relative to the folder -> digest of the files that the ranks wrote and flushed.

        Raises:
            CheckpointError: the disk is full or read-only; a file differs from its digest; `latest` is at this step or
                a later one; or no save of this step was begun. Earlier checkpoints are untouched.
        """
        final = self._folder(step)
        newest = self._pointer()
        if self._begun is None or self._begun[0] != step:
            raise CheckpointError(f"{final}: cannot be committed: no save of step {step} was begun")
        if newest is not None and newest >= step:
            problem = f"{self.root / _POINTER} is already at step {newest}"
            raise CheckpointError(f"{final} cannot be committed: {problem}. Does another run use the folder?")
        (_, work), self._begun = self._begun, None
        try:
            with naming(final):
                manifest = self._finish(work, step, documents, written)
                reached = self.committed()
                for folder in self._folders():
                    if folder not in reached:  # it belongs to discarded steps, and `latest` would commit it
                        self._delete(folder)
                work.rename(final)
                fsync(self.root)
                self._point_to(final)
        except CheckpointError:
            if not work.exists() and self._pointer() != step:  # renamed, but not committed
                remove(final)
            self.remove_leftovers()
            raise
        return manifest

    def prune(self, keep_last: int, best: Best | None = None) -> None:
        """Delete all but the newest `keep_last` and the best one.

        The file `best` names the best one, if it is saved; it does not outlive the checkpoint that it names.

        A folder is renamed before its files are deleted, so a kill leaves no incomplete checkpoint. If a deletion fails
        it is logged and tried again at the next save: it costs space, not the run.
        """
        committed = self.committed()
        kept = None if best is None else self._folder(best.step)
        if best is not None and kept in committed:
            with naming(self.root / _BEST):
                replace_file(self.root / _BEST, best.to_bytes())
        for folder in committed[:-keep_last]:
            if folder != kept:
                try:
                    self._delete(folder)
                except OSError as error:
                    log.warning("the old checkpoint %s cannot be deleted: %s", folder, error)
        self._forget_best()

    def _forget_best(self) -> None:
        """Delete the file `best` if it names a checkpoint that does not exist."""
        with suppress(CheckpointError):  # a damaged file is reported where it is used
            if self.best() is None:
                remove(self.root / _BEST)

    def best(self) -> Best | None:
        """Return what `prune` was given last of the checkpoints that exist, or None if it was given nothing.

        Raises:
            CheckpointError: the file is damaged.
        """
        file = self.root / _BEST
        if not file.exists():
            return None
        with naming(file, "read"):
            best = Best.of_bytes(file.read_bytes())
        return best if self._folder(best.step) in self.committed() else None

    def newest(self) -> Path | None:
        """Return the newest committed checkpoint that is undamaged, or None; log damaged ones.

        Reads every byte.

        Raises:
            CheckpointError: all checkpoints are damaged (names each with its problem); or one cannot be read now or was
                written by another version, since resuming from an earlier one would discard it.
        """
        damages = []
        newest = self._pointer()
        folders = self._folders()
        committed = self.committed()
        if newest is not None and self._folder(newest) not in folders:
            damages.append(f"{self._folder(newest)} is missing ({_POINTER} names it)")
            log.error("damaged checkpoint: %s; trying the one before", damages[-1])
        if newest is None and committed:
            log.error("%s is missing or invalid; using the newest complete checkpoint", self.root / _POINTER)
        if folders and not committed:
            log.warning("%s was never committed (its save was killed) and is not used", folders[0])
        for folder in reversed(committed):
            try:
                verified(folder)
            except DamagedCheckpoint as error:
                damages.append(str(error))
                log.error("damaged checkpoint: %s; trying the one before", damages[-1])
            else:
                return folder
        if damages:
            raise CheckpointError(
                f"no checkpoint in {self.root} can be used: {'; '.join(damages)}. Restore one, name another in "
                "trainer.resume, or delete the folder to start from step 0."
            )
        return None

    def rewind_to(self, folder: Path) -> None:
        """Make this checkpoint the newest committed one. Raises CheckpointError: `latest` cannot be written."""
        if self._pointer() != step_of(folder):
            with naming(self.root / _POINTER):
                self._point_to(folder)
            self._forget_best()

    def committed(self) -> list[Path]:
        """Return the committed checkpoints, oldest first."""
        folders = self._folders()
        newest = self._pointer()
        if newest is not None:
            return [folder for folder in folders if (step_of(folder) or 0) <= newest]
        # A killed first save leaves at most one folder without a pointer. With more than one the pointer was lost, and
        # each folder was complete when it was renamed.
        return folders if (self.root / _POINTER).exists() or len(folders) > 1 else []

    def has_any(self) -> bool:
        """Return whether the folder has any checkpoint, committed or not."""
        return bool(self._folders()) or (self.root / _POINTER).exists()

    def remove_leftovers(self) -> None:
        """Delete leftovers of killed saves and deletions; no other process may be writing."""
        for path in [*self.root.glob(f"{TMP}*"), *self.root.glob(f"{_TRASH}*")]:
            remove(path)

    def _finish(
        self, work: Path, step: int, documents: Mapping[str, bytes], written: Mapping[str, FileDigest]
    ) -> Manifest:
        """Write the driver's files, then the manifest, and flush all names."""
        if not any(name.startswith(f"{ACTOR}/") for name in written):
            raise CheckpointError(f"{work}: the actor wrote nothing")
        files = {**written, **{name: digest_bytes(data) for name, data in documents.items()}}
        for name, data in documents.items():
            write_synced(work / name, data)
        manifest = Manifest(step, files)
        check_sizes(work, manifest)
        write_synced(work / MANIFEST, manifest.to_bytes())
        for folder in {parent for name in files for parent in (work / name).parents if parent.is_relative_to(work)}:
            fsync(folder)
        return manifest

    def _point_to(self, folder: Path) -> None:
        replace_file(self.root / _POINTER, f"{folder.name}\n".encode())

    def _pointer(self) -> int | None:
        """Return the step that `latest` names, or None if the file is missing or invalid."""
        file = self.root / _POINTER
        try:
            text = file.read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        step = step_of(Path(text.removesuffix("\n")))
        return step if step is not None and text == f"{step_folder(step)}\n" else None

    def _folders(self) -> list[Path]:
        with naming(self.root, "read"):
            folders = [path for path in self.root.glob("step_*") if step_of(path) is not None and path.is_dir()]
        return sorted(folders, key=lambda path: step_of(path) or 0)

    def _folder(self, step: int) -> Path:
        return self.root / step_folder(step)

    def _delete(self, folder: Path) -> None:
        trash = folder.with_name(f"{_TRASH}{folder.name}")
        folder.rename(trash)
        fsync(self.root)
        remove(trash)


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
            return cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"checkpoints/best is damaged ({error}). Fix: delete it") from error


class BestStep:
    """The best of the steps that were evaluated; a later step with an equal number does not replace it.

    Attributes:
        best: None means keep_best is off, or no step was evaluated.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._metric = config.keep_best
        self._smallest = config.keep_best in SMALLER_IS_BETTER
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
        if (
            step
            and not math.isnan(value)
            and (self.best is None or (value < self.best.value if self._smallest else value > self.best.value))
        ):
            self.best = Best(step, self._metric, value)

    def restore(self, best: Best | None, step: int) -> None:
        """Continue from a checkpoint of this step, with the best one that was saved before it.

        Args:
            best: what the run folder has; not used if it is later than the step, or chosen by another number.
        """
        if best is not None and best.step <= step and best.metric == self._metric:
            self.best = best

"""A run's checkpoints on disk: whole or absent, however the process or the machine ends. Floor 1.

checkpoints/step_N/{actor/..., in_flight/..., trainer.json, config.yaml, teacher.json, manifest.json}
            latest            name of the newest committed one
            .tmp_step_N_*/    being written; each save has a name of its own, see `CheckpointStore.begin`
            .trash_step_N/    being deleted

    begin -> others write into .tmp_step_N_*/{actor,in_flight} -> commit: documents, manifest, flush, rename, flush,
    `latest`

Committed is what `latest` reaches: the folder that it names and those of earlier steps. A folder of a later step was
renamed by a save that was killed before its end, or belongs to a future that was given up when a run went back to an
earlier checkpoint; nobody uses it, and the next commit removes it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from gkd.errors import CheckpointError, DamagedCheckpoint
from gkd.handles import FileDigest
from gkd.log import get_logger
from gkd.run.disk import TMP, fsync, make_folder, naming, remove, replace_file, write_synced
from gkd.run.manifest import NAME as MANIFEST
from gkd.run.manifest import Manifest, check_sizes, digest_bytes, verify

log = get_logger("checkpoints")

ACTOR, IN_FLIGHT, STATE = "actor", "in_flight", "trainer.json"
_POINTER, _TRASH = "latest", ".trash_"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What the driver needs to go on; the rest is in the actor's part of the checkpoint."""

    step: int
    # Of the prompts' order: those that the student answers before it are trained on, in flight, or unfinished.
    sampler_position: int
    unfinished: tuple[int, ...] = ()  # positions before it that are neither trained on nor in flight: to begin again

    def to_bytes(self) -> bytes:
        """As it is stored in trainer.json."""
        return (json.dumps(asdict(self)) + "\n").encode()


def read_state(folder: Path) -> TrainerState:
    """The driver's part of a checkpoint. Raises CheckpointError: it is missing, damaged or of another step."""
    file = folder / STATE
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {STATE} cannot be read ({error})") from error
    keys = set(TrainerState.__slots__)
    if not isinstance(content, dict) or {*content, "unfinished"} != keys:  # written before there was any: none
        raise CheckpointError(f"{folder}: {STATE} has {content!r} where {', '.join(sorted(keys))} were expected")
    unfinished = content.get("unfinished", [])
    counts = [content["step"], content["sampler_position"], *(unfinished if type(unfinished) is list else [None])]
    if not all(type(value) is int and value >= 0 for value in counts):
        raise CheckpointError(f"{folder}: {STATE} has {content!r} where counts were expected")
    if content["step"] != step_of(folder):
        raise CheckpointError(f"{folder}: {STATE} is of step {content['step']}")
    return TrainerState(content["step"], content["sampler_position"], tuple(unfinished))


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint's folder is named after; None: that is no checkpoint's name."""
    digits = folder.name.removeprefix("step_")
    is_one = re.fullmatch("[0-9]{8,}", digits) and folder.name == step_folder(int(digits))
    return int(digits) if is_one else None


def step_folder(step: int) -> str:
    """Name of a step's folder."""
    return f"step_{step:08d}"


def verified(folder: Path) -> tuple[TrainerState, Manifest]:
    """A checkpoint's state, after every byte of it was read and compared.

    Raises:
        DamagedCheckpoint: names the file that is not what was saved.
        CheckpointError: names the file that cannot be read now, or that another version wrote.
    """
    manifest = verify(folder)
    if manifest.step != step_of(folder):
        raise DamagedCheckpoint(f"{folder}: {MANIFEST} is of step {manifest.step}")
    return read_state(folder), manifest


class CheckpointStore:
    """The checkpoints of one run; one process at a time may write. Nothing is created before the first `begin`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._begun: tuple[int, Path] | None = None  # the save under way

    def begin(self, step: int) -> Path:
        """An empty folder for the files of a save; it becomes a checkpoint by `commit`. Raises CheckpointError.

        Its name is new each time: the ranks of a killed run live on for seconds, and what they still write must not
        come into a save of the next run.
        """
        work = self.root / f"{TMP}{step_folder(step)}_{secrets.token_hex(4)}"
        with naming(work):
            make_folder(self.root)
            self.remove_leftovers()
            work.mkdir()
        self._begun = step, work
        return work

    def commit(self, step: int, documents: Mapping[str, bytes], written: Mapping[str, FileDigest]) -> Manifest:
        """Make what was written since `begin` the newest checkpoint; on an error it is removed. Blocks on the disk.

        Args:
            documents: file name -> content, of the driver's files.
            written: what others wrote and flushed since, relative to the folder.

        Raises:
            CheckpointError: the disk is full or read-only, or a file is not what the ranks say; or `latest` is at this
                step or a later one, or no save of this step was begun. Earlier checkpoints are untouched.
        """
        final, newest = self._folder(step), self._pointer()
        if self._begun is None or self._begun[0] != step:
            raise CheckpointError(f"{final}: no save of step {step} was begun, so none can be committed")
        if newest is not None and newest >= step:
            problem = f"{self.root / _POINTER} is at step {newest} already"
            raise CheckpointError(f"{final} cannot be committed: {problem}; is another run writing into the folder?")
        (_, work), self._begun = self._begun, None
        try:
            with naming(final):
                manifest = self._finish(work, step, documents, written)
                reached = self.committed()
                for folder in self._folders():
                    if folder not in reached:  # `latest` would reach it from now on, and it is of another history
                        self._delete(folder)
                work.rename(final)
                fsync(self.root)
                self._point_to(final)
        except CheckpointError:
            if not work.exists() and self._pointer() != step:  # renamed, and nothing reaches it
                remove(final)
            self.remove_leftovers()
            raise
        return manifest

    def prune(self, keep_last: int, keep_every: int) -> None:
        """Delete all but the newest `keep_last` and those whose step `keep_every` divides (0: none of them).

        A folder is renamed before its files go, so a kill in between leaves no half of a checkpoint. One that cannot be
        deleted is logged and tried again at the next save: it costs space, not the run.
        """
        for folder in self.committed()[:-keep_last]:
            if not keep_every or (step_of(folder) or 0) % keep_every:
                try:
                    self._delete(folder)
                except OSError as error:
                    log.warning("the old checkpoint %s cannot be deleted: %s", folder, error)

    def newest(self) -> Path | None:
        """The newest committed checkpoint that is undamaged, each byte read; damaged ones are logged. None: no save.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged; names each and what is wrong with it. Or one
                cannot be read now, or another version wrote it: going on from the one before would give it up.
        """
        damages = []
        newest, folders, committed = self._pointer(), self._folders(), self.committed()
        if newest is not None and self._folder(newest) not in folders:
            damages.append(f"{self._folder(newest)} is missing ({_POINTER} names it)")
            log.error("damaged checkpoint: %s; looking for the one before", damages[-1])
        if newest is None and committed:
            log.error("%s is lost or garbled; looking for the newest whole checkpoint", self.root / _POINTER)
        if folders and not committed:
            log.warning("%s was never committed (its save was killed) and is not used", folders[0])
        for folder in reversed(committed):
            try:
                verified(folder)
            except DamagedCheckpoint as error:
                damages.append(str(error))
                log.error("damaged checkpoint: %s; looking for the one before", damages[-1])
            else:
                return folder
        if damages:
            raise CheckpointError(
                f"no checkpoint in {self.root} can be used: {'; '.join(damages)}. Restore one, name another in "
                "trainer.resume, or delete the folder to begin anew."
            )
        return None

    def go_on_from(self, folder: Path) -> None:
        """The run goes on from this one of its checkpoints: later ones are not committed any more.

        Raises:
            CheckpointError: `latest` cannot be written.
        """
        if self._pointer() != step_of(folder):
            with naming(self.root / _POINTER):
                self._point_to(folder)

    def committed(self) -> list[Path]:
        """The folders that `latest` reaches, oldest first."""
        folders, newest = self._folders(), self._pointer()
        if newest is not None:
            return [folder for folder in folders if (step_of(folder) or 0) <= newest]
        # A killed first save leaves one folder without a pointer, and never more: so then the pointer was lost, and
        # each of them was whole when it was renamed.
        return folders if (self.root / _POINTER).exists() or len(folders) > 1 else []

    def has_any(self) -> bool:
        """Is there anything of a run to lose, committed or not?"""
        return bool(self._folders()) or (self.root / _POINTER).exists()

    def remove_leftovers(self) -> None:
        """Delete what killed saves and deletions left behind; no other process may be writing."""
        for path in [*self.root.glob(f"{TMP}*"), *self.root.glob(f"{_TRASH}*")]:
            remove(path)

    def _finish(
        self, work: Path, step: int, documents: Mapping[str, bytes], written: Mapping[str, FileDigest]
    ) -> Manifest:
        """The driver's files, the manifest last; all names flushed."""
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
        """The step that `latest` names; None: there is no such file, or it is garbled."""
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
            found = [path for path in self.root.glob("step_*") if step_of(path) is not None and path.is_dir()]
        return sorted(found, key=lambda path: step_of(path) or 0)

    def _folder(self, step: int) -> Path:
        return self.root / step_folder(step)

    def _delete(self, folder: Path) -> None:
        trash = folder.with_name(f"{_TRASH}{folder.name}")
        folder.rename(trash)
        fsync(self.root)
        remove(trash)

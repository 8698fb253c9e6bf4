"""A run's folder: what a run writes, where, and how another run is kept from overwriting it.

run_dir/config.yaml            resolved settings
        teacher.json           who scores: name and fingerprint of the teacher's weights
        metrics.jsonl          one line a step
        gpus.json              which rank sat on which GPU at the last start; see `gkd.cluster.places`
        stacks.txt             where every rank stood the last time that some did not answer
        checkpoints/           see `gkd.checkpoints`
        branched_from          the checkpoint of another run that this one began with, if it did
        going_back             the earlier checkpoint of its own that it was told to go back to, until that is loaded
        memory/                reports of ranks that ran out of memory; see `gkd.memory.oom`
        samples/step_N.jsonl   greedy answers to held-out prompts
        token_losses/step_N.jsonl  the numbers of each token of an evaluation, with eval.keep_token_losses
        batches/step_N/        what each step was trained on, with trainer.record_batches; see `gkd.replay`
        export/                the trained student in Hugging Face format; see `gkd.export_folder`
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from gkd import export_folder
from gkd.checkpoints import ACTOR, STATE, CheckpointStore, TrainerState, read_state, step_of, verified
from gkd.config import Config
from gkd.config_load import config_yaml
from gkd.disk import TMP, fsync, make_folder, naming, replace_file
from gkd.errors import ConfigError
from gkd.log import get_logger
from gkd.manifest import NAME as MANIFEST
from gkd.manifest import Manifest
from gkd.roles import FileDigest, Sample, TokenRecord
from gkd.same_run import check_same_reference, check_same_run, check_same_teacher

log = get_logger("run_folder")

BATCHES = "batches"
CHECKPOINTS = "checkpoints"
PLACES = "gpus.json"
STACKS = "stacks.txt"
_LOCK, _ORIGIN, _GOING_BACK = ".lock", "branched_from", "going_back"
_BY_STEP = ("samples", "token_losses", BATCHES)  # folders with files of each evaluation or step


class RunFolder:
    """Paths and checkpoints of one run. Made by `open_run_folder`, which decides whether it may be used.

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
            "teacher.json": _teacher_json(self._teacher).encode(),
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
            with naming(self.root / _GOING_BACK, "deleted"):
                (self.root / _GOING_BACK).unlink(missing_ok=True)
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


def open_run_folder(config: Config, teacher: dict[str, str]) -> RunFolder:
    """Take `trainer.run_dir` for this run, and hold it: a new folder, or (unless resume: never) the same run's.

    Reads the whole checkpoint that the run goes on from. A refused run changes nothing.

    Args:
        teacher: name and fingerprint of the model that scores; a resumed run must have the same fingerprint.

    Raises:
        ConfigError: it holds another run and trainer.resume is never or a checkpoint of another run, or the teacher or
            settings that shape the result have changed; trainer.resume is no checkpoint; another process holds it; it
            is a folder of something else; it cannot be written.
        CheckpointError: the checkpoint that trainer.resume names is damaged, or (auto) all of the run's are; or one
            cannot be read now.
    """
    root = Path(config.trainer.run_dir)
    if root.exists() and not root.is_dir():
        raise ConfigError("trainer.run_dir", str(root), "it is a file.", "name a folder.")
    is_ours = (root / "config.yaml").exists() and (root / "teacher.json").exists()
    if not is_ours and _holds_another_s(root):
        problem = "it is not empty and holds no whole run of ours."
        raise ConfigError("trainer.run_dir", str(root), problem, "name a new folder.")
    store, named = CheckpointStore(root / CHECKPOINTS), named_checkpoint(config)
    if named is not None and named.parent == store.root.resolve():
        named = store.root / named.name
    elif is_ours and _has_begun(root):
        if config.trainer.resume != "auto":
            raise ConfigError(
                "trainer.run_dir",
                str(root),
                "it holds a run already.",
                "name another folder, or set trainer.resume=auto to go on with that run.",
            )
        check_same_run(root / "config.yaml", config)
        check_same_teacher(root / "teacher.json", teacher, config)
        check_same_reference(root / "teacher.json", teacher, config)
    if named is not None:
        _check_checkpoint(named, teacher, config)
    try:
        make_folder(root)
        lock = _hold(root)
        try:
            start = named
            if config.trainer.resume == "auto":
                going_back = _noted(root / _GOING_BACK, teacher, config)
                start = going_back or store.newest() or _noted(root / _ORIGIN, teacher, config)
            store.remove_leftovers()
            export_folder.tidy(root)
            # Before the config: from that on this is a run, and `auto` must know what it was told to begin with.
            _note_start(root, start, store, config)
            replace_file(root / "teacher.json", _teacher_json(teacher).encode())
            replace_file(root / "config.yaml", config_yaml(config).encode())
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise ConfigError("trainer.run_dir", str(root), f"it cannot be written ({error}).", "name another.") from error
    return RunFolder(root, config, teacher, lock, start)


def named_checkpoint(config: Config) -> Path | None:
    """The folder that trainer.resume names; None where it is auto or never.

    Raises:
        ConfigError: there is no such folder, or it is no checkpoint.
    """
    resume = config.trainer.resume
    if resume in ("auto", "never"):
        return None
    problem = "it is neither auto nor never, and there is no such folder."
    if os.path.isdir(resume):
        folder = Path(resume).resolve()
        if step_of(folder) is not None and any((folder / file).exists() for file in (MANIFEST, STATE)):
            return folder
        problem = "that folder is no checkpoint."
    raise ConfigError("trainer.resume", resume, problem, "name one, like RUN_DIR/checkpoints/step_00000100.")


def _noted(file: Path, teacher: Mapping[str, str], config: Config) -> Path | None:
    """The checkpoint that an earlier start was told to go on from, and has not come to replace by its own work.

    `branched_from`: the other run's that a branch began with, until it has saved one of its own. `going_back`: the
    run's own, until it is loaded. None: there is no such file.
    """
    if not file.exists():
        return None
    with naming(file, "read"):
        text = file.read_text().removesuffix("\n")
    # Of its own the name alone, so that the run can be moved.
    folder = file.parent / CHECKPOINTS / text if file.name == _GOING_BACK else Path(text)
    log.info("%s: an earlier start was told to go on from %s, and this one does", file, folder)
    _check_checkpoint(folder, teacher, config)
    return folder


def _note_start(root: Path, start: Path | None, store: CheckpointStore, config: Config) -> None:
    """Write down what the run was told to go on from, where `auto` would not find it by itself. Raises OSError."""
    origin, going_back = root / _ORIGIN, root / _GOING_BACK
    if config.trainer.resume == "auto":
        return  # what is noted still holds
    if start is not None and start.parent == store.root:
        replace_file(going_back, f"{start.name}\n".encode())
        return
    going_back.unlink(missing_ok=True)
    if start is None:
        origin.unlink(missing_ok=True)
    else:
        replace_file(origin, f"{start}\n".encode())


def _check_checkpoint(folder: Path, teacher: Mapping[str, str], config: Config) -> None:
    """Is this checkpoint whole, and may a run of this config and teacher go on from it?"""
    verified(folder)
    check_same_run(folder / "config.yaml", config)
    check_same_teacher(folder / "teacher.json", teacher, config)
    check_same_reference(folder / "teacher.json", teacher, config)


def _hold(root: Path) -> TextIO:
    """Lock the folder for as long as the file stays open; the kernel lets go of it however the process ends."""
    lock = (root / _LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ConfigError(
            "trainer.run_dir", str(root), "another run is writing into it right now.", "wait for it, or name another."
        ) from error
    except OSError as error:
        lock.close()
        raise ConfigError(
            "trainer.run_dir",
            str(root),
            f"its file system cannot lock files ({error}), so two runs could write into it at once.",
            "name a folder of a file system that can, or have this one mounted with locks (flock).",
        ) from error
    return lock


def _holds_another_s(root: Path) -> bool:
    """Is there anything in it that a start of ours, killed before it had written its config, does not leave?"""
    ours = {_LOCK, _ORIGIN, _GOING_BACK, "teacher.json"}
    ours |= {f"{TMP}{name}" for name in (*ours, "config.yaml")}
    return root.exists() and any(path.name not in ours for path in root.iterdir())


def _teacher_json(teacher: Mapping[str, str]) -> str:
    return json.dumps(teacher, indent=2) + "\n"


def _has_begun(root: Path) -> bool:
    """Is there anything of a run to lose? A config alone is that of a run that never came to its first number."""
    metrics = root / "metrics.jsonl"
    return (metrics.is_file() and metrics.stat().st_size > 0) or CheckpointStore(root / CHECKPOINTS).has_any()

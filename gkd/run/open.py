"""Open a run folder: check that this run may use it, lock it, and find the checkpoint to resume from."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from gkd.config.load import config_yaml
from gkd.config.schema import Config
from gkd.errors import ConfigError
from gkd.files.disk import TMP, make_folder, naming, replace_file
from gkd.files.manifest import NAME as MANIFEST
from gkd.log import get_logger
from gkd.run.checkpoints import STATE, CheckpointStore, step_of, verified
from gkd.run.folder import CHECKPOINTS, ENVIRONMENT, GOING_BACK, LOCK, ORIGIN, RunFolder, teacher_json, tidy_export
from gkd.run.resume_compat import check_same_files, check_same_reference, check_same_run, check_same_teacher

log = get_logger("run_folder")


def open_run_folder(config: Config, teacher: Mapping[str, Any], files: Sequence[Mapping[str, Any]] = ()) -> RunFolder:
    """Open and lock `trainer.run_dir`: a new folder, or the folder of the run that is resumed.

    Verifies the checkpoint to resume from, every byte of it. A refused run changes nothing.

    Args:
        teacher: name and fingerprint of the teacher; a resumed run must have the same fingerprint.
        files: the prompt files, see `gkd.data.row_files.describe_files`; a resumed run must have the same.

    Raises:
        ConfigError: the folder holds another run, or files that are not of a run; the teacher, prompt files or settings
            that change the result differ; trainer.resume is not a checkpoint; another process holds the folder; or it
            cannot be written.
        CheckpointError: the checkpoint that trainer.resume names is damaged, or (auto) all of the run's are; or one
            cannot be read now.
    """
    named = check_run_folder(config)
    root = Path(config.trainer.run_dir)
    store = CheckpointStore(root / CHECKPOINTS)
    if named is None and _holds_run(root):
        check_same_teacher(root / "teacher.json", teacher, config)
        check_same_reference(root / "teacher.json", teacher, config)
        check_same_files(root / ENVIRONMENT, files, config)
    if named is not None:
        _check_checkpoint(named, teacher, files, config)
    with _writing(root):
        make_folder(root)
        lock = _hold(root)
        try:
            start = named
            if config.trainer.resume == "auto":
                going_back = _noted(root / GOING_BACK, teacher, files, config)
                start = going_back or store.newest() or _noted(root / ORIGIN, teacher, files, config)
            store.remove_leftovers()
            tidy_export(root)
            # Before the config, which makes this a run: a later start with `auto` must find the choice of this one.
            _note_start(root, start, store, config)
            replace_file(root / "teacher.json", teacher_json(teacher).encode())
            replace_file(root / "config.yaml", config_yaml(config).encode())
        except BaseException:
            lock.close()
            raise
    return RunFolder(root, config, teacher, lock, start)


def check_run_folder(config: Config) -> Path | None:
    """Check trainer.run_dir and trainer.resume as far as the settings decide. Changes nothing and reads no checkpoint.

    Returns:
        The checkpoint that trainer.resume names; None for auto and never.

    Raises:
        ConfigError: the folder cannot be used; its run has other settings; or as `named_checkpoint`.
    """
    root = Path(config.trainer.run_dir)
    with _writing(root):
        nearest = next(path for path in (root, *root.parents) if path.exists())
        if not nearest.is_dir():
            raise config.error("trainer.run_dir", f"{nearest} is a file.", "name a folder.")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(f"this user may not write in {nearest}")
        if (root / LOCK).exists():
            _hold(root).close()
    if not _is_ours(root) and _holds_other_files(root):
        problem = "it is not empty and holds no complete run of gkd."
        raise config.error("trainer.run_dir", problem, "name a new folder.")
    named = named_checkpoint(config)
    if named is not None and named.parent == (root / CHECKPOINTS).resolve():
        return root / CHECKPOINTS / named.name
    if _holds_run(root):
        if config.trainer.resume != "auto":
            problem = "the folder already holds a run."
            fix = "name another folder, or set trainer.resume=auto to resume that run."
            raise config.error("trainer.run_dir", problem, fix)
        check_same_run(root / "config.yaml", config)
    return named


def named_checkpoint(config: Config) -> Path | None:
    """Return the folder that trainer.resume names, or None if it is auto or never.

    Raises:
        ConfigError: there is no such folder, or it is not a checkpoint.
    """
    resume = config.trainer.resume
    if resume in ("auto", "never"):
        return None
    problem = "there is no such folder, and it is neither auto nor never."
    if os.path.isdir(resume):
        folder = Path(resume).resolve()
        if step_of(folder) is not None and any((folder / file).exists() for file in (MANIFEST, STATE)):
            return folder
        problem = "not a checkpoint folder."
    raise config.error("trainer.resume", problem, "name one, like RUN_DIR/checkpoints/step_00000100.")


def _noted(file: Path, teacher: Mapping[str, Any], files: Sequence[Mapping[str, Any]], config: Config) -> Path | None:
    """Return the checkpoint which an earlier start resumed from. None means that there is no such file.

    `branched_from` names another run's checkpoint, until the branch has saved its own. `going_back` names one of the
    run's own, until it is loaded.
    """
    if not file.exists():
        return None
    with naming(file, "read"):
        text = file.read_text().removesuffix("\n")
    # The run's own checkpoint by name alone, so that the folder can be moved.
    folder = file.parent / CHECKPOINTS / text if file.name == GOING_BACK else Path(text)
    log.info("%s: resuming from %s, as an earlier start was told to", file, folder)
    _check_checkpoint(folder, teacher, files, config)
    return folder


def _note_start(root: Path, start: Path | None, store: CheckpointStore, config: Config) -> None:
    """Record the checkpoint that the run was told to resume from, for later starts with `auto`. Raises OSError."""
    origin, going_back = root / ORIGIN, root / GOING_BACK
    if config.trainer.resume == "auto":
        return  # the record of an earlier start is still valid
    if start is not None and start.parent == store.root:
        replace_file(going_back, f"{start.name}\n".encode())
        return
    going_back.unlink(missing_ok=True)
    if start is None:
        origin.unlink(missing_ok=True)
    else:
        replace_file(origin, f"{start}\n".encode())


def _check_checkpoint(
    folder: Path, teacher: Mapping[str, Any], files: Sequence[Mapping[str, Any]], config: Config
) -> None:
    """Check that a checkpoint is complete, and that a run with this config, teacher and data may resume from it."""
    verified(folder)
    check_same_run(folder / "config.yaml", config)
    check_same_teacher(folder / "teacher.json", teacher, config)
    check_same_reference(folder / "teacher.json", teacher, config)
    check_same_files(folder.parents[1] / ENVIRONMENT, files, config)


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Raise ConfigError naming trainer.run_dir if the block cannot write into it."""
    try:
        yield
    except OSError as error:
        raise ConfigError("trainer.run_dir", str(root), f"it cannot be written ({error}).", "name another.") from error


def _hold(root: Path) -> TextIO:
    """Lock the folder while the returned file is open; the kernel unlocks it however the process ends."""
    lock = (root / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ConfigError(
            "trainer.run_dir", str(root), "another run is using the folder.", "wait for it, or name another folder."
        ) from error
    except OSError as error:
        lock.close()
        raise ConfigError(
            "trainer.run_dir",
            str(root),
            f"its file system cannot lock files ({error}), so two runs could use the folder at once.",
            "name a folder on a file system with locks, or mount this one with locks (flock).",
        ) from error
    return lock


def _holds_other_files(root: Path) -> bool:
    """Return whether the folder has files that a start killed before it wrote its config does not leave."""
    ours = {LOCK, ORIGIN, GOING_BACK, "teacher.json"}
    ours |= {f"{TMP}{name}" for name in (*ours, "config.yaml")}
    return root.exists() and any(path.name not in ours for path in root.iterdir())


def _is_ours(root: Path) -> bool:
    return (root / "config.yaml").exists() and (root / "teacher.json").exists()


def _holds_run(root: Path) -> bool:
    """Return whether a run of gkd has made progress in the folder."""
    return _is_ours(root) and _has_results(root)


def _has_results(root: Path) -> bool:
    """Return whether a run has written a metrics line or a checkpoint."""
    metrics = root / "metrics.jsonl"
    return (metrics.is_file() and metrics.stat().st_size > 0) or CheckpointStore(root / CHECKPOINTS).has_any()

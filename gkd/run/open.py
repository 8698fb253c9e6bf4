"""Open a run folder: check that this run may use it, lock it, and find the checkpoint to resume from.

A run that resumes must have the settings, the teacher, the reference and the data that it was started with.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from gkd.config.declare import IF_CONSTANT, IF_MOVED, IF_NO_REWARD
from gkd.config.load import config_yaml, load_config
from gkd.config.schema import Config
from gkd.config.schema_sections import EXACT_MATCH, all_keys
from gkd.config.schema_teacher import HTTP
from gkd.errors import ConfigError
from gkd.log import get_logger
from gkd.run.checkpoints import STATE, CheckpointStore, step_of, verified
from gkd.run.disk import TMP, make_folder, naming, replace_file
from gkd.run.folder import CHECKPOINTS, ENVIRONMENT, GOING_BACK, LOCK, ORIGIN, RunFolder, teacher_json, tidy_export
from gkd.run.manifest import NAME as MANIFEST

log = get_logger("run_folder")

_TRAINING = "data.train_files"
SAME_PROBE = 1e-2  # nats by which the logprobs of an HTTP teacher's probe may differ
_NEW_RUN = "start a new run with the export of this one as model.path."


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
    named = check_same_models(config, teacher, files)
    root = Path(config.trainer.run_dir)
    store = CheckpointStore(root / CHECKPOINTS)
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


def check_same_models(
    config: Config, teacher: Mapping[str, Any], files: Sequence[Mapping[str, Any]] = ()
) -> Path | None:
    """Check as `check_run_folder`, and that a run that is resumed has had this teacher, reference and data."""
    named = check_run_folder(config)
    root = Path(config.trainer.run_dir)
    if named is None and _holds_run(root):
        _check_same(root, root, teacher, files, config)
    return named


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
    if named is not None and named.parent.resolve() == (root / CHECKPOINTS).resolve():
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
    problem = f"there is no folder {os.path.abspath(resume)}, and it is neither auto nor never."
    if os.path.isdir(resume):
        folder = Path(resume).absolute()  # its run is above it by name: checkpoints/ may be a link to another disk
        folder = folder if step_of(folder) is not None else folder.resolve()
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
    origin = root / ORIGIN
    going_back = root / GOING_BACK
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
    _check_same(folder, folder.parents[1], teacher, files, config)


def _check_same(
    folder: Path, root: Path, teacher: Mapping[str, Any], files: Sequence[Mapping[str, Any]], config: Config
) -> None:
    """Check that this run has the models of a run or checkpoint in `folder`, and the data of the run in `root`."""
    check_same_teacher(folder / "teacher.json", teacher, config)
    check_same_reference(folder / "teacher.json", teacher, config)
    check_same_files(root / ENVIRONMENT, files, config)


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
    except OSError as error:
        lock.close()
        problem = f"its file system cannot lock files ({error}), so two runs could use the folder at once."
        fix = "name a folder on a file system with locks, or mount this one with locks (flock)."
        if isinstance(error, BlockingIOError):
            problem = "another run is using the folder."
            fix = "wait for it, or name another folder."
        raise ConfigError("trainer.run_dir", str(root), problem, fix) from error
    return lock


def _holds_other_files(root: Path) -> bool:
    """Return whether the folder has files that a start killed before it wrote its config does not leave."""
    ours = {LOCK, ORIGIN, GOING_BACK, "teacher.json"}
    ours |= {f"{TMP}{name}" for name in (*ours, "config.yaml")}
    return root.exists() and any(path.name not in ours for path in root.iterdir())


def _is_ours(root: Path) -> bool:
    return (root / "config.yaml").exists() and (root / "teacher.json").exists()


def _holds_run(root: Path) -> bool:
    """Return whether a run of gkd has written a metrics line or a checkpoint in the folder."""
    metrics = root / "metrics.jsonl"
    has_line = metrics.is_file() and metrics.stat().st_size > 0
    return _is_ours(root) and (has_line or CheckpointStore(root / CHECKPOINTS).has_any())


def may_change(key: str, now: Config) -> bool:
    """Return whether a run that resumes with these settings may change the key; see `resume` at the key's field."""
    rule = all_keys()[key].setting.resume
    if isinstance(rule, bool) or rule == IF_MOVED:
        return rule is True  # `kept_value` leaves out what may change
    if rule == IF_NO_REWARD:
        return EXACT_MATCH not in now.derived.rewards
    assert rule == IF_CONSTANT, rule
    # The end of the run shapes every step of a decaying schedule, and no step of a constant one.
    return now.actor.optim.schedule == "constant"


def kept_value(config: Config, key: str) -> object:
    """Return the part of a value that a resumed run must keep, unless it may change the whole key."""
    value = config.value(key)
    if all_keys()[key].setting.resume != IF_MOVED:
        return value
    return {name: (route.temperature, route.weight) for name, route in sorted(value.items())}  # a server may move


def check_same_run(before: Path, now: Config) -> None:
    """Raise ConfigError naming every setting that differs although a resumed run must keep it.

    Args:
        before: config.yaml of the run or checkpoint to resume from.
    """
    old = load_config(before)
    errors = []
    for key in sorted(all_keys()):
        was = kept_value(old, key)
        value = kept_value(now, key)
        is_chosen_later = key == "actor.strategy" and value == "auto"  # and then compared
        if was != value and not is_chosen_later and not may_change(key, now):
            problem = f"{before.parent} was started with {was!r}."
            fix = "keep the old value to resume, or start a new run in another trainer.run_dir."
            errors.append(ConfigError(key, value, problem, fix))
    if errors:
        raise ConfigError.together(errors)


def check_same_teacher(file: Path, teacher: Mapping[str, Any], now: Config, *, any_dtype: bool = False) -> None:
    """Raise ConfigError if another teacher, or one in another dtype, scored the run so far; it names the route.

    Args:
        file: teacher.json of the run or checkpoint.
        teacher: what this run would write into it.
        any_dtype: the dtype may differ, because this teacher scores nothing.
    """
    try:
        recorded = json.loads(file.read_text())
        by_route = {
            name: (entry["fingerprint"], entry["name"], [float(value) for value in entry.get("probe", ())])
            for name, entry in _by_route(recorded).items()
        }
    except (ValueError, KeyError, TypeError) as error:
        problem = f"its teacher.json is damaged ({error!r})."
        raise now.error("trainer.run_dir", problem, "name another folder.") from error
    derived = now.derived
    by_name = _by_route(teacher)
    if by_route.keys() != by_name.keys():
        problem = f"this run was scored by the routes {sorted(by_route)}."
        raise ConfigError("teacher.routes", sorted(by_name), problem, "use the same, or another trainer.run_dir.")
    for route in derived.routes:
        (fingerprint, name, probe), new = by_route[route.name], by_name[route.name]
        problem = (
            f"the teacher there is {new['name']} ({new['fingerprint'][:12]}); this run was scored by "
            f"{name} ({fingerprint[:12]})."
        )
        if fingerprint == new["fingerprint"]:
            moved = largest_difference(probe, new.get("probe", ()))
            dtype, new_dtype = (entry.get("dtype") for entry in (_by_route(recorded)[route.name], new))
            if moved <= SAME_PROBE and (any_dtype or dtype == new_dtype):
                continue
            problem = f"{name} has other weights or numerics: logprobs of its probe moved by up to {moved:.3g} nats."
            if moved <= SAME_PROBE:
                problem = f"{name} computes in {new_dtype}; this run was scored in {dtype}."
        key = route.key("server_port")
        value = now.teacher.path or route.teacher.server_port
        fix = "start the server with the old model and --dtype to resume"
        if derived.teacher_pool:
            key = now.teacher.kind.model
            fix = "name the old model to resume"
        elif route.teacher.backend == HTTP:
            key = route.key("url")
            value = ", ".join(route.teacher.url)
        raise ConfigError(key, value, problem, f"{fix}, or start a new run in another trainer.run_dir.")


def largest_difference(some: Sequence[float], other_values: Sequence[float]) -> float:
    """Return the largest difference of two probes of HTTP teachers, in nats; infinite if they do not correspond."""
    if len(some) != len(other_values):
        return math.inf
    return max((abs(one - other) for one, other in zip(some, other_values, strict=True)), default=0.0)


def _by_route(identity: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return dict(identity.get("routes", {"": identity}))


def check_same_reference(file: Path, identity: Mapping[str, Any], now: Config) -> None:
    """Raise ConfigError if the reference's weights differ from the run's so far.

    Args:
        file: teacher.json of the run or checkpoint, already read by `check_same_teacher`.
        identity: what this run would write into it.
    """
    before = json.loads(file.read_text()).get("reference")
    fingerprint = identity.get("reference")
    if before != fingerprint:
        new_mark, other = ((digest or "none")[:12] for digest in (fingerprint, before))
        problem = f"its weights ({new_mark}) are not those of the reference of this run ({other})."
        fix = "restore the old weights to resume, or start a new run in another trainer.run_dir."
        raise now.error("reference.path" if now.reference.path else "model.path", problem, fix)


def check_same_files(environment: Path, files: Sequence[Mapping[str, Any]], now: Config) -> None:
    """Raise ConfigError if training data has changed since the run's last start; warn if other data has, or it may.

    Args:
        environment: environment.jsonl of the run.
        files: the prompt files of this start, as a line of environment.jsonl has them.
    """
    if not files:
        return
    try:
        recorded = json.loads(environment.read_text().splitlines()[-1])["data"]
        before = {(file["key"], file["file"]): _mark(file) for file in recorded}
    except FileNotFoundError:
        log.warning("%s is missing, so it is not known whether the prompt files have changed", environment)
        return
    except (OSError, ValueError, LookupError, TypeError) as error:
        problem = f"the last line of {environment} is damaged ({error!r})."
        raise now.error("trainer.run_dir", problem, "restore it, or delete it.") from error
    errors = []
    for file in files:
        name = (file["key"], file["file"])
        mark = _mark(file)
        if before.get(name, mark) == mark:
            continue
        problem = f"the file has changed since the last start of this run: it had {before[name]}, and has {mark}."
        if file["key"] == _TRAINING:
            errors.append(ConfigError(*name, problem, f"restore the file, or {_NEW_RUN}"))
        else:
            log.warning("%s = %r: %s", *name, problem)
    if errors:
        raise ConfigError.together(errors)


def _mark(file: Mapping[str, Any]) -> str:
    return f"{file['rows']} rows, xxh3_128 {file['xxh3_128']}"

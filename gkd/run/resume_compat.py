"""Check that a run may resume: settings, teacher and reference must be those that it was started with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from gkd.config.declare import IF_CONSTANT
from gkd.config.derived import derive
from gkd.config.key_list import all_keys, value_of
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.errors import ConfigError


def may_change(key: str, now: Config) -> bool:
    """Return whether a run that resumes with these settings may change the key; see `resume` at the key's field."""
    rule = all_keys()[key].key.resume
    if isinstance(rule, bool):
        return rule
    assert rule == IF_CONSTANT, rule
    # The end of the run shapes every step of a decaying schedule, and no step of a constant one.
    return now.actor.optim.schedule == "constant"


def check_same_run(before: Path, now: Config) -> None:
    """Raise ConfigError naming every setting that differs although a resumed run must keep it.

    Args:
        before: config.yaml of the run or checkpoint to resume from.
    """
    old, errors = load_config(before), []
    for key in sorted(all_keys()):
        was, value = value_of(old, key), value_of(now, key)
        if was != value and not may_change(key, now):
            problem = f"{before.parent} was started with {was!r}."
            fix = "keep the old value to resume, or start a new run in another trainer.run_dir."
            errors.append(ConfigError(key, value, problem, fix))
    if errors:
        raise ConfigError.together(errors)


def check_same_teacher(file: Path, teacher: Mapping[str, str], now: Config) -> None:
    """Raise ConfigError if another teacher scored the run so far.

    Args:
        file: teacher.json of the run or checkpoint.
        teacher: name and fingerprint of the teacher now.
    """
    try:
        before = json.loads(file.read_text())
        before["fingerprint"], before["name"]
    except (ValueError, KeyError, TypeError) as error:
        problem = f"its teacher.json is damaged ({error!r})."
        raise ConfigError("trainer.run_dir", now.trainer.run_dir, problem, "name another folder.") from error
    if before["fingerprint"] != teacher["fingerprint"]:
        key, fix = "teacher.server_port", "start the server with the old model to resume"
        if derive(now).is_local_teacher:
            key, fix = "teacher.path", "name the old model to resume"
        raise ConfigError(
            key,
            now.teacher.path or now.teacher.server_port,
            f"the teacher there is {teacher['name']} ({teacher['fingerprint'][:12]}); this run was scored by "
            f"{before['name']} ({before['fingerprint'][:12]}).",
            f"{fix}, or start a new run in another trainer.run_dir.",
        )


def check_same_reference(file: Path, identity: Mapping[str, str], now: Config) -> None:
    """Raise ConfigError if the reference's weights differ from those of the run so far.

    Args:
        file: teacher.json of the run or checkpoint, already read by `check_same_teacher`.
        identity: what this run would write into it.
    """
    before, fingerprint = json.loads(file.read_text()).get("reference"), identity.get("reference")
    if before != fingerprint:
        key, path = ("reference.path", now.reference.path) if now.reference.path else ("model.path", now.model.path)
        raise ConfigError(
            key,
            path,
            f"its weights ({(fingerprint or 'none')[:12]}) are not those of the reference of this run "
            f"({(before or 'none')[:12]}).",
            "restore the old weights to resume, or start a new run in another trainer.run_dir.",
        )

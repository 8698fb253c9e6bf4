"""Check that a run may resume: settings, teacher, reference and data must be the ones that it was started with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gkd.config.declare import IF_CONSTANT, IF_MOVED
from gkd.config.load import load_config
from gkd.config.schema import Config, planned_steps
from gkd.config.schema_sections import all_keys, value_of
from gkd.config.schema_teacher import BACKENDS, HTTP
from gkd.errors import ConfigError
from gkd.log import get_logger

log = get_logger("run_folder")

_TRAINING = "data.train_files"
SAME_PROBE = 1e-2  # nats by which the logprobs of an HTTP teacher's probe may differ
_NEW_RUN = "start a new run with the export of this one as model.path."


def may_change(key: str, now: Config) -> bool:
    """Return whether a run that resumes with these settings may change the key; see `resume` at the key's field."""
    rule = all_keys()[key].key.resume
    if isinstance(rule, bool) or rule == IF_MOVED:
        return rule is True  # `kept_value` leaves out what may change
    assert rule == IF_CONSTANT, rule
    # The end of the run shapes every step of a decaying schedule, and no step of a constant one.
    return now.actor.optim.schedule == "constant"


def kept_value(config: Config, key: str) -> object:
    """Return the part of a value that a resumed run must keep, unless it may change the whole key."""
    value = value_of(config, key)
    if all_keys()[key].key.resume != IF_MOVED:
        return value
    return {name: (route.temperature, route.weight) for name, route in sorted(value.items())}  # a server may move


def check_same_run(before: Path, now: Config) -> None:
    """Raise ConfigError naming every setting that differs although a resumed run must keep it.

    Args:
        before: config.yaml of the run or checkpoint to resume from.
    """
    old, errors = load_config(before), []
    for key in sorted(all_keys()):
        was, value = kept_value(old, key), kept_value(now, key)
        if was != value and not may_change(key, now):
            problem = f"{before.parent} was started with {was!r}."
            fix = "keep the old value to resume, or start a new run in another trainer.run_dir."
            errors.append(ConfigError(key, value, problem, fix))
    if errors:
        raise ConfigError.together(errors)


def check_same_teacher(file: Path, teacher: Mapping[str, Any], now: Config) -> None:
    """Raise ConfigError if another teacher scored the run so far; of several it names the route.

    Args:
        file: teacher.json of the run or checkpoint.
        teacher: what this run would write into it.
    """
    try:
        recorded = json.loads(file.read_text())
        by_route = {
            name: (each["fingerprint"], each["name"], [float(value) for value in each.get("probe", ())])
            for name, each in _by_route(recorded).items()
        }
    except (ValueError, KeyError, TypeError) as error:
        problem = f"its teacher.json is damaged ({error!r})."
        raise ConfigError("trainer.run_dir", now.trainer.run_dir, problem, "name another folder.") from error
    derived, own = now.derived, _by_route(teacher)
    if by_route.keys() != own.keys():
        problem = f"this run was scored by the routes {sorted(by_route)}."
        raise ConfigError("teacher.routes", sorted(own), problem, "use the same, or another trainer.run_dir.")
    for route in derived.routes:
        (fingerprint, name, probe), new = by_route[route.name], own[route.name]
        problem = (
            f"the teacher there is {new['name']} ({new['fingerprint'][:12]}); this run was scored by "
            f"{name} ({fingerprint[:12]})."
        )
        if fingerprint == new["fingerprint"]:
            moved = largest_difference(probe, new.get("probe", ()))
            if moved <= SAME_PROBE:
                continue
            problem = f"{name} has other weights or numerics: logprobs of its probe moved by up to {moved:.3g} nats."
        key, value = route.key("server_port"), now.teacher.path or route.teacher.server_port
        fix = "start the server with the old model to resume"
        if derived.teacher_pool:
            key, fix = BACKENDS[now.teacher.backend].model, "name the old model to resume"
        elif route.teacher.backend == HTTP:
            key, value = route.key("url"), ", ".join(route.teacher.url)
        raise ConfigError(key, value, problem, f"{fix}, or start a new run in another trainer.run_dir.")


def largest_difference(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest difference of two probes of HTTP teachers, in nats; infinite if they do not correspond."""
    if len(some) != len(others):
        return math.inf
    return max((abs(one - other) for one, other in zip(some, others, strict=True)), default=0.0)


def _by_route(identity: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return dict(identity.get("routes", {"": identity}))


def check_same_reference(file: Path, identity: Mapping[str, Any], now: Config) -> None:
    """Raise ConfigError if the reference's weights differ from the run's so far.

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
        before = {(each["key"], each["file"]): _mark(each) for each in recorded}
    except FileNotFoundError:
        log.warning("%s is missing, so it is not known whether the prompt files have changed", environment)
        return
    except (OSError, ValueError, LookupError, TypeError) as error:
        problem = f"the last line of {environment} is damaged ({error!r})."
        raise ConfigError("trainer.run_dir", now.trainer.run_dir, problem, "restore it, or delete it.") from error
    errors = []
    for each in files:
        name, mark = (each["key"], each["file"]), _mark(each)
        if before.get(name, mark) == mark:
            continue
        problem = f"the file has changed since the last start of this run: it had {before[name]}, and has {mark}."
        if each["key"] == _TRAINING and not now.data.allow_changed_files:
            fix = "restore the file, start a new run, or accept its rows with data.allow_changed_files=true."
            errors.append(ConfigError(*name, problem, fix))
        elif each["key"] == _TRAINING and now.reward.functions and now.trainer.scheduler != "sync":
            problem += " Functions of reward.functions would judge the responses in flight by the new rows."
            errors.append(ConfigError(*name, problem, f"restore the file, or {_NEW_RUN}"))
        else:
            log.warning("%s = %r: %s", *name, problem)
    if errors:
        raise ConfigError.together(errors)
    _check_same_end(recorded, files, now)


def _mark(file: Mapping[str, Any]) -> str:
    return f"{file['rows']} rows, xxh3_128 {file['xxh3_128']}"


def _check_same_end(before: Sequence[Mapping[str, Any]], files: Sequence[Mapping[str, Any]], now: Config) -> None:
    """Raise ConfigError if the new number of rows moves the end of a schedule that decays."""
    then, steps = (
        planned_steps(now, sum(each["rows"] for each in some if each["key"] == _TRAINING)) for some in (before, files)
    )
    if then != steps and now.actor.optim.schedule != "constant":
        problem = f"with the new rows the run has {steps} steps, not {then}, and its learning rates depend on that."
        fix = f"restore the files, or {_NEW_RUN}"
        raise ConfigError("actor.optim.schedule", now.actor.optim.schedule, problem, fix)

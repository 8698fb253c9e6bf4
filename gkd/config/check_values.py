"""Check every setting by itself, against the limits and choices declared at its field."""

from __future__ import annotations

from collections.abc import Iterator

from gkd.config.interval import save_interval
from gkd.config.key_list import all_keys, value_of
from gkd.config.schema import TRACKER_NAMES, Config
from gkd.config.schema_teacher import MAX_NAME_LENGTH
from gkd.errors import ConfigError


def check_values(config: Config) -> None:
    """Raise ConfigError naming every value that is not valid by itself."""
    if errors := value_errors(config):
        raise ConfigError.together(errors)


def value_errors(config: Config) -> list[ConfigError]:
    """Return an error for each value that is not valid by itself."""
    return list(_errors(config))


def check_value(name: str, value: object) -> None:
    """Raise ConfigError if a value of one key is outside its declared limits."""
    if error := _value_error(name, value):
        raise error


def _value_error(name: str, value: object) -> ConfigError | None:
    key = all_keys()[name].key
    if key.required and not value:
        return ConfigError(name, value, "is empty.", key.required)
    if key.is_valid(value):
        return None
    if key.choices:
        return ConfigError(name, value, "is not one of the choices.", f"use one of: {key.allowed()}.")
    allowed = key.allowed()
    fix = f"use a number from {allowed}." if " to " in allowed else f"use a number {allowed}."
    return ConfigError(name, value, "is out of range.", fix)


def _errors(config: Config) -> Iterator[ConfigError]:
    for name in all_keys():
        if error := _value_error(name, value_of(config, name)):
            yield error
    if len(config.teacher.name) > MAX_NAME_LENGTH:
        fix = f"use one of the server's names, of at most {MAX_NAME_LENGTH} characters."
        yield ConfigError("teacher.name", config.teacher.name, "is too long.", fix)
    yield from _tracker_errors(config)
    try:
        save_interval(config.trainer.save_every)
    except ConfigError as error:
        yield error
    betas = config.actor.optim.betas
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        yield ConfigError("actor.optim.betas", betas, "must be two numbers in [0, 1).", "use e.g. [0.9, 0.95].")
    if config.eval.metric == "exact_match" and not config.eval.answer_marker:
        yield ConfigError("eval.answer_marker", "", "exact_match needs one.", "set it, or eval.metric=none.")


def _tracker_errors(config: Config) -> Iterator[ConfigError]:
    loggers = config.trainer.loggers
    if not set(loggers) <= set(TRACKER_NAMES) or len(set(loggers)) < len(loggers):
        fix = f"use some of {', '.join(TRACKER_NAMES)}, each once."
        yield ConfigError("trainer.loggers", loggers, "is not a list of distinct trackers.", fix)
    if not config.trainer.project_name:
        yield ConfigError("trainer.project_name", "", "is empty.", "give a name, e.g. gkd.")

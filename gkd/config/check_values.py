"""Check every setting by itself, against the limits and choices declared at its field; parse the texts of some."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gkd.config.schema_sections import HEALTH_CHECKS, NO_METRIC, Sections, all_keys
from gkd.config.schema_teacher import MAX_NAME_LENGTH
from gkd.config.schema_trainer import TRACKER_NAMES
from gkd.errors import ConfigError, GkdError
from gkd.log import get_logger
from gkd.spans import driver
from teacher_server.config.load import limit_problem
from teacher_server.vision.images import ImageError

log = get_logger("check")

_NAMED = re.compile(r"[a-z_]+(?:\.\w+)+")  # keys in a message
_SETTING = re.compile(r".*?([\w.]+) = ([^\s,]+): (.+)", re.DOTALL)  # a message that begins with a setting
_MOST_PROFILED = 100  # steps of one range; each writes megabytes per rank


class Mistakes:
    """Collect the mistakes that independent checks find.

    A mistake that names the key of an earlier one is left out, because it may follow from that one: checks go on with
    the default of a key that is misspelled, or without a model.
    """

    def __init__(self) -> None:
        self.found: list[ConfigError] = []  # each names one mistake
        self._raised: list[Exception] = []
        self.keys: set[str] = set()  # keys that are wrong, or not checked because of other mistakes

    def add(self, error: ConfigError, raised: Exception | None = None) -> None:
        """Add the mistakes that an error names. `raised` stands for it in `raise_all`."""
        new = [each for each in error.parts() if not {each.key, *named_keys(str(each))} & self.keys]
        self.found += new
        self._raised += [raised or error] * bool(new)
        for each in new:
            self.keys |= {each.key, declared_key(each.key)} - {""}
            if not declared_key(each.key):  # The key does not exist, and the fix names the right one.
                self.keys |= named_keys(each.fix)

    @contextmanager
    def step(self, key: str, value: object = "") -> Iterator[None]:
        """Add the error of the block; key and value are those of an error that names none."""
        try:
            with driver.doing(key):
                yield
        except ConfigError as error:
            self.add(error)
        except (GkdError, ImageError, PermissionError) as error:
            problem, _, fix = str(error).partition(" Fix: ")
            if named := _SETTING.match(problem):
                key, text, problem = named.groups()
                value = int(text) if text.isdecimal() else text
            if isinstance(error, PermissionError):
                fix = "permit this user to use it and the folders above it."
            self.add(ConfigError(key, value, f"{problem.rstrip('.')}.", fix), error)
        except Exception as error:
            if not self.found:
                raise
            log.warning("%s is not checked further until the other mistakes are corrected (%r)", key, error)

    def raise_all(self) -> None:
        """Raise the only error as it is, or one ConfigError for several; nothing without one."""
        if len(self._raised) == 1:
            raise self._raised[0]
        if self.found:
            raise ConfigError.together(self.found)


def named_keys(text: str) -> set[str]:
    """Return the keys that a message names."""
    return {key for name in _NAMED.findall(text) if (key := declared_key(name))}


def declared_key(name: str) -> str:
    """Return the key that a name of an error belongs to, as distill.losses of distill.losses[0].name; empty if none."""
    name = name.partition("[")[0]
    while name and name not in all_keys():
        name = name.rpartition(".")[0]
    return name


def check_values(config: Sections) -> None:
    """Raise ConfigError naming every value that is not valid by itself."""
    if errors := list(value_errors(config)):
        raise ConfigError.together(errors)


def check_value(name: str, value: object) -> None:
    """Raise ConfigError if a value of one key is outside its declared limits."""
    if error := value_error(name, value):
        raise error


def value_error(name: str, value: object) -> ConfigError | None:
    """Return the error of a value outside the declared limits of its key."""
    problem = limit_problem(all_keys()[name], value)
    return ConfigError(*problem) if problem else None


def value_errors(config: Sections) -> Iterator[ConfigError]:
    """Yield an error for each value that is not valid by itself."""
    for name in all_keys():
        if error := value_error(name, config.value(name)):
            yield error
    if len(config.teacher.name) > MAX_NAME_LENGTH:
        fix = f"use one of the server's names, of at most {MAX_NAME_LENGTH} characters."
        yield config.error("teacher.name", "is too long.", fix)
    loggers = config.trainer.loggers
    if not set(loggers) <= set(TRACKER_NAMES) or len(set(loggers)) < len(loggers):
        fix = f"use some of {', '.join(TRACKER_NAMES)}, each once."
        yield config.error("trainer.loggers", "is not a list of distinct trackers.", fix)
    if not config.trainer.project_name:
        yield config.error("trainer.project_name", "is empty.", "give a name, e.g. gkd.")
    try:
        save_interval(config.trainer.save_every)
    except ConfigError as error:
        yield error
    yield from _best_errors(config)
    try:
        listed_steps(config.trainer.profile_steps)
    except ValueError:
        problem = f"an entry is neither a step from 1 on nor a range of at most {_MOST_PROFILED} steps."
        yield config.error("trainer.profile_steps", problem, "write e.g. [3, 10-12].")
    yield from _health_errors(config)
    betas = config.actor.optim.betas
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        yield config.error("actor.optim.betas", "must be two numbers in [0, 1).", "use e.g. [0.9, 0.95].")


def listed_steps(entries: Sequence[str]) -> set[int]:
    """Return the steps of trainer.profile_steps. Raises ValueError: an entry is neither a step nor a range."""
    steps: set[int] = set()
    for entry in entries:
        first, dash, last = entry.partition("-")
        chosen = range(int(first), int(last if dash else first) + 1)
        if not chosen or chosen[0] < 1 or len(chosen) > _MOST_PROFILED:
            raise ValueError(entry)
        steps.update(chosen)
    return steps


def _best_errors(config: Sections) -> Iterator[ConfigError]:
    name = config.trainer.keep_best
    if name and not config.data.val_files:
        problem = "data.val_files is empty, so nothing is evaluated."
        yield config.error("trainer.keep_best", problem, "remove it, or name files.")
    elif config.eval.metric == NO_METRIC and ("/accuracy" in name or "/pass_at_" in name):
        yield config.error("trainer.keep_best", "eval.metric is none.", "set eval.metric, or keep eval/kl.")


def _health_errors(config: Sections) -> Iterator[ConfigError]:
    limits = config.health.limits
    if unknown := sorted(set(limits) - set(HEALTH_CHECKS)):
        yield ConfigError("health.limits", unknown[0], "there is no such check.", f"use {', '.join(HEALTH_CHECKS)}.")
    if not all(0 <= limit < math.inf for limit in limits.values()):
        yield config.error("health.limits", "has a limit that is not a number.", "use numbers >= 0; 0 switches off.")


_SECONDS = {"s": 1, "min": 60, "h": 3600}
_FIX = "give steps, e.g. 100 (0 = only at the end), or a time in s, min or h, e.g. 45s, 30min, 2h."


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval in steps or in seconds; the other one is 0. Both 0: never."""

    steps: int = 0
    seconds: float = 0.0


def save_interval(value: int | str) -> Interval:
    """Return the interval that `trainer.save_every` names. Raises ConfigError: it names none."""
    text = str(value).strip()
    if re.fullmatch("[0-9]+", text):
        return Interval(steps=int(text))
    named = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h)", text)
    if named is None:
        raise ConfigError("trainer.save_every", value, "is neither a number of steps nor a time.", _FIX)
    if (seconds := float(named[1]) * _SECONDS[named[2]]) == 0.0:
        raise ConfigError("trainer.save_every", value, "is an empty time.", _FIX)
    return Interval(seconds=seconds)


def template_parts(template: str) -> list[tuple[str, str]]:
    """Return the parts of `teacher.prompt_template`: a text, and the placeholder that follows it (empty: none).

    Raises:
        ConfigError: a placeholder is not a plain name in braces, or there is none.
    """
    key, fix = "teacher.prompt_template", "write {prompt}, {answer}, {response} or {COLUMN}, and {{ }} for braces."
    parts = []
    try:
        for text, name, spec, conversion in string.Formatter().parse(template):
            if name is not None and (not name or name.isdigit() or spec or conversion or set(".[]") & set(name)):
                raise ConfigError(key, template, f"the placeholder {{{name}}} is not the name of a column.", fix)
            parts.append((text, name or ""))
    except ValueError as error:
        raise ConfigError(key, template, f"unbalanced braces ({error}).", fix) from error
    if not any(name for _, name in parts):
        raise ConfigError(key, template, "no placeholder: every row would have the same prompt.", fix)
    return parts

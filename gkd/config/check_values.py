"""Check every setting by itself, against the limits and choices declared at its field; parse the texts of some."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gkd.config.schema_sections import Sections, all_keys
from gkd.errors import ConfigError
from teacher_server.config.load import limit_problems

_MOST_PROFILED = 100  # steps of one range; each writes megabytes per rank


def value_errors(config: Sections) -> Iterator[ConfigError]:
    """Yield an error for each value that is not valid by itself."""
    yield from (ConfigError(*problem) for problem in limit_problems(all_keys(), config.value))
    try:
        save_interval(config.trainer.save_every)
    except ConfigError as error:
        yield error
    try:
        listed_steps(config.trainer.profile_steps)
    except ValueError:
        problem = f"an entry is neither a step from 1 on nor a range of at most {_MOST_PROFILED} steps."
        yield config.error("trainer.profile_steps", problem, "write e.g. [3, 10-12].")
    if len(config.actor.optim.betas) != 2:
        yield config.error("actor.optim.betas", "must be two numbers.", "use e.g. [0.9, 0.95].")
    clip = config.distill.reward_clip
    if len(clip) != 2 or clip[0] >= 1:
        yield config.error("distill.reward_clip", "must be two numbers, the first below 1.", "use e.g. [0.2, 0.2].")
    if 0 < config.distill.importance_clip < 1:
        yield config.error("distill.importance_clip", "must be 0 or at least 1.", "use e.g. 2.0, or 0 for no limit.")


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
    key = "teacher.prompt_template"
    fix = "write {prompt}, {answer}, {response} or {COLUMN}, and {{ }} for braces."
    pairs = []
    try:
        for text, name, spec, conversion in string.Formatter().parse(template):
            if name is not None and (not name or name.isdigit() or spec or conversion or set(".[]") & set(name)):
                raise ConfigError(key, template, f"the placeholder {{{name}}} is not the name of a column.", fix)
            pairs.append((text, name or ""))
    except ValueError as error:
        raise ConfigError(key, template, f"unbalanced braces ({error}).", fix) from error
    if not any(name for _, name in pairs):
        raise ConfigError(key, template, "no placeholder: every row would have the same prompt.", fix)
    return pairs

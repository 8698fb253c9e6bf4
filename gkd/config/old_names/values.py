"""Convert values that several systems write in the same way."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from gkd.config.old_names.row import Convert, NotConvertible, OldSettings

NO_REWARD = (
    "rewards are functions: set reward.functions, distill.reward_weight, distill.advantage and distill.reward_clip "
    "(docs/losses.md)."
)


def fixed(settings: dict[str, Any]) -> Convert:
    """Return a conversion of a switch: on gives these settings, off gives none."""
    return lambda value, old: dict(settings) if value else None


def choices(names: dict[Any, Any], otherwise: str) -> Convert:
    """Return a conversion by a table; any other value is not convertible, for this reason."""

    def convert(value: Any, old: OldSettings) -> Any:
        name = value.lower() if isinstance(value, str) else value
        if name not in names:
            raise NotConvertible(otherwise)
        return names[name]

    return convert


def as_list(value: Any, old: OldSettings) -> list[Any]:
    """Return a list: the value if it is one, the parts of `a,b`, else a list of the one value."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, Iterable) else [value]


def never_is_zero(value: Any, old: OldSettings) -> int:
    """Return an interval in steps: -1 or nothing, which mean never, become 0."""
    return max(int(value or 0), 0)


def nothing(value: Any, old: OldSettings) -> None:
    """Return no setting: the value is used by the conversion of another name."""


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")  # of trainer.loggers
_NO_TRACKERS = ("console", "stdout", "file", "none")  # metrics.jsonl and the log are always written


def trackers(value: Any, old: OldSettings) -> list[str]:
    """Return trainer.loggers. Raises NotConvertible if it does not have one of the trackers."""
    names = [str(name) for name in as_list(value, old) if name and name not in _NO_TRACKERS]
    if unknown := sorted(set(names) - set(TRACKERS)):
        raise NotConvertible(f"trainer.loggers has {', '.join(TRACKERS)}, not {', '.join(unknown)}.")
    return names


def tensor_parallel_only(name: str) -> Convert:
    """Return a conversion of sequence parallelism, which is off with a tensor parallel size of 1."""
    return lambda value, old: True if value and int(old(name, 1)) > 1 else None


def ratio_to(name: str, otherwise: float) -> Convert:
    """Return a conversion of a learning rate to its ratio to the peak, which is the setting of this name."""
    return lambda value, old: float(f"{float(value) / float(old(name, otherwise)):.9g}")


def share_of_steps(ratio: float, total_steps: Any, key: str) -> int:
    """Return a share of the run in steps. Raises NotConvertible if the number of steps is not in the old file."""
    if not ratio:
        return 0
    if not total_steps or total_steps <= 0:
        raise NotConvertible(f"set {key} to {ratio:g} x the number of steps, which follows from the data.")
    return math.ceil(ratio * total_steps)


_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "wsd": "wsd",
    "warmup_stable_decay": "wsd",
}
normalize = choices(
    {"token-mean": "token", "seq-mean-token-mean": "sequence"},
    "distill.normalize is a mean of all tokens or of the responses' means.",
)
schedule = choices(_SCHEDULES, "use constant, linear, cosine or wsd.")


def devices(text: Any) -> list[int]:
    """Return the GPU numbers of a list, or of a text like `list(range(0, 8)) + [9]`. Raises NotConvertible."""
    if not isinstance(text, str):
        return [int(gpu) for gpu in text]
    found: list[int] = []
    for part in text.split("+"):
        if bounds := re.fullmatch(r"\s*list\(range\(([\d\s,]+)\)\)\s*", part):
            found += range(*(int(number) for number in bounds[1].split(",")))
        elif re.fullmatch(r"\s*\[[\d\s,]*\]\s*", part):
            found += map(int, re.findall(r"\d+", part))
        else:
            raise NotConvertible("the list of GPUs cannot be read; set the sizes of the pools.")
    return found

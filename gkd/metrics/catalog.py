"""List every key that a line of metrics.jsonl can have: unit, meaning, healthy values, problems and their fixes.

The rows are in `catalog_learning` and `catalog_system`. `python -m gkd.tools.metrics_page` writes docs/metrics.md from
them. Tests compare them with the keys of real runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gkd.config.schema import HEALTH_CHECKS
from gkd.config.schema_teacher import LOSS_NAMES

NUMBER, NAME, FUNCTION, DOTTED = r"\d+", r"[\w-]+", r"\w+", r"\w+(?:\.\w+)+"
# Placeholder of a key -> its values. NUMBER: any number; NAME: a name in teacher.routes; FUNCTION: in reward.functions.
PLACEHOLDERS: dict[str, tuple[str, ...] | str] = {
    "loss": (DOTTED, *LOSS_NAMES),
    "stage": (
        *("data", "rollout", "teacher", "reference", "train", "weight_sync", "usage"),
        *("eval", "checkpoint", "record", "switch"),
    ),
    "pool": ("rollout", "teacher", "actor"),
    "call": ("train", "evaluate", "logprobs", "reference", "sync", "save", "load", "teacher", "teacher_head"),
    "phase": (
        *("training_step", "evaluation", "teacher_scoring", "reference_logprobs", "logprobs", "sending_weights"),
        *("saving_a_checkpoint", "offloading_states", "reloading_states", "loading_a_checkpoint"),
        *("loading_the_teacher", "loading_the_reference", "setting_the_teacher's_LM_head"),
    ),
    "engine_phase": ("generating", "receiving_weights", "offloading_states"),
    "check": HEALTH_CHECKS,
    "age": NUMBER,
    "k": NUMBER,
    "function": FUNCTION,
    "route": NAME,
}
EVERY_STEP = "every step"


@dataclass(frozen=True, slots=True)
class Row:
    """One key, or a family of keys with a placeholder in angle brackets.

    Args:
        when: the lines that have it: `EVERY_STEP`, or a condition in words.
        problem: what an unhealthy value looks like, its usual cause and what to do; empty if it only informs.
    """

    key: str
    unit: str
    when: str
    meaning: str
    healthy: str = ""
    problem: str = ""

    def matches(self, key: str) -> bool:
        """Return whether a key of a metrics line belongs to this row."""
        return re.fullmatch(re.sub(r"<(\w+)>", lambda found: _pattern(found[1]), self.key), key) is not None


def _pattern(placeholder: str) -> str:
    values = PLACEHOLDERS[placeholder]
    return values if isinstance(values, str) else f"(?:{'|'.join(values)})"

"""List every key that a line of metrics.jsonl can have: unit, meaning, healthy values, problems and their fixes.

The rows are the tables of docs/metrics.md, to which `metrics.md` in this folder is a link: the report shows them, too.
Tests compare them with the keys of real runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import get_args

from gkd.config.schema_sections import HEALTH_CHECKS
from gkd.config.schema_teacher import LOSS_NAMES
from gkd.spans import Phase, Stage

# Calls on the actor's ranks that may move states, and their other phases with numbers of memory.
_CALLS = (
    *(Phase.TRAIN, Phase.EVALUATE, Phase.LOGPROBS, Phase.REFERENCE, Phase.SEND, Phase.SAVE, Phase.LOAD),
    *(Phase.LOAD_TEACHER, Phase.TEACHER_HEAD),
)
_OTHERS = (Phase.SCORE, Phase.OFFLOAD, Phase.ONLOAD, Phase.LOAD_REFERENCE)

NUMBER = r"\d+"
NAME = r"[\w-]+"
FUNCTION = r"\w+"
DOTTED = r"\w+(?:\.\w+)+"
KEY = r"[\w.:]+"
# Placeholder of a key -> its values. NUMBER: any number; NAME: a name in teacher.routes; FUNCTION: in reward.functions.
PLACEHOLDERS: dict[str, tuple[str, ...] | str] = {
    "loss": (DOTTED, *LOSS_NAMES),
    "stage": get_args(Stage),
    "pool": ("rollout", "teacher", "actor"),
    "call": tuple(phase.span for phase in _CALLS),
    "phase": tuple(phase.metric for phase in (*_CALLS, *_OTHERS)),
    "engine_phase": tuple(phase.metric for phase in (Phase.GENERATE, Phase.RECEIVE, Phase.OFFLOAD)),
    "check": HEALTH_CHECKS,
    "age": NUMBER,
    "k": NUMBER,
    "function": FUNCTION,
    "key": KEY,
    "route": NAME,
    "turn": NUMBER,
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
    healthy: str
    problem: str

    def matches(self, key: str) -> bool:
        """Return whether a key of a metrics line belongs to this row."""
        return re.fullmatch(re.sub(r"<(\w+)>", lambda match: _pattern(match[1]), self.key), key) is not None


def _pattern(placeholder: str) -> str:
    values = PLACEHOLDERS[placeholder]
    return values if isinstance(values, str) else f"(?:{'|'.join(values)})"


def table_rows(page: str, n_columns: int) -> list[list[str]]:
    """Return the cells of a page's table rows with this number of columns and code in the first; `\\|` is a bar."""
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("| `")]
    return [[cell.strip().replace(r"\|", "|") for cell in row] for row in cells if len(row) == n_columns]


_PAGE = (files("gkd.metrics") / "metrics.md").read_text(encoding="utf-8")
ROWS = tuple(Row(key.strip("`"), *columns) for key, *columns in table_rows(_PAGE, len(fields(Row))))

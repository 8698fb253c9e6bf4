"""Check, before the start, that the functions of rewards and evaluations can be called on every row."""

from __future__ import annotations

from collections.abc import Sequence

from gkd.config.declare import search_path
from gkd.config.schema import Config, Derived
from gkd.config.schema_sections import COMPARING
from gkd.errors import ConfigError, RewardError
from gkd.scoring.reward.pool import RewardWorkers
from gkd.scoring.reward.worker import Start
from gkd.types import Prompt

_IMPORT_S = 120.0


def check_answers(config: Config, key: str, prompts: Sequence[Prompt], functions: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError if a function compares with reference answers, and a row has none.

    Args:
        key: of the files.
        functions: (key, path) of each function that judges responses to these prompts.
    """
    for setting, path in functions:
        if path in COMPARING and any(prompt.answer is None for prompt in prompts):
            problem = f"{setting}={path} needs this column, and a row of {key} does not have it."
            fix = f"name the column with the reference answer, or change {setting}."
            raise ConfigError("data.answer_key", config.data.answer_key, problem, fix)


def check_functions(config: Config, derived: Derived) -> None:
    """Raise ConfigError if a function cannot be imported. A process of its own does: user modules may be large."""
    for key, paths in (("reward.functions", derived.rewards), ("eval.metric", derived.metrics)):
        if not paths:
            continue
        workers = RewardWorkers(Start(config, paths, search_path()), 1, config.reward.timeout_s)
        try:
            workers.wait_ready(_IMPORT_S)
        except RewardError as error:
            fix = "name a function of a module that this folder or PYTHONPATH has, or install what it needs."
            raise ConfigError(key, list(paths), f"{error}.", fix) from error
        finally:
            workers.close()

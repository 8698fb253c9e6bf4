"""Check the functions of rewards and evaluations. `gkd.preflight.reward` imports them."""

from __future__ import annotations

import math
import re

from gkd.config.derived import Derived
from gkd.config.schema import Config
from gkd.config.schema_reward import EXACT_MATCH, NO_METRIC, REWARD_NAMES
from gkd.errors import ConfigError

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_reward(config: Config, derived: Derived) -> None:
    """Check that all functions are named in a valid way, and that none is named twice."""
    reward, metric = config.reward, config.eval.metric
    for i, entry in enumerate(reward.functions):
        _check_path(f"reward.functions[{i}].path", entry.path)
        if not math.isfinite(entry.weight) or entry.weight == 0:
            key, problem = f"reward.functions[{i}].weight", "must be a number that is not 0."
            raise ConfigError(key, entry.weight, problem, "give it a weight, or remove the function.")
    paths = [entry.path for entry in reward.functions]
    if len(set(paths)) < len(paths):
        raise ConfigError("reward.functions", paths, "names a function twice.", "name each once.")
    if metric != NO_METRIC:
        _check_path("eval.metric", metric, f", or {NO_METRIC}")
    elif config.eval.n > 1:
        raise ConfigError("eval.n", config.eval.n, "eval.metric is none.", "use 1, or choose a metric.")
    if EXACT_MATCH in (metric, *paths) and not config.eval.answer_marker:
        raise ConfigError("eval.answer_marker", "", "exact_match needs one.", "set it, or use another function.")


def _check_path(key: str, path: str, more: str = "") -> None:
    if path not in REWARD_NAMES and not _PATH.fullmatch(path):
        fix = f"use {', '.join(REWARD_NAMES)}, or a function as package.module:function{more}."
        raise ConfigError(key, path, "is not a function.", fix)

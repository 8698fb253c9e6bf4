"""Check the functions of rewards and evaluations. `gkd.preflight.reward` imports them."""

from __future__ import annotations

import math

from gkd.config.derived import Derived
from gkd.config.function_path import function_name, is_path
from gkd.config.schema import Config
from gkd.config.schema_reward import EXACT_MATCH, NO_METRIC, REWARD_NAMES
from gkd.errors import ConfigError


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
    if config.eval.teacher_prompts and (metric == NO_METRIC or not derived.has_teacher_server):
        problem = "eval.metric is none." if metric == NO_METRIC else "there is no teacher server."
        raise ConfigError("eval.teacher_prompts", config.eval.teacher_prompts, problem, "use 0.")
    names = [function_name(path) for path in paths]
    if len(set(names)) < len(names):
        problem = "two functions have the same name, and the metrics contain it."
        raise ConfigError("reward.functions", paths, problem, "rename one.")
    if derived.loss.has_rewards:
        _check_training(config)
    if EXACT_MATCH in (metric, *paths) and not config.eval.answer_marker:
        raise ConfigError("eval.answer_marker", "", "exact_match needs one.", "set it, or use another function.")


def _check_training(config: Config) -> None:
    """Check that there are rewards to train on, and that the ratio of probabilities belongs to one policy."""
    key, weight, distill = "distill.reward_weight", config.distill.reward_weight, config.distill
    if not config.reward.functions:
        raise ConfigError(key, weight, "reward.functions is empty.", "name a function, or use 0.")
    if distill.on_policy_share == 0.0:
        problem = "only responses of the student are judged, and distill.on_policy_share is 0."
        raise ConfigError(key, weight, problem, "use 0, or a share above 0.")
    if distill.advantage == "group" and config.rollout.n < 2:
        problem = "the mean of one response is its own reward, so every advantage is 0."
        raise ConfigError("distill.advantage", "group", problem, "set rollout.n to 2 or more, or use batch.")
    sampled, own = config.rollout.temperature, config.teacher.temperature
    routes = [route.temperature for route in config.teacher.routes.values() if route.temperature is not None]
    if any(temperature != sampled for temperature in (own, *routes)):
        problem = f"rewards train the distribution that the engines sample from, at rollout.temperature={sampled:g}."
        raise ConfigError("teacher.temperature", own, problem, "use the same temperature for both.")


def _check_path(key: str, path: str, more: str = "") -> None:
    if path not in REWARD_NAMES and not is_path(path):
        fix = f"use {', '.join(REWARD_NAMES)}, or a function as package.module:function{more}."
        raise ConfigError(key, path, "is not a function.", fix)

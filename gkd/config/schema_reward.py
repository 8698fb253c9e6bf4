"""Declare the settings of rewards: section `reward`."""

from __future__ import annotations

from dataclasses import dataclass

from gkd.config.declare import key

EXACT_MATCH, MATH_VERIFY, LENGTH = "exact_match", "math_verify", "length"
REWARD_NAMES = (EXACT_MATCH, MATH_VERIFY, LENGTH)  # functions of `gkd.reward.functions`
COMPARING = (EXACT_MATCH, MATH_VERIFY)  # functions that need the reference answer
NO_METRIC = "none"  # eval.metric


@dataclass
class RewardFunctionConfig:
    """Entry of `reward.functions`."""

    path: str = ""
    weight: float = 1.0


@dataclass
class RewardConfig:
    functions: list[RewardFunctionConfig] = key(
        [],
        "Functions that judge the student's responses, a list of {path, weight}: exact_match, math_verify, length, or "
        "module:function of a function (prompt, response, row) -> float. Their weighted sum is the reward. Empty = no "
        "rewards. docs/losses.md.",
        limits="each path once, weights not 0",
    )
    workers: int = key(
        2, "Processes that call the functions, over all data-parallel groups; each has at least one.", gt=0, resume=True
    )
    timeout_s: float = key(
        10.0, "Seconds that one call of a function may take; a longer one ends the run.", gt=0, resume=True
    )

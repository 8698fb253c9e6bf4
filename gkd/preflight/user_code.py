"""Check code of a user before the start: functions of rewards and evaluations, and the class of an environment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import msgspec
import numpy as np

from gkd.config.schema import Config
from gkd.config.schema_sections import COMPARING
from gkd.config.schema_teacher import PROMPT_FUNCTION
from gkd.data.chat_delta import ChatDelta
from gkd.data.row_files import RowTable
from gkd.data.template import Tools
from gkd.environment import worker as environment_worker
from gkd.environment.calls import written_calls
from gkd.environment.pool import Environments
from gkd.errors import ConfigError, EnvironmentError, RewardError
from gkd.log import get_logger
from gkd.scoring.reward import worker as reward_worker
from gkd.scoring.reward.judging import TRAINING, Judging, RewardWorkers
from gkd.types import Prompt, Rollout
from gkd.user_code import search_path

log = get_logger("environment")

_IMPORT_S = 120.0  # a process of its own imports the code: user modules may be large


def check_answers(config: Config, key: str, prompts: Sequence[Prompt], functions: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError if a function compares with reference answers, and a row has none.

    Args:
        key: of the files.
        functions: (key, path) of each function that judges responses to these prompts.
    """
    for setting, path in functions:
        without = [prompt for prompt in prompts if prompt.answer is None] if path in COMPARING else []
        if without:
            row = without[0].prompt_id + 1
            problem = f"{setting}={path} needs this column, and row {row} of {key} has no text or number in it."
            fix = f"name the column with the reference answer, or change {setting}."
            raise config.error("data.answer_key", problem, fix)


def check_functions(
    config: Config, key: str, paths: Sequence[str], prompts: Sequence[Prompt] | None = None, tokenizer: Any = None
) -> None:
    """Raise ConfigError if a function cannot be imported, has another form, or does not judge the first row.

    Args:
        prompts, tokenizer: without them no function is called.
    """
    if not paths:
        return
    workers = RewardWorkers(reward_worker.Start(config, tuple(paths), search_path()), 1, config.reward.timeout_s)
    fix = "name a function in a module that this folder or PYTHONPATH has, see docs/losses.md."
    try:
        with closing(workers):
            workers.wait_ready(_IMPORT_S)
            fix = "correct the function, or the row; see docs/losses.md."
            if prompts:
                workers.values(range(len(paths)), [_first_case(config, prompts[0], tokenizer)])
    except RewardError as error:
        raise ConfigError(key, list(paths), f"{error}.", fix) from error


def _first_case(config: Config, prompt: Prompt, tokenizer: Any) -> reward_worker.Case:
    """Return the reference answer of a prompt, or any text, as a response to judge."""
    text = tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=True)
    response = prompt.answer or "1"
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": response}]
    messages = msgspec.json.encode(turns) if config.rollout.environment else None
    return reward_worker.Case(text, response, prompt.row or b"", 1, False, messages, 0.0)


def check_group_function(config: Config, key: str, prompt: Prompt, tokenizer: Any, tools: Tools) -> None:
    """Raise ConfigError if the function of a key cannot be imported, has another form, or fails for the first prompt.

    It gets the reference answer, or any text, as each response. `tools` are those of rollout.environment.
    """
    alone = config.with_values({name: "none" for name, _ in config.derived.groups if name != key})
    case = _first_case(config, prompt, tokenizer)
    ids = np.array(tokenizer(case.response, add_special_tokens=False)["input_ids"], np.int32)
    zeros = np.zeros(len(ids), np.float32)
    rollouts = [
        Rollout(prompt.prompt_id, i, prompt.token_ids, ids, zeros, (), "stop", messages=case.encoded_messages, reward=0)
        for i in range(config.rollout.n)
    ]
    rows = RowTable.of([prompt])
    functions = {TRAINING: config.derived.rewards}
    try:
        with closing(Judging(alone, functions, 1, search_path(), rows, rows, tokenizer, tools)) as judging:
            judging.prompted(rollouts) if key == PROMPT_FUNCTION else judging.judge(rollouts, TRAINING)
    except RewardError as error:
        problem, _, fix = str(error).partition(" Fix: ")
        fix = fix or "correct the function, or the row; see docs/losses.md."
        raise config.error(key, f"{problem.rstrip('.')}.", fix) from error


def environment_tools(config: Config, tokenizer: Any) -> Tools:
    """Return the tools that the class of rollout.environment offers; nothing without one.

    Raises:
        ConfigError: the class cannot be imported, has the wrong form, or does not read the template's calls of tools.
    """
    path = config.rollout.environment
    if not path:
        return ()
    written = written_calls(tokenizer, config.data.chat_template_kwargs)
    start = environment_worker.Start(path, search_path(), written=written)
    try:
        with closing(Environments(start, 1, config.rollout.environment_timeout_s)) as environments:
            environments.wait_ready(_IMPORT_S)
            tools = environments.tools
    except EnvironmentError as error:
        problem, _, fix = str(error).partition(". Fix: ")
        fix = fix or "name a class of a module that this folder or PYTHONPATH has, see docs/environments.md"
        raise config.error("rollout.environment", f"{problem}.", f"{fix}.") from error
    if tools and not written:
        log.info("the chat template writes no calls of tools: see docs/environments.md for the forms that are read")
    return tools


def check_observations(config: Config, tokenizer: Any, eos_ids: Sequence[int], tools: Tools) -> None:
    """Check that the chat template continues a turn of the student; log what it would change in earlier turns.

    Raises:
        ConfigError: it does not.
    """
    path = config.rollout.environment
    variables = config.data.chat_template_kwargs
    if not path:
        return
    delta = ChatDelta(tokenizer, variables, eos_ids, tools, setting=("rollout.environment", path))
    log.info("observations are written as messages of the role %s", " or ".join(sorted(delta.roles)))
    if delta.remark:
        log.warning("%s", delta.remark)

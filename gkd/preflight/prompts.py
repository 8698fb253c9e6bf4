"""Read and check the prompt files of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gkd.config.schema import Config
from gkd.data.prompts import RowReader, load_prompts
from gkd.data.row_files import read_rows
from gkd.data.template import Tools
from gkd.log import get_logger
from gkd.preflight.images import image_reader
from gkd.preflight.mistakes import Mistakes
from gkd.preflight.settings import check_shares
from gkd.preflight.tokenizer_pair import teacher_tokenizer
from gkd.preflight.user_code import check_answers, check_observations, environment_tools
from gkd.types import Prompt

log = get_logger("preflight")


def read_prompts(
    config: Config, tokenizer: Any, eos_ids: Sequence[int], mistakes: Mistakes
) -> tuple[list[Prompt] | None, list[Prompt] | None, Any, Tools]:
    """Return the prompts for training and the held-out ones, None if they are wrong, the teacher's own tokenizer, and
    the tools of the environment.

    Args:
        tokenizer: None: it is wrong, so that only the columns of the rows are checked.
    """
    train: list[Prompt] | None = None
    val: list[Prompt] | None = None
    other_tokenizer = tools = None
    with mistakes.step("model.path", config.model.path):
        other_tokenizer = teacher_tokenizer(config)
        if tokenizer is not None:
            check_observations(config, tokenizer, eos_ids, offered := environment_tools(config, tokenizer))
            tools = offered
    if tools is not None:
        with mistakes.step("data.train_files", config.data.train_files):
            train = training_prompts(config, tokenizer, eos_ids, tools, other_tokenizer)
        with mistakes.step("data.val_files", config.data.val_files):
            val = _held_out(config, tokenizer, tools, other_tokenizer)
    for key, prompts in (("data.train_files", train), ("data.val_files", val)):
        with mistakes.step(key):
            if prompts is None:
                _check_columns(config, key)
    return train, val, other_tokenizer, tools or ()


def _check_columns(config: Config, key: str) -> None:
    """Raise ConfigError if a file cannot be read, or a row has no column of prompts."""
    name = "data.messages_key" if config.data.messages_key else "data.prompt_key"
    for file in config.value(key):
        for where, row in read_rows(file, key):
            if config.value(name) not in row:
                raise config.error(name, f"{where} has only the columns {sorted(row)}.", "name the prompts' column.")


def training_prompts(
    config: Config, tokenizer: Any, eos_ids: Sequence[int], tools: Tools, teacher_tokenizer: Any = None
) -> list[Prompt]:
    """Load and check data.train_files; log how many prompts were dropped and responses truncated."""
    ends = eos_ids if config.distill.on_policy_share < 1 else None
    reader = RowReader(config.data, tokenizer, config.teacher, tools, ends, teacher_tokenizer, image_reader(config))
    keep_rows = bool(config.derived.rewards or config.derived.groups or config.rollout.environment)
    train, dropped = load_prompts(config.data.train_files, "data.train_files", reader, keep_rows=keep_rows)
    check_answers(config, "data.train_files", train, [("reward.functions", path) for path in config.derived.rewards])
    check_shares(config, train)
    if dropped:
        log.warning("dropped %d training prompts longer than data.max_prompt_length or that of the teacher", dropped)
    n_truncated = sum(p.response_ids is not None and int(p.response_ids[-1]) not in eos_ids for p in train)
    if n_truncated:
        log.warning("truncated %d dataset responses to data.max_response_length, without an end token", n_truncated)
    return train


def _held_out(config: Config, tokenizer: Any, tools: Tools, teacher_tokenizer: Any) -> list[Prompt]:
    """Load the held-out prompts. Raises ConfigError if eval.metric needs answers that they do not have."""
    if not config.data.val_files:
        return []
    reader = RowReader(
        config.data, tokenizer, config.teacher, tools, teacher_tokenizer=teacher_tokenizer, images=image_reader(config)
    )
    keep_rows = bool(config.derived.metrics or config.rollout.environment)
    prompts, dropped = load_prompts(config.data.val_files, "data.val_files", reader, keep_rows=keep_rows)
    if dropped:
        log.warning("dropped %d held-out prompts longer than data.max_prompt_length", dropped)
    check_answers(config, "data.val_files", prompts, [("eval.metric", config.eval.metric)])
    return prompts

"""Check, before the start, that the class of rollout.environment can be used, and that its messages can be rendered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gkd.config.declare import search_path
from gkd.config.schema import Config
from gkd.data.chat_delta import ChatDelta
from gkd.data.render import Tools
from gkd.environment.pool import Environments
from gkd.environment.worker import Start
from gkd.errors import ConfigError, EnvironmentError
from gkd.log import get_logger

log = get_logger("environment")

_IMPORT_S = 120.0


def environment_tools(config: Config) -> Tools:
    """Return the tools that the class of rollout.environment offers; nothing without one.

    Raises:
        ConfigError: the class cannot be imported, or has the wrong form. A process of its own imports it.
    """
    path = config.rollout.environment
    if not path:
        return ()
    environments = Environments(Start(path, search_path()), 1, config.rollout.environment_timeout_s)
    try:
        environments.wait_ready(_IMPORT_S)
        return environments.tools
    except EnvironmentError as error:
        fix = "name a class of a module that this folder or PYTHONPATH has, see docs/environments.md."
        raise ConfigError("rollout.environment", path, f"{error}.", fix) from error
    finally:
        environments.close()


def check_observations(config: Config, tokenizer: Any, eos_ids: Sequence[int], tools: Tools) -> None:
    """Check that the chat template continues a turn of the student; log what it would change in earlier turns.

    Raises:
        ConfigError: it does not.
    """
    if not config.rollout.environment:
        return
    delta = chat_delta(config, tokenizer, eos_ids, tools)
    log.info("observations are written as messages of the role %s", " or ".join(sorted(delta.roles)))
    if delta.remark:
        log.warning("%s", delta.remark)


def chat_delta(config: Config, tokenizer: Any, eos_ids: Sequence[int], tools: Tools) -> ChatDelta:
    """Return what renders the observations of a run. Raises ConfigError: the template cannot."""
    path, variables = config.rollout.environment, config.data.chat_template_kwargs
    return ChatDelta(tokenizer, variables, eos_ids, tools, setting=("rollout.environment", path))

"""Open the pools of a run and call their roles, for a pipeline of your own. See docs/own_pipeline.md.

Nothing else is needed from this package for `examples/own_pipeline.py`; `gkd.roles` documents the calls.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.memory.offload_manager import state_offload_manager
from gkd.roles import Roles
from gkd.spans import driver

if TYPE_CHECKING:
    from gkd.preflight.run import Plan

__all__ = ["Config", "Pools", "load_config", "open_pools", "state_offload_manager"]

# Ray prints one of the lines that differ in numbers alone, except for these of each rank: its GPUs, and its memory.
LINES_OF_ALL_RANKS = "CUDA_VISIBLE_DEVICES=|host RSS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools(Roles):
    """The roles of a run, on processes that are up, and the results of its checks.

    Attributes:
        plan: prompts, number of steps, ids that student and teacher share, run folder.
    """

    plan: Plan


@contextmanager
def open_pools(config: Config, *, engines_sleep: bool = False) -> Iterator[Pools]:
    """Check the run, start its processes, load the models; stop everything on exit, also after an error.

    The engines have the student's initial weights as version 0. Make all calls from one thread, except the calls
    that `gkd.roles` names.

    Args:
        engines_sleep: build engines whose memory `rollout.offload_states` can release, as trainer.colocate does.

    Raises:
        GkdError: as `gkd.preflight.run.preflight`, before a process starts, and `gkd.start.launcher.started_roles`.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS_ALLOW_REGEX", LINES_OF_ALL_RANKS)  # read when Ray is imported
    with driver.doing("checks"):
        from gkd.preflight.environment import describe_start
        from gkd.preflight.run import preflight

        plan = preflight(config)
        facts = describe_start(config, plan)
    plan.folder.add_start(facts)
    with driver.doing("importing Ray"):
        from gkd.start.launcher import started_roles  # a heavy import, after the cheap checks

    header = f"==== {time.ctime()}: {shlex.join(facts['command'])}"
    with plan.folder.logged(header), started_roles(plan, engines_sleep=engines_sleep) as roles:
        yield Pools(plan=plan, **{field.name: getattr(roles, field.name) for field in fields(roles)})

"""Open the pools of a run and call their roles, for a pipeline of your own. See docs/own_pipeline.md.

Nothing else is needed from this package for `examples/own_pipeline.py`; `gkd.roles` documents the calls.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gkd.cluster.garbage import collect_garbage_rarely
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_sections import all_keys
from gkd.console.summary import Closing
from gkd.console.terminal import Terminal
from gkd.memory.offload_manager import state_offload_manager
from gkd.roles import Roles
from gkd.run.folder import EXPORT
from gkd.spans import driver
from gkd.trainer import Trainer

if TYPE_CHECKING:
    from gkd.preflight.run import Plan

__all__ = ["Config", "Finished", "Pools", "load_config", "open_pools", "state_offload_manager", "train"]

# Ray prints one of the lines that differ in numbers alone, except for these of each rank: its GPUs, and its memory.
LINES_OF_ALL_RANKS = "CUDA_VISIBLE_DEVICES=|host RSS"


@dataclass(frozen=True, slots=True)
class Finished:
    """Holds what a run has left: folder, last line of metrics.jsonl, and the student in Hugging Face format."""

    folder: Path
    metrics: dict[str, Any]
    export: Path


def train(config: str | Path | Sequence[str | Path] | None = None, **settings: Any) -> Finished:
    """Train as `gkd train` does, with its progress, to the end.

        train("mine.yaml", actor={"optim": {"lr": 1e-6}}, trainer={"total_steps": 100})

    Args:
        config: YAML files, of which later ones win.
        settings: by section, in place of the files'.

    Raises:
        GkdError: a setting is wrong, or the run failed.
    """

    loaded = load_config(config, [f"{key}={json.dumps(value)}" for key, value in _leaves("", settings)])
    closing = Closing(loaded.trainer.run_dir, [])
    run(loaded, closing)
    closing.print(0)
    folder = Path(loaded.trainer.run_dir)
    last = (folder / "metrics.jsonl").read_text().splitlines()[-1]
    return Finished(folder, json.loads(last), folder / EXPORT)


def run(config: Config, closing: Closing) -> None:
    """Check the run, start the pools, train, and stop the pools. Blocks until training ends."""
    from gkd.preflight.run import check_has_teacher

    check_has_teacher(config)
    with Terminal(config.trainer.progress, config.trainer.run_dir) as terminal, open_pools(config) as pools:
        plan = pools.plan
        trainer = Trainer(plan.config, pools, plan.train_prompts, plan.val_prompts, plan.folder, plan.total_steps)
        closing.state = trainer.metrics.state
        closing.device = plan.device
        with terminal.watching(trainer.metrics.state, pools.teacher_health):
            collect_garbage_rarely()
            trainer.fit()


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of sections in sections. A key may have a mapping as its value."""
    if isinstance(value, Mapping) and name not in all_keys():
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else key, inner)
    else:
        yield name, value


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

"""Print what a run leaves behind: results, checkpoint, export, and the commands to go on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from gkd.config.schema import Config
from gkd.console.closing import print_closing, resume_command
from gkd.console.state import RunState
from gkd.run.checkpoints import CheckpointStore, step_of
from gkd.run.export_folder import NAME as EXPORT
from gkd.run.folder import CHECKPOINTS

_TITLES = {0: "run finished", 1: "run failed", 130: "run interrupted"}


class Closing:
    """The closing words of one run of `gkd.main_gkd`.

    Attributes:
        state: None means the run has not reached its loop.

    Args:
        arguments: of the command line.
    """

    def __init__(self, config: Config, arguments: Sequence[str]) -> None:
        self._config, self._arguments = config, arguments
        self._root = Path(config.trainer.run_dir)
        self.state: RunState | None = None

    def print(self, code: int) -> None:
        """Print the table and the commands to stderr.

        Args:
            code: the exit code: 0, 1 or 130.
        """
        saved = CheckpointStore(self._root / CHECKPOINTS).committed()
        if self.state is None and not saved:
            return  # nothing was made, and the error is on the screen
        checkpoint = f"step {step_of(saved[-1])}, {saved[-1]}" if saved else "none: a resumed run starts at step 0"
        facts = [("newest checkpoint", checkpoint)]
        if code == 0:
            facts.append(("student", str(self._root / EXPORT)))
        commands = self._next_commands() if code == 0 else [resume_command(self._arguments)]
        print_closing(sys.stderr, f"{_TITLES[code]}: {self._root}", self.state, facts, commands)

    def _next_commands(self) -> list[str]:
        """Return commands to use the student, to read the report, and to find a faster split of the GPUs."""
        trainer, rollout = self._config.trainer, self._config.rollout
        run, python = shlex.quote(str(self._root)), shlex.quote(sys.executable)
        vllm = Path(sys.executable).with_name("vllm")  # the shell may not have activated this environment
        serve = [str(vllm) if vllm.is_file() else "vllm", "serve", str(self._root / EXPORT)]
        commands = [shlex.join(serve), f"{python} -m gkd.tools.report {run}"]
        if trainer.colocate or self._config.teacher.backend != "zmq":
            return [*commands, f"{python} -m gkd.tools.memory --config {run}/config.yaml"]
        n_gpus = trainer.nnodes * trainer.n_gpus_per_node + rollout.nnodes * rollout.n_gpus_per_node
        return [*commands, f"{python} -m gkd.tools.split --run {run} --gpus {n_gpus} --teacher-elsewhere"]

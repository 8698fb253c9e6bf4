"""The last words of a run: a table of what it has done, and the commands to go on."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gkd.config.schema import Config
from gkd.console.numbers import count, seconds, short
from gkd.console.state import RunState, is_worse
from gkd.run.checkpoints import CheckpointStore, step_of
from gkd.run.folder import CHECKPOINTS, EXPORT

COMMAND_ENV = "GKD_COMMAND"  # set by launch/train.sh: what the user typed before the arguments


def serve_command(folder: Path) -> str:
    """Return the command that serves a model folder with this environment's vLLM, quoted for a shell.

    With the CPU build `vllm serve` fails: it looks for a package with the name vllm, and that of the build has another
    one. Its KV cache would also take nearly all of the host's memory.
    """
    try:
        is_cpu_build = "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        is_cpu_build = find_spec("vllm") is not None
    if is_cpu_build:
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        return shlex.join([*words, "--kv-cache-memory-bytes", "1G", "--enforce-eager"])
    vllm = Path(sys.executable).with_name("vllm")  # the shell may not have activated this environment
    return shlex.join([str(vllm) if vllm.is_file() else "vllm", "serve", str(folder)])


@dataclass(frozen=True, slots=True)
class Change:
    """A number before and after the run, as text."""

    name: str
    before: str
    after: str
    is_worse: bool = False


def changes(state: RunState) -> list[Change]:
    """Return loss, KL and accuracy before and after; without evaluations only the loss."""
    rows = []
    if state.first_losses:
        before, after = (sum(x) / len(x) for x in (state.first_losses, state.last_losses))
        rows.append(_change("loss/total", "loss (mean of 5 steps)", before, after))
    found = state.evaluations
    names = {"eval/kl": "validation KL", "eval/reverse_kl": "validation k1", "eval/accuracy": "validation accuracy"}
    for key, name in names.items():
        if key in found.last:
            rows.append(_change(key, name, found.first.get(key) if found.n > 1 else None, found.last[key]))
    return rows


def _change(key: str, name: str, before: float | None, after: float) -> Change:
    is_share = key == "eval/accuracy"
    before_text, after_text = ("-" if x is None else f"{x:.1%}" if is_share else short(x) for x in (before, after))
    return Change(name, before_text, after_text, before is not None and is_worse(key, before, after))


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command line that resumes the run, quoted for a shell.

    Args:
        arguments: of the command that was interrupted.
    """
    kept = [word for word in arguments if not word.startswith("trainer.resume=")]
    typed = os.environ.get(COMMAND_ENV)
    command = shlex.split(typed) if typed else [sys.executable, "-m", "gkd.main_gkd"]
    return shlex.join([*command, *kept, "trainer.resume=auto"])


def summary(state: RunState) -> list[tuple[str, str]]:
    """Return the facts about a run: label and text."""
    n_steps = state.step - state.first_step
    text = f"{state.step} of {state.total_steps}" + (
        f", {n_steps} of them since the resume" if state.first_step else ""
    )
    mean = f", mean step {seconds(state.step_s / n_steps)}" if n_steps else ""
    alarms = ", ".join(f"{name} ({n} steps)" for name, n in state.alarms.items()) or "none"
    return [
        ("steps", text),
        ("time", seconds(state.elapsed_s) + mean),
        ("tokens trained", count(state.tokens)),
        ("health alarms", alarms),
    ]


def print_closing(
    stream: TextIO, title: str, state: RunState | None, facts: Sequence[tuple[str, str]], commands: Sequence[str]
) -> None:
    """Print the closing table, red where a number became worse, and commands to copy, one per line.

    Args:
        state: None: the run has not reached its loop.
        facts: more rows: label and text.
        commands: quoted for a shell; they are not wrapped.
    """
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else 200)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for label, text in [] if state is None else summary(state):
        table.add_row(f"  {label}", text)
    for change in [] if state is None else changes(state):
        after = f"{change.after}  worse" if change.is_worse else change.after
        style = "bold red" if change.is_worse else "bold"
        table.add_row(
            f"  {change.name}", Text("" if change.before == "-" else f"{change.before} -> ").append(after, style)
        )
    for label, text in facts:
        table.add_row(f"  {label}", Text(text, overflow="fold"))
    with console.capture() as captured:
        console.print(Text(title, "bold"), soft_wrap=True)
        console.print(table)
        if commands:
            console.print(Text("next:", "bold"))
        for command in commands:
            console.print(Text(f"  {command}"), soft_wrap=True)
    stream.write("\n".join(line.rstrip() for line in captured.get().split("\n")))
    stream.flush()


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
        run, python = shlex.quote(str(self._root)), shlex.quote(sys.executable)
        commands = [serve_command(self._root / EXPORT), f"{python} -m gkd.tools.report {run}"]
        if self._config.trainer.colocate or self._config.derived.teacher_pool:
            return [*commands, f"{python} -m gkd.tools.memory --config {run}/config.yaml"]
        return [*commands, f"{python} -m gkd.tools.split {run}"]

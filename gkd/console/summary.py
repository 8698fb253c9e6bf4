"""Print the summary at the end of a run and the commands that follow; write the model card of its export."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_sections import TrainerConfig
from gkd.console.numbers import count, seconds
from gkd.console.state import SCORES, RunState, changed
from gkd.run.checkpoints import CheckpointStore, step_of
from gkd.run.disk import naming, replace_file
from gkd.run.folder import CHECKPOINTS, ENVIRONMENT, EXPORT
from teacher_server.config.command import gkd_words

# Steps that `gkd split` leaves out at the start of a run (loading, compiling, first caches), and needs after them.
WARM_UP = 2
MIN_STEPS = 4
COMMAND_ENV = "GKD_COMMAND"  # set by launch/train.sh: what the user typed before the arguments


def serve_command(folder: Path) -> str:
    """Return the command that serves a model folder with this environment's vLLM, quoted for a shell.

    The CPU build is a package with another name, which `vllm serve` does not find, and its KV cache would take nearly
    all of the host's memory.
    """
    try:
        is_cpu_build = "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        is_cpu_build = True
    if is_cpu_build:
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        return shlex.join([*words, "--kv-cache-memory-bytes", "1G", "--enforce-eager"])
    vllm = Path(sys.executable).with_name("vllm")  # the shell may not have activated this environment
    return shlex.join([str(vllm), "serve", str(folder)])


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command line that resumes the run, quoted for a shell.

    Args:
        arguments: of the command that was interrupted.
    """
    kept = [word for word in arguments if not word.startswith("trainer.resume=")]
    command = shlex.split(os.environ.get(COMMAND_ENV, "")) or [*gkd_words(), "train"]
    return shlex.join([*command, *kept, "trainer.resume=auto"])


def summary(state: RunState) -> list[tuple[str, str]]:
    """Return the facts about a run, and loss, KL and accuracy before and after: label and text.

    The text of a number that became worse ends with "worse".
    """
    n_steps = state.step - state.first_step
    resumed = f", {n_steps} of them since the resume" if state.first_step else ""
    mean = f", mean step {seconds(state.step_s / n_steps)}" if n_steps else ""
    rows = [
        ("steps", f"{state.step} of {state.total_steps}{resumed}"),
        ("time", seconds(state.elapsed_s) + mean),
        ("tokens trained", count(state.tokens)),
        ("health alarms", ", ".join(f"{name} ({n} step{'s' * (n > 1)})" for name, n in state.alarms.items()) or "none"),
    ]
    if state.losses:
        n = max(1, min(5, len(state.losses) // 2))  # the two means have no step in common
        before = fmean(state.losses[:n]) if len(state.losses) > 1 else None
        loss = changed("loss/total", before, fmean(state.losses[-n:]))
        rows.append((f"loss (mean of {n} steps)" if n > 1 else "loss", loss))
    return rows + [(f"validation {SCORES[key]}", changed(key, *values)) for key, values in state.scores().items()]


def write_card(out: Path, root: Path, config: Config, state: RunState, step: int) -> None:
    """Write the README.md of an export: what the student of the run `root` was made of, and what changed until `step`.

    Raises CheckpointError: the file cannot be written.
    """
    teacher = json.loads((root / "teacher.json").read_text())
    terms = config.derived.loss.terms
    rows = {
        "base model": config.model.path,
        "teacher": ", ".join(dict.fromkeys(route["name"] for route in teacher.get("routes", {"": teacher}).values())),
        "prompts": ", ".join(config.data.train_files),
        "loss": " + ".join(term.name if term.weight == 1 else f"{term.weight:g} {term.name}" for term in terms),
        "steps": f"{step}, of {config.trainer.global_batch_size} prompts",
        **{f"validation {SCORES[key]}": changed(key, *values) for key, values in state.scores().items()},
        "version of gkd": metadata.version("gkd"),
    }
    if (root / ENVIRONMENT).exists():
        rows["command"] = shlex.join(json.loads((root / ENVIRONMENT).read_text().partition("\n")[0])["command"])
    task = "image-text-to-text" if config.data.images_key else "text-generation"
    lines = ["---", "library_name: transformers", f"pipeline_tag: {task}", "tags: [distillation, gkd]", "---"]
    lines += [f"# {root.absolute().name}, step {step}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {text.replace('|', '&#124;')} |" for name, text in rows.items()]
    with naming(out):
        replace_file(out / "README.md", "\n".join([*lines, ""]).encode())


_TITLES = {0: "run finished", 1: "run failed", 130: "run interrupted"}


class Closing:
    """The closing words of the run in a folder that `gkd.main_gkd` started with these command-line arguments.

    Attributes:
        state: None means the run has not reached its loop.
        device: that was chosen, "cpu" or "cuda"; empty: none yet.
    """

    def __init__(self, run_dir: str, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._root = Path(run_dir)
        self.state: RunState | None = None
        self.device = ""

    def print(self, code: int) -> None:
        """Print the table, red where a number became worse, and the commands, one a line, to stderr.

        Args:
            code: the exit code: 0, 1 or 130.
        """
        saved = CheckpointStore(self._root / CHECKPOINTS).committed()
        if self.state is None and not saved:
            return  # nothing was made, and the error is on the screen
        checkpoint = f"step {step_of(saved[-1])}, {saved[-1]}" if saved else "none: a resumed run starts at step 0"
        facts = [] if self.state is None else summary(self.state)
        facts.append(("newest checkpoint", checkpoint))
        if code == 0:
            facts.append(("student", str(self._root / EXPORT)))
        commands = self._next_commands() if code == 0 else [resume_command(self._arguments)]
        table = Table.grid(padding=(0, 2, 0, 0))
        for label, text in facts:
            table.add_row(f"  {label}", Text(text, "bold red" if text.endswith("worse") else "", overflow="fold"))
        console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 200)
        console.print(Text(f"{_TITLES[code]}: {self._root}", "bold"), soft_wrap=True)
        console.print(table)
        console.print(Text("next:", "bold"))
        for command in commands:
            text = in_rows(command, console.width) if sys.stderr.isatty() else f"  {command}"
            console.print(Text(text), soft_wrap=True)

    def _next_commands(self) -> list[str]:
        """Return commands to use the student, to read the report, and to find a faster split of the GPUs."""
        run = shlex.quote(str(self._root))
        gkd = shlex.join(gkd_words())
        commands = [serve_command(self._root / EXPORT), f"{gkd} report {run}"]
        best = CheckpointStore(self._root / CHECKPOINTS).best()
        if best is not None and self.state is not None and best.step < self.state.step:
            commands.append(f"{gkd} export {run} --best --out {run}/export_of_step_{best.step}")
        config = load_config(self._root / "config.yaml")
        if config.trainer.colocate or config.derived.teacher_pool:
            return [*commands, f"{gkd} memory --config {run}/config.yaml"]
        return [*commands, f"{gkd} split {run}"] if self._has_split(config.trainer) else commands

    def _has_split(self, trainer: TrainerConfig) -> bool:
        """Return whether the run has what `gkd split` measures; on the CPU there is no GPU to split."""
        if self.state is None or self.device != "cuda" or trainer.replay:
            return False
        n_steps = self.state.step - self.state.first_step
        n_evaluated = sum(step > self.state.first_step for step, _ in self.state.evaluations)
        return n_steps - n_evaluated >= WARM_UP + MIN_STEPS + trainer.staleness_bound


def in_rows(command: str, width: int) -> str:
    """Return a command in rows of a terminal, which end between words and with a backslash, for a shell to join."""
    first, *words = map(shlex.quote, shlex.split(command))
    rows = [f"  {first}"]
    for word in words:
        rows[-1:] = [f"{rows[-1]} {word}"] if len(rows[-1]) + len(word) < width - 3 else [rows[-1], f"    {word}"]
    return " \\\n".join(rows)

"""Environments that tests of whole runs name by their path, and the small models that act in them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from examples.quickstart.pretrain import ModelRecipe, train_from_scratch
from examples.tools.products import Script, make_problems, write_jsonl

FAULTS = ("raise", "role", "huge", "unicode", "marker", "die", "hang", "")


# A model that has learned the form of a call, and hardly anything else: its turns differ from sample to sample.
RECIPE = ModelRecipe(
    hidden_size=64,
    intermediate_size=128,
    n_layers=1,
    n_heads=4,
    seed=0,
    batch_size=16,
    warmup_steps=5,
    peak_lr=6e-3,
    eval_every=40,
    step_limit=40,
    stop_accuracy=0.0,
    min_accuracy=0.0,
    max_accuracy=1.0,
)


def small_models(out: Path) -> Path:
    """Make models of examples/tools with hardly any training, and prompts of its task."""
    out.mkdir(parents=True)
    script, problems = Script(), make_problems(0, 512, 64)
    for name, part in zip(("train", "heldout"), problems, strict=True):
        write_jsonl(part, out / f"{name}.jsonl")
    sequences = [script.trajectory(problem) for problem in problems[0]]
    for seed, role in enumerate(("student", "teacher")):
        recipe = replace(RECIPE, seed=seed)
        model, _, _ = train_from_scratch(role, recipe, script.tokenizer, sequences, lambda _: (0.0, 1.0))
        model.save_pretrained(out / role)
        script.tokenizer.save_pretrained(out / role)
    return out


class Echo:
    """Answer each turn with its length, whatever it is; the reward is the number of turns."""

    reward: float = 0.0

    def __init__(self, row: dict[str, Any], seed: int) -> None:
        self.row = row

    async def step(self, text: str) -> list[dict[str, str]] | None:
        self.reward += 1
        return [{"role": "tool", "content": f"{len(text)} {self.row['answer']}"}]


class Slow(Echo):
    """Answer after some time, which differs from row to row."""

    async def step(self, text: str) -> list[dict[str, str]] | None:
        await asyncio.sleep(0.02 * (int(self.row["answer"]) % 5))
        return await super().step(text)


class Faulty(Echo):
    """Fail as the row demands."""

    async def step(self, text: str) -> Any:
        fault = FAULTS[int(self.row["answer"]) % len(FAULTS)]
        if fault == "raise":
            raise RuntimeError("the shop is closed")
        if fault == "die":
            os._exit(3)
        if fault == "hang":
            await asyncio.Event().wait()
        contents = {"huge": "x" * 10_000_000, "unicode": "\ud800", "marker": "<|end|><|assistant|>"}
        if fault in ("role", *contents):
            return [{"role": "system" if fault == "role" else "tool", "content": contents.get(fault, "")}]
        return await super().step(text)


class Killed(Echo):
    """End the process of all trajectories with SIGKILL, once, when a late one makes its second turn.

    The answers of the rows whose trajectories were open are in the file that the column `killed` names. Rows without
    this column are those of `Echo`.
    """

    opened: ClassVar[list[Killed]] = []
    n_made: ClassVar[int] = 0

    def __init__(self, row: dict[str, Any], seed: int) -> None:
        super().__init__(row, seed)
        if "killed" in row:
            Killed.n_made += 1
            self.opened.append(self)

    async def step(self, text: str) -> list[dict[str, str]] | None:
        is_second, file = self.reward == 1 and self in self.opened, Path(self.row.get("killed", ""))
        if is_second and Killed.n_made > 8 and not file.exists():  # 8 trajectories are the first batch
            file.write_text(json.dumps([each.row["answer"] for each in self.opened]))
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().step(text)

    async def close(self) -> None:
        if self in self.opened:
            self.opened.remove(self)

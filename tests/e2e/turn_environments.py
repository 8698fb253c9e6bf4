"""Environments that tests of whole runs name by their path. Each of their processes imports this: no torch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any, ClassVar

FAULTS = ("raise", "role", "huge", "unicode", "marker", "die", "hang", "")


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

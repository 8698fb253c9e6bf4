"""Environment classes that tests name by their path; the worker processes import this file."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

from gkd.user_code import BATCH_SIGNALS
from tests.processes import FOREVER
from tests.unit.judging_functions import write_everywhere

SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
NOT_A_CLASS = 3
NUMBERS = (*map(int, BATCH_SIGNALS), 1, 2)  # and SIGHUP, SIGINT
GIANT = "x" * 10_000_000


class Text(str):
    """A text as some libraries return it."""


class Shop:
    """Do what the student's turn demands."""

    tools = [SEARCH]

    def __init__(self, row: dict[str, Any], seed: int) -> None:
        self._row, self._random, self._turns = row, random.Random(seed), 0
        self.reward: Any = None
        if row.get("broken"):
            raise KeyError("the row has no price")

    async def step(self, text: str) -> Any:
        self._turns += 1
        name, _, argument = text.partition(" ")
        return await getattr(self, name)(argument)

    async def close(self) -> None:
        if path := self._row.get("closed"):
            with open(path, "a") as file:
                file.write(f"{self._row['name']}\n")

    async def count(self, argument: str) -> Any:
        return [{"role": "tool", "content": f"{self._row.get('name')} {self._turns} {self._random.random()}"}]

    async def say(self, argument: str) -> Any:
        return [{"role": "user", "content": argument}, {"role": Text("tool"), "content": Text("\u00e9\u2402")}]

    async def over(self, argument: str) -> None:
        self.reward = {"": None, "nan": float("nan"), "text": "1"}[argument] if argument in ("", "nan", "text") else 0.5

    async def wait_for(self, path: str) -> Any:
        while not os.path.exists(path):
            await asyncio.sleep(0.01)
        return await self.say(path)

    async def forever(self, argument: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if argument == "stubborn":
                await asyncio.Event().wait()

    async def block(self, argument: str) -> None:
        while True:
            self._turns += 1

    async def block_threads(self, argument: str) -> None:
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 1000) for _ in range(300)))

    async def start(self, argument: str) -> Any:
        options: dict[str, Any] = {}
        if argument == "session":
            options["start_new_session"] = True
        if argument == "group":
            options |= {"process_group": 0, "env": {}}
        child = subprocess.Popen([sys.executable, "-c", FOREVER], **options)
        return [{"role": "tool", "content": str(child.pid)}]

    async def clutter(self, argument: str) -> Any:
        for number in range(1_000_000):  # is not done when the test goes on
            open(f"file{number % 5000}", "w").close()
            await asyncio.sleep(0)
        return await self.count(argument)

    async def raise_it(self, argument: str) -> None:
        if argument == "exit":
            raise SystemExit(4)
        if argument == "cancel":
            raise asyncio.CancelledError
        raise ValueError(GIANT if argument == "giant" else f"no such item \udcff {argument}")

    async def die(self, argument: str) -> None:
        if argument == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)

    async def chatter(self, argument: str) -> Any:
        print('{"key": 0, "messages": null}', flush=True)
        os.write(1, b"{}\n")
        print("to stderr", file=sys.stderr, flush=True)
        return await self.say("quiet")

    async def corrupt(self, argument: str) -> None:
        write_everywhere()

    async def facts(self, argument: str) -> Any:
        with open("left", "w") as file:
            file.write("x")
        for number in NUMBERS:
            os.kill(os.getpid(), number)
        ended = [subprocess.run(["sh", "-c", f"kill -{number} $$"], check=False).returncode for number in NUMBERS]
        if not (forked := os.fork()):
            os.kill(os.getpid(), signal.SIGTERM)  # as multiprocessing ends its processes
            os._exit(0)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
        found = os.getcwd(), os.environ["CUDA_VISIBLE_DEVICES"], ended, os.getpid()
        return [{"role": "tool", "content": "|".join(map(str, found))}]

    async def memory(self, argument: str) -> Any:
        return [{"role": "tool", "content": str(len(bytearray(8 << 30)))}]

    async def invalid(self, argument: str) -> Any:
        message = {"role": "tool", "content": "x"}
        return {
            "text": "a message",
            "empty": [],
            "tuple": (message,),
            "no_content": [{"role": "tool"}],
            "no_role": [{"content": "x"}],
            "role": [message, {"role": "assistant", "content": "x"}],
            "role_list": [{"role": [], "content": "x"}],
            "number": [{"role": "tool", "content": 3}],
            "parts": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "key": [{**message, 3: "x"}],
            "surrogate": [{"role": "user", "content": "\ud800"}],
            "bytes": [{"role": "user", "content": b"\xff"}],
            "giant": [{"role": "user", "content": GIANT}],
            "giant_in_parts": [{"role": "user", "content": "x" * 1000}] * 2000,
        }[argument]


class NoStep:
    def __init__(self, row: dict[str, Any], seed: int) -> None: ...


class SyncStep(NoStep):
    def step(self, text: str) -> None: ...


class StepWithoutText(NoStep):
    async def step(self) -> None: ...


class NoSeed:
    def __init__(self, row: dict[str, Any]) -> None: ...

    async def step(self, text: str) -> None: ...


class SyncClose(Shop):
    def close(self) -> None: ...  # type: ignore[override]


class ToolsAsText(Shop):
    tools = "search"  # type: ignore[assignment]


class ToolsAsFunctions(Shop):
    tools = [print]  # type: ignore[list-item]


class ToolsWithoutJson(Shop):
    tools = [{**SEARCH, "extra": {1, 2}}]

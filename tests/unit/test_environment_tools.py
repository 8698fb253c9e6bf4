"""Test tools of plain functions, the adapters for other systems' environments, and the examples."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest

from examples.tools.calculator import Calculator
from examples.tools.python_tool import Python, python
from gkd.environment.form import checked_messages, checked_reward, import_environment
from gkd.environment.tools import ToolEnvironment, schema
from gkd.environment.trl import TrlEnvironment
from tests.processes import is_alive, wait_until
from tests.structure import ROOT

LOOP = "loop of"  # name of the thread in which coroutines run
CALL = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'


def in_thread(coroutine: Any) -> Any:
    """Run a coroutine in a thread of its own: the loop of a browser may run in this one."""
    with ThreadPoolExecutor(1, LOOP) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def add(a: int, b: int = 1) -> int:
    """Add two numbers.
    Exactly.

    Args:
        a: The first one,
            of two.
        b (int): The second one.

    Returns:
        The sum.
    """
    if a == 13:
        raise ValueError("unlucky")
    return a + b


def pick(name: str | None, mode: Literal["1", "2"] = "1") -> str:
    return f"{name!r} {mode!r}"


async def repeat(text: str, modes: list[Literal["a", "b"]], strict: bool | None = None) -> str:
    return f"{text!r} {modes} {strict} {threading.current_thread().name.startswith(LOOP)}"


class Tools(ToolEnvironment):
    functions = (add, repeat, pick)


def play(kind: Any, turns: Sequence[str], row: dict[str, Any] | None = None) -> tuple[list[Any], float | None]:
    """Return the contents of the messages that follow each turn, and the reward."""

    async def run() -> tuple[list[Any], float | None]:
        environment = kind(row or {}, 0)
        found: list[Any] = []
        for turn in turns:
            messages = checked_messages(await environment.step(turn))
            found.append(messages and [message["content"] for message in messages])
        if hasattr(environment, "close"):
            await environment.close()
        return found, checked_reward(environment)

    return in_thread(run())


def test_schemas_come_from_signature_and_docstring() -> None:
    """Fails if the first prompt describes a tool differently than a chat template expects, or a mistake goes unseen."""
    assert schema(add) == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.\nExactly.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first one, of two."},
                    "b": {"type": "integer", "description": "The second one."},
                },
                "required": ["a"],
            },
        },
    }
    properties = schema(repeat)["function"]["parameters"]["properties"]
    assert properties["modes"] == {"type": "array", "items": {"enum": ["a", "b"]}}
    assert Tools.tools == [schema(add), schema(repeat), schema(pick)]

    def no_hint(a) -> None: ...  # type: ignore[no-untyped-def]

    def no_json(a: threading.Thread) -> None: ...

    def any_number(*values: int) -> None: ...

    def no_name(a: int, /) -> None: ...

    for function in (no_hint, no_json, any_number, no_name):
        with pytest.raises(TypeError):
            schema(function)


def test_tools_without_docstrings_are_refused() -> None:
    """Fails if Python's option -OO, which removes docstrings, trains with tools that nothing describes."""
    code = "from gkd.environment.form import import_environment as load; load('examples.tools.calculator:Calculator')"
    command = [sys.executable, "-B", "-OO", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "EnvironmentError" in done.stderr and "PYTHONOPTIMIZE" in done.stderr


def test_the_student_reads_results_and_its_mistakes() -> None:
    """Fails if a mistake of the student ends its trajectory, as the template's markers in an answer do, or a tool gets
    arguments of undeclared types.
    """
    turns = [
        CALL.format("add", '{"a": 1}') + CALL.format("add", '{"a": 2, "b": 3}'),
        "<function=add><parameter=a>4</parameter></function>",
        '<function=repeat><parameter=text>4</parameter><parameter=modes>["a"]</parameter></function>',
        "<function=repeat><parameter=text>4</parameter><parameter=modes>[]</parameter><parameter=strict>True</parameter>",
        "<function=pick><parameter=name>12</parameter><parameter=mode>2</parameter></function>"
        '<function=pick><parameter=name>"a"</parameter></function>',
        "fine",
    ]
    expected = [["2", "5"], ["5"], ["'4' ['a'] None True"], ["'4' [] True True"], ["'12' '2'", "'\"a\"' '1'"], None]
    assert play(Tools, turns) == (expected, None)
    mistakes = [
        *(CALL.format("add", arguments) for arguments in ("{}", '{"a": "1"}', '{"a": 1, "c": 2}', '{"a": true}')),
        *(CALL.format("sub", "{}"), CALL.format("add", '{"a": 13}'), "<tool_call>{", "<function=add"),
        *('<tool_call>{"name": "<|end|>"', CALL.format("<|end|>", "{}"), "<function=<|end|>></function>"),
        *(CALL.format("pick", a) for a in ('{"name": "a", "mode": "<|end|>"}', '{"name": "a", "<|end|>": 1}')),
        f"<function=repeat><parameter=text>4</parameter><parameter=modes>{'[' * 99999}</parameter></function>",
        *("<function=add><parameter=a>x</parameter></function>", '<tool_call>{"name": "\\ud800"}</tool_call>'),
    ]
    for content in play(Tools, ["".join(mistakes[:6]), *mistakes])[0]:
        assert all(text.startswith("Error: ") for text in content)
        assert "<|" not in "".join(content) and "".join(content).encode()


class Counter:
    """An environment in TRL's form."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, **row: Any) -> str | None:
        self.count, self.reward = row["start"], 0.0
        return row.get("observation")

    def increment(self, by: int) -> str:
        """Count.

        Args:
            by: how far
        """
        self.count += by
        self.reward = 0.5
        return f"now {self.count}"

    async def read(self) -> int:
        return self.count

    def _hidden(self) -> None: ...


class Judged(Counter):
    async def get_reward(self) -> float:
        return float(self.count)


class Verified(Counter):
    """Its reward is a property that judges once, as TRL's `HarborEnv` has it."""

    verdict: float | None = None

    @property
    def reward(self) -> float:
        if self.verdict is None:
            assert not threading.current_thread().name.startswith(LOOP), "it may take minutes"
            self.verdict = float(self.count)
        return self.verdict

    @reward.setter
    def reward(self, value: float) -> None: ...


class CounterEnvironment(TrlEnvironment):
    factory = Counter


class VerifiedEnvironment(TrlEnvironment):
    factory = Verified


class JudgedEnvironment(TrlEnvironment):
    factory = Judged
    prompt_has_observation = True


def test_environments_of_trl() -> None:
    """Fails if a class for TRL's trainers has other tools, other results or another reward here."""
    assert import_environment(f"{__name__}:CounterEnvironment") is CounterEnvironment
    assert [tool["function"]["name"] for tool in CounterEnvironment.tools] == ["increment", "read"]
    turns = [CALL.format("increment", '{"by": 3}'), CALL.format("read", "{}") + CALL.format("reset", "{}"), "done"]
    for _ in range(2):
        messages, reward = play(CounterEnvironment, turns, {"start": 4})
        assert (messages[0], messages[1][0], messages[2], reward) == (["now 7"], "7", None, 0.5)
        assert messages[1][1].startswith("Error: ")
    assert Counter.made == 1  # TRL, too, uses objects again
    assert play(VerifiedEnvironment, turns, {"start": 4})[1] == 7.0  # judged at the end, not while tools are listed
    with pytest.raises(ValueError):
        play(CounterEnvironment, turns, {"start": 4, "observation": "you see a door"})
    assert play(JudgedEnvironment, turns, {"start": 4, "observation": "you see a door"})[1] == 7.0
    assert play(JudgedEnvironment, [], {"start": 4})[1] is None
    with pytest.raises(TypeError):
        type("NoReset", (TrlEnvironment,), {"factory": threading.Lock})


@pytest.mark.slow
def test_classes_that_trl_ships(tmp_path: Path) -> None:
    """Fails if TRL's own environments find other tools, another order of calls or another reward here than in TRL."""
    harbor = pytest.importorskip("trl.experimental.harbor._env")
    openreward = pytest.importorskip("trl.experimental.openreward.environment")

    class Shell:  # in place of a sandbox
        async def exec(self, command: str, timeout_sec: int) -> Any:
            done = subprocess.run(
                command, shell=True, capture_output=True, text=True, cwd=tmp_path, timeout=timeout_sec
            )
            return types.SimpleNamespace(stdout=done.stdout, stderr=done.stderr, return_code=done.returncode)

    class Local(harbor.HarborBashEnv):  # type: ignore[name-defined]
        async def _start(self, task_dir: str) -> str:
            self._env = Shell()
            return task_dir

        async def _verify(self) -> float:
            return float((tmp_path / "answer.txt").read_text())

        async def _stop(self) -> None: ...

    made: Any = type("Made", (TrlEnvironment,), {"factory": Local, "prompt_has_observation": True})
    assert [tool["function"]["name"] for tool in made.tools] == ["bash"]
    turns = [CALL.format("bash", json.dumps({"command": command})) for command in ("echo a", "echo 0.25 > answer.txt")]
    messages, reward = play(made, [*turns, "done"], {"task_dir": "x"})
    assert messages[0] == ["a\n"] and messages[1][0].startswith("(empty output") and reward == 0.25

    class Session:  # of a server
        def __enter__(self) -> Session:
            return self

        def __exit__(self, *error: object) -> None: ...

        def get_prompt(self) -> list[Any]:
            return []

        def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
            text = [types.SimpleNamespace(text=f"{name} {arguments}", type="text")]
            return types.SimpleNamespace(blocks=text, reward=arguments["n"] / 4, metadata=None, finished=False)

    server = types.SimpleNamespace(session=lambda **options: Session())
    numbers = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = [{"name": "guess", "description": "Guess.", "input_schema": numbers}]

    def remote() -> Any:
        return openreward._RolloutEnvironment(base_url="x", _client=server, _env=server, _tool_specs=tools)

    guessing: Any = type(
        "Guessing", (TrlEnvironment,), {"factory": staticmethod(remote), "prompt_has_observation": True}
    )
    assert [tool["function"]["name"] for tool in guessing.tools] == ["guess"]
    assert guessing.tools[0]["function"]["parameters"]["properties"]["n"]["type"] == "integer"
    messages, reward = play(guessing, [CALL.format("guess", '{"n": 3}'), "done"], {"task_index": 0})
    assert messages[0] == ["guess {'n': 3}"] and reward == 0.75


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 * (3 + 4)", "14"), ("-7 // 2", "-4"), ("2 ** 10 % 7", "2"), ("1 / 4", "0.25"), (" 2**-1", "0.5")],
)
def test_the_calculator(expression: str, value: str) -> None:
    """Fails if the example computes something else than Python does."""
    assert play(Calculator, [CALL.format("calculate", f'{{"expression": "{expression}"}}')])[0] == [[value]]


@pytest.mark.parametrize("expression", ["9**9**9", "1/0", "x", "__import__('os')", "'a'*9", "1+", "(" * 9999])
def test_the_calculator_refuses(expression: str) -> None:
    """Fails if the student can make the example compute for minutes, or run code."""
    began_s = time.monotonic()
    ((text,),), _ = play(Calculator, [CALL.format("calculate", f'{{"expression": "{expression}"}}')])
    assert text.startswith("Error: ")
    assert time.monotonic() - began_s < 60


def test_the_python_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the student's code exceeds time, memory or output, or leaves a process behind."""

    def run(code: str) -> str:
        return in_thread(python(code))

    assert run("import os; print(6 * 7, len(os.listdir()))") == "42 0\n"
    assert run("print('x' * 5000)").startswith("x" * 4096 + "\n")
    assert "MemoryError" in run("bytearray(4 << 30)")
    assert "ZeroDivisionError" in run("1 / 0")
    monkeypatch.setattr("examples.tools.python_tool.LIMIT_S", 1.0)
    pid = tmp_path / "pid"
    start = "subprocess.Popen(['sleep', '977']).pid"
    assert "1 s" in run(f"import subprocess; open({str(pid)!r}, 'w').write(str({start}))\nwhile 1: pass")
    wait_until(lambda: not is_alive(int(pid.read_text())), 30.0, "the end of its child")
    assert Python.tools[0]["function"]["parameters"]["required"] == ["code"]

"""Test the processes that run environments, with real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import gkd.errors
from gkd.data.chat_delta import ChatDelta
from gkd.data.row_files import encode_row
from gkd.environment.form import MAX_BYTES
from gkd.environment.pool import Environments
from gkd.environment.worker import Answer, Start
from gkd.rollout.messages import Sampling
from gkd.rollout.vllm.sampling import Request
from gkd.rollout.vllm.turns import Turns
from gkd.types import Prompt, Rollout
from gkd.user_code import search_path
from tests.processes import FOREVER, is_alive, wait_until
from tests.structure import ROOT
from tests.unit.environment_classes import NUMBERS, SEARCH
from tests.unit.turn_templates import FAMILIES, end_ids, tokenizer

HERE = "tests.unit.environment_classes"
LIMIT_S = 30.0  # of everything that a test waits for
STEP_S, GRACE_S = 2.0, 2.0


def row(**columns: Any) -> bytes:
    return encode_row("f.jsonl:7", columns)


def make(kind: str = "Shop", n: int = 1, timeout_s: float = LIMIT_S, **start: Any) -> Environments:
    return Environments(Start(f"{HERE}:{kind}", search_path(), **start), n, timeout_s, GRACE_S)


@pytest.fixture
def environments() -> Iterator[Callable[..., Environments]]:
    """Make pools that are closed after the test."""
    made: list[Environments] = []

    def ready(*args: Any, **kwargs: Any) -> Environments:
        made.append(make(*args, **kwargs))
        made[-1].wait_ready(LIMIT_S)
        return made[-1]

    yield ready
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Environments]:
    """Return one pool with generous limits, for tests that leave it working. It starts as in a process of Ray."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    pool = make()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    pool.wait_ready(LIMIT_S)
    yield pool
    pool.close()


def collect(pool: Environments, n: int) -> list[Answer]:
    """Return the next replies, at least n."""
    found: list[Answer] = []
    deadline_s = time.monotonic() + LIMIT_S
    while len(found) < n and time.monotonic() < deadline_s:
        pool.wait(1.0)
        found += pool.replies()
    assert len(found) >= n, f"only {found}"
    return found


def ask(pool: Environments, text: str, key: int = 0, seed: int = 0, **columns: Any) -> Answer:
    """Return the reply to a step."""
    pool.step(key, row(**columns), seed, text)
    (reply,) = collect(pool, 1)
    assert reply.key == key
    return reply


def content(reply: Answer) -> str:
    assert reply.messages is not None, reply
    return reply.messages[-1]["content"]


def gone(pid: int) -> bool:
    """Wait until a process has ended; a zombie has, too."""
    wait_until(lambda: not is_alive(pid), LIMIT_S, f"the end of process {pid}")
    return True


def test_one_object_is_a_trajectory(shared: Environments) -> None:
    """Fails if trajectories share an object, or an object outlives its trajectory, or gets another row or seed."""
    first = [content(ask(shared, "count", key, seed, name=f"n{key}")) for key, seed in ((1, 5), (2, 5), (3, 6))]
    assert [text.split()[:2] for text in first] == [["n1", "1"], ["n2", "1"], ["n3", "1"]]
    numbers = [text.split()[2] for text in first]
    assert numbers[0] == numbers[1] != numbers[2]
    assert content(ask(shared, "count", 1)).split()[:2] == ["n1", "2"]
    assert shared.n_open == 3
    assert ask(shared, "over", 1) == Answer(1)
    assert content(ask(shared, "count", 1, 5, name="n1")) == first[0]  # the same row, seed and texts: the same messages
    shared.abort([1, 2, 3])
    assert (shared.n_open, shared.tools) == (0, (SEARCH,))


def test_replies_come_as_trajectories_are_done(shared: Environments, tmp_path: Path) -> None:
    """Fails if a slow environment holds up the others of its process, or texts do not arrive as they were sent, or one
    of a subclass of str never arrives.
    """
    gate = tmp_path / "gate"
    shared.step(1, row(), 0, f"wait_for {gate}")
    shared.step(2, row(), 0, "say \u00fc\u2028\x00 \U0001f600\n")
    (second,) = collect(shared, 1)
    assert second.messages[0] == {"role": "user", "content": "\u00fc\u2028\x00 \U0001f600\n"}
    assert second.messages[1] == {"role": "tool", "content": "\u00e9\u2402"}
    assert (shared.replies(), shared.wait(0.0)) == ([], False)
    with pytest.raises(ValueError):
        shared.step(1, row(), 0, "count")
    gate.touch()
    assert [reply.key for reply in collect(shared, 1)] == [1]
    shared.abort([1, 2])


def test_ends_and_aborts(shared: Environments, tmp_path: Path) -> None:
    """Fails if the end of a trajectory has no reply or no reward, an abort has one, or an object is not closed."""
    closed = str(tmp_path / "closed")
    for key in range(4):
        ask(shared, "count", key, name=str(key), closed=closed)
    assert ask(shared, "over 0.5", 0) == Answer(0, None, 0.5)
    shared.end(1)
    shared.step(2, b"", 0, "forever")
    shared.abort([2, 77])
    assert collect(shared, 1) == [Answer(1)]
    shared.end(88)  # its first turn was the last one
    assert shared.replies() == [Answer(88)]
    assert ask(shared, "raise_it", 3).error
    for argument in ("nan", "text"):
        assert "reward" in ask(shared, f"over {argument}").error
    assert "close" in ask(shared, "over", 5, closed=str(tmp_path / "no" / "folder")).error
    wait_until(lambda: ask(shared, "over", 6) and Path(closed).read_text().count("\n") == 4, LIMIT_S, "the last close")
    assert sorted(Path(closed).read_text().split()) == ["0", "1", "2", "3"]
    assert shared.n_open == 0


@pytest.mark.parametrize(
    "text",
    [
        *("raise_it", "raise_it giant", "raise_it exit", "raise_it cancel", "no_such_method"),
        *("invalid text", "invalid empty", "invalid tuple", "invalid no_content", "invalid no_role", "invalid role"),
        *("invalid role_list", "invalid number", "invalid parts", "invalid key", "invalid surrogate", "invalid bytes"),
        *("invalid giant", "invalid giant_in_parts"),
    ],
)
def test_a_faulty_step_ends_its_trajectory_alone(shared: Environments, text: str) -> None:
    """Fails if an invalid message reaches the student, ends the run or another trajectory, or is not explained."""
    process = content(ask(shared, "facts", 2)).split("|")[-1]
    reply = ask(shared, text, 1)
    assert (reply.messages, reply.reward) == (None, None)
    assert reply.error.startswith(f"{HERE}:Shop, row f.jsonl:7: step ")
    assert len(reply.error) < 1000
    assert shared.n_open == 1
    assert content(ask(shared, "facts", 2)).split("|")[-1] == process
    shared.abort([2])


def test_a_faulty_row_ends_its_trajectory_alone(shared: Environments) -> None:
    """Fails if an object that cannot be made, or a row that cannot be read, has no reply, or an error has no place."""
    error = ask(shared, "count", broken=True).error
    assert "price" in error and re.search(
        r"environment_classes\.py:\d+: raise KeyError.*Columns of the row: .*broken", error
    )
    shared.step(1, b"no row", 0, "count")
    assert collect(shared, 1)[0].error
    assert shared.n_open == 0


def test_prints_do_not_break_the_protocol(shared: Environments, tmp_path: Path) -> None:
    """Fails if what an environment writes to stdout or stderr is taken for a message, a signal to all processes of the
    run ends it, or a signal cannot end a program that it starts, or SIGTERM a process that it forks.
    """
    assert ask(shared, "chatter", 0).messages
    folder, devices, ended, _ = content(ask(shared, "facts", 0)).split("|")
    assert (devices, ended) == ("", str([-number for number in (*NUMBERS, signal.SIGTERM)]))
    assert Path(folder).parent == Path(tempfile.gettempdir())
    shared.abort([0])


def test_a_step_that_takes_too_long_is_canceled(environments: Callable[..., Environments]) -> None:
    """Fails if one trajectory that waits for ever holds up the run, or ends the others."""
    pool = environments(timeout_s=STEP_S)
    ask(pool, "count", 1)
    for key, how in ((2, ""), (3, "stubborn")):
        pool.step(key, row(), 0, f"forever {how}")
    assert content(ask(pool, "count", 1)).split()[1] == "2"
    replies = collect(pool, 2)
    assert {(reply.key, reply.messages) for reply in replies} == {(2, None), (3, None)}
    assert all(f"{STEP_S:g} s" in reply.error for reply in replies)
    assert content(ask(pool, "count", 1)).split()[1] == "3"


@pytest.mark.parametrize("text", ["block busy", "block_threads"])
def test_code_that_blocks_its_process_is_ended(environments: Callable[..., Environments], text: str) -> None:
    """Fails if a process that hangs holds up the run, keeps what it has started, or is not started again."""
    pool = environments(timeout_s=STEP_S)
    first = ask(pool, "start", 1)
    pool.step(0, row(), 0, text)
    pool.step(2, row(), 0, "forever")
    replies = collect(pool, 2)
    assert {reply.key for reply in replies} == {0, 2}
    assert all(reply.error.startswith(f"{HERE}:Shop") for reply in replies)
    if text != "block_threads":
        assert gone(int(content(first)))
    else:  # its own step is canceled first; the process ends because no thread is left
        wait_until(lambda: not ask(pool, "count", 3).messages, LIMIT_S, "the end of the process")
    assert ask(pool, "count", 1).error  # it was open when its process ended: its next call has the error
    assert content(ask(pool, "count", 4)).split()[1] == "1"


@pytest.mark.parametrize(("text", "how"), [("die kill", "9"), ("corrupt", "")])
def test_a_process_that_dies_is_started_again(environments: Callable[..., Environments], text: str, how: str) -> None:
    """Fails if the death of a process, or one that writes to the connection, hangs or ends the run."""
    pool = environments(n=2)
    before = content(ask(pool, "facts", 1)).split("|")
    ask(pool, "count", 2)  # in the other process
    child = int(content(ask(pool, "start session", 3)))
    pool.step(5, row(), 0, "forever")
    error = ask(pool, text, 1).error
    assert how in error and error.startswith(f"{HERE}:Shop")
    assert gone(int(before[-1]))
    assert content(ask(pool, "count", 2)).split()[1] == "2"
    assert ask(pool, "count", 3).error and gone(child)
    pool.abort([2, 5])
    assert content(ask(pool, "facts", 4)).split("|")[-1] != before[-1]
    for _ in range(3):
        assert ask(pool, "die exit", 6).error
    assert ask(pool, "count", 7).messages


def test_what_a_tool_started_ends_with_the_pool(environments: Callable[..., Environments]) -> None:
    """Fails if a process that a tool has started outlives the run, in its own session or environment."""
    pool = environments()
    children = [int(content(ask(pool, f"start {how}", key))) for key, how in enumerate(("", "session", "group"))]
    assert all(map(psutil.pid_exists, children))
    pool.close()
    assert all(map(gone, children))


def test_memory_is_limited(environments: Callable[..., Environments]) -> None:
    """Fails if an environment can take the memory of the engine on its host."""
    pool = environments(memory_gib=4.0)
    assert "MemoryError" in ask(pool, "memory", 0).error
    assert ask(pool, "count", 1).messages


def test_the_caller_never_waits(environments: Callable[..., Environments]) -> None:
    """Fails if a process that does not read its messages blocks the engine."""
    pool = environments()
    pid = int(content(ask(pool, "facts", 1000)).split("|")[-1])
    os.kill(pid, signal.SIGSTOP)
    began_s = time.monotonic()
    for key in range(20):
        pool.step(key, row(text="x" * 100_000), 0, "say " + "y" * 100_000)
    assert pool.replies() == []
    assert time.monotonic() - began_s < 60
    os.kill(pid, signal.SIGCONT)
    assert sorted(reply.key for reply in collect(pool, 20)) == list(range(20))


def test_a_reply_of_the_largest_size_arrives(shared: Environments) -> None:
    """Fails if the host and the worker have different limits, or characters that JSON escapes make a reply too long."""
    text = "\x01" * (MAX_BYTES - 100)
    assert ask(shared, f"say {text}").messages == [
        {"role": "user", "content": text},
        {"role": "tool", "content": "\u00e9\u2402"},
    ]
    shared.abort([0])


def test_close_leaves_nothing(tmp_path: Path, temporary_is: Callable[[Path], None]) -> None:
    """Fails if a pool leaves a process, a file, a thread or an open file behind, or does not close its objects."""
    folders = tmp_path / "folders"
    folders.mkdir()
    temporary_is(folders)

    def left() -> tuple[set[int], set[str], int, int]:
        me = psutil.Process()
        names = {path.name for path in folders.iterdir()}
        return {child.pid for child in me.children(recursive=True)}, names, me.num_fds(), threading.active_count()

    before = left()
    pool = make(n=2)
    pool.wait_ready(LIMIT_S)
    closed = tmp_path / "closed"
    ask(pool, "facts", 0, name="a", closed=str(closed))
    ask(pool, "die exit", 1)
    pool.step(2, row(), 0, "forever")
    assert left()[0] != before[0] and left()[1] != before[1]
    pool.close()
    pool.close()
    assert left() == before
    assert closed.read_text() == "a\n"
    assert (pool.n_open, pool.tools) == (0, (SEARCH,))


@pytest.mark.parametrize("turn", ["clutter", "block busy"])
def test_nothing_outlives_a_parent_that_was_killed(tmp_path: Path, turn: str) -> None:
    """Fails if workers, what they started, or their folders outlive a run that was killed."""
    code = (
        "from tests.unit.test_environment_workers import *; pool = make(); pool.wait_ready(60); "
        "facts = content(ask(pool, 'facts')); child = content(ask(pool, 'start session', 1)); "
        f"pool.step(2, row(), 0, '{turn}'); pool.wait(0.5); "
        f"print(facts, child, sep='|', flush=True); {FOREVER}"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        folder, *_, pid, child = parent.stdout.readline().strip().split("|")
        os.kill(parent.pid, signal.SIGKILL)
    assert gone(int(pid)) and gone(int(child))
    wait_until(lambda: not Path(folder).exists(), LIMIT_S, "the end of its folder")


@pytest.mark.parametrize(
    "kind",
    [
        *("NoStep", "SyncStep", "StepWithoutText", "NoSeed", "SyncClose", "NOT_A_CLASS", "missing"),
        *("ToolsAsText", "ToolsAsFunctions", "ToolsWithoutJson"),
    ],
)
def test_a_class_of_another_form_is_refused(kind: str) -> None:
    """Fails if a mistake in a class shows only after the models are loaded, or does not name the class."""
    from gkd.environment.form import import_environment

    with pytest.raises(gkd.errors.EnvironmentError, match=f"^{HERE}:{kind}: "):
        import_environment(f"{HERE}:{kind}")


def test_a_refusal_reaches_the_host() -> None:
    """Fails if the start of a run does not stop at a class that cannot be imported, or at an import that hangs."""
    pool = make("missing")
    with pytest.raises(gkd.errors.EnvironmentError, match=f"^{HERE}:missing: "):
        pool.wait_ready(LIMIT_S)
    pool.close()
    pool = make()
    with pytest.raises(gkd.errors.EnvironmentError, match=f"^{HERE}:Shop: "):
        pool.wait_ready(0.0)
    pool.close()


MAX_TURNS = 2


class Trajectory:
    """One trajectory, whose turns are given instead of generated."""

    def __init__(self, pool: Environments, key: int, **columns: Any) -> None:
        family = FAMILIES["smollm2"]
        self._tokenizer = tokenizer(family)
        ends = end_ids(family, self._tokenizer)
        self._delta = ChatDelta(self._tokenizer, {}, ends, setting=("rollout.environment", HERE))
        self.turns = Turns(pool, self._delta)
        prompt = Prompt(0, np.array([1], np.int32), row=row(**columns))
        self.request = Request("owner", prompt, 0, Sampling(1, 1.0, 1.0, 4000, seed=0, max_turns=MAX_TURNS), key)

    def turn(self, text: str, finish_reason: str = "stop") -> Rollout | None:
        """Return the rollout if the trajectory ends after this turn."""
        ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._delta.end_id]
        self.request.ids.append(np.array(ids, np.int32))
        self.request.logprobs.append(np.zeros(len(ids), np.float32))
        self.request.record_span(self.request.n_tokens, 0)
        self.turns.ended(self.request, finish_reason)
        deadline_s = time.monotonic() + LIMIT_S
        while not (found := list(self.turns.replies())):
            assert time.monotonic() < deadline_s
            self.turns.wait(1.0)
        (reply,) = found
        return reply[1] if isinstance(reply, tuple) else None


@pytest.mark.parametrize(("finish_reason", "expected"), [("stop", "environment_error"), ("length", "length")])
def test_an_environment_that_cannot_be_closed_has_failed(
    shared: Environments, tmp_path: Path, caplog: pytest.LogCaptureFixture, finish_reason: str, expected: str
) -> None:
    """Fails if an error of `close` after the last turn is neither logged nor the end of the trajectory.

    A reward function would then miss the reward of an environment that has none, and end the run.
    """
    case = Trajectory(shared, 900, closed=str(tmp_path / "no" / "folder"), name="x")
    assert case.turn("count") is None
    rollout = case.turn("count", finish_reason)
    assert rollout is not None and (rollout.finish_reason, rollout.reward) == (expected, None)
    assert "FileNotFoundError" in caplog.text and shared.n_open == 0


def test_a_dropped_trajectory_leaves_no_environment(shared: Environments, tmp_path: Path) -> None:
    """Fails if the environment of a trajectory stays open that is dropped while its next turn is generated.

    A closed stream would leave what the environments hold, such as containers, until the run ends.
    """
    closed = tmp_path / "closed"
    case = Trajectory(shared, 910, closed=str(closed), name="x")
    assert case.turn("count") is None and shared.n_open == 1
    case.turns.abort("another")
    assert shared.n_open == 1
    case.turns.abort("owner")
    wait_until(lambda: shared.wait(0.0) or (closed.exists() and closed.read_text()), LIMIT_S, "the end of the object")
    assert (shared.n_open, closed.read_text()) == (0, "x\n")

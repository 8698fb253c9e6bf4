"""What a dump of stacks says: who waits for whom. Real processes for the dump itself."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gkd.cluster.hang import describe
from gkd.cluster.progress import Phases, Progress
from gkd.cluster.stacks import Frame, RankStack, rank_env, stacks_here
from gkd.cluster.startup import summary

IN_A_COLLECTIVE = """Thread 0x1 (most recent call first):
  File "/x/python3.11/threading.py", line 327 in wait

Current thread 0x2 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3 in all_reduce
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 2 in wrapper
  File "/src/gkd/actor/step.py", line 7 in agree
  File "/src/gkd/actor/worker.py", line 9 in train_step
"""
IN_A_FILE = IN_A_COLLECTIVE.replace("/x/site-packages/torch/distributed/", "/x/site-packages/safetensors/")
ABOVE_A_COLLECTIVE = """Thread 0x2 (most recent call first):
  File "/src/gkd/actor/hook.py", line 1 in hook
  File "/x/site-packages/torch/distributed/fsdp/api.py", line 5 in call
  File "/src/gkd/actor/worker.py", line 9 in train_step
"""
IDLE = """Thread 0x1 (most recent call first):
  File "/x/python3.11/threading.py", line 327 in wait

Current thread 0x2 (most recent call first):
  File "/x/site-packages/ray/_private/worker.py", line 1069 in main_loop
  File "/x/site-packages/ray/_private/workers/default_worker.py", line 323 in <module>
"""


def stack(rank: str, text: str, problem: str = "") -> RankStack:
    return RankStack(rank, "host", 7, "ray::ActorWorker", text, problem)


@pytest.mark.parametrize(
    ("text", "waits", "idle", "where"),
    [
        (IN_A_COLLECTIVE, True, False, "waits for other ranks in a collective, called at gkd/actor/step.py line 7 (ag"),
        (IN_A_FILE, False, False, "at safetensors/distributed_c10d.py line 3 (all_reduce), called at gkd/actor/step"),
        (ABOVE_A_COLLECTIVE, False, False, "at gkd/actor/hook.py line 1 (hook)"),
        (IDLE, False, True, "waits for its next call"),
    ],
)  # fmt: skip
def test_what_a_stack_means(text: str, waits: bool, idle: bool, where: str) -> None:
    """Fails if a rank that waits is taken for the one it waits for, or the reverse."""
    one = stack("actor rank 0", text)
    assert (one.in_collective, one.is_idle) == (waits, idle)
    assert one.where().startswith(where)


@pytest.mark.parametrize(
    ("file", "ours", "short"),
    [
        ("/home/me/gkd/gkd/actor/step.py", True, "gkd/actor/step.py"),
        ("/venv/lib/python3.11/site-packages/gkd/actor/step.py", True, "gkd/actor/step.py"),
        ("/home/me/gkd/.venv/lib/python3.11/site-packages/torch/nn/f.py", False, "torch/nn/f.py"),
        ("/home/me/gkd/.python/lib/python3.11/threading.py", False, "threading.py"),
    ],
)
def test_a_checkout_called_like_the_package_is_not_the_package(file: str, ours: bool, short: str) -> None:
    """Fails if, in a folder that is called gkd, every library's code passes for this project's, and no rank waits."""
    frame = Frame(file, "7", "f")
    assert (frame.is_ours, str(frame)) == (ours, f"{short} line 7 (f)")


def test_a_rank_is_not_waiting_if_one_of_its_threads_is_not() -> None:
    """Fails if the thread that keeps everybody waiting hides behind another one of its process."""
    both = stack("actor rank 0", IN_A_COLLECTIVE + "\n" + ABOVE_A_COLLECTIVE)
    assert not both.in_collective
    assert both.where().count(";") == 1


def test_the_report_begins_with_the_rank_at_fault() -> None:
    """Fails if, in a large run, the one line that matters is not the first, or a thousand ranks are listed."""
    waiting = [stack(f"actor rank {i}", IN_A_COLLECTIVE) for i in range(1000)]
    stacks = [*waiting, stack("actor rank 1000", IN_A_FILE), stack("rollout engine 0", IDLE), stack("b", "", "stopped")]
    progress = {s.rank: Progress("step", 5.0) for s in stacks if s.rank != "b"}
    names = [*(s.rank for s in stacks), "rollout engine 1"]
    lines = describe(names, progress, [], stacks).lines
    assert lines[0] == "rollout engine 1: has no process: Ray has not started it"
    assert lines[1] == "b (host, pid 7): has not said how far it is; stopped"
    assert lines[2].startswith("actor rank 1000 (host, pid 7): step for 5 s; at safetensors/")
    assert lines[3].startswith("1000 (actor rank 0, ") and lines[3].count("actor rank") <= 10
    assert lines[4] == "1 (rollout engine 0) wait for their next call" and len(lines) == 5
    assert "node 10.0.0.9" in describe(["a"], {}, [], [], ["10.0.0.9"]).lines[0]


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        (["actor rank 1"], ["actor rank 1", "3 (actor rank 10, rollout engine 0, scoring endpoint 0) are not late"]),
        (["chunk 7 (scoring endpoint 0)"], ["scoring endpoint 0"]),
        (["rollout engine 0", "actor stage 0 exporter 1"], ["4 (actor rank 1, actor rank 10, rollout engine 0, sc"]),
        ([], ["4 (actor rank 1, actor rank 10, rollout engine 0, scoring endpoint 0), the first: "]),
    ],
)
def test_whoever_is_not_late_is_not_accused(late: list[str], expected: list[str]) -> None:
    """Fails if a process that does its work is shown as one that hangs, or one that hangs is left out."""
    names = ["actor rank 1", "actor rank 10", "rollout engine 0", "scoring endpoint 0"]
    lines = describe(names, {}, late, [stack(name, IN_A_FILE) for name in names]).lines
    assert [line.startswith(start) for line, start in zip(lines, expected, strict=False)] == [True] * len(expected)


def test_the_line_of_a_start_counts_ranks_by_phase() -> None:
    """Fails if the progress of a start hides a rank that is behind, or floods the log with those that are not."""
    progress = {f"actor rank {i}": Progress("loading weights", float(i)) for i in range(9)}
    progress["rollout engine 0"] = Progress("up", 1.0)
    line = summary([*progress, "rollout engine 1"], progress)
    assert line.startswith("1 of 11 ranks are up, 9 loading weights (actor rank 8 8 s, actor rank 7 7 s, ")
    assert line.endswith("actor rank 5 5 s, ...), 1 process not up (rollout engine 1)")


def test_a_phase_is_told_from_the_code_that_runs() -> None:
    """Fails if the start of an engine, which is one call of a library, shows as one phase however long it takes."""
    phases = Phases()
    phases.enter("starting")

    def load_weights() -> Progress:
        return phases.now({"load_weights": "loading"})

    assert load_weights().phase == "starting: loading"
    assert phases.now({"load_weights": "loading"}).phase == "starting"


def test_many_at_one_place_come_after_the_one_that_is_elsewhere() -> None:
    """Fails if, where nobody can tell a wait (for a GPU's work it is no collective's frame that waits), the one rank
    that is somewhere else is lost among those that wait for it.
    """
    elsewhere = IN_A_FILE.replace("step.py", "data.py")
    stacks = [stack(f"actor rank {i}", IN_A_FILE) for i in range(64)] + [stack("actor rank 64", elsewhere)]
    lines = describe([], {}, [], stacks).lines
    assert len(lines) == 2 and lines[0].startswith("actor rank 64 (host")
    assert lines[1].startswith("64 (actor rank 0, ") and "the first: actor rank 0 (host" in lines[1]


def test_helpers_of_libraries_are_no_ranks() -> None:
    """Fails if processes that a rank's libraries start, which cannot be asked, push the rank itself out of sight."""
    helpers = [RankStack("actor rank 0", "host", 8 + i, "python", "", "takes no questions", True) for i in range(9)]
    report = describe(["actor rank 0"], {}, [], [stack("actor rank 0", IN_A_FILE), *helpers])
    assert len(report.lines) == 1 and "pid 7" in report.lines[0]
    assert report.stacks.count("takes no questions") == 9


SCRIPT = """
    from gkd.cluster import stacks
    {before}
    print("ready", flush=True)
    def hold():
        {body}
    hold()
"""
LISTEN = "stacks.listen()"
RETITLE = "import setproctitle; stacks.listen(); setproctitle.setproctitle('VLLM::Worker_TP0')"
CHILD = """import subprocess, sys; stacks.listen(); child = subprocess.Popen([sys.executable, "-c", "input()"])"""


@contextmanager
def process(run: str, before: str, body: str = "import time; time.sleep(60)", **more: bytes) -> Iterator[int]:
    """A process of actor rank 3 of this run; its pid."""
    script = textwrap.dedent(SCRIPT.format(before=before, body=body))
    environ = {k.encode(): v.encode() for k, v in (os.environ | rank_env(run, "actor rank 3")).items()}
    environ |= {key.encode(): value for key, value in more.items()}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None and started.stdout.readline() == "ready\n"
            time.sleep(0.2)
            yield started.pid
            assert started.poll() is None, "the question has ended it"
        finally:
            started.kill()


@pytest.fixture
def run() -> str:
    return f"test{time.time_ns()}"


@pytest.mark.parametrize(
    ("before", "body", "expected"),
    [
        ("stacks.listen(); stacks.listen()", "import time; time.sleep(60)", "(hold)"),
        # A regular expression that takes for ever, in C, with the interpreter's lock held.
        (LISTEN, "import re; re.match('(a+)+$', 'a' * 60 + 'b')", "(hold)"),
        (RETITLE, "import time; time.sleep(60)", "(hold)"),  # which overwrites the environment that others see
        ("pass", "import time; time.sleep(60)", "takes no questions"),
        (LISTEN, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "stopped by a signal"),
    ],
)
def test_a_process_is_asked_from_outside(run: str, before: str, body: str, expected: str) -> None:
    """Fails if a process that hangs cannot be asked, or the question kills one that does not listen."""
    with process(run, before, body, NOTE=b"caf\xe9") as pid:
        (one,) = stacks_here(run)
        assert (one.rank, one.pid) == ("actor rank 3", pid)
        assert expected in one.where(), (one.where(), one.text)
        if one.text:
            assert stacks_here(run)[0].text.count("in hold") == 1, "the second dump, and not both"
    assert stacks_here(run) == []


def test_a_rank_comes_before_its_children_and_other_runs_are_left_alone(run: str) -> None:
    """Fails if a run that hangs accuses the ranks of another run on the same machine, or a helper for its rank."""
    with process(run, CHILD) as pid, process(f"{run}0", LISTEN):
        own, child = stacks_here(run)
        assert (own.pid, own.is_child) == (pid, False) and "(hold)" in own.where()
        assert child.is_child and child.rank == own.rank and not child.text

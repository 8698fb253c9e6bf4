"""Test the hang report: classification of stacks, and stack dumps of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from gkd.cluster.cluster import _RUN, _kill_rest
from gkd.cluster.stacks import Frame, RankStack, describe, rank_env, ranks_here, stacks_here
from gkd.spans import Phase, Progress, SpanRecorder
from tests.processes import is_alive, wait_until

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
        (IN_A_COLLECTIVE, True, False, "gkd/actor/step.py line 7 (agree)"),
        (IN_A_FILE, False, False, "safetensors/distributed_c10d.py line 3 (all_reduce)"),
        (ABOVE_A_COLLECTIVE, False, False, "gkd/actor/hook.py line 1 (hook)"),
        (IDLE, False, True, "idle"),
    ],
)  # fmt: skip
def test_classification_of_a_stack(text: str, waits: bool, idle: bool, where: str) -> None:
    """Fails if a waiting rank is confused with the rank that it waits for."""
    one = stack("actor rank 0", text)
    assert (one.in_collective, one.is_idle) == (waits, idle)
    assert where in one.where()


@pytest.mark.parametrize(
    ("file", "ours", "short"),
    [
        ("/home/me/gkd/gkd/actor/step.py", True, "gkd/actor/step.py"),
        ("/venv/lib/python3.11/site-packages/gkd/actor/step.py", True, "gkd/actor/step.py"),
        ("/home/me/gkd/.venv/lib/python3.11/site-packages/torch/nn/f.py", False, "torch/nn/f.py"),
    ],
)
def test_checkout_folder_named_like_the_package(file: str, ours: bool, short: str) -> None:
    """Fails if, in a checkout folder named gkd, library code is taken for this project's code."""
    frame = Frame(file, "7", "f")
    assert (frame.is_ours, str(frame)) == (ours, f"{short} line 7 (f)")


def test_rank_waits_only_if_all_threads_wait() -> None:
    """Fails if a thread that hangs is hidden by another thread of its process that waits."""
    both = stack("actor rank 0", IN_A_COLLECTIVE + "\n" + ABOVE_A_COLLECTIVE)
    assert not both.in_collective
    assert both.where().count(";") == 1


def test_report_starts_with_the_cause() -> None:
    """Fails if, in a large run, the relevant lines are not first, or all ranks are listed."""
    waiting = [stack(f"actor rank {i}", IN_A_COLLECTIVE) for i in range(1000)]
    stacks = [*waiting, stack("actor rank 1000", IN_A_FILE), stack("rollout engine 0", IDLE), stack("b", "", "stopped")]
    progress = {s.rank: Progress("step", 5.0) for s in stacks if s.rank != "b"}
    lines = describe([*(s.rank for s in stacks), "rollout engine 1"], progress, [], stacks).lines
    assert lines[0].startswith("rollout engine 1: ")
    assert lines[1].startswith("b (host, pid 7): ") and lines[1].endswith("stopped")
    assert lines[2].startswith("actor rank 1000 (host, pid 7): step for 5 s; at safetensors/")
    assert ": 1000 (actor rank 0, " in lines[3] and lines[3].count("actor rank") <= 10
    assert "1 (rollout engine 0)" in lines[4] and len(lines) == 5
    assert "node 10.0.0.9" in describe(["a"], {}, [], [], ["10.0.0.9"]).lines[0]


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        (["actor rank 1"], ["actor rank 1", "not late: 3 (actor rank 10, rollout engine 0, scoring endpoint 0)"]),
        (["rollout engine 0", "actor stage 0 exporter 1"], ["4 (actor rank 1, actor rank 10, rollout engine 0, sc"]),
        ([], ["4 (actor rank 1, actor rank 10, rollout engine 0, scoring endpoint 0)"]),
    ],
)
def test_only_late_ranks_are_reported(late: list[str], expected: list[str]) -> None:
    """Fails if a working process is reported as late, or a late one is left out."""
    names = ["actor rank 1", "actor rank 10", "rollout engine 0", "scoring endpoint 0"]
    lines = describe(names, {}, late, [stack(name, IN_A_FILE) for name in names]).lines
    assert [line.startswith(start) for line, start in zip(lines, expected, strict=False)] == [True] * len(expected)


def test_phase_from_the_running_library_code() -> None:
    """Fails if the start of an engine, a single library call, is shown as a single phase."""
    spans = SpanRecorder("engine 0", Phase.STARTED)
    spans.enter("starting")

    def load_weights() -> Progress:
        return spans.progress({"load_weights": "loading"})

    assert load_weights().phase == "starting: loading"
    assert spans.progress({"load_weights": "loading"}).phase == "starting"


def test_small_groups_come_first() -> None:
    """Fails if a rank at a different location is lost among many ranks that wait for it.

    A rank that waits for GPU work has no frame of a collective, so the report cannot classify it as waiting.
    """
    elsewhere = IN_A_FILE.replace("step.py", "data.py")
    stacks = [stack(f"actor rank {i}", IN_A_FILE) for i in range(64)] + [stack("actor rank 64", elsewhere)]
    lines = describe([], {}, [], stacks).lines
    assert len(lines) == 2 and lines[0].startswith("actor rank 64 (host")
    assert lines[1].startswith("64 (actor rank 0, ") and "actor rank 0 (host" in lines[1]


def test_helper_processes_are_not_ranks() -> None:
    """Fails if helper processes of libraries, which have no stacks, hide the rank itself in the report."""
    helpers = [RankStack("actor rank 0", "host", 8 + i, "python", "", "no stacks", True) for i in range(9)]
    report = describe(["actor rank 0"], {}, [], [stack("actor rank 0", IN_A_FILE), *helpers])
    assert len(report.lines) == 1 and "pid 7" in report.lines[0]
    assert report.stacks.count("no stacks") == 9


SCRIPT = """
    from gkd.cluster import stacks
    {before}
    def hold():
        print("ready", flush=True)
        {body}
    hold()
"""
IN_HOLD = "input()"
STOPPED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
LISTEN = "stacks.listen()"
RETITLE = "import setproctitle; stacks.listen(); setproctitle.setproctitle('VLLM::Worker_TP0')"
CHILD = """import subprocess, sys; stacks.listen(); child = subprocess.Popen([sys.executable, "-c", "input()"])"""


@contextmanager
def process(run: str, before: str, body: str = IN_HOLD, **more: bytes) -> Iterator[int]:
    """Start a process of actor rank 3 of this run, and yield its pid."""
    script = textwrap.dedent(SCRIPT.format(before=before, body=body))
    environ = {k.encode(): v.encode() for k, v in (os.environ | rank_env(run, "actor rank 3")).items()}
    environ |= {key.encode(): value for key, value in more.items()}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout.readline() == "ready\n"
            if body is STOPPED:
                wait_until(lambda: psutil.Process(started.pid).status() == psutil.STATUS_STOPPED, 30.0, "the stop")
            yield started.pid
            assert started.poll() is None, "the signal ended the process"
        finally:
            started.kill()


@pytest.fixture
def run() -> str:
    return f"test{time.time_ns()}"


@pytest.mark.parametrize(
    ("before", "body", "expected"),
    [
        ("stacks.listen(); stacks.listen()", IN_HOLD, "(hold)"),
        # A regular expression that runs forever in C and holds the GIL.
        (LISTEN, "import re; re.match('(a+)+$', 'a' * 60 + 'b')", "(hold)"),
        (RETITLE, IN_HOLD, "(hold)"),  # overwrites the readable environment
        ("pass", IN_HOLD, "no stack handler"),
        (LISTEN, STOPPED, "stopped by a signal"),
    ],
)
def test_stacks_are_read_from_outside(run: str, before: str, body: str, expected: str) -> None:
    """Fails if the stacks of a hanging process cannot be read, or if the signal ends a process without a handler."""
    with process(run, before, body, NOTE=b"caf\xe9") as pid:
        (one,) = stacks_here(run)
        assert (one.rank, one.pid) == ("actor rank 3", pid)
        assert expected in one.where(), (one.where(), one.text)
        if one.text:
            assert stacks_here(run)[0].text.count("in hold") == 1, "only the second dump"
    assert stacks_here(run) == []


def test_ranks_come_before_children_and_other_runs_are_ignored(run: str) -> None:
    """Fails if the report includes ranks of another run, or takes a helper process for its rank."""
    with process(run, CHILD) as pid, process(f"{run}0", LISTEN):
        own, child = stacks_here(run)
        assert (own.pid, own.is_child) == (pid, False) and "(hold)" in own.where()
        assert child.is_child and child.rank == own.rank and not child.text


@pytest.mark.parametrize(
    "command",
    [
        # A process that Linux shows without an environment most of the time: it starts one program after the other.
        ["sh", "-c", 'echo ready; exec sh "$0"'],
        [sys.executable, "-c", "import os\nprint('ready', flush=True)\nwhile True: os.close(os.dup(0))"],
    ],
)
def test_a_process_is_found_at_any_moment(
    run: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a process is overlooked that is being started, or that closes a file while it is looked at.

    What is left of a rank would then keep its GPU.
    """
    monkeypatch.setattr("gkd.cluster.stacks.EXEC_S", 60.0)  # on a busy machine an environment may be absent for longer
    script = tmp_path / "again.sh"
    script.write_text(f'exec sh "{script}"\n')
    environ = os.environ | rank_env(run, "actor rank 3")
    with subprocess.Popen([*command, str(script)], env=environ, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout.readline() == "ready\n"
            looks = [ranks_here(run) for _ in range(100)]
            assert looks == [{started.pid: "actor rank 3"}] * len(looks)
        finally:
            started.kill()


def test_the_rest_of_a_cluster_is_ended_at_any_moment(run: str, tmp_path: Path) -> None:
    """Fails if a process of the cluster outlives the run because it is being started when the others are killed."""
    script = tmp_path / "again.sh"
    script.write_text(f'exec sh "{script}"\n')
    with ExitStack() as stack:
        left = [subprocess.Popen(["sh", script], env=os.environ | {_RUN: run}) for _ in range(40)]
        for each in left:
            stack.callback(each.wait)
            stack.callback(each.kill)
        _kill_rest(run)
        assert [each.pid for each in left if is_alive(each.pid)] == []

"""Test the terminal of a run: a real process on a pseudo-terminal, and streams that are none."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import sys
from contextlib import redirect_stderr

import pytest

from gkd.console.state import STEP_LINE
from gkd.console.terminal import LINES, OFF, PANEL, Terminal
from gkd.log import get_logger
from gkd.spans import Phase, SpanRecorder
from gkd.types import TeacherHealth
from tests.unit.console_runs import Clock, run

log = get_logger("test")

# A process with the logger of a library that keeps the first stderr, a step that goes on after the signal, and an end.
RUN = """
import logging, sys, time
library = logging.getLogger("library")
library.addHandler(logging.StreamHandler())
from gkd.console.state import STEP_LINE
from gkd.console.terminal import Terminal
from gkd.log import get_logger
from gkd.run import interrupts
from tests.unit.console_runs import line, run
log = get_logger("test")
interrupts.install()
state = run()
try:
    with Terminal(sys.argv[1], "runs/mine") as terminal, interrupts.training_loop():
        with terminal.watching(state, lambda: None):
            state.add(1, line())
            log.info("a step line", extra=STEP_LINE)
            log.info("an event")
            library.warning("logged by a library")
            print("printed by a library", file=sys.stderr)
            print("printed to stdout")
            time.sleep(1.5)
            print("ready")
            time.sleep(4.0)
            log.info("the step is finished")
            with interrupts.interruptible():
                raise AssertionError("the signal was not held")
except KeyboardInterrupt:
    log.info("after the panel: %s", interrupts.came_between_steps(), extra=STEP_LINE)
"""


# Threads that print whole lines and parts of lines, while the height of the panel changes.
THREADS = """
import sys, threading, time
from gkd.console.terminal import Terminal
from gkd.log import get_logger
from tests.unit.console_runs import line, run
log = get_logger("test")
state = run()
state.add(1, line())
sys.setswitchinterval(1e-5)
def work(thread):
    for i in range(400):
        if thread % 2:
            log.info("line %d of %d", i, thread)
        else:
            print(f"line {i} of {thread}", file=sys.stderr)
        time.sleep(0.001)
with Terminal(sys.argv[1], "runs/mine") as terminal, terminal.watching(state, lambda: None):
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for each in threads:
        each.start()
    while any(each.is_alive() for each in threads):
        state.active_alarms = [] if state.active_alarms else ["kl_rises"]
        time.sleep(0.3)
"""
WIDTH = 150


def shown(written: str) -> list[str]:
    """Return the rows of a terminal, those that scrolled away included, after the characters and sequences of rich.

    As on a real one, a character behind a full row begins the next one.
    """
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part[0] != "\x1b":
            for character in part:
                if column == WIDTH:
                    row, column = row + 1, 0
                    rows += [""] * (row == len(rows))
                rows[row] = rows[row].ljust(column)[:column] + character + rows[row][column + 1 :]
                column += 1
        elif part[-1] == "A":  # cursor up
            row = max(0, row - int(part[2:-1] or 1))
        elif part == "\x1b[2K":  # erase the row
            rows[row] = ""
    return [text.rstrip() for text in rows]


def run_on_a_terminal(setting: str, program: str = RUN) -> tuple[list[str], list[str], str]:
    """Return the rows of a terminal shortly before Ctrl-C, which a run gets in a step after `ready`, those at its end,
    and all that it has printed.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
        os.execve(sys.executable, [sys.executable, "-c", program, setting], environment)
    written, rows = b"", list[str]()
    try:
        while data := os.read(terminal, 65536):
            written += data
            _, ready, behind = written.partition(b"ready\r\n")
            drawn = setting == "lines" or "╯".encode() in behind  # the panel comes back behind what is printed
            if ready and drawn and not rows:  # whole, so that the echo of Ctrl-C is behind it
                rows = shown(written[: written.rfind("╯".encode()) + len("╯".encode())].decode())  # whole panels
                os.write(terminal, b"\x03")
    except OSError:  # the process has closed its end
        pass
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, written.decode()
    return rows, shown(written.decode()), written.decode()


ANSWER = "Ctrl-C: finishing the step, then saving; Ctrl-C again: stop without saving (at the latest after 120 s)"
PRINTED = ["an event", "logged by a library", "printed by a library", "printed to stdout", "ready"]


def test_what_is_printed_stays_above_the_panel() -> None:
    """Fails if the panel covers the answer to Ctrl-C or what a library prints, does not answer itself, leaves pieces of
    itself where the terminal echoes Ctrl-C, is not drawn again by itself, doubles the step line, or stays at the end.
    """
    before, rows, written = run_on_a_terminal("auto")
    assert any("1/120" in row for row in before) and any(row.startswith("╰") for row in before)
    assert written.count(ANSWER[8:70]) > 1, "the panel does not have the answer"
    texts = [row for row in rows if row]
    assert not [row for row in texts if row[0] in "╭│╰"], "pieces of the panel"
    ends = [*PRINTED, ANSWER, "the step is finished", "after the panel: True"]
    assert len(texts) == len(ends) and all(row.endswith(end) for row, end in zip(texts, ends, strict=True)), texts


def test_no_thread_loses_a_line_above_the_panel() -> None:
    """Fails if a thread that prints paints over lines, since another one has drawn a panel of another height, or if the
    threads lose or mix parts of their lines.
    """
    _, rows, _ = run_on_a_terminal("panel", THREADS)
    printed = [row[row.find("line ") :] for row in rows if row]
    assert sorted(printed) == sorted(f"line {i} of {thread}" for i in range(400) for thread in range(4))


def test_the_answer_to_an_interrupt_without_a_panel() -> None:
    """Fails if Ctrl-C has no answer, or lines on a terminal come with control sequences."""
    _, rows, _ = run_on_a_terminal("lines")
    texts = [row for row in rows if row and "so far" not in row]
    ends = ["a step line", *PRINTED, ANSWER, "the step is finished"]
    assert all(row.endswith(end) for row, end in zip(texts, [*ends, "after the panel: True"], strict=True)), texts


def test_a_stream_that_is_no_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if control sequences get into a log file, or a dumb terminal gets a panel."""
    with redirect_stderr(io.StringIO()):
        assert Terminal("auto", "").mode == LINES and Terminal("panel", "").mode == PANEL
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal, redirect_stderr(terminal):
        monkeypatch.setenv("TERM", "xterm")
        assert Terminal("auto", "").mode == PANEL and Terminal("lines", "").mode == LINES
        monkeypatch.setenv("TERM", "dumb")
        assert Terminal("auto", "").mode == LINES
    os.close(reader)


@pytest.mark.parametrize(("setting", "lines"), [("lines", ["a step", "an event"]), ("off", ["an event"])])
def test_step_lines_can_be_switched_off(setting: str, lines: list[str]) -> None:
    """Fails if trainer.progress=off prints a line per step, or hides events; or a heartbeat hides the real silence."""
    stream, clock = io.StringIO(), Clock()
    handler = logging.StreamHandler(stream)
    logging.getLogger("gkd").addHandler(handler)
    doing = SpanRecorder("driver", clock=clock)
    try:
        with redirect_stderr(stream), Terminal(setting, "", doing) as terminal:
            assert terminal.mode == (OFF if setting == "off" else LINES)
            log.info("a step", extra=STEP_LINE)
            log.info("an event")
            if setting == "lines":
                with doing.doing(Phase.STEP, 2, 1), doing.span("teacher"):
                    for waited_s in (5.0, 1.0, 4.0):
                        clock.now_s += waited_s
                        terminal.tick()
    finally:
        logging.getLogger("gkd").removeHandler(handler)
    printed = stream.getvalue().splitlines()
    assert printed[: len(lines)] == lines
    assert ["teacher" in text for text in printed[len(lines) :]] == ([True, True] if setting == "lines" else [])


def test_the_health_of_the_teacher_is_requested_within_the_loop(gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if each poll costs a request, an outage or its end is not reported, or a request follows the loop."""
    gkd_log.set_level(logging.WARNING)
    clock, n_probes, silent_s = Clock(), 0, 0.0

    def probe() -> TeacherHealth:
        nonlocal n_probes
        n_probes += 1
        return TeacherHealth(silent_s, 300.0, 1, 1, 0)

    def wait(n: int) -> None:
        for _ in range(n):
            clock.now_s += 1.0
            terminal.tick()

    terminal = Terminal("lines", "", SpanRecorder("driver", clock=clock))  # not entered: this test is its thread
    with terminal.watching(run(), probe):
        wait(20)
        assert n_probes == 4 and not gkd_log.messages
        silent_s = 12.0
        wait(10)
        assert len(gkd_log.messages) == 1
        silent_s = 0.0
        wait(10)
        assert n_probes == 8 and len(gkd_log.messages) == 2
    wait(100)
    assert n_probes == 8

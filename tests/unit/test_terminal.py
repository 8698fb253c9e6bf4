"""Test the terminal of a run: a real pseudo-terminal, and streams that are none."""

from __future__ import annotations

import io
import logging
import os
import pty
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr

import pytest

from gkd.console.state import STEP_LINE
from gkd.console.terminal import LINES, OFF, PANEL, Terminal, resolve_mode
from gkd.log import get_logger
from gkd.spans import Phase, SpanRecorder
from gkd.types import TeacherHealth
from tests.unit.console_runs import Clock, line, run

log = get_logger("test")


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[io.TextIOBase, list[bytes]]]:
    """Return a pseudo-terminal, to which the loggers print, and what has arrived at its other end."""
    reader, writer = pty.openpty()
    stream = os.fdopen(writer, "w", buffering=1)
    arrived: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(reader, 65536):
                arrived.append(data)  # may end within a character
        except OSError:  # the writer is closed
            return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    handler = logging.StreamHandler(stream)
    logging.getLogger("gkd").addHandler(handler)
    yield stream, arrived
    logging.getLogger("gkd").removeHandler(handler)
    stream.close()
    thread.join(30)
    os.close(reader)


def test_a_panel_is_drawn_on_a_terminal(screen: tuple[io.TextIOBase, list[bytes]]) -> None:
    """Fails if there is no panel on a terminal, a log line tears it, a step line doubles it, it is not drawn again by
    itself, or it stays at the end.
    """
    stream, arrived = screen
    clock = Clock()
    state = run(120, clock=clock)
    with redirect_stderr(stream):  # here, since pytest replaces it after the fixtures
        with Terminal("auto", "runs/mine", doing=SpanRecorder("driver", clock=clock)) as terminal:
            assert terminal.mode == PANEL and sys.stderr is not stream
            with terminal.watching(state, lambda: None):
                state.add(1, line())
                log.info("an event")
                log.info("a step line", extra=STEP_LINE)
                print("printed by a library", file=sys.stderr)
                wait_for("1/120", arrived)
        assert sys.stderr is stream
    log.info("after the end", extra=STEP_LINE)
    stream.flush()
    os.write(stream.fileno(), b"END")
    text = wait_for("END", arrived)
    assert "runs/mine" in text and "1/120" in text and "an event" in text and "printed by a library" in text
    assert "a step line" not in text and "after the end" in text
    assert text.index("an event") < text.rindex("╭"), "the panel is drawn again below the line"
    assert "\x1b[2K" in text[text.rindex("╰") :], "the panel is erased at the end"


def wait_for(mark: str, arrived: list[bytes]) -> str:
    waited = threading.Event()
    for _ in range(200):
        if mark in (text := b"".join(arrived).decode(errors="replace")):
            return text
        waited.wait(0.05)
    raise AssertionError(f"no {mark!r} arrived")


def test_a_stream_that_is_no_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if control sequences get into a log file, or a dumb terminal gets a panel."""
    assert resolve_mode("auto", io.StringIO()) == LINES and resolve_mode("panel", io.StringIO()) == PANEL
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setenv("TERM", "xterm")
        assert resolve_mode("auto", terminal) == PANEL and resolve_mode("lines", terminal) == LINES
        monkeypatch.setenv("TERM", "dumb")
        assert resolve_mode("auto", terminal) == LINES
    os.close(reader)


@pytest.mark.parametrize(("setting", "lines"), [("lines", ["a step", "an event"]), ("off", ["an event"])])
def test_step_lines_can_be_switched_off(setting: str, lines: list[str]) -> None:
    """Fails if trainer.progress=off prints a line per step, or hides events; or a heartbeat hides the real silence."""
    stream, clock = io.StringIO(), Clock()
    handler = logging.StreamHandler(stream)
    logging.getLogger("gkd").addHandler(handler)
    doing = SpanRecorder("driver", clock=clock)
    try:
        with Terminal(setting, "", stream, doing) as terminal:
            assert terminal.mode == (OFF if setting == "off" else LINES)
            log.info("a step", extra=STEP_LINE)
            log.info("an event")
            if setting == "lines":
                with doing.doing(Phase.STEP, 2, 1), doing.span("teacher"):
                    clock.now_s += 5.0
                    terminal.tick()
                    clock.now_s += 1.0
                    terminal.tick()
                    clock.now_s += 4.0
                    terminal.tick()
    finally:
        logging.getLogger("gkd").removeHandler(handler)
    printed = stream.getvalue().splitlines()
    assert printed[: len(lines)] == lines
    assert ["teacher" in text for text in printed[len(lines) :]] == ([True, True] if setting == "lines" else [])


def test_the_health_of_the_teacher_is_requested_only_in_long_stages(gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if short stages cost a request each, an outage or its end is not reported, or one follows the loop."""
    gkd_log.set_level(logging.WARNING)
    clock, n_probes, silent_s = Clock(), 0, 0.0
    doing = SpanRecorder("driver", clock=clock)

    def probe() -> TeacherHealth:
        nonlocal n_probes
        n_probes += 1
        return TeacherHealth(silent_s, 300.0, 1, 1, 0)

    def short_stages(n: int) -> None:
        for _ in range(n):
            with doing.doing(Phase.STEP, 2, 1), doing.span("teacher"):
                clock.now_s += 3.0
                terminal.tick()

    terminal = Terminal("lines", "", io.StringIO(), doing)  # not entered: this test is its thread
    with terminal.watching(run(), probe):
        short_stages(20)
        assert n_probes == 0
        with doing.doing(Phase.STEP, 2, 2), doing.span("teacher"):
            for _ in range(15):
                clock.now_s, silent_s = clock.now_s + 1.0, silent_s + 1.0
                terminal.tick()
        assert n_probes == 4 and len(gkd_log.messages) == 1
        silent_s = 0.0
        short_stages(5)
        assert n_probes == 5 and len(gkd_log.messages) == 2
    clock.now_s += 100.0
    terminal.tick()
    assert n_probes == 5

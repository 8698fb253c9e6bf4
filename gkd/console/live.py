"""A live panel at the bottom of a terminal, drawn by rich. Everything that the driver prints appears above it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live


class LivePanel:
    """Show a panel from `start` to `stop`, when it disappears.

    Args:
        stream: the terminal; loggers that print to it print above the panel.
        draw: returns the panel for a number of columns; called by a thread of rich.
    """

    def __init__(self, stream: TextIO, draw: Callable[[int], RenderableType]) -> None:
        self._stream = stream
        console = Console(file=stream, force_terminal=True)
        self._live = Live(
            console=console, refresh_per_second=2, transient=True, get_renderable=lambda: draw(console.width)
        )
        self._moved: list[logging.StreamHandler[TextIO]] = []

    def start(self) -> None:
        self._live.start(refresh=True)  # replaces sys.stdout and sys.stderr
        for handler in logging.getLogger("gkd").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is self._stream:
                handler.setStream(sys.stderr)
                self._moved.append(handler)

    def stop(self) -> None:
        self._live.stop()
        for handler in self._moved:
            handler.setStream(self._stream)
        self._moved.clear()

"""The file of `--ready-file`: written atomically when a server is ready, removed at its exit."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from teacher_server.errors import ServerError

log = logging.getLogger(__name__)


class ReadyFile:
    """Check before loading that the file can be written, without changing it. Without a file nothing is done.

    Raises:
        ServerError: it cannot be written.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        if file is None:
            return
        self._partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
        try:
            if file.is_dir():
                raise ServerError(f"--ready-file {file}: this is a folder. Fix: give a file name.")
            file.parent.mkdir(parents=True, exist_ok=True)
            self._partial.touch()
            self._partial.unlink()
        except OSError as error:
            raise ServerError(f"--ready-file {file}: {error}. Fix: give a path that can be written.") from error

    def write(self, content: Mapping[str, object]) -> None:
        """Write the content as JSON, atomically. Raises ServerError."""
        if self._file is None:
            return
        try:
            self._partial.write_text(json.dumps(content) + "\n")
            self._partial.replace(self._file)
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            raise ServerError(f"--ready-file {self._file}: {error}.") from error

    def remove(self) -> None:
        """Remove the file; a failure is logged."""
        try:
            if self._file is not None:
                self._file.unlink(missing_ok=True)
        except OSError as error:
            log.error("--ready-file %s cannot be removed: %s", self._file, error)

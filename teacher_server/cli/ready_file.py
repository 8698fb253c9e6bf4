"""The file of `--ready-file`: written atomically when a server is ready, removed at its exit."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from teacher_server.errors import ServerError

log = logging.getLogger(__name__)


def check_ready_file(file: Path) -> None:
    """Check before loading that the file can be written, without changing it. Raises ServerError."""
    try:
        if file.is_dir():
            raise ServerError(f"--ready-file {file}: this is a folder. Fix: give a file name.")
        file.parent.mkdir(parents=True, exist_ok=True)
        _partial(file).touch()
        _partial(file).unlink()
    except OSError as error:
        raise ServerError(f"--ready-file {file}: {error}. Fix: give a path that can be written.") from error


def write_ready_file(file: Path, content: Mapping[str, object]) -> None:
    """Write the content as JSON, atomically. Raises ServerError."""
    partial = _partial(file)
    try:
        partial.write_text(json.dumps(content) + "\n")
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ServerError(f"--ready-file {file}: {error}.") from error


def remove_ready_file(file: Path) -> None:
    """Remove the file; a failure is logged."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log.error("--ready-file %s cannot be removed: %s", file, error)


def _partial(file: Path) -> Path:
    return file.with_name(f"{file.name}.{os.getpid()}.partial")

"""Write answers to prompts as JSONL, so that a second start goes on after an interruption at any place.

FILE.progress has the settings that made the answers, the number of answered prompts, and the bytes of their rows. It
is replaced after each prompt. What the file has behind these bytes is cut off at the next start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gkd.errors import ConfigError
from gkd.run.open import SAME_PROBE, largest_difference

OPTION = "--out"


class AnswerFile:
    """The file of answers, open for rows of further prompts.

    Args:
        file: in a folder that exists.
        settings: what the answers depend on, as JSON values.

    Raises:
        ConfigError: the file is another one's, was made with other settings, or has lost rows.
    """

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self._progress = file.with_name(f"{file.name}.progress")
        other = f"name another file, or remove it and {self._progress.name}."
        if not file.parent.is_dir():
            raise ConfigError(OPTION, str(file), "its folder does not exist.", f"create {file.parent}.")
        self.n_prompts = 0  # number of answered prompts
        n_bytes = 0
        if self._progress.exists():
            stored = json.loads(self._progress.read_text())
            for name, value in self._settings.items():
                before = stored["settings"].get(name)
                if not _is_same(before, value):
                    problem = f"its answers were made with {name} = {before!r}, not {value!r}."
                    raise ConfigError(OPTION, str(file), problem, other)
            self.n_prompts = stored["prompts"]
            n_bytes = stored["bytes"]
        n_found = file.stat().st_size if file.exists() else 0
        if n_found < n_bytes or (n_found and not self._progress.exists()):
            problem = f"it has {n_found} bytes, and gkd generate has written {n_bytes} of them."
            raise ConfigError(OPTION, str(file), problem, other)
        self._file = file.open("ab")
        self._file.truncate(n_bytes)
        self._file.seek(n_bytes)
        if not self._progress.exists():
            self._record()

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows of the next prompt; there may be none. Raises TypeError: a value is none of JSON's."""
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        self._file.write(lines.encode())
        self._file.flush()
        self.n_prompts += 1
        self._record()

    def close(self) -> None:
        self._file.close()

    def _record(self) -> None:
        written = {"settings": self._settings, "prompts": self.n_prompts, "bytes": self._file.tell()}
        new = self._progress.with_name(f"{self._progress.name}.new")
        new.write_text(json.dumps(written, indent=1) + "\n")
        os.replace(new, self._progress)


def _is_same(before: Any, now: Any) -> bool:
    """Return whether a setting is the same; a list has the logprobs of a probe, which may differ a little."""
    if isinstance(before, list) and isinstance(now, list):
        return largest_difference(before, now) <= SAME_PROBE
    return bool(before == now)

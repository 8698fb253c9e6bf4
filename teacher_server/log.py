"""Logging of the server's processes to stderr, as human-readable text or as JSON lines."""

from __future__ import annotations

import datetime
import json
import logging
import sys

# Attributes of every record. All others come from `extra` and become fields of the JSON line.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def log_to_stderr(name: str, log_format: str = "text") -> None:
    """Configure the root logger of this process. stdout is reserved for the ready lines."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonLines(name))
    else:
        line = f"%(asctime)s.%(msecs)03d %(levelname)s [{name} %(process)d] %(message)s"
        handler.setFormatter(logging.Formatter(line, datefmt="%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.captureWarnings(True)


class JsonLines(logging.Formatter):
    """Format one JSON object per line: time (UTC), level, process, pid, logger, message, `extra` fields, error."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        for key, value in vars(record).items():
            if key not in _STANDARD and not key.startswith("_"):
                line.setdefault(key, value)  # an extra field cannot replace one of the above
        return json.dumps(line, default=str)

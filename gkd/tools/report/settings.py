"""Find the settings of a run that differ from the defaults, and those that differ between runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gkd.config.key_list import all_keys
from gkd.tools.report.read import Run

# Differ between any two runs, so they explain nothing.
_PLACES = frozenset({"trainer.run_dir", "teacher.server_port"})


def from_defaults(run: Run) -> list[dict[str, str]]:
    """Return key, value, default and help of each setting that is not the default; the help of older keys is empty."""
    rows = []
    for name, value in run.settings.items():
        declared = all_keys().get(name)
        if declared is None:
            rows.append({"key": name, "value": shown(value), "default": "", "help": ""})
        elif _plain(value) != _plain(declared.default):
            row = {"key": name, "value": shown(value), "default": shown(declared.default)}
            rows.append(row | {"help": declared.key.help})
    return rows


def differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return key, help and the runs' values of each setting that differs between runs; folders and ports come last."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    rows = []
    for name in sorted(names, key=lambda name: name in _PLACES):
        values = [shown(run.settings[name]) if name in run.settings else "(no such key)" for run in runs]
        if len(set(values)) > 1:
            known = all_keys().get(name)
            rows.append({"key": name, "values": values, "help": known.key.help if known else ""})
    return rows


def trained_loss(run: Run) -> str:
    """Return the trained loss, with what makes its values incomparable."""
    terms = run.settings.get("distill.losses") or run.settings.get("distill.loss", "")
    others = {key: run.settings.get(key) for key in ("distill.tail", "distill.beta", "distill.alpha")}
    return json.dumps([_plain(terms), others])


def shown(value: Any) -> str:
    """Return a value as it is written in YAML's flow style."""
    if isinstance(value, str):
        return value or '""'
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return a value in which equal numbers are equal: YAML may have 1 for 1.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value

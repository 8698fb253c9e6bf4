"""Convert old settings row by row, and write the YAML: what became of each old key is in its comments."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from gkd.config.check import check_config
from gkd.config.dialects.table import UNSET, Dialect, NotConvertible, OldSettings, Row
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_sections import all_keys
from gkd.errors import ConfigError

Status = Literal["mapped", "to set", "refused", "not supported", "not recognized", "default", "meaningless"]
STATUSES: dict[Status, str] = {
    "mapped": "mapped",
    "to set": "to set yourself",
    "refused": "refused",
    "not supported": "not supported",
    "not recognized": "not recognized",
    "default": "default here",
    "meaningless": "meaningless here",
}


# Words in names of settings that decide what is trained: loss, teacher, data or sampling.
_DECIDING = re.compile(
    r"\[@\]$|(?<![a-z])(loss(es)?|kl|kld|jsd|kd|ce|sft|divergence|distill(ation)?|gkd|ops?d|gold|"
    r"solution|privileged|teachers?|ref|reference|rewards?|adv|"
    r"advantage|entropy|importance|clip|alpha|beta|lmbda|lambda|data|datasets?|prompts?|question|responses?|answer|"
    r"completions?|chat|template|system|thinking|messages|tokenizer|domains?|tags?|interleave|mix|sampl(ing|er)|"
    r"temperature|top|topk|[knp]|stop|eos|seq|sequence|length|filter|truncation)(?![a-z])"
)
_DECIDING_KEY = re.compile(
    r"trainer\.global_batch_size|(distill|reward|data)\..*|teacher\.(backend|path|name|signal|topk|mass|temperature|routes|prompt_template)|"
    r"rollout\.(n|temperature|top_p|top_k|min_p|stop_token_ids)"
)


@dataclass(slots=True)
class Entry:
    """Hold the result for one old key.

    Args:
        settings: settings of the YAML that it sets.
        keys: keys that it could set.
        servers: commands that start the teachers.
        is_set: false: the other system's default, which differs from the one here.
    """

    old: str
    value: Any
    status: Status
    note: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    is_set: bool = True
    keys: list[str] = field(default_factory=list)
    servers: list[str] = field(default_factory=list)


def convert(dialect: Dialect, values: Mapping[str, Any]) -> list[Entry]:
    """Return an entry for each old key, and for each default of the other system that differs from the one here."""
    old = OldSettings(values, dialect)
    entries = [_entry(name, value, dialect.find(name), old) for name, value in values.items()]
    unset = [row for row in dialect.rows if row.default is not UNSET and not any(map(old.has, row.names))]
    defaults = [_entry(row.names[0], row.default, row, old, is_set=False) for row in unset]
    _refuse_conflicts([*entries, *defaults])
    for entry in [*entries, *defaults]:
        _drop_defaults(entry)
    return [*entries, *(entry for entry in defaults if entry.settings or entry.status == "to set")]


def settings_of(entries: list[Entry]) -> dict[str, Any]:
    """Return all settings of the entries, in the order of the schema."""
    found = {key: value for entry in entries for key, value in entry.settings.items()}
    return {key: found[key] for key in all_keys() if key in found}


def _entry(name: str, value: Any, row: Row | None, old: OldSettings, *, is_set: bool = True) -> Entry:
    if row is None:
        return Entry(name, value, "not recognized")
    if row.kind != "mapped":
        harmless = row.kind in ("refused", "unsupported") and (value is None or value in row.harmless)
        status: Status = "default" if harmless else "not supported" if row.kind == "unsupported" else row.kind
        return Entry(name, value, status, "" if harmless else row.note)
    if value is None:
        return Entry(name, value, "default", "not set")
    to_set = Entry(name, value, "to set", is_set=is_set, keys=row.keys)
    unknown = "the variable has no value in the file, or several."
    if is_set and "$" in str(value):
        to_set.note = f"set {_or(row)}: {unknown}"
        return to_set
    try:
        settings = row.settings(value, old)
        entry = Entry(name, value, "mapped", row.note, settings, is_set, row.keys, row.commands(value, old))
        problem = unknown if not is_set and "$" in str(settings) else _wrong_type(settings)
    except NotConvertible as reason:
        to_set.note = str(reason)
        return to_set
    except (TypeError, ValueError, ZeroDivisionError, LookupError, AttributeError):
        problem = "the value cannot be converted."
    if problem:
        to_set.note = f"set {_or(row)}: {problem} {row.note}".strip()
        return to_set
    return entry


def _drop_defaults(entry: Entry) -> None:
    """Leave out what is the default here."""
    entry.settings = {key: each for key, each in entry.settings.items() if each != all_keys()[key].default}
    if entry.status == "mapped" and not entry.settings and not entry.servers:
        entry.status = "default"


def _wrong_type(settings: Mapping[str, Any]) -> str:
    """Return what is wrong with the value of a key; empty means that it is valid."""
    try:
        load_config(
            None, [f"{key}={json.dumps(value, ensure_ascii=False, default=str)}" for key, value in settings.items()]
        )
    except ConfigError as error:
        return error.problem
    return ""


def _refuse_conflicts(entries: list[Entry]) -> None:
    """Keep the first of two values of one key; the other one is to set. Defaults come last."""
    taken: dict[str, Entry] = {}
    for entry in entries:
        for key, value in list(entry.settings.items()):
            first = taken.setdefault(key, entry)
            if first.settings[key] == value:
                continue
            del entry.settings[key]
            if entry.is_set:
                entry.keys, entry.status = [key], "to set"
                entry.note = f"{key} is {value!r} by this, and {first.settings[key]!r} by {first.old}, which was kept."


def _or(row: Row) -> str:
    return " or ".join(row.keys)


def not_understood(entries: list[Entry]) -> list[str]:
    """Return the old keys that decide what is trained and have no equal here, or none that is known.

    Names that are not recognized are judged by their words, and those without a value by the keys that they would set.
    """
    return [
        entry.old
        for entry in entries
        if entry.status == "refused"
        or entry.status == "not recognized"
        and _DECIDING.search(entry.old.lower())
        or entry.status == "to set"
        and any(map(_DECIDING_KEY.fullmatch, entry.keys))
    ]


def summary(entries: list[Entry]) -> str:
    """Return the number of old keys of each kind."""
    counts = Counter(entry.status for entry in entries if entry.is_set)
    n_defaults = sum(not entry.is_set for entry in entries)
    parts = [f"{counts[status]} {words}" for status, words in STATUSES.items()]
    return f"{sum(counts.values())} old keys: {', '.join(parts)}; {n_defaults} defaults of the other system written out"


def yaml_text(dialect: Dialect, source: str, entries: list[Entry]) -> str:
    """Return the YAML: the report and the next things to set as comments, then the settings."""
    settings = OmegaConf.create()
    for key, value in settings_of(entries).items():
        OmegaConf.update(settings, key, value)
    body = OmegaConf.to_yaml(settings) if len(settings) else "{}\n"
    lines = [f"from {source}, read as {dialect.title}, by python -m gkd.tools.migrate {dialect.name}"]
    lines += [summary(entries), ""]
    for status, words in STATUSES.items():
        chosen = [entry for entry in entries if entry.status == status]
        lines += [f"{words}:", *(f"  {_line(entry, dialect)}" for entry in chosen), ""] if chosen else []
    steps = next_steps(body)
    if unknown := not_understood(entries):
        steps = [refusal(unknown), *(f"  {name}" for name in unknown), *steps]
    servers = dict.fromkeys(command for entry in entries for command in entry.servers)
    lines += ["start the teachers first:", *(f"  {command}" for command in servers), ""] if servers else []
    lines += ["next:", *(f"  {step}" for step in steps)] if steps else ["check_config accepts these settings."]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + body


def refusal(unknown: list[str]) -> str:
    """Return the sentence on the keys of `not_understood`."""
    return f"not accepted: {len(unknown)} keys decide what is trained and are not understood"


def next_steps(body: str) -> list[str]:
    """Return what the checks still refuse: missing and invalid values, then the first contradiction between keys."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.yaml"
        file.write_text(body, encoding="utf-8")
        config = load_config(file)
    found = _errors(config)
    return [*found, *(step for step in _errors(_fill_required(config)) if step not in found)]


def _errors(config: Config) -> list[str]:
    try:
        check_config(config)
    except ConfigError as error:
        first = ConfigError(error.key, error.value, error.problem, error.fix)
        return [str(each) for each in (first, *error.more)]
    return []


def _fill_required(config: Config) -> Config:
    """Return the settings with a value for each required key that is empty, so that the checks of several keys run."""
    empty = [each for name, each in all_keys().items() if each.key.required and not config.value(name)]
    return config.with_values({key.name: ["file.jsonl"] if "list" in key.type else "folder" for key in empty})


def _line(entry: Entry, dialect: Dialect) -> str:
    origin = f"{entry.old} = {_short(entry.value)}" if entry.is_set else f"{entry.old} is not set, {dialect.title} uses"
    value = "" if entry.is_set else f" {_short(entry.value)}"
    arrow = ", ".join(f"{key}: {_short(value)}" for key, value in entry.settings.items())
    note = f"  ({entry.note.rstrip('.')})" if entry.note else ""
    return f"{origin}{value}{f' -> {arrow}' if arrow else ''}{note}"


def _short(value: Any) -> str:
    return " ".join(str(value).split())

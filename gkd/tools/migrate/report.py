"""Write the YAML with its report as comments, and list what is still to set."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gkd.config.check import check_config
from gkd.config.dialects.table import Dialect
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_sections import all_keys, value_of, with_values
from gkd.errors import ConfigError
from gkd.tools.migrate.convert import STATUSES, Entry, settings_of

# Words in names of settings that decide what is trained: loss, teacher, data or sampling.
_DECIDING = re.compile(
    r"(?<![a-z])(loss(es)?|kl|kld|jsd|divergence|distill(ation)?|gkd|opd|gold|teachers?|ref|reference|rewards?|adv|"
    r"advantage|entropy|importance|clip|alpha|beta|lmbda|lambda|data|datasets?|prompts?|question|responses?|answer|"
    r"completions?|chat|template|system|thinking|messages|tokenizer|domains?|tags?|interleave|mix|sampl(ing|er)|"
    r"temperature|top|topk|[knp]|stop|eos|seq|sequence|length|filter|truncation)(?![a-z])"
)
_DECIDING_KEY = re.compile(
    r"trainer\.global_batch_size|(distill|reward|data)\..*|teacher\.(backend|path|name|signal|topk|mass|temperature|routes|prompt_template)|"
    r"rollout\.(n|temperature|top_p|top_k|min_p|stop_token_ids)"
)


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
        file.write_text(body)
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
    empty = [each for name, each in all_keys().items() if each.key.required and not value_of(config, name)]
    return with_values(config, {key.name: ["file.jsonl"] if "list" in key.type else "folder" for key in empty})


def _line(entry: Entry, dialect: Dialect) -> str:
    origin = f"{entry.old} = {_short(entry.value)}" if entry.is_set else f"{entry.old} is not set, {dialect.title} uses"
    value = "" if entry.is_set else f" {_short(entry.value)}"
    arrow = ", ".join(f"{key}: {_short(value)}" for key, value in entry.settings.items())
    note = f"  ({entry.note.rstrip('.')})" if entry.note else ""
    return f"{origin}{value}{f' -> {arrow}' if arrow else ''}{note}"


def _short(value: Any) -> str:
    return " ".join(str(value).split())

"""YAML file and `key=value` overrides -> `gkd.config.schema.Config`, and back; the list of all keys.

    config = load_config("configs/quickstart_cpu.yaml", ["actor.optim.lr=1e-3"])

A key that does not exist is an error that suggests the nearest one; types are checked by OmegaConf. Loads
without torch, ray or an engine, so that a wrong YAML dies before any process starts.
"""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from gkd.config.schema import Config, LossTermConfig
from gkd.errors import ConfigError


def load_config(path: str | Path | None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Defaults <- YAML file <- `key=value` overrides, typed.

    Raises:
        ConfigError: unreadable file, unknown key (with the nearest known one), wrong type, malformed override.
    """
    merged = OmegaConf.structured(Config)
    sources = [] if path is None else [(str(path), _read_yaml(path))]
    for where, source in [*sources, *((override, _read_override(override)) for override in overrides)]:
        try:
            merged = OmegaConf.merge(merged, source)
        except ConfigKeyError as error:
            key = _full_key(error)
            raise _unknown_key(key, _value_at(source, key)) from error
        except TypeError as error:  # a mapping where a list belongs
            problem = f"{str(error).rstrip('.')}."
            fix = "write it as the key's type says; a list is given whole, like distill.losses=[{name: jsd}]."
            raise ConfigError(where, "?", problem, fix) from error
        except ValidationError as error:
            key = _full_key(error) if error.full_key else where
            problem = str(error).splitlines()[0].rstrip(".") + "."
            raise ConfigError(key, _value_at(source, key), problem, "write a value of the type the key has.") from error
        except OmegaConfBaseException as error:
            raise ConfigError(where, "?", str(error).splitlines()[0] + ".", "correct that entry.") from error
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:  # an interpolation like ${x} that leads nowhere
        key = str(error.full_key or "config")
        raise ConfigError(key, "?", str(error).splitlines()[0] + ".", "correct that entry.") from error
    assert isinstance(config, Config)
    return config


def _full_key(error: OmegaConfBaseException) -> str:
    """The key that an error of omegaconf is about; it names entries of a list without the list."""
    key = str(error.full_key or error.key)
    in_a_term = error.object_type is LossTermConfig and "." not in key
    return f"distill.losses[...].{key}" if in_a_term else key


def _value_at(source: Any, key: str) -> object:
    """What the source says there; "?" where that cannot be told."""
    if "[...]" in key or "=" in key:
        return "?"
    try:
        return OmegaConf.select(source, key)
    except OmegaConfBaseException:  # an interpolation that leads nowhere
        return "?"


def config_yaml(config: Config) -> str:
    """The resolved settings as YAML; `load_config` of a file with it gives the same config."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def save_config(config: Config, path: Path) -> None:
    """Write the resolved settings to a file that `load_config` takes."""
    path.write_text(config_yaml(config))


def describe_keys() -> list[tuple[str, str, Any, str]]:
    """(key, type, default, description) of every key, in order; the description is the comment above the field."""
    import inspect
    import re

    rows: list[tuple[str, str, Any, str]] = []

    def walk(cls: type, prefix: str) -> None:
        comments: dict[str, str] = {}
        pending: list[str] = []
        for line in inspect.getsource(cls).splitlines()[2:]:
            text = line.strip()
            if text.startswith("#"):
                pending.append(text.lstrip("# "))
            elif match := re.match(r"(\w+):", text):
                comments[match[1]] = " ".join(pending)
                pending = []
        for item in dataclasses.fields(cls):
            default = item.default_factory() if callable(item.default_factory) else item.default
            if dataclasses.is_dataclass(default):
                walk(type(default), f"{prefix}{item.name}.")
            else:
                rows.append((f"{prefix}{item.name}", str(item.type), default, comments.get(item.name, "")))

    for section in dataclasses.fields(Config):
        assert callable(section.default_factory)
        walk(type(section.default_factory()), f"{section.name}.")
    return rows


def _read_yaml(path: str | Path) -> Any:
    file = Path(path)
    if not file.is_file():
        raise ConfigError("--config", str(path), "there is no such file.", "give the path of a YAML file.")
    try:
        loaded = OmegaConf.load(file)
    except Exception as error:  # yaml's errors have no common root that omegaconf exports
        raise ConfigError("--config", str(path), f"it is not YAML ({error}).", "correct the file.") from error
    if not OmegaConf.is_dict(loaded):
        raise ConfigError("--config", str(path), "it is not a mapping of sections.", "start it with e.g. `data:`.")
    return loaded


def _read_override(override: str) -> Any:
    key, sep, _ = override.partition("=")
    if not sep or not key:
        raise ConfigError("override", override, "it is not of the form key=value.", "write e.g. actor.tp=2.")
    try:
        return OmegaConf.from_dotlist([override])
    except Exception as error:  # yaml's errors have no common root that omegaconf exports
        raise ConfigError(key, override.partition("=")[2], "it is not YAML.", "close brackets and quotes.") from error


def _unknown_key(key: str, value: object) -> ConfigError:
    known = [row[0] for row in describe_keys()] + [f.name for f in dataclasses.fields(Config)]
    if key == "teacher.n_gpus_per_node":
        return ConfigError(
            key,
            value,
            "the teacher is a process of its own; its GPUs are chosen where it is started (python -m teacher_server).",
            "remove the key; teacher.n_server_workers is the number of sequences kept in flight, not GPUs.",
        )
    if key in ("distill.lambda", "distill.lmbda"):
        problem = "there is no such key: lambda is a reserved word of Python."
        return ConfigError(key, value, problem, "GKD's lambda is distill.on_policy_share.")
    if key.startswith("distill.losses[...]"):
        known = [f"distill.losses[...].{item.name}" for item in dataclasses.fields(LossTermConfig)]
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]}?" if nearest else "see python -m gkd.main_gkd --help for all keys."
    return ConfigError(key, value, "there is no such key.", hint)

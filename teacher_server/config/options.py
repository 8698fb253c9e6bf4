"""The table of all settings: one row makes a flag, a YAML key, their checks and their help.

So a flag and its key cannot drift apart, and both say the same when a value is wrong. What the
settings mean together is checked in `settings.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from teacher_server.errors import SettingsError

Kind = Literal["int", "float", "text", "choice", "flag", "list"]


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: `--max-queue-mib` on the command line is `max_queue_mib` in the YAML file."""

    key: str
    kind: Kind
    default: Any
    text: str  # its line of --help
    low: float = 0  # of int and float, both ends included
    high: float = 0
    choices: tuple[str, ...] = ()
    metavar: str = "N"
    in_file_only: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    def convert(self, raw: Any, where: str) -> Any:
        """The value of a flag's text or of a YAML value. Raises SettingsError naming `where`."""
        if self.kind in ("int", "float"):
            return self._number(raw, where)
        if self.kind == "flag":
            if isinstance(raw, bool):
                return raw
            raise SettingsError(f"{where}: {raw!r} is not true or false.")
        if self.kind == "list":
            return _list(raw, where)
        if self.kind == "choice" and raw not in self.choices:
            raise SettingsError(f"{where}: {raw!r} is not one of {', '.join(self.choices)}.")
        if not isinstance(raw, str) or not raw:
            raise SettingsError(f"{where}: {raw!r} is not a text. Fix: put it in quotes.")
        return raw

    def _number(self, raw: Any, where: str) -> int | float:
        number = int if self.kind == "int" else float
        try:
            # From YAML a number has come as one, and `true` and 1.5 are no integers.
            if not isinstance(raw, str) and (isinstance(raw, bool) or number(raw) != raw):
                raise ValueError
            value = number(raw)
            if not self.low <= value <= self.high:  # a NaN fails here, too
                raise ValueError
        except (TypeError, ValueError, OverflowError) as error:
            what = "a whole number" if self.kind == "int" else "a number"
            raise SettingsError(f"{where}: {raw!r} is not {what} of {self.low:g} to {self.high:g}.") from error
        return value


def _list(raw: Any, where: str) -> tuple[str, ...]:
    items = raw.split(",") if isinstance(raw, str) else [raw] if isinstance(raw, int) else raw
    if isinstance(raw, bool) or not isinstance(items, list) or not all(type(item) in (str, int) for item in items):
        raise SettingsError(f"{where}: {raw!r} is not a list like 4,5,6,7.")
    names = tuple(str(item).strip() for item in items)
    if not names or not all(names):
        raise SettingsError(f"{where}: {raw!r} has an empty entry.")
    return names


# Settings a teacher may have of its own under `teachers:`; the `worker` command knows them all.
TEACHER_OPTIONS = (
    Option(
        "engine",
        "choice",
        "auto",
        "what runs the model; trivial is no model but a load generator's partner",
        choices=("auto", "vllm", "hf", "trivial"),
    ),
    Option("device", "choice", "auto", "auto: cuda if there is a GPU", choices=("auto", "cpu", "cuda")),
    Option(
        "dtype",
        "choice",
        "auto",
        "of the weights; auto: bfloat16 on cuda, float32 on cpu",
        choices=("auto", "float32", "bfloat16"),
    ),
    Option(
        "gpus",
        "list",
        None,
        "GPUs by id, UUID or MIG name; default: CUDA_VISIBLE_DEVICES, else all; labels on cpu",
        metavar="A,B,..",
    ),
    Option("tensor_parallel_size", "int", 1, "GPUs of one model copy (vllm)", 1, 64),
    Option("threads", "int", 1, "CPU threads of a worker", 1, 1024),
    Option("max_tokens", "int", 0, "longest prompt + response; 0: as many as the model takes", 0, 1 << 20),
    Option("max_batch_tokens", "int", 8192, "padded tokens of a batch", 2, 1 << 24),
    Option("gpu_memory_utilization", "float", 0.85, "part of a GPU that vllm takes", 0.01, 1.0, metavar="X"),
)
N_WORKERS = Option(
    "n_workers",
    "int",
    None,
    "model copies of each teacher, one process each; default: one a GPU group, 1 on cpu; "
    "0: all workers join from elsewhere",
    0,
    1024,
)
COMPUTE_TIMEOUT_S = Option(
    "compute_timeout_s",
    "float",
    600.0,
    "a worker whose one batch takes longer ends itself and is replaced",
    1.0,
    1e6,
    metavar="S",
)
KEYS = Option(
    "keys",
    "text",
    None,
    "made by `keygen`: encrypt, and let only known keys in; a worker gives its bundle",
    metavar="DIR",
)
LOG_FORMAT = Option("log_format", "choice", "text", "json: one object a line", choices=("text", "json"))

SERVER_OPTIONS = (
    Option("host", "text", "127.0.0.1", "IPv4 address or name to listen on", metavar="ADDR"),
    Option("port", "int", 15555, "where clients connect; 0 picks a free one", 0, 65535),
    Option(
        "worker_port", "int", None, "where workers of other hosts join; default: nowhere; 0 picks a free one", 0, 65535
    ),
    KEYS,
    Option("insecure", "flag", False, "listen beyond loopback without keys: whoever gets there may use it"),
    Option("max_queue_mib", "int", 256, "waiting requests, before clients are told `busy`", 1, 1 << 20),
    Option("worker_timeout_s", "float", 3.0, "a worker silent for so long is lost", 0.5, 3600.0, metavar="S"),
    COMPUTE_TIMEOUT_S,
    Option("metrics_port", "int", None, "Prometheus on this port; default: none; 0 picks a free one", 0, 65535),
    Option(
        "metrics_host", "text", "127.0.0.1", "address of the metrics: plain HTTP, no authentication", metavar="ADDR"
    ),
    LOG_FORMAT,
    Option("ready_file", "text", None, "written when ready: JSON with host, ports, pids, fingerprints", metavar="F"),
    Option("share_gpus", "flag", False, "let several teachers use one GPU", in_file_only=True),
)


def add_flags(parser: argparse.ArgumentParser, options: Iterable[Option], title: str) -> None:
    """A flag for each option; what is not on the command line is not in the namespace."""
    group = parser.add_argument_group(title)
    for option in options:
        if option.in_file_only:
            continue
        if option.kind == "flag":
            action = argparse.BooleanOptionalAction
            group.add_argument(option.flag, action=action, default=argparse.SUPPRESS, help=option.text)
            continue
        metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.metavar
        default = "" if option.default is None else f" (default: {option.default})"
        # Texts, converted later, so that a wrong one is told like a wrong YAML value.
        group.add_argument(
            option.flag, dest=option.key, metavar=metavar, default=argparse.SUPPRESS, help=option.text + default
        )


def given_flags(args: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """{key: value} of the flags on the command line. Raises SettingsError."""
    given = vars(args)
    return {option.key: option.convert(given[option.key], option.flag) for option in options if option.key in given}


def file_values(
    content: dict[Any, Any], options: Iterable[Option], where: str, others: Iterable[str]
) -> dict[str, Any]:
    """{key: value} of a YAML mapping; `others` are keys that are read elsewhere.

    Raises:
        SettingsError: an unknown key, or a wrong value.
    """
    by_key = {option.key: option for option in options}
    values = {}
    for key, raw in content.items():
        if key in others:
            continue
        if key not in by_key:
            known = ", ".join(sorted([*by_key, *others]))
            raise SettingsError(f"{where}: unknown key {key!r}. Known: {known}.")
        if raw is not None:  # `key:` with nothing after it: the default
            values[key] = by_key[key].convert(raw, f"{where}: {key}")
    return values

"""Read the server's settings from the command line and a YAML file, and check them against each other.

    flag  >  teachers.NAME.key of the file  >  key of the file  >  default

`teacher_server.worker.gpus` and `.model_folder` check GPUs and model folders.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from teacher_server.config.declare import keys_of
from teacher_server.config.load import Problem, Tree, Unreadable, limit_problems, merge, nearest, read_file, read_word
from teacher_server.config.schema import (
    N_WORKERS,
    SERVER_OPTIONS,
    TEACHER_OPTIONS,
    GivenSettings,
    Option,
    ServerSetting,
    ServerSettings,
    TeacherSettings,
    options_of,
)
from teacher_server.errors import SettingsError

T = TypeVar("T")
ONLY_TEACHER = "default"  # its name where --model or `model:` gives no other
_OWN_KEYS = [option.name for option in (*TEACHER_OPTIONS, N_WORKERS)]
_EXAMPLE = "{math: {model: PATH}}"
_HOST = re.compile(r"[A-Za-z0-9._-]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def read_settings(args: argparse.Namespace) -> ServerSettings:
    """Return the complete settings. Raises SettingsError naming the invalid flag or key, and the fix."""
    flags = given_flags(args, GivenSettings)
    content = _read_file(args.config) if args.config is not None else {}
    models, in_file_only = _teachers(args, content)
    common = {key: value for key, value in content.items() if key not in ("model", "teachers")}
    whole = settings_from(
        GivenSettings, [common, flags], lambda key: flag_of(key) if key in flags else f"{args.config}: {key}"
    )
    teachers = []
    for name, model in models.items():
        in_file = in_file_only.get(name, {})
        trees = [_of_teacher(common), in_file, _of_teacher(flags)]
        teacher = settings_from(TeacherSettings, trees, f"{args.config}: teachers.{name}.".__add__)
        # The common `gpus` are distributed over the teachers; only the file can give a teacher its own.
        gpus = teacher.gpus if "gpus" in in_file and "gpus" not in flags else None
        teachers.append(replace(teacher, name=name, model=model, gpus=gpus))
    values = {option.name: getattr(whole, option.name) for option in SERVER_OPTIONS}
    settings = ServerSettings(teachers=tuple(teachers), gpus=whole.gpus, address=ipv4("--host", whole.host), **values)
    _check(settings)
    return settings


def _read_file(path: str) -> Tree:
    """Return the values of the YAML file. Raises SettingsError."""
    try:
        return _given(read_file(path, GivenSettings))
    except Unreadable as error:
        problem = error.problem
        where = f"--config {path}" if problem.key == "--config" else f"{path}: {problem.key}"
        raise settings_error(where, problem) from error


def _given(tree: Tree) -> Tree:
    """Return the tree without keys that have nothing after them: they have their defaults."""
    return {key: value for key, value in tree.items() if value is not None}


def _of_teacher(tree: Tree) -> Tree:
    return {key: value for key, value in tree.items() if key in _OWN_KEYS}


def _folder(model: Any, where: str) -> str:
    if not isinstance(model, str):
        raise SettingsError(f"{where}: {model!r} is not a folder. Fix: write its path.")
    return model


def _teachers(args: argparse.Namespace, content: Tree) -> tuple[dict[str, str], dict[str, Tree]]:
    """Return {name: model folder} and {name: values of the file for this teacher alone}."""
    where = str(args.config)
    models: dict[str, str] = {}
    values_of_teacher: dict[str, Tree] = {}
    in_file = content.get("teachers", {})
    if not isinstance(in_file, dict):
        raise SettingsError(f"{where}: teachers: not a mapping of names. Fix: teachers: {_EXAMPLE}.")
    for name, values in in_file.items():
        place = f"{where}: teachers.{name}"
        if not isinstance(values, dict):
            raise SettingsError(f"{place}: {values!r} is not a mapping. Fix: {name}: {{model: PATH}}.")
        models[check_name(name, place)] = _folder(values.get("model", ""), f"{place}.model")
        values_of_teacher[name] = _given({key: value for key, value in values.items() if key != "model"})
    for flag, model in ((f"{where}: model", content.get("model")), ("--model", args.model)):
        if model is not None:
            if values_of_teacher:
                raise SettingsError(f"{flag}: there are `teachers` in {where}, too. Fix: use one of the two.")
            models[ONLY_TEACHER] = _folder(model, flag)
    named: set[str] = set()
    for text in args.teacher or ():
        name, _, model = text.partition("=")
        if args.model is not None or "model" in content:
            raise SettingsError(f"--teacher {text}: there is a model without a name, too. Fix: use one of the two.")
        if name in named:
            raise SettingsError(f"--teacher {text}: {name} is given twice.")
        named.add(check_name(name, f"--teacher {text}"))
        models[name] = model or models.get(name, "")
    if not models:
        raise SettingsError("no teacher. Fix: give --model PATH, --teacher NAME=PATH or --config FILE.")
    return models, values_of_teacher


def _check(settings: ServerSettings) -> None:
    """Check settings against each other. Raises SettingsError."""
    for teacher in settings.teachers:
        if teacher.n_workers == 0 and settings.worker_port is None:
            raise SettingsError("--n-workers 0: no worker can join. Fix: add --worker-port.")
        alone = all(entry.n_workers == 0 for entry in settings.teachers)
        if teacher.n_workers == 0 and (teacher.gpus or (settings.gpus and alone)):
            problem = "workers of other hosts choose their own GPUs. Fix: remove one of them"
            raise SettingsError(f"--gpus with --n-workers 0 (teacher {teacher.name}): {problem}.")
        if not teacher.model and teacher.n_workers != 0:
            raise SettingsError(f"teacher {teacher.name}: no model. Fix: --teacher {teacher.name}=PATH.")
        if teacher.engine == "hf" and teacher.tensor_parallel_size > 1:
            raise SettingsError(
                f"--tensor-parallel-size {teacher.tensor_parallel_size} with --engine hf "
                f"(teacher {teacher.name}): only vllm splits a model. Fix: --engine vllm."
            )
    if settings.insecure and settings.keys:
        raise SettingsError("--insecure with --keys: they exclude each other. Fix: remove one of them.")
    if not ipaddress.ip_address(settings.address).is_loopback and not settings.keys and not settings.insecure:
        raise SettingsError(
            f"--host {settings.host}: reachable from other machines, and without keys any client may use it. "
            "Fix: use 127.0.0.1, or --keys DIR (made by `gkd teacher keygen DIR`), or --insecure in a "
            "trusted network."
        )
    is_default = ipaddress.ip_address(ipv4("--metrics-host", settings.metrics_host)).is_loopback
    if settings.metrics_port is None and not is_default:
        raise SettingsError(f"--metrics-host {settings.metrics_host}: there are no metrics. Fix: add --metrics-port.")
    ports = [port for port in (settings.port, settings.worker_port, settings.metrics_port) if port]
    if len(set(ports)) < len(ports):
        raise SettingsError("--port, --worker-port and --metrics-port are not different. Fix: change one, or use 0.")


def add_flags(parser: argparse.ArgumentParser, options: Iterable[Option], title: str) -> None:
    """Add a flag for each option. Flags that are not on the command line are not in the namespace."""
    group = parser.add_argument_group(title)
    for field in options:
        setting = field.setting
        if setting.in_file_only:
            continue
        if field.type == "bool":
            action = argparse.BooleanOptionalAction
            group.add_argument(flag_of(field.name), action=action, default=argparse.SUPPRESS, help=field.help)
            continue
        choices = [*setting.choices, *["MODULE:FUNCTION"] * setting.paths]
        metavar = "{" + ",".join(choices) + "}" if choices else setting.metavar
        text = field.help if field.default is None else f"{field.help} (default: {field.default})"
        # Values stay text here and are converted later, so that a flag and a YAML key give the same error.
        group.add_argument(flag_of(field.name), dest=field.name, metavar=metavar, default=argparse.SUPPRESS, help=text)


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def given_flags(args: argparse.Namespace, cls: type) -> Tree:
    """Return {key: value} of the flags on the command line. Raises SettingsError."""
    tree: Tree = {}
    for field in options_of(cls):
        value = vars(args).get(field.name)
        if isinstance(value, str) and field.type.startswith(("int", "float")):
            try:
                tree |= read_word(f"{field.name}={value}", cls)
            except Unreadable as error:
                raise settings_error(flag_of(field.name), error.problem) from error
        elif value is not None:
            tree[field.name] = value
    return tree


def settings_from(cls: type[T], trees: Iterable[Tree], where: Callable[[str], str]) -> T:
    """Return the settings of trees, of which later ones win.

    Args:
        where: returns the place of a key in an error.

    Raises:
        SettingsError: an unknown key, or an invalid value. A value that is empty, as of a variable that is not set, is
            no default: a server would run without its keys.
    """
    keys = keys_of(cls, ServerSetting)
    trees = list(trees)

    def unknown(values: Mapping[str, Any]) -> list[Problem]:
        return [Problem(key, values[key], "this key does not exist.", nearest(key, keys)) for key in values]

    settings, problems = merge(cls, keys, trees, unknown)
    fix = "write a value, or leave it out."
    problems += [Problem(key, "", "is empty.", fix) for tree in trees for key, value in tree.items() if value == ""]
    if settings is not None:
        problems += limit_problems(keys, partial(getattr, settings))
    for problem in problems:
        raise settings_error(where(problem.key), problem)
    assert settings is not None
    return settings


def settings_error(where: str, problem: Problem) -> SettingsError:
    return SettingsError(f"{where}: {problem.value!r}: {problem.problem} Fix: {problem.fix}")


def ipv4(flag: str, host: str) -> str:
    """Return the IPv4 address of a host. Raises SettingsError: unknown, or the name of this machine at 127.0.1.1."""
    try:
        address = str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"{flag} {host}: not an IPv4 address or known name ({error}).") from error
    if ipaddress.ip_address(address).is_loopback and host[:1].isalpha() and not host.startswith("localhost"):
        problem = f"{host} is {address} here (/etc/hosts), which no other machine reaches"
        raise SettingsError(f"{flag} {host}: {problem}. Fix: give the address in the network, 0.0.0.0, or 127.0.0.1.")
    return address


def tcp_endpoint(flag: str, address: str) -> str:
    """Return `tcp://HOST:PORT` for HOST:PORT. Raises SettingsError."""
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host) or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise SettingsError(f"{flag} {address}: not HOST:PORT, like 10.0.0.5:15556.")
    return f"tcp://{host}:{port}"


def server_endpoint(flag: str, address: str) -> str:
    """Return `tcp://HOST:PORT` of a server whose host has an address. Raises SettingsError."""
    endpoint = tcp_endpoint(flag, address)
    try:
        socket.getaddrinfo(address.rpartition(":")[0], None, socket.AF_INET)
    except OSError as error:  # libzmq would retry an unknown name until the time-out
        raise SettingsError(f"{flag} {address}: unknown host ({error.strerror}). Fix: check the name.") from error
    return endpoint


def check_name(name: object, where: str) -> str:
    """Return the name if it is valid. Raises SettingsError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SettingsError(f"{where}: {name!r} is not a valid name. Fix: up to 64 letters, digits and . _ -")
    return name

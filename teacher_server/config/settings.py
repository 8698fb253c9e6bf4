"""Read the server's settings from the command line and a YAML file, and check them against each other.

    flag  >  teachers.NAME.key of the file  >  key of the file  >  default

`teacher_server.worker.gpus` and `.model_folder` check GPUs and model folders.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from teacher_server.config.declare import OTHER_BASE
from teacher_server.config.options import file_values, given_flags
from teacher_server.config.schema import N_WORKERS, SERVER_OPTIONS, TEACHER_OPTIONS, ServerSettings, TeacherSettings
from teacher_server.errors import SettingsError

ONLY_TEACHER = "default"  # its name where --model or `model:` gives no other
_OWN_OPTIONS = (*TEACHER_OPTIONS, N_WORKERS)
_HOST = re.compile(r"[A-Za-z0-9._-]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def read_settings(args: argparse.Namespace) -> ServerSettings:
    """Return the complete settings. Raises SettingsError naming the invalid flag or key, and the fix."""
    flags = given_flags(args, (*SERVER_OPTIONS, *_OWN_OPTIONS))
    config = read_yaml(args.config) if args.config is not None else {}
    where = str(args.config)
    in_file = file_values(config, (*SERVER_OPTIONS, *_OWN_OPTIONS), where, ("model", "teachers"))
    models, own = _teachers(args, config, where)
    defaults = {option.key: option.default for option in (*SERVER_OPTIONS, *_OWN_OPTIONS)}
    common = defaults | in_file | flags
    teachers = []
    for name, model in models.items():
        values = defaults | in_file | own.get(name, {}) | flags
        # The common `gpus` are distributed over the teachers; only the file can give a teacher its own.
        values["gpus"] = None if "gpus" in flags else own.get(name, {}).get("gpus")
        fields = {option.key: values[option.key] for option in _OWN_OPTIONS}
        teachers.append(TeacherSettings(name=name, model=model, **fields))
    fields = {option.key: common[option.key] for option in SERVER_OPTIONS}
    fields["ready_file"] = Path(fields["ready_file"]) if fields["ready_file"] else None
    address = ipv4("--host", fields["host"])
    settings = ServerSettings(teachers=tuple(teachers), gpus=common["gpus"], address=address, **fields)
    _check(settings)
    return settings


def _teachers(
    args: argparse.Namespace, config: Mapping[Any, Any], where: str
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Return {name: model folder} and {name: values of the file for this teacher alone}."""
    models: dict[str, str] = {}
    own: dict[str, dict[str, Any]] = {}
    in_file = config.get("teachers") or {}
    if not isinstance(in_file, dict):
        raise SettingsError(f"{where}: teachers: not a mapping of names. Fix: teachers: {{math: {{model: PATH}}}}.")
    for name, values in in_file.items():
        place = f"{where}: teachers.{name}"
        if not isinstance(values, dict):
            raise SettingsError(f"{place}: {values!r} is not a mapping. Fix: {name}: {{model: PATH}}.")
        models[check_name(name, place)] = _path(values.get("model", ""), f"{place}.model")
        own[name] = file_values(values, _OWN_OPTIONS, place, ("model",))
    for flag, text in ((f"{where}: model", config.get("model")), ("--model", args.model)):
        if text is not None:
            if own:
                raise SettingsError(f"{flag}: there are `teachers` in {where}, too. Fix: use one of the two.")
            models[ONLY_TEACHER] = _path(text, flag)
    given: set[str] = set()
    for text in args.teacher or ():
        name, _, model = text.partition("=")
        if args.model is not None or "model" in config:
            raise SettingsError(f"--teacher {text}: there is a model without a name, too. Fix: use one of the two.")
        if name in given:
            raise SettingsError(f"--teacher {text}: {name} is given twice.")
        given.add(check_name(name, f"--teacher {text}"))
        models[name] = model or models.get(name, "")
    if not models:
        raise SettingsError("no teacher. Fix: give --model PATH, --teacher NAME=PATH or --config FILE.")
    return models, own


def read_yaml(path: str) -> dict[Any, Any]:
    """Return the mapping in a YAML file. Raises SettingsError: not readable, not a mapping, or a duplicate key."""
    try:
        content = yaml.load(Path(path).read_bytes(), _StrictLoader)  # a SafeLoader
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path}: invalid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"--config {path}: not a mapping of settings.")
    return content


class _StrictLoader(yaml.SafeLoader):
    """Refuse duplicate keys: YAML would drop a teacher that is named twice. Refuse 010, which YAML reads as 8."""

    def construct_scalar(self, node: Any) -> Any:
        if node.tag.endswith((":int", ":float")) and OTHER_BASE.fullmatch(node.value):
            problem = f"{node.value} is no decimal number; write one, or put a text into quotes"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key!r}", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _check(settings: ServerSettings) -> None:
    """Check settings against each other. Raises SettingsError."""
    for teacher in settings.teachers:
        if teacher.n_workers == 0 and settings.worker_port is None:
            raise SettingsError("--n-workers 0: no worker can join. Fix: add --worker-port.")
        alone = all(each.n_workers == 0 for each in settings.teachers)
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


def _path(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise SettingsError(f"{where}: {value!r} is not a folder.")
    return value

"""Declare all settings of the teacher server. Each field with a help text is a flag and a YAML key.

The flag `--max-queue-mib` is `max_queue_mib` in the file. `settings.py` reads and checks both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from teacher_server.config.declare import Declared, Setting, declare, keys_of

_GPU = re.compile(r"0|[1-9]\d*|[A-Za-z][\w/:-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetting(Setting):
    """Describe one setting of the server."""

    metavar: str = "N"
    in_file_only: bool = False


Option: TypeAlias = Declared[ServerSetting]


def option(default: Any, **details: Any) -> Any:
    """Return a dataclass field; `details` are the arguments of `ServerSetting`."""
    return declare(default, ServerSetting(**details))


def options_of(cls: type) -> tuple[Option, ...]:
    """Return the declared settings of a dataclass, in their order."""
    return tuple(keys_of(cls, ServerSetting).values())


def gpu_list(value: Any) -> Any:
    """Return the GPUs of a text like 4,5,6,7, and a list as it is. Raises ValueError: an entry names no GPU."""
    gpus = [gpu.strip() for gpu in str(value).split(",")] if isinstance(value, str | int) else value
    if isinstance(gpus, list) and not (gpus and all(_GPU.fullmatch(str(gpu)) for gpu in gpus)):
        raise ValueError(value)
    return gpus


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """One teacher: a model and how its workers run it. `teachers:` of the file can set these per teacher."""

    name: str = ""
    model: str = ""  # folder; empty if all its workers join from other hosts
    engine: str = option("auto", choices=("auto", "vllm", "hf"), paths=True)
    """what runs the model; an import path: an engine of your own"""
    device: str = option("auto", choices=("auto", "cpu", "cuda"))
    """auto: cuda if there is a GPU"""
    dtype: str = option("auto", choices=("auto", "float32", "bfloat16"))
    """of the weights; auto: bfloat16 on cuda, float32 on cpu"""
    gpus: list[str] | None = option(None, metavar="A,B,..", read=gpu_list, example="a list like 4,5,6,7")
    """GPUs by id, UUID or MIG name; default: CUDA_VISIBLE_DEVICES, else all; labels on cpu"""
    tensor_parallel_size: int = option(1, ge=1, le=64)
    """GPUs of one model copy (vllm)"""
    threads: int = option(1, ge=1, le=1024)
    """CPU threads of a worker"""
    max_tokens: int = option(0, ge=0, le=1 << 20)
    """longest prompt + response; 0: the model's limit"""
    max_batch_tokens: int = option(8192, ge=2, le=1 << 24)
    """padded tokens of a batch"""
    gpu_memory_utilization: float = option(0.85, ge=0.01, le=1, metavar="X")
    """fraction of each GPU that a worker may use"""
    kv_cache_mib: int = option(0, ge=0, le=1 << 24)
    """vllm: KV cache on each GPU; 0: what the fraction leaves; on cpu: enough for two batches"""
    images: bool = option(False)
    """take sequences with images: load the vision tower, too"""
    n_workers: int | None = option(None, ge=0, le=1024)
    """model copies of each teacher, one process each; default: one per GPU group, 1 on cpu; 0: all workers join
    from other hosts"""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of the whole server, each a flag and a key of the file."""

    host: str = option("127.0.0.1", metavar="ADDR")
    """IPv4 address or name to listen on"""
    port: int = option(15555, ge=0, le=65535)
    """where clients connect; 0 picks a free one"""
    worker_port: int | None = option(None, ge=0, le=65535)
    """where workers of other hosts join; default: none; 0 picks a free one"""
    keys: str | None = option(None, metavar="DIR")
    """folder made by `keygen`: encrypt, and accept only known keys; for a worker: its bundle"""
    insecure: bool = option(False)
    """listen beyond loopback without keys: any client that reaches the port may use it"""
    max_queue_mib: int = option(256, ge=1, le=1 << 20)
    """waiting requests, before clients get `busy`"""
    worker_timeout_s: float = option(3.0, ge=0.5, le=3600, metavar="S")
    """seconds of silence after which a worker is lost"""
    compute_timeout_s: float = option(600.0, ge=1, le=1e6, metavar="S")
    """a worker that needs longer for one batch exits and is replaced"""
    metrics_port: int | None = option(None, ge=0, le=65535)
    """Prometheus on this port; default: none; 0 picks a free one"""
    metrics_host: str = option("127.0.0.1", metavar="ADDR")
    """address of the metrics: plain HTTP, no authentication"""
    log_format: str = option("text", choices=("text", "json"))
    """json: one object per line"""
    ready_file: Path | None = option(None, metavar="F")
    """written when ready: JSON with host, ports, pids, fingerprints"""
    share_gpus: bool = option(False, in_file_only=True)
    """let several teachers use one GPU"""


@dataclass(frozen=True, kw_only=True)
class GivenSettings(ServerOptions, TeacherSettings):
    """Settings that flags and the YAML file can give. `teachers` sets for one teacher what else applies to all."""

    teachers: dict[str, TeacherSettings] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ServerOptions):
    """The whole server."""

    teachers: tuple[TeacherSettings, ...]
    gpus: list[str] | None  # distributed over the teachers without GPUs of their own
    address: str  # IPv4 of `host`


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """The HTTP server before a teacher server; flags only."""

    server: str = option("127.0.0.1:15555", metavar="HOST:PORT")
    """address of the teacher server"""
    keys: str | None = option(None, metavar="DIR")
    """a client's key bundle, if the teacher server runs with keys"""
    host: str = option("127.0.0.1", metavar="ADDR")
    """IPv4 address or name to listen on"""
    port: int = option(8100, ge=0, le=65535)
    """where HTTP clients connect; 0 picks a free one"""
    bearer_env: str | None = option(None, metavar="NAME")
    """environment variable with the token that clients have to send; required beyond loopback"""
    log_format: str = option("text", choices=("text", "json"))
    """json: one object per line"""
    ready_file: Path | None = option(None, metavar="F")
    """written when ready: JSON with host, port, pid"""


SERVER_OPTIONS = options_of(ServerOptions)
HTTP_OPTIONS = options_of(HttpSettings)
*TEACHER_OPTIONS, N_WORKERS = options_of(TeacherSettings)  # a single worker has all but the number of workers

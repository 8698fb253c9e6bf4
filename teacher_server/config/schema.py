"""Declare all settings of the teacher server. Each field with a default is a flag and a YAML key, see `options`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from teacher_server.config.options import option, options_of
from teacher_server.log import LogFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSettings:
    """One teacher: a model and how its workers run it. `teachers:` of the file can set these per teacher."""

    name: str
    model: str  # folder; empty if all its workers join from other hosts
    engine: str = option(
        "auto",
        "what runs the model; an import path: an engine of your own",
        choices=("auto", "vllm", "hf"),
        paths=True,
    )
    device: str = option("auto", "auto: cuda if there is a GPU", choices=("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto", "of the weights; auto: bfloat16 on cuda, float32 on cpu", choices=("auto", "float32", "bfloat16")
    )
    gpus: tuple[str, ...] | None = option(
        None,
        "GPUs by id, UUID or MIG name; default: CUDA_VISIBLE_DEVICES, else all; labels on cpu",
        metavar="A,B,..",
    )
    tensor_parallel_size: int = option(1, "GPUs of one model copy (vllm)", ge=1, le=64)
    threads: int = option(1, "CPU threads of a worker", ge=1, le=1024)
    max_tokens: int = option(0, "longest prompt + response; 0: the model's limit", ge=0, le=1 << 20)
    max_batch_tokens: int = option(8192, "padded tokens of a batch", ge=2, le=1 << 24)
    gpu_memory_utilization: float = option(
        0.85, "fraction of each GPU that a worker may use", ge=0.01, le=1, metavar="X"
    )
    kv_cache_mib: int = option(
        0,
        "vllm: KV cache on each GPU; 0: what the fraction leaves; on cpu: enough for two batches",
        ge=0,
        le=1 << 24,
    )
    images: bool = option(False, "take sequences with images: load the vision tower, too")
    n_workers: int | None = option(
        None,
        "model copies of each teacher, one process each; default: one per GPU group, 1 on cpu; "
        "0: all workers join from other hosts",
        ge=0,
        le=1024,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The whole server."""

    teachers: tuple[TeacherSettings, ...]
    gpus: tuple[str, ...] | None  # distributed over the teachers without GPUs of their own
    address: str  # IPv4 of `host`
    host: str = option("127.0.0.1", "IPv4 address or name to listen on", metavar="ADDR")
    port: int = option(15555, "where clients connect; 0 picks a free one", ge=0, le=65535)
    worker_port: int | None = option(
        None, "where workers of other hosts join; default: none; 0 picks a free one", ge=0, le=65535
    )
    keys: str | None = option(
        None,
        "folder made by `keygen`: encrypt, and accept only known keys; for a worker: its bundle",
        metavar="DIR",
    )
    insecure: bool = option(False, "listen beyond loopback without keys: any client that reaches the port may use it")
    max_queue_mib: int = option(256, "waiting requests, before clients get `busy`", ge=1, le=1 << 20)
    worker_timeout_s: float = option(
        3.0, "seconds of silence after which a worker is lost", ge=0.5, le=3600, metavar="S"
    )
    compute_timeout_s: float = option(
        600.0, "a worker that needs longer for one batch exits and is replaced", ge=1, le=1e6, metavar="S"
    )
    metrics_port: int | None = option(
        None, "Prometheus on this port; default: none; 0 picks a free one", ge=0, le=65535
    )
    metrics_host: str = option("127.0.0.1", "address of the metrics: plain HTTP, no authentication", metavar="ADDR")
    log_format: LogFormat = option("text", "json: one object per line", choices=("text", "json"))
    ready_file: Path | None = option(None, "written when ready: JSON with host, ports, pids, fingerprints", metavar="F")
    share_gpus: bool = option(False, "let several teachers use one GPU", in_file_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The HTTP server before a teacher server; flags only."""

    server: str = option("127.0.0.1:15555", "address of the teacher server", metavar="HOST:PORT")
    keys: str | None = option(None, "a client's key bundle, if the teacher server runs with keys", metavar="DIR")
    host: str = option("127.0.0.1", "IPv4 address or name to listen on", metavar="ADDR")
    port: int = option(8100, "where HTTP clients connect; 0 picks a free one", ge=0, le=65535)
    bearer_env: str | None = option(
        None, "environment variable with the token that clients have to send; required beyond loopback", metavar="NAME"
    )
    log_format: LogFormat = option("text", "json: one object per line", choices=("text", "json"))
    ready_file: Path | None = option(None, "written when ready: JSON with host, port, pid", metavar="F")


SERVER_OPTIONS = options_of(ServerSettings)
HTTP_OPTIONS = options_of(HttpSettings)
*TEACHER_OPTIONS, N_WORKERS = options_of(TeacherSettings)  # a single worker has all but the number of workers
_BY_KEY = {each.key: each for each in SERVER_OPTIONS}
KEYS, COMPUTE_TIMEOUT_S, LOG_FORMAT = _BY_KEY["keys"], _BY_KEY["compute_timeout_s"], _BY_KEY["log_format"]

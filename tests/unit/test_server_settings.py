"""Flags and YAML of the teacher server: precedence, and the errors of invalid ones."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from teacher_server.cli.serve import build_parser
from teacher_server.config.schema import ServerSettings
from teacher_server.config.settings import read_settings
from teacher_server.errors import SettingsError


def settings_of(*words: str) -> ServerSettings:
    return read_settings(build_parser().parse_args(words))


def in_file(folder: Path, text: str) -> tuple[str, str]:
    """Write a YAML file; return the arguments that name it."""
    file = folder / "teacher.yaml"
    file.write_text(text)
    return "--config", str(file)


def test_flag_beats_own_key_beats_key_beats_default(tmp_path: Path) -> None:
    """Fails if the file overrides a flag, or a value of one teacher applies to another."""
    text = "port: 1\nthreads: 3\ndtype: bfloat16\nteachers: {a: {model: /a, threads: 5}, b: {model: /b}}"
    settings = settings_of(*in_file(tmp_path, text), "--port", "2", "--dtype", "float32")
    assert settings.port == 2 and settings.host == "127.0.0.1"
    assert [(t.name, t.model, t.threads, t.dtype) for t in settings.teachers] == [
        ("a", "/a", 5, "float32"),
        ("b", "/b", 3, "float32"),
    ]
    assert settings_of(*in_file(tmp_path, text), "--threads", "7").teachers[0].threads == 7


def test_teachers_of_flags_join_those_of_the_file(tmp_path: Path) -> None:
    """Fails if --teacher removes teachers or settings of the file."""
    config = in_file(tmp_path, "teachers: {a: {model: /old, threads: 5}}")
    settings = settings_of(*config, "--teacher", "a=/new", "--teacher", "b=/b")
    assert [(t.name, t.model, t.threads) for t in settings.teachers] == [("a", "/new", 5), ("b", "/b", 1)]


def test_a_whole_file_needs_no_flag(tmp_path: Path) -> None:
    """Fails if a setting cannot be written in the file."""
    text = """
host: 127.0.0.1
port: 0
worker_port: 0
max_queue_mib: 7
worker_timeout_s: 2
compute_timeout_s: 30.5
metrics_port: 0
log_format: json
ready_file: here/ready.json
share_gpus: true
gpus: 4,5
engine: vllm
teachers:
  math: {model: /math, gpus: [0, GPU-12ab], tensor_parallel_size: 2, gpu_memory_utilization: 1}
  code: {model: /code, gpus: 7, n_workers: 1, max_tokens: 4096}
"""
    settings = settings_of(*in_file(tmp_path, text))
    assert settings.gpus == ["4", "5"] and settings.share_gpus and settings.worker_port == 0
    assert settings.ready_file == Path("here/ready.json") and settings.log_format == "json"
    assert [t.gpus for t in settings.teachers] == [["0", "GPU-12ab"], ["7"]]


@pytest.mark.parametrize(
    "text,words",
    [
        ("model: /m\nports: 5", ("ports", "port?")),
        ("teachers: {a: {model: /a, thread: 5}}", ("teachers.a.thread", "threads")),
        ("teachers: {a: {model: /a, port: 5}}", ("teachers.a.port",)),
        ("teachers: {a: {model: /a}, a: {model: /b}}", ("teachers.a",)),
        ("model: /m\nport: 010", ("010",)),
        ("model: /m\nworker_timeout_s: 1:30", ("1:30",)),
        ("model: /m\ngpus: [0, 010]", ("010",)),
        ("model: /m\nport: 70000", ("port", "70000", "65535")),
        ("model: /m\nworker_timeout_s: .nan", ("worker_timeout_s", "nan")),
        ("model: /m\nengine: vlm", ("engine", "'vlm'", "vllm")),
        ("model: /m\ninsecure: maybe", ("insecure", "'maybe'")),
        ("model: /m\ngpus: [1.5]", ("gpus", "4,5,6,7")),
        ("model: /m\ngpus: '4,,5'", ("gpus", "'4,,5'")),
        ("model: /m\nteachers: {a: {model: /a}}", ("model", "`teachers`")),
        ("model: {a: b}", ("model", "{'a': 'b'}")),
        ("teachers: [a]", ("teachers", "{model: PATH}")),
        ("teachers: {a: /a}", ("teachers.a", "{model: PATH}")),
        ("teachers: {'a b': {model: /a}}", ("'a b'",)),
        ("worker_port: 0\nteachers: {a: {model: /a, n_workers: 0, gpus: [1]}}", ("teacher a", "--gpus")),
        ("teachers: {a: {threads: 2}}", ("teacher a", "--teacher a=PATH")),
        ("port: 5", ("--model", "--teacher")),
        ("- 5", ("--config",)),
        ("model: [", ("--config",)),
    ],
)
def test_an_invalid_file_is_refused_by_key(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    """Fails if a typo in the file is ignored, 010 is read as 8, or one of them ends in a traceback."""
    with pytest.raises(SettingsError) as caught:
        settings_of(*in_file(tmp_path, text))
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "flags,words",
    [
        (("--port", "x"), ("--port", "'x'", "65535")),
        (("--n-workers", "0"), ("--n-workers 0", "--worker-port")),
        (("--n-workers", "0", "--worker-port", "0", "--gpus", "4"), ("--n-workers 0", "--gpus")),
        (("--metrics-host", "0.0.0.0"), ("--metrics-host 0.0.0.0", "--metrics-port")),
        (("--tensor-parallel-size", "2", "--engine", "hf"), ("--tensor-parallel-size 2", "vllm")),
        (("--host", "0.0.0.0"), ("--host 0.0.0.0", "--keys", "--insecure")),
        (("--host", "no.such.host.invalid"), ("--host no.such.host.invalid",)),
        (("--keys", ""), ("--keys", "empty")),
        (("--keys", "k", "--insecure"), ("--insecure", "--keys")),
        (("--port", "5", "--metrics-port", "5"), ("--worker-port", "--metrics-port")),
        (("--teacher", "a=/a"), ("--teacher a=/a",)),
        (("--config", "/no/such.yaml"), ("--config /no/such.yaml",)),
    ],
)
def test_invalid_flags_are_refused_by_name(flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Fails if flags that contradict, have no effect, or open the server unintentionally, are accepted."""
    with pytest.raises(SettingsError) as caught:
        settings_of("--model", "/m", *flags)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_beyond_loopback_with_keys_or_the_explicit_flag() -> None:
    """Fails if a server with keys, or with --insecure, cannot serve other hosts."""
    assert settings_of("--model", "/m", "--host", "0.0.0.0", "--keys", "k").address == "0.0.0.0"
    assert settings_of("--model", "/m", "--host", "0.0.0.0", "--insecure").address == "0.0.0.0"


def test_the_name_of_this_machine_is_not_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if --host with a name that /etc/hosts has at 127.0.1.1, as on Debian, listens where no other host is."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    for flag in ("--host", "--metrics-host"):
        with pytest.raises(SettingsError):
            settings_of("--model", "/m", flag, "node7", "--insecure", "--metrics-port", "0")
    for host in ("127.0.1.1", "localhost"):
        assert settings_of("--model", "/m", "--host", host).address == "127.0.1.1"


def test_a_teacher_without_a_folder_is_for_joining_workers() -> None:
    """Fails if the broker's host needs the model that only the workers' hosts have."""
    words = ("--teacher", "a", "--n-workers", "0", "--worker-port", "0")
    assert settings_of(*words).teachers[0].model == ""
    assert len(settings_of(*words, "--teacher", "b=/b", "--metrics-host", "127.0.0.1").teachers) == 2

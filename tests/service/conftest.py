"""Fixtures of the service tests: two tiny models, and one server per test file for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device import kind
from tests.service.harness import ServerProcess, save_model

TINY_VOCAB = 300
WIDE_VOCAB = 32003  # odd, and above 2^15: detects errors in the id planes and padding of the vocabulary


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny", TINY_VOCAB)


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "wide", WIDE_VOCAB, seed=1)


def on_device(*options: str) -> tuple[str, ...]:
    """Return the options of a server that computes on the tests' device, with the engine and numbers of a CPU."""
    return ("--device", kind(), "--engine", "hf", "--dtype", "float32", *options)


@pytest.fixture(scope="module")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder, options = tmp_path_factory.mktemp("server"), on_device("--max-batch-tokens", "512")
    with ServerProcess(tiny_model, folder, options=options) as server:
        yield server


@pytest.fixture(scope="module")
def wide_server(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(wide_model, tmp_path_factory.mktemp("server"), options=on_device()) as server:
        yield server

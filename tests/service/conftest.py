"""Fixtures of the service tests: two tiny models with a server for each, and one without a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device import kind
from tests.service.harness import TRIVIAL, ServerProcess, save_model, trivial_model

TINY_VOCAB = 300
TRIVIAL_VOCAB = 500
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


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder, options = tmp_path_factory.mktemp("server"), on_device("--max-batch-tokens", "512")
    with ServerProcess(tiny_model, folder, options=options) as server:
        yield server


@pytest.fixture(scope="module")
def wide_server(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(wide_model, tmp_path_factory.mktemp("server"), options=on_device()) as server:
        yield server


@pytest.fixture(scope="session")
def trivial_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start an engine without a model, whose requests of several sequences take several batches."""
    folder = tmp_path_factory.mktemp("trivial")
    options = (*TRIVIAL, "--max-batch-tokens", "300")
    with ServerProcess(trivial_model(folder / "m", TRIVIAL_VOCAB), folder, options=options) as server:
        yield server

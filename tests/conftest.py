"""The device of the tests, and how pytest-xdist distributes the tests of all folders over its workers."""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import device

SYSTEM = "tests/e2e"
# Files that start vLLM's engines and no run. Their processes are forks of one, see `tests.engine_process`.
ENGINES = (
    *(f"{SYSTEM}/test_rollout_{name}.py" for name in ("engine", "sleep", "adapters", "experts", "folders")),
    *(f"{SYSTEM}/test_{name}.py" for name in ("stream_engine", "turns")),
    *(f"tests/service/test_{name}.py" for name in ("engine_contract", "prefix_sharing", "engine_load")),
)


class ByFile(LoadScopeScheduling):
    """Give a worker whole files, one worker all runs of the whole system, and one worker all engines.

    The tests of a file share fixtures. The runs share the session's models, teacher server and base run, and each of
    them starts some ten processes. The engines share the process that has imported vLLM.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file in ENGINES:
            return "engines"
        return SYSTEM if file.startswith(f"{SYSTEM}/") else file


gc.disable()  # until all tests are collected: it would take a quarter of that time, and find nothing


def pytest_collection_finish() -> None:
    gc.freeze()  # what has been imported stays
    gc.enable()


hypothesis.settings.register_profile("tests", deadline=None)  # timing decides no test
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    where = "where tests/dist and tests/service compute"
    parser.addoption("--device", choices=device.KINDS, default=device.kind(), help=where)


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell's `&` had it ignored
    os.environ[device.VARIABLE] = config.getoption("--device")
    if device.on_cuda() and not device.n_cards():
        raise pytest.UsageError("--device = cuda: torch finds no CUDA device. Fix: run on a machine that has one.")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    config.option.loadscopereorder = False  # it puts the files with the fewest tests last, and those are the longest
    return ByFile(config, log)  # type: ignore[arg-type]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the runs of the whole system first: they are the longest part that one worker has to do alone.

    On CUDA, tests marked `cpu_only` are skipped, and on stand-in cards those marked `real_card`.
    """
    unfit = {"cpu_only": "CPU only"} | ({"real_card": "not on stand-in cards"} if device.on_stand_in() else {})
    for item in items if device.on_cuda() else ():
        for mark in item.iter_markers():
            if mark.name in unfit:
                item.add_marker(pytest.mark.skip(reason=f"{unfit[mark.name]}: {mark.args[0]}"))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith((SYSTEM, *ENGINES)))


@pytest.fixture
def torch_sees(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the number of GPUs that torch finds, with CUDA_VISIBLE_DEVICES unset."""
    import torch

    def sees(n_gpus: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return sees


@pytest.fixture
def temporary_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return a function that sets the folder for temporary files, of this process and of those that it starts."""

    def is_folder(folder: Path) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setenv("TMPDIR", str(folder))

    return is_folder


@pytest.fixture
def gkd_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Yield `caplog` with the project's lines, whose loggers do not propagate to its handler."""
    logger = logging.getLogger("gkd")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)

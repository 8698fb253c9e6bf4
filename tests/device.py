"""Where the tests of tests/dist and tests/service compute: `pytest --device cpu | cuda`.

The choice is in the environment, so that ranks, servers and engines inherit it. torch is imported on use, since most
tests need none, and so is pytest, since most processes that tests start need none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

KINDS = ("cpu", "cuda")
VARIABLE = "GKD_TEST_DEVICE"
CUDA_PATIENCE = 4  # there each rank imports on its own, starts CUDA and NCCL, and compiles kernels
CPU_PATIENCE = 3  # cores that other programs use


def kind() -> str:
    return os.environ.get(VARIABLE, "cpu")


def on_cuda() -> bool:
    return kind() == "cuda"


def on_stand_in() -> bool:
    """Return whether the cards are those of tests/dry_card."""
    return "DRY_CARD_BUILD" in os.environ


def patience() -> int:
    """Return the factor of time limits."""
    return CUDA_PATIENCE if on_cuda() else CPU_PATIENCE


def rank_device() -> torch.device:
    """Return the device of this process. On CUDA it is the first one: a rank sees its own card alone, as in a run."""
    import torch

    return torch.device("cuda", 0) if on_cuda() else torch.device("cpu")


def backend() -> str:
    """Return the backend of torch.distributed."""
    return "nccl" if on_cuda() else "gloo"


def cards() -> list[str]:
    """Return the visible cards, as CUDA_VISIBLE_DEVICES names them. It does not initialize CUDA."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = [str(i) for i in range(torch.cuda.device_count())]
    return numbers if named is None else named.split(",")[: len(numbers)]


def n_cards() -> int:
    return len(cards())


def need_cards(n: int) -> None:
    """Skip the test if it is to run on more cards than there are."""
    if on_cuda() and n_cards() < n:
        import pytest

        pytest.skip(f"needs {n} cards, here are {n_cards()}")


def host(tensor: torch.Tensor) -> np.ndarray:
    """Return the values in host memory; they share memory with a tensor that is there."""
    values: np.ndarray = tensor.detach().cpu().numpy()
    return values


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the processes that start within."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

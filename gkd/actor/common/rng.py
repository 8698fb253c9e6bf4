"""Save and restore the states of all random generators of an actor process, as bytes for a checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gkd.errors import CheckpointError


def rng_state() -> dict[str, Tensor]:
    """Return the states of the generators of Python, numpy, torch and, if there is one, the current CUDA device.

    Returns:
        Name -> [n] uint8 on the CPU.
    """
    numpy: Any = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    states = {"python": _bytes(random.getstate()), "numpy": _bytes(numpy), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: Mapping[str, Tensor], source: str | Path) -> None:
    """Restore the states that `rng_state` returned on a machine of the same kind.

    Args:
        source: the file or folder of `states`, for the error.

    Raises:
        CheckpointError: `states` is not a result of `rng_state`.
    """
    try:
        _restore(states)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{source}: the random generators cannot be restored: {type(error).__name__}: {error}"
        ) from error


def _restore(states: Mapping[str, Tensor]) -> None:
    version, internal, gauss_next = _parsed(states["python"])
    random.setstate((version, tuple(internal), gauss_next))
    numpy = _parsed(states["numpy"])
    numpy["state"]["key"] = np.array(numpy["state"]["key"], np.uint32)
    np.random.set_state(numpy)
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _bytes(state: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _parsed(state: Tensor) -> Any:
    return json.loads(state.numpy().tobytes())

"""Write a safetensors file one tensor at a time; the safetensors package requires all of them in memory.

The format: 8 bytes with the length of the header, little endian; the header, JSON with dtype, shape and byte range of
each tensor; then the tensors' bytes in the order of the header.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGN_BYTES = 8  # alignment of the first tensor, so that a mapped file can be read in place


def write_safetensors(
    path: Path, plan: Sequence[tuple[str, tuple[int, ...], torch.dtype]], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write the file `path`; at most one tensor is copied at a time, and no reference is kept.

    Args:
        plan: (name, shape, dtype) of each tensor in the file.
        tensors: on any device; the first `len(plan)` are consumed.

    Raises:
        OSError: the file cannot be written.
        RuntimeError: `tensors` does not follow the plan.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype in plan:
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    stream = iter(tensors)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for expected in plan:
            name, tensor = next(stream, ("the end", torch.empty(0)))
            if (name, tuple(tensor.shape), tensor.dtype) != expected:
                raise RuntimeError(
                    f"export order: expected {expected}, got {(name, tuple(tensor.shape), tensor.dtype)}"
                )
            # These may be live states, so avoid Tensor.numpy(): see `gkd.memory.states`.
            file.write(np.from_dlpack(tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)).data)
            del tensor  # before the next one is created

"""Check and list the weight files of a HF folder with the teacher server's code. Pure: no torch.

Its errors become ModelErrors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import teacher_server.engines.weight_files as files
from gkd.errors import ModelError
from teacher_server.engines.folder_check import check_folder
from teacher_server.engines.vllm_limits import check_vllm_support

INDEX_NAME, SINGLE_NAME = files.INDEX, files.SINGLE
some_names = files.some_names


def check_trained_folder(folder: Path) -> None:
    """Raise ModelError if programs disagree about the model in a folder, see `folder_check`, or it is quantized."""
    with _model_errors():
        check_folder(folder, full_precision=True)


def check_rollout_support(folder: Path, device: str) -> None:
    """Raise ModelError if vLLM, which generates the rollouts, cannot compute the model on this device."""
    with _model_errors():
        check_vllm_support(folder, on_cpu=device == "cpu")


def weight_files(folder: Path) -> list[Path]:
    """Return the paths of the weight files. Raises ModelError: none, a damaged index, or a file that is absent."""
    with _model_errors(f"{folder}: "):
        return files.weight_files(folder)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape by name of all tensors in the weight files. Raises ModelError: as above, or one is damaged."""
    with _model_errors(f"{folder}: "):
        entries = [files.read_entries(file) for file in files.weight_files(folder)]
        return {name: entry.shape for each in entries for name, entry in each.items()}


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file. Raises ModelError: it is missing, or not a JSON object."""
    with _model_errors(f"{file.parent}: "):
        return files.read_json(file)


@contextmanager
def _model_errors(where: str = "") -> Iterator[None]:
    try:
        yield
    except files.FolderError as error:
        raise ModelError(f"{where}{error.problem}", error.fix) from error

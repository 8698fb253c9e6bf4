"""Open the safetensors files of a HF folder, and compare their headers with the tensors that a model requires."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

import teacher_server.engines.weight_files as files
from gkd.errors import ModelError
from teacher_server.engines.folder_check import check_folder
from teacher_server.engines.vllm_limits import check_vllm_support

_DTYPES = ("F32", "BF16", "F16")  # names in safetensors; integers and float8 are quantized weights
_SAMPLES, _SAMPLE_BYTES = 64, 16 << 10  # pieces of each file in its digest, and their size


@contextmanager
def open_tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Memory-map a folder's safetensors files, and yield the open file of each tensor by the tensor's name.

    Raises:
        ModelError: there are no safetensors files, a file in the index is absent, or one is corrupt.
    """
    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is not a readable safetensors file ({error}). Copy it again.") from error
            tensors.update(dict.fromkeys(handle.keys(), handle))
        yield tensors


def weights_digest(folder: Path) -> str:
    """Return a digest of a model without reading all of it: xxh3 of each file's name, size, header and sampled bytes.

    Training changes all weights, so a sample is enough to tell two models apart.

    Raises:
        ModelError: as `open_tensors`.
    """
    hasher = xxhash.xxh3_128()
    for path in weight_files(folder):
        size = path.stat().st_size
        hasher.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            n_header = int.from_bytes(file.read(8), "little")  # size of the header, at the start of the file
            hasher.update(file.read(min(n_header, size)))
            for part in range(_SAMPLES):
                file.seek(size * part // _SAMPLES)
                hasher.update(file.read(_SAMPLE_BYTES))
    return hasher.hexdigest()


def check_headers(
    folder: Path,
    tensors: Mapping[str, Any],
    expected: Mapping[str, tuple[int, ...]],
    *,
    model_type: str,
    is_ignorable: Callable[[str], bool],
    is_float: Callable[[str], bool] = lambda name: True,
) -> None:
    """Compare the files with the architecture. Raises ModelError that names the tensors of the first kind of mismatch.

    Args:
        tensors: as `open_tensors` yields them.
        expected: tensor name -> shape.
        is_ignorable: returns whether an unexpected tensor may be skipped.
        is_float: returns whether an expected tensor must have a float dtype; False for counters and other integers.
    """
    if missing := [name for name in expected if name not in tensors]:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing: {some_names(missing)}.")
    if unexpected := [name for name in sorted(tensors) if name not in expected and not is_ignorable(name)]:
        raise ModelError(
            f"{folder}: {len(unexpected)} tensors do not belong to a {model_type} model: {some_names(unexpected)}."
        )
    for name, shape in expected.items():
        header = tensors[name].get_slice(name)
        if (actual := tuple(header.get_shape())) != shape:
            raise ModelError(f"{folder}: {name} has shape {list(actual)}, config.json requires {list(shape)}.")
        if (dtype := header.get_dtype()) not in _DTYPES and is_float(name):
            raise ModelError(
                f"{folder}: {name} has dtype {dtype}, supported are {', '.join(_DTYPES)}. Convert quantized weights."
            )


# Check and list the weight files of a HF folder with the teacher server's code. Pure: no torch.
#
# Its errors become ModelErrors.

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

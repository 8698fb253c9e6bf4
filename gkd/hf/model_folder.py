"""Read and check a model folder without loading it: config.json, and the headers of its safetensors files.

The teacher server's code finds the weight files; its errors become ModelErrors. No process imports torch for this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError, safe_open

import teacher_server.engines.weight_files as files
from gkd.config.schema import Config
from gkd.errors import ConfigError, ModelError
from gkd.hf.hub import local_path
from gkd.hf.model_dims import ModelDims, read_dims
from teacher_server.engines.folder_check import check_folder, check_vllm_support, longest_agreeing

INDEX_NAME = files.INDEX
SINGLE_NAME = files.SINGLE
some_names = files.some_names
Tensors: TypeAlias = Mapping[str, tuple[int, ...]]  # shape by tensor name
# The name of a decoder layer's tensor has one of these words, followed by a number.
_BLOCKS = frozenset({"layers", "h", "blocks", "block"})
_DTYPES = ("F32", "BF16", "F16")  # names in safetensors; integers and float8 are quantized weights


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Data of a model folder that a memory estimate reads."""

    config_json: Mapping[str, Any]
    dims: ModelDims
    tensors: Tensors | None  # None: `dims` are exact
    vision_params: int = 0  # parameters of the vision tower and its projection


def read_model_folder(path: str | Path, key: str) -> ModelFolder:
    """Read config.json and, only if it does not determine the number of parameters, the headers of the weight files.

    Args:
        path: a Hugging Face folder, or a model's name on the hub. Weights are downloaded if they are read.
        key: the setting or flag that names the model, for errors.

    Raises:
        ConfigError: the folder has no readable config.json; or as `local_path`.
        ModelError: a size is missing in it, or a weight file is absent or damaged.
    """
    config_json = read_config_json(local_path(str(path), key, weights=False), key)
    dims = read_dims(config_json)
    if dims.is_exact and "vision_config" not in config_json:
        return ModelFolder(config_json, dims, None)
    tensors = tensor_shapes(Path(local_path(str(path), key)))
    text_tensors = _language_model(tensors, dims.n_layers) if "text_config" in config_json else tensors
    vision_sizes = (prod(shape) for name, shape in tensors.items() if name not in text_tensors and "mtp" not in name)
    vision = sum(vision_sizes) if "vision_config" in config_json else 0
    return ModelFolder(config_json, dims, None if dims.is_exact else text_tensors, vision)


def read_config_json(path: str | Path, key: str) -> dict[str, Any]:
    """Return the content of the folder's config.json. Raises ConfigError naming `key` if it cannot be read."""
    if not Path(path).is_dir():
        fix = "give a complete model folder, or a model's name on the hub."
        raise ConfigError(key, str(path), f"no such folder ({Path(path).absolute()}).", fix)
    try:
        return read_json(Path(path) / "config.json")
    except ModelError as error:
        raise ConfigError(key, str(path), error.problem, error.fix) from error


def count_params(tensors: Tensors) -> tuple[int, int, int]:
    """Return the parameters of a folder's tensors: (all, of the largest decoder layer, of the embedding).

    Raises:
        ModelError: no tensor is an embedding.
    """
    layers: dict[str, int] = {}
    embedding = total = 0
    for name, shape in tensors.items():
        n = prod(shape)
        total += n
        if block := _block(name):
            layers[block] = layers.get(block, 0) + n
        elif len(shape) == 2:
            embedding = max(embedding, n)
    if not embedding:
        raise ModelError("the model's weight files have no embedding, so its memory cannot be estimated.")
    return total, max(layers.values(), default=0), embedding


def _block(name: str) -> str:
    """Return the name of the layer that a tensor belongs to; empty if it belongs to none."""
    words = name.split(".")
    numbers = [i for i, word in enumerate(words) if word.isdecimal() and i and words[i - 1] in _BLOCKS]
    return ".".join(words[: numbers[0] + 1]) if numbers else ""


def _language_model(tensors: Tensors, n_layers: int) -> Tensors:
    """Return the tensors that a run holds: of the largest part with `n_layers` layers, and of the head."""
    sizes = Counter[str]()
    layers: dict[str, set[str]] = {}
    for name, shape in tensors.items():
        part = _block(name).rpartition(".")[0].rpartition(".")[0]
        sizes[part] += prod(shape)
        layers.setdefault(part, set()).add(_block(name))
    part = max(sizes, key=lambda part: (len(layers[part]) == n_layers, sizes[part]))
    prefix = f"{part}." if part else ""
    return {name: shape for name, shape in tensors.items() if name.startswith(prefix) or "lm_head" in name}


def eos_token_ids(path: str, tokenizer: Any) -> list[int]:
    """Return the tokens of generation_config.json or, if it has none, of config.json; and the tokenizer's own.

    Raises:
        ModelError: the model defines none, or not by numbers, or a file is damaged.
    """
    named = (Path(path) / name for name in ("generation_config.json", "config.json"))
    generation, config = (read_json(file) if file.is_file() else {} for file in named)
    sources = (generation, config, config.get("text_config") or {})
    eos_value: Any = next((value for source in sources if (value := source.get("eos_token_id")) is not None), [])
    listed = eos_value if isinstance(eos_value, list) else [eos_value]
    if any(type(value) is not int for value in listed):
        raise ModelError(f"{path} has the eos_token_id {eos_value!r}.", "name ids of tokens, as numbers.")
    ids = set(listed)
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise ModelError(
            f"{path} has no end-of-sequence token in generation_config.json, config.json or its tokenizer.",
            "add eos_token_id to generation_config.json.",
        )
    return sorted(ids)


@contextmanager
def checked_folder(key: str, path: str) -> Iterator[None]:
    """Check that programs agree about the model in a folder, see `folder_check`; rewrite the ModelErrors of the block.

    Raises:
        ConfigError: naming `key`. The folder does not exist: it may be a name on the Hugging Face hub; the model is
            quantized; or a check failed.
    """
    if not Path(path).is_dir():
        fix = "give a local folder in Hugging Face format; `hf download NAME --local-dir FOLDER` makes one."
        raise ConfigError(key, path, f"no such folder ({Path(path).absolute()}).", fix)
    try:
        check_folder(Path(path), full_precision=True)
        yield
    except (ModelError, files.FolderError) as error:
        raise ConfigError(key, path, error.problem, error.fix or "name a complete model folder.") from error


def check_engines(config: Config, device: str) -> None:
    """Raise ConfigError if vLLM, which generates the rollouts, cannot compute the student on `device`: cpu or cuda."""
    try:
        images = bool(config.data.images_key)
        check_vllm_support(Path(config.model.path), on_cpu=device == "cpu", dtype=config.model.dtype, images=images)
    except files.FolderError as error:
        raise config.error("model.path", error.problem, error.fix) from error
    if (longest := longest_agreeing(Path(config.model.path))) < config.derived.max_sequence_length:
        problem = f"vLLM computes sequences of this model with more than {longest} tokens otherwise than transformers."
        fix = "lower it or data.max_prompt_length, so that their sum is not larger."
        raise config.error("data.max_response_length", problem, fix)


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
    """Return a digest of a model without reading all of it, as a teacher server does: see `fingerprint_of`.

    Raises:
        ModelError: as `open_tensors`, or config.json is damaged.
    """
    with _model_errors(f"{folder}: "):
        return files.fingerprint_of(folder, files.weight_files(folder))


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


def check_prefix(folder: Path, held_names: Collection[str]) -> None:
    """Raise ModelError if the folder was saved from the backbone: transformers adds the prefix, and vLLM does not.

    vLLM adds other prefixes: the first folders of GPT-2 and BLOOM have none.

    Args:
        held_names: the whole model's names of its tensors.
    """
    if any(name.partition(".")[0] in _BLOCKS and f"model.{name}" in held_names for name in tensor_shapes(folder)):
        problem = f'{folder}: the tensors have no prefix "model.".'
        raise ModelError(problem, "load the folder with AutoModelForCausalLM and save it again (save_pretrained).")


def weight_files(folder: Path) -> list[Path]:
    """Return the paths of the weight files. Raises ModelError: none, a damaged index, or a file that is absent."""
    with _model_errors(f"{folder}: "):
        return files.weight_files(folder)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape by name of all tensors in the weight files. Raises ModelError: as above, or one is damaged."""
    with _model_errors(f"{folder}: "):
        entries = [files.read_entries(file) for file in files.weight_files(folder)]
        return {name: entry.shape for file_entries in entries for name, entry in file_entries.items()}


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

"""Write a trained student's tensors as a HF folder that transformers and vLLM load. Runs in one process.

The folder gets its final name when it is complete.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gkd.config.schema_actor import LoraConfig
from gkd.hf.model_folder import INDEX_NAME, SINGLE_NAME, open_tensors
from gkd.run.disk import fsync, fsync_tree
from teacher_server.engines.hub import name_of

TensorPlan: TypeAlias = tuple[str, tuple[int, ...], torch.dtype]  # (HF name, shape, dtype)
Readers: TypeAlias = dict[TensorPlan, Callable[[], Tensor]]  # tensors of a checkpoint, in the order of an export
MAX_SHARD_BYTES = 4 << 30
# The export replaces weights in any format, and their indices; other files are copied.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
_LEFT_OUT = ("adapter_config.json",)  # The export has no adapter.
_COPIED_FOLDERS = ("additional_chat_templates",)  # subfolders of a tokenizer


def write_folder(
    tensors: Iterator[tuple[str, Tensor]],
    plans: Sequence[Sequence[TensorPlan]],
    out_dir: Path,
    source_dir: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    stop_ids: Sequence[int] = (),
) -> None:
    """Write the weights, and copy what the student does not hold from `source_dir`. All or nothing.

    That is config, generation config and tokenizer; and tensors, such as a vision tower's or those that predict further
    tokens: a folder without them is another model, for which transformers makes them up.

    Args:
        tensors: the tensors of `plans`, in their order, on any device; written one at a time.
        plans: by pipeline stage.
        max_shard_bytes: a file is closed before it would grow past this size.
        stop_ids: tokens that end a response besides the source's; they become `eos_token_id`s of the folder, too.

    Raises:
        OSError: `out_dir` exists or cannot be written.
    """
    if out_dir.exists():
        raise FileExistsError(f"{out_dir} exists already; choose another folder or remove it")
    partial = out_dir.with_name(f"{out_dir.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)  # left by an interrupted export
    partial.mkdir(parents=True)
    try:
        _fill(partial, tensors, plans, source_dir, max_shard_bytes)
        if stop_ids:
            _add_end_tokens(partial, stop_ids)
        fsync_tree(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # frees a full disk
        raise
    partial.rename(out_dir)
    fsync(out_dir.parent)


def _fill(
    partial: Path,
    tensors: Iterator[tuple[str, Tensor]],
    plans: Sequence[Sequence[TensorPlan]],
    source_dir: Path,
    max_shard_bytes: int,
) -> None:
    for source in sorted(source_dir.iterdir()):
        if source.is_dir() and source.name in _COPIED_FOLDERS:
            shutil.copytree(source, partial / source.name, copy_function=shutil.copyfile)
        elif source.is_file() and not source.name.endswith(_WEIGHT_SUFFIXES + _LEFT_OUT):
            shutil.copyfile(source, partial / source.name)  # sets no mode: files of a shared model store are read-only
    specs = {spec[0]: spec for plan in plans for spec in plan}
    _set_dtype(partial / "config.json", plans[0][0][2])
    with open_tensors(source_dir) as held:
        # The student holds its head; one that it does not export is the source's copy of tied embeddings.
        source_names = [name for name in held if name not in specs and not name.endswith("lm_head.weight")]
        for name in source_names:
            header = held[name].get_slice(name)
            specs[name] = (name, tuple(header.get_shape()), _COPIED_DTYPES[header.get_dtype()])
        sizes = {name: _n_bytes(shape, dtype) for name, shape, dtype in specs.values()}
        files = _split_into_files(sizes, max_shard_bytes)
        all_tensors = chain(tensors, ((name, held[name].get_tensor(name)) for name in source_names))
        for file_name, names in files.items():
            write_safetensors(partial / file_name, [specs[name] for name in names], all_tensors)
    if len(files) > 1:
        weight_map = {name: file_name for file_name, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (partial / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _split_into_files(sizes: dict[str, int], max_bytes: int) -> dict[str, list[str]]:
    """Return tensor names by file name, filled in order; a tensor is never split."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def _set_dtype(config_path: Path, dtype: torch.dtype) -> None:
    """Set the dtype of the exported weights in config.json, under both names; older readers use only the first."""
    config = json.loads(config_path.read_text())
    for key in ("torch_dtype", "dtype"):
        if key in config or key == "dtype":
            config[key] = str(dtype).removeprefix("torch.")
    config_path.write_text(json.dumps(config, indent=2) + "\n")


def _add_end_tokens(folder: Path, ids: Sequence[int]) -> None:
    """Add end tokens to generation_config.json: engines read them there, and only there if the file names any."""
    file = folder / "generation_config.json"
    generation = json.loads(file.read_text()) if file.exists() else {}
    config = json.loads((folder / "config.json").read_text())
    sources = (generation, config, config.get("text_config") or {})  # the order of `eos_token_ids`
    eos_value: Any = next((value for source in sources if (value := source.get("eos_token_id")) is not None), [])
    saved_ids = eos_value if isinstance(eos_value, list) else [eos_value]
    generation["eos_token_id"] = [*saved_ids, *sorted({*ids} - {*saved_ids})]
    file.write_text(json.dumps(generation, indent=2) + "\n")


def _n_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def exhaust(iterator: Iterator[object]) -> None:
    """Consume an iterator for its side effects."""
    deque(iterator, maxlen=0)


_PREFIX = "base_model.model."  # prefix of peft's names
_LANGUAGE = "language_model."  # in the names of a language model that is a part of another model


def write_adapters(
    tensors: Iterator[tuple[str, Tensor]], plan: Sequence[TensorPlan], folder: Path, lora: LoraConfig, base: str
) -> None:
    """Write peft's two files into `folder`, which must not exist.

    Args:
        tensors: the tensors of `plan`, in its order; names end with .lora_A.weight or .lora_B.weight.
        base: the base model, for the reader.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True)
    renamed = [(_PREFIX + name, shape, dtype) for name, shape, dtype in plan]
    write_safetensors(
        folder / "adapter_model.safetensors", renamed, ((_PREFIX + name, tensor) for name, tensor in tensors)
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name_of(Path(base)) or base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "inference_mode": True,
    }
    if all(_LANGUAGE in name for name, _, _ in plan):  # a tower has layers of these names, too, and no adapters
        config["exclude_modules"] = rf"(?!.*{re.escape(_LANGUAGE)}).*"
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    fsync_tree(folder)


# Names of the dtypes in safetensors files.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
}
# Those of tensors that an export copies: counters, masks, weights in 8 bits.
_COPIED_DTYPES = DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _COPIED_DTYPES.items()}
_ALIGN_BYTES = 8  # alignment of the first tensor, so that a mapped file can be read in place


def safetensors_start(plan: Iterable[TensorPlan], metadata: dict[str, str]) -> bytes:
    """Return the start of a file with these tensors: 8 bytes of length and JSON, padded so that data are aligned."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, shape, dtype in plan:
        start = end
        end = end + _n_bytes(shape, dtype)
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(path: Path, plan: Sequence[TensorPlan], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write the file `path`; at most one tensor is copied at a time, and no reference is kept.

    Args:
        tensors: on any device; the first `len(plan)` are consumed.

    Raises:
        OSError: the file cannot be written.
        RuntimeError: `tensors` does not follow the plan.
    """
    stream = iter(tensors)
    with path.open("wb") as file:
        file.write(safetensors_start(plan, {"format": "pt"}))
        for expected in plan:
            name, tensor = next(stream, ("the end", torch.empty(0)))
            if (name, tuple(tensor.shape), tensor.dtype) != expected:
                raise RuntimeError(
                    f"export order: expected {expected}, got {(name, tuple(tensor.shape), tensor.dtype)}"
                )
            # These may be live states, so avoid Tensor.numpy(): see `gkd.memory.states`.
            file.write(np.from_dlpack(tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)).data)
            del tensor  # before the next one is created

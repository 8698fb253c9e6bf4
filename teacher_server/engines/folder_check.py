"""Check that a model folder has one meaning, whichever program loads it. Reads headers, and the weights of a tied head.

Every folder is checked here: student, teacher of each engine, local teacher, reference. transformers, vLLM and the
trainer's loaders disagree about what is refused here: one applies a leftover, another ignores it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from teacher_server.engines.weight_files import FolderError, TensorEntry, read_entries, read_json, weight_files
from teacher_server.vision.processor import ATTENDING_BOTH_WAYS

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_FLOATS = {"F64", "F32", "BF16", "F16"}
_HEAD = "lm_head"
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embeddings", "embed_in")
_PIECE_BYTES = 16 << 20  # bytes of each of two tensors that are compared at a time


def check_folder(folder: Path, *, full_precision: bool = False) -> list[Path]:
    """Check config.json and the weight files, and return the latter.

    Args:
        full_precision: refuse quantized weights: the trainer's loaders do not dequantize.

    Raises:
        FolderError: a file is missing or damaged; there are adapters; or config.json and the weights disagree.
    """
    _check_adapters(folder)
    config = read_json(folder / "config.json")
    files = weight_files(folder)
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_entries(file).items():
            if name in entries:  # programs take the last one, not that of the index
                problem = f"{name} is in {entries[name].file.name} and in {file.name}."
                raise FolderError(folder, problem, "load the folder with transformers and save it again, or copy it.")
            entries[name] = entry
    _check_quantization(folder, config, entries, full_precision)
    _check_tied_head(folder, config, entries)
    return files


def _check_adapters(folder: Path) -> None:
    names = [name for name in ADAPTER_FILES if (folder / name).is_file()]
    if not names:
        return
    if any(not file.name.startswith("adapter_") for file in folder.glob("*.safetensors")):
        problem = (
            f"{' and '.join(names)} next to full weights: transformers, vLLM and the trainer use them differently."
        )
        raise FolderError(folder, problem, "delete the adapter's files if it is merged; else merge it first.")
    config = read_json(folder / ADAPTER_FILES[0]) if ADAPTER_FILES[0] in names else {}
    base = config.get("base_model_name_or_path") or "its base model"
    fix = f"merge it into {base} (PeftModel.merge_and_unload of peft), and name the folder of the merged model."
    raise FolderError(folder, f"this is a LoRA adapter of {base} ({', '.join(names)}), not a model.", fix)


def _check_quantization(
    folder: Path, config: Mapping[str, Any], entries: Mapping[str, TensorEntry], full_precision: bool
) -> None:
    quantization = config.get("quantization_config")
    if not quantization:
        return
    # Models that are quantized while they are loaded say so; their files have full precision.
    online = isinstance(quantization, dict) and quantization.get("quantization_mode") == "online"
    if {entry.dtype for entry in entries.values()} <= _FLOATS and not online:
        problem = "config.json has quantization_config, but all weights have full precision."
        raise FolderError(folder, problem, "remove quantization_config from config.json.")
    modules = {name.rpartition(".")[0] for name in entries if "scale" in name.rpartition(".")[2]}
    eights = [name for name, entry in entries.items() if entry.dtype == "F8_E4M3" and name.endswith(".weight")]
    if modules and (lost := [name for name in eights if name.rpartition(".")[0] not in modules]):
        raise FolderError(folder, f"there is no scale of the float8 weights {lost[0]}.", "copy it again.")
    if full_precision:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        problem = f"its weights are quantized (quantization_config in config.json: {method})."
        raise FolderError(folder, problem, "use the folder of the model in full precision.")


def _check_tied_head(folder: Path, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> None:
    heads = {name: entry for name, entry in entries.items() if _module(name) == _HEAD}
    if not heads:
        return
    name, head = next(iter(heads.items()))
    embeddings = {key: entry for key, entry in entries.items() if _module(key) in _EMBEDDINGS}
    if any(_is_equal(head, entry) for entry in embeddings.values()) or not _ties(config):
        return
    if embeddings:
        problem = f"config.json ties the embeddings, but the weights {name} and {next(iter(embeddings))} differ."
        raise FolderError(folder, problem, "set tie_word_embeddings to false in config.json.")
    if not any(entry.shape == head.shape and entry is not head for entry in entries.values()):
        problem = f"config.json ties the embeddings, and the files have {name} instead of the input embedding."
        raise FolderError(folder, problem, "load the folder with transformers and save it again (save_pretrained).")


def _ties(config: Mapping[str, Any]) -> bool:
    """Return whether the input embedding is the head, also if config.json leaves that to its model type."""
    text = config.get("text_config")
    configs = [config, text if isinstance(text, dict) else {}]
    flags = [part["tie_word_embeddings"] for part in configs if part.get("tie_word_embeddings") is not None]
    if flags:
        return any(flags)
    from transformers import CONFIG_MAPPING  # heavy, and rarely needed

    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return False
    default = CONFIG_MAPPING[model_type]()
    return any(getattr(part, "tie_word_embeddings", False) for part in (default, default.get_text_config()))


def _module(name: str) -> str:
    """Return the last module in the name of a weight, "" for other tensors."""
    return name.removesuffix(".weight").rpartition(".")[2] if name.endswith(".weight") else ""


def _is_equal(one: TensorEntry, other: TensorEntry) -> bool:
    """Compare shape, dtype and bytes."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        sizes = (min(_PIECE_BYTES, one.stop - offset) for offset in range(one.start, one.stop, _PIECE_BYTES))
        return all(first.read(size) == second.read(size) for size in sizes)


# Refuse models that vLLM 0.32 cannot compute, from config.json alone. vLLM itself fails only at the first tokens.

# Model types that read images and that vLLM computes without torchvision, see `vllm_process`.
WITHOUT_TORCHVISION = ("llava",)
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # head sizes of vLLM's CPUAttentionBackend
_COMPUTED = ("qwen2", "llama", "mistral", "mixtral")  # head_dim follows from other sizes if config.json has none
_ONE_WINDOW = ("qwen2", "qwen3")  # vLLM's code for these has a sliding window in all layers or in none
_NO_WINDOW = ("llama",)  # transformers' code for these ignores the key; merged models have it from a mistral or qwen2


# Model types whose logprobs in vLLM 0.32 differ from those of transformers, measured on a CPU (docs/models.md).
# By 0.3 to 10 nats, in code that GPUs run, too: it leaves out the per-layer embeddings of Gemma 3n's text model, the
# bias of Phi-3.5-MoE's LM head, and the state of Zaya's convolutions.
_OTHERS = ("gemma3n_text", "phimoe", "zaya")
# By 0.1 to 6 nats, for a reason that is not known, or (Llama 4) beyond a length.
_OTHERS_ON_CPU = ("llama4", "llama4_text", "hrm_text", "minimax_m3_vl_text")
# By 0.003 to 0.07 nats: it holds numbers in 16 bits (Apertus), or does not limit time steps of Mamba from below.
IMPRECISE_ON_CPU = ("apertus", "nemotron_h", "zamba2")


def check_vllm_support(folder: Path, *, on_cpu: bool, dtype: str, images: bool = False) -> None:
    """Raise FolderError if vLLM lacks a kernel for the CPU or a package, or has other sliding windows."""
    config = read_json(folder / "config.json")
    text = {**config, **inner} if isinstance(inner := config.get("text_config"), dict) else config
    head_size = _head_size(text)
    if on_cpu and head_size is not None and head_size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        problem = f"its attention heads have size {head_size}; vLLM's CPU attention supports {sizes}."
        raise FolderError(folder, problem, "use a model with one of these sizes.")
    if on_cpu and dtype == "float32" and "linear_key_head_dim" in text:
        problem = "vLLM's CPU kernel for its layers of linear attention computes in bfloat16, not in float32."
        raise FolderError(folder, problem, "set the dtype to bfloat16.")
    kind = config.get("model_type")
    if kind in _OTHERS or (on_cpu and kind in _OTHERS_ON_CPU):
        problem = f"vLLM computes other logprobs of a {kind} model than transformers does."
        raise FolderError(folder, problem, "use another model.")
    if on_cpu and images and kind in ATTENDING_BOTH_WAYS:
        problem = f"vLLM's CPU attention is causal within an image, and that of a {kind} model is not."
        raise FolderError(folder, problem, "use GPUs.")
    if on_cpu and dtype == "float32" and kind in IMPRECISE_ON_CPU:
        problem = f"vLLM's logprobs of a {kind} model are up to 0.07 nats off."
        raise FolderError(folder, problem, "set the dtype to bfloat16, whose rounding is larger.")
    if text.get("model_type") in _NO_WINDOW and _has_unread_window(text):
        problem = (
            f"sliding_window = {text['sliding_window']} in config.json: vLLM applies it, and transformers does not."
        )
        raise FolderError(folder, problem, "remove sliding_window from config.json.")
    if text.get("model_type") in _ONE_WINDOW and _mixes_windows(text):
        window = text.get("sliding_window")
        problem = (
            f"by config.json only some layers have a sliding window (sliding_window = {window}), which vLLM lacks."
        )
        fix = f"if no sequence is longer than {window}, set use_sliding_window to false and remove layer_types there."
        raise FolderError(folder, problem, fix)
    needs_it = text is not config and config.get("model_type") not in WITHOUT_TORCHVISION
    if needs_it and find_spec("torchvision") is None:
        problem = "its model reads images, for which vLLM imports torchvision, and that is not installed."
        raise FolderError(folder, problem, "install the torchvision of the index that torch was installed from.")


def longest_agreeing(folder: Path) -> int:
    """Return the most tokens of a sequence that vLLM computes as transformers does; sys.maxsize: any number."""
    config = read_json(folder / "config.json")
    text = {**config, **inner} if isinstance(inner := config.get("text_config"), dict) else config
    longest = sys.maxsize
    if text.get("model_type") == "cohere2":  # vLLM's window is a token longer
        longest = text.get("sliding_window") or longest
    rope = text.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("llama_4_scaling_beta"):  # Ministral 3; vLLM has it under another name
        longest = rope.get("original_max_position_embeddings") or longest
    return int(longest)


def _head_size(text: dict[str, Any]) -> int | None:
    """Return the size of all heads. None means it is unknown, or the attention has latents instead (MLA)."""
    hidden = text.get("hidden_size")
    heads = text.get("num_attention_heads")
    if text.get("kv_lora_rank") or not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return None
    if "head_dim" not in text and text.get("model_type") not in _COMPUTED:
        return None
    size = text.get("head_dim") or hidden // heads
    return size if isinstance(size, int) else None


def _has_unread_window(text: dict[str, Any]) -> bool:
    """Return whether a window that transformers ignores is shorter than the longest sequence."""
    window = text.get("sliding_window")
    longest = text.get("max_position_embeddings", 2048)
    is_shorter = isinstance(window, int) and isinstance(longest, int) and 0 < window < longest
    return is_shorter and "sliding_attention" in (text.get("layer_types") or ["sliding_attention"])


def _mixes_windows(text: dict[str, Any]) -> bool:
    if types := text.get("layer_types"):
        return len(set(types)) > 1
    n_layers = text.get("num_hidden_layers")
    n_full = text.get("max_window_layers", 28)
    has_window = text.get("use_sliding_window") and text.get("sliding_window", 4096)
    return bool(has_window) and isinstance(n_layers, int) and isinstance(n_full, int) and 0 < n_full < n_layers

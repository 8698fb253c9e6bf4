"""Refuse models that vLLM 0.32 cannot compute, from config.json alone. vLLM itself fails only at the first tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from teacher_server.engines.weight_files import FolderError, read_json

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # head sizes of vLLM's CPUAttentionBackend
_COMPUTED = ("qwen2", "llama", "mistral", "mixtral")  # head_dim follows from other sizes if config.json has none
_ONE_WINDOW = ("qwen2", "qwen3")  # vLLM's code for these has a sliding window in all layers or in none


def check_vllm_support(folder: Path, *, on_cpu: bool) -> None:
    """Raise FolderError if vLLM lacks the model's head size on the CPU, or its mix of sliding windows."""
    config = read_json(folder / "config.json")
    text = {**config, **inner} if isinstance(inner := config.get("text_config"), dict) else config
    head_size = _head_size(text)
    if on_cpu and head_size is not None and head_size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        problem = f"its attention heads have size {head_size}; vLLM's CPU attention supports {sizes}."
        raise FolderError(folder, problem, "use a model with one of these sizes.")
    if text.get("model_type") in _ONE_WINDOW and _mixes_windows(text):
        window = text.get("sliding_window")
        problem = (
            f"by config.json only some layers have a sliding window (sliding_window = {window}), which vLLM lacks."
        )
        fix = f"if no sequence is longer than {window}, set use_sliding_window to false and remove layer_types there."
        raise FolderError(folder, problem, fix)


def _head_size(text: dict[str, Any]) -> int | None:
    """Return the size of all heads. None means it is unknown, or the attention has latents instead (MLA)."""
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    if text.get("kv_lora_rank") or not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return None
    if "head_dim" not in text and text.get("model_type") not in _COMPUTED:
        return None
    size = text.get("head_dim") or hidden // heads
    return size if isinstance(size, int) else None


def _mixes_windows(text: dict[str, Any]) -> bool:
    if types := text.get("layer_types"):
        return len(set(types)) > 1
    n_layers, n_full = text.get("num_hidden_layers"), text.get("max_window_layers", 28)
    has_window = text.get("use_sliding_window") and text.get("sliding_window", 4096)
    return bool(has_window) and isinstance(n_layers, int) and isinstance(n_full, int) and 0 < n_full < n_layers

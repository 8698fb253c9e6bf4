"""Write trained LoRA adapters as a folder that peft and vLLM load on top of the base model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from gkd.config.schema_actor import LoraConfig
from gkd.files.disk import fsync_tree
from gkd.hf.folder import TensorPlan
from gkd.hf.safetensors_file import write_safetensors
from teacher_server.engines.hub import name_of

_PREFIX = "base_model.model."  # prefix of peft's names


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
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    fsync_tree(folder)

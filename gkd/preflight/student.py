"""Check the student's folder before any process starts: config.json, headers of the weight files, tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gkd.config.schema import Config
from gkd.errors import ConfigError
from gkd.hf.model_dims import check_engine_split, check_megatron_support, read_dims
from gkd.hf.model_folder import ModelFolder, check_prefix, checked_folder, read_config_json
from gkd.memory.footprint.actor import megatron_stages

_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of config.json


def check_student(config: Config) -> int:
    """Check that the student's folder is whole, and that the configured ranks can split it. Reads headers only.

    Returns:
        The number of rows of its embedding.

    Raises:
        ConfigError: naming model.path, or the key of a size that cannot split the model.
    """
    path, longest = config.model.path, config.derived.max_sequence_length
    with checked_folder("model.path", path):
        vocab_size, max_positions = _CHECKS[config.actor.strategy](config)
    if config.derived.engine_adapter_rank:
        _check_engine_adapters(path)
    if longest > max_positions:
        problem = (
            f"with data.max_prompt_length {config.data.max_prompt_length} a sequence may have {longest} tokens; the "
            f"student supports {max_positions} (max_position_embeddings; with longrope the original ones)."
        )
        raise config.error("data.max_response_length", problem, "lower one of the two.")
    return vocab_size


def _check_megatron(config: Config) -> tuple[int, int]:
    """Compare config.json with the headers of the weight files, the adapters, and the sizes that split the model.

    Returns:
        (vocabulary size, longest sequence in tokens)

    Raises:
        ConfigError, ModelError: something does not fit; a sequence may be longer than the model's sliding window.
    """
    path, actor = config.model.path, config.actor
    config_json = read_config_json(path, "model.path")
    check_megatron_support(config_json, path)
    dims = read_dims(config_json)
    from gkd.actor.megatron.hf_mapping import check_weight_files, expected_hf_tensors  # imports torch

    check_prefix(Path(path), expected_hf_tensors(dims))
    check_weight_files(Path(path), dims)
    if actor.lora.rank > 0:
        from gkd.actor.megatron.lora import check_targets  # imports Megatron

        check_targets(dims, actor.lora)
    megatron_stages(config, ModelFolder(config_json, dims, None))
    check_engine_split(config.rollout.tp, (dims.n_heads,), (dims.n_kv_heads,), dims.mlp_columns)
    return dims.vocab_size, dims.max_positions


def _check_fsdp(config: Config) -> tuple[int, int]:
    from gkd.preflight.meta_models import check_fsdp_student  # imports transformers

    return check_fsdp_student(config)


_CHECKS = {"megatron": _check_megatron, "fsdp2": _check_fsdp}  # value of actor.strategy -> its check


def _check_engine_adapters(path: str) -> None:
    """Raise ConfigError if the engines cannot compute with adapters of this student."""
    config_json = read_config_json(path, "model.path")
    if any(config_json.get("text_config", config_json).get(key) for key in _NUMBERS_OF_EXPERTS):
        problem = "with LoRA vLLM computes experts with other kernels, to which weight syncs are not adapted."
        raise ConfigError("weight_sync.lora", "adapters", problem, "use merged for a student with experts.")


def check_tokenizer_fits(config: Config, tokenizer: Any, vocab_size: int) -> None:
    """Raise ConfigError if a token of the tokenizer has no row in the embedding."""
    highest = max(tokenizer.get_vocab().values())
    if highest >= vocab_size:
        problem = f"its tokenizer has token ids up to {highest}, and its embedding only {vocab_size} rows."
        fix = "resize the model's embedding, or use the tokenizer it was made with."
        raise config.error("model.path", problem, fix)

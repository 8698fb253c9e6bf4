"""Check the student's folder before any process starts: config.json, headers of the weight files, tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gkd.config.check import check_strategy
from gkd.config.schema import Config
from gkd.errors import ConfigError, ModelError
from gkd.hf.model_dims import check_engine_split, check_megatron_support, read_dims
from gkd.hf.model_folder import ModelFolder, check_prefix, checked_folder, read_config_json
from gkd.log import get_logger
from gkd.memory.footprint.actor import megatron_stages

log = get_logger("preflight")

_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of config.json


# Keys that auto leaves to the model -> what False means.
_OF_MODEL = {"actor.packing": "sequences are padded", "actor.fused_lm_head": "LM head and loss are computed apart"}


def chosen(config: Config) -> Config:
    """Return the settings with values for those of actor.strategy, packing and fused_lm_head that are auto.

    Raises:
        ConfigError: see `check_student`.
    """
    config = with_strategy(config)
    for _ in _OF_MODEL:
        try:
            check_student(config)
        except ConfigError as error:
            if error.key not in _OF_MODEL or config.value(error.key) is not None:
                raise
            log.info("%s=auto: %s, because %s", error.key, _OF_MODEL[error.key], error.problem)
            config = config.with_values({error.key: False})
    return config


def with_strategy(config: Config) -> Config:
    """Return the settings with a value for actor.strategy=auto. Reads config.json. Raises as `check_student`."""
    if config.actor.strategy != "auto":
        return config
    name = config.actor.backend_name
    why = "it trains this model"
    if name == "megatron":
        try:
            check_megatron_support(read_config_json(config.model.path, "model.path"), config.model.path)
        except ModelError as error:
            name = "fsdp2"
            why = str(error).partition(" Fix:")[0]
    if config.data.images_key:
        name = "fsdp2"
        why = "it trains on images"
    log.info("actor.strategy=auto: %s, because %s", name, why)
    config = config.with_values({"actor.strategy": name})
    check_strategy(config)
    return config


def check_student(config: Config) -> int:
    """Check that the student's folder is whole, and that the configured ranks can split it. Reads headers only.

    Returns:
        The number of rows of its embedding.

    Raises:
        ConfigError: naming model.path, or the key of a size that cannot split the model.
    """
    path = config.model.path
    longest = config.derived.max_sequence_length
    with checked_folder("model.path", path):
        if config.actor.backend_name == "megatron":
            vocab_size, max_positions = _check_megatron(config)
        else:
            from gkd.preflight.meta_models import check_fsdp_student  # imports transformers

            vocab_size, max_positions = check_fsdp_student(config)
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
    """
    path = config.model.path
    actor = config.actor
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

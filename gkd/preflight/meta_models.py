"""Check models of transformers before any process starts: an fsdp2 student, a local teacher, a reference.

They are built without weights, and compared with the headers of their files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from gkd.actor.frozen.model import head_refusal
from gkd.actor.fsdp.attention import check_columns
from gkd.actor.fsdp.lora import check_targets
from gkd.actor.fsdp.model import build_on_meta
from gkd.actor.fsdp.probe import probe_on_meta
from gkd.actor.fsdp.weights import check_weight_files, named_places
from gkd.config.schema import Config
from gkd.data.prompts import load_tokenizer
from gkd.errors import ConfigError
from gkd.hf.model_dims import check_context_split, check_engine_split
from gkd.hf.model_folder import check_prefix, checked_folder, weights_digest
from gkd.preflight.teacher import own_teacher, shared_ids
from gkd.scoring.teacher.info import TeacherInfo


def check_fsdp_student(config: Config) -> tuple[int, int]:
    """Check an fsdp2 student.

    Sizes come from transformers, not from `gkd.hf.model_dims`: the model may have code of its own, layers of different
    sizes, and names of its own for them. A size that it does not name is not checked.

    Returns:
        (vocabulary size, longest sequence in tokens; sys.maxsize if there is no limit)

    Raises:
        ModelError, ConfigError: as `FsdpStudent` would, except for errors that need a forward pass with weights; or
            actor.cp or rollout.tp cannot split the model.
    """
    actor = config.actor
    hf = _built(config, Path(config.model.path))
    check_prefix(Path(config.model.path), named_places(hf)[0])
    if actor.lora.rank > 0:
        check_targets(hf, actor.lora)
    probe_on_meta(hf, packing=actor.packs, fused=actor.fuses)
    text = hf.config.get_text_config()
    heads = distinct_sizes(text, "num_attention_heads")
    kv_heads = distinct_sizes(text, "num_key_value_heads")
    columns = {
        "MLP columns": distinct_sizes(text, "intermediate_size"),
        "expert columns": distinct_sizes(text, "moe_intermediate_size"),
    }
    check_columns(hf, actor.cp)
    check_context_split(actor.cp, heads, kv_heads)
    check_engine_split(config.rollout.tp, heads, kv_heads, columns)
    return text.vocab_size, _max_tokens(hf)


def distinct_sizes(config: PretrainedConfig, name: str) -> tuple[int, ...]:
    """Return the distinct values of a setting that is one number, or one for each layer; empty if it is not set."""
    value = getattr(config, name, None)
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(sorted({int(size) for size in values if size}))


def local_teacher(config: Config, device: str) -> TeacherInfo:
    """Return the description of the model in teacher.path, as a server would.

    Raises:
        ConfigError: naming teacher.path: the folder is damaged, has no tokenizer, or its model cannot score; or naming
            actor.packing, which the model does not support.
    """
    hf = _frozen(config, config.teacher.path, "teacher.path")
    head: Any = hf.get_output_embeddings()
    if config.teacher.signal == "hidden" and (head.cap is not None or head.bias is not None):
        problem = "the teacher's logits have a soft cap or a bias, which are not in its hidden states."
        raise config.error("teacher.signal", problem, "use topk or logits.")
    vocab_size, hidden_size = map(int, hf.get_output_embeddings().weight.shape)
    return own_teacher(
        config,
        "teacher.path",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_tokens=_max_tokens(hf),
        n_workers=config.derived.world_size,
        engine="local",
        device=device,
    )


def check_reference(config: Config, tokenizer: Any, n_vocab: int) -> str:
    """Check that the model of `Derived.reference_folder` can score the student's tokens.

    Args:
        n_vocab: token ids that the student, whose tokenizer it is, generates.

    Returns:
        The fingerprint of the weights; a resumed run must have the same.

    Raises:
        ConfigError: naming reference.path or, if that is empty, model.path: the folder is damaged, or its model cannot
            score, has another vocabulary or a shorter context; or naming actor.packing.
    """
    derived = config.derived
    path = config.reference.path
    folder = derived.reference_folder
    longest = derived.max_sequence_length
    key = "reference.path" if path else "model.path"
    hf = _frozen(config, folder, key)
    n_rows = len(hf.get_output_embeddings().weight)
    if n_rows < n_vocab:
        problem = f"the student has {n_vocab} token ids and the reference only {n_rows}."
        raise ConfigError(key, folder, problem, "use a reference with at least as many ids.")
    if path:
        other = load_tokenizer(path, key, trust_remote_code=config.model.trust_remote_code)
        vocab = {token: i for token, i in tokenizer.get_vocab().items() if i < n_vocab}
        n_shared, difference = shared_ids(vocab, other.get_vocab(), n_vocab, n_rows)
        if difference or n_shared < n_vocab:
            problem = f"its tokenizer differs from the student's: {difference}."
            raise ConfigError(key, path, problem, "use a reference with the student's tokens and ids.")
    if longest > _max_tokens(hf):
        problem = f"a sequence may have {longest} tokens, and the reference supports {_max_tokens(hf)}."
        raise ConfigError(key, folder, problem, "lower data.max_response_length, or use another reference.")
    return weights_digest(Path(folder))


def _frozen(config: Config, path: str, key: str) -> PreTrainedModel:
    """Return a model that can score, on the meta device. Raises ConfigError naming `key`, or actor.packing."""
    with checked_folder(key, path):
        hf = _built(config, Path(path))
        with head_refusal(key, Path(path)):
            probe_on_meta(hf, packing=config.actor.packs, fused=True)
    return hf


def _built(config: Config, folder: Path) -> PreTrainedModel:
    """Return a model on the meta device; its weight files fit it. Raises ModelError, ConfigError."""
    packing = config.actor.packs
    trusts = config.model.trust_remote_code
    hf = build_on_meta(
        folder, dtype=torch.float32, packing=packing, trust_remote_code=trusts, images=bool(config.data.images_key)
    )
    check_weight_files(hf, folder)
    return hf


def _max_tokens(hf: PreTrainedModel) -> int:
    """Return the longest sequence whose logits do not depend on the other sequences of its micro-batch.

    With rope_type longrope transformers takes other frequencies for a whole micro-batch as soon as one of its sequences
    is longer than the original context.
    """
    config = hf.config.get_text_config()
    longest = max(distinct_sizes(config, "max_position_embeddings"), default=sys.maxsize)
    rope = getattr(config, "rope_parameters", None) or {}
    # Some models have one entry for each kind of layer.
    for settings in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if settings.get("rope_type") == "longrope":
            longest = min(longest, int(settings["original_max_position_embeddings"]))
    return longest

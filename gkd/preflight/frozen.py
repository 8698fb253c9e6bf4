"""Check a local teacher or a reference before any process starts: code, headers of the weight files, tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gkd.actor.frozen.model import head_refusal
from gkd.actor.fsdp.model import build_on_meta, layer_list
from gkd.actor.fsdp.probe import probe_on_meta
from gkd.actor.fsdp.weights import check_weight_files
from gkd.config.schema import Config
from gkd.data.prompts import load_tokenizer
from gkd.errors import ConfigError
from gkd.hf.files import weights_digest
from gkd.preflight.same_tokens import shared_ids
from gkd.preflight.student import checked_folder
from gkd.scoring.teacher.info import TeacherInfo
from teacher_server.wire.fingerprint import tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def local_teacher(config: Config, device: str) -> TeacherInfo:
    """Return the description of the model in teacher.path, as a server would.

    Raises:
        ConfigError: naming teacher.path: the folder is damaged, has no tokenizer, or its model cannot score; or naming
            actor.packing, which the model does not support.
    """
    path = config.teacher.path
    hf = _checked(config, path, "teacher.path")
    vocab_size, hidden_size = map(int, hf.get_output_embeddings().weight.shape)
    tokenizer = load_tokenizer(path, "teacher.path", trust_remote_code=config.model.trust_remote_code)
    return TeacherInfo(
        teacher="",
        model_name=Path(path).resolve().name,
        model_path=str(Path(path).resolve()),
        fingerprint=weights_digest(Path(path)),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer.get_vocab()),
        max_tokens=_max_tokens(hf),
        n_workers=config.derived.world_size,
        n_streams=1,
        engine="local",
        device=device,
        dtype=config.model.dtype,
        protocol_version=0,
    )


def check_reference(config: Config, tokenizer: Any, n_vocab: int) -> str:
    """Check that the model of `Derived.reference_folder` can score the student's tokens.

    Args:
        tokenizer: the student's tokenizer.
        n_vocab: token ids that the student generates.

    Returns:
        The fingerprint of the weights; a resumed run must have the same.

    Raises:
        ConfigError: naming reference.path or, if that is empty, model.path: the folder is damaged, or its model cannot
            score, has another vocabulary or a shorter context; or naming actor.packing.
    """
    derived, path = config.derived, config.reference.path
    folder, longest = derived.reference_folder, derived.max_sequence_length
    key = "reference.path" if path else "model.path"
    hf = _checked(config, folder, key)
    n_rows = len(hf.get_output_embeddings().weight)
    if n_rows < n_vocab:
        problem = f"the student has {n_vocab} token ids and the reference only {n_rows}."
        raise ConfigError(key, folder, problem, "use a reference with at least as many ids.")
    if path:
        other = load_tokenizer(path, key, trust_remote_code=config.model.trust_remote_code)
        own = {token: i for token, i in tokenizer.get_vocab().items() if i < n_vocab}
        n_shared, difference = shared_ids(own, other.get_vocab(), n_vocab, n_rows)
        if difference or n_shared < n_vocab:
            problem = f"its tokenizer differs from the student's: {difference}."
            raise ConfigError(key, path, problem, "use a reference with the student's tokens and ids.")
    if longest > _max_tokens(hf):
        problem = f"a sequence may have {longest} tokens, and the reference supports {_max_tokens(hf)}."
        raise ConfigError(key, folder, problem, "lower data.max_response_length, or use another reference.")
    return weights_digest(Path(folder))


def _checked(config: Config, path: str, key: str) -> PreTrainedModel:
    """Return the model of a folder on the meta device after checking its weight files. Raises ConfigError for `key`."""
    packing, folder = config.actor.packing, Path(path)
    with checked_folder(key, path):
        trust = config.model.trust_remote_code
        hf = build_on_meta(folder, dtype=torch.float32, packing=packing, trust_remote_code=trust)
        check_weight_files(hf, folder)
        with head_refusal(key, folder):
            probe_on_meta(hf, n_layers=len(layer_list(hf)), packing=packing, fused=True)
    return hf


def _max_tokens(hf: PreTrainedModel) -> int:
    return getattr(hf.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

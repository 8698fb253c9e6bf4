"""What the driver can know of a local teacher before any process starts: its code, headers of its files, tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from gkd.actor.fsdp.model import build_on_meta, layer_list
from gkd.actor.fsdp.probe import probe_on_meta
from gkd.actor.fsdp.weights import check_weight_files
from gkd.actor.hf_files import weights_digest
from gkd.config import Config
from gkd.data import load_tokenizer
from gkd.errors import ConfigError, ModelError
from gkd.frozen.model import head_refusal
from gkd.teacher.base import TeacherInfo
from teacher_server.protocol import tokenizer_fingerprint


def local_teacher(config: Config, device: str) -> TeacherInfo:
    """What a server would say of itself, of teacher.path.

    Raises:
        ConfigError: naming teacher.path: the folder is broken, without a tokenizer, or not a model that can be scored
            so; or actor.packing, which this model does not bear.
    """
    path, packing, trust = config.teacher.path, config.actor.packing, config.model.trust_remote_code
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            "teacher.path", path, "there is no such folder.", "give a local folder in Hugging Face format."
        )
    try:
        hf = build_on_meta(folder, dtype=torch.float32, packing=packing, trust_remote_code=trust)
        check_weight_files(hf, folder)
        fingerprint = weights_digest(folder)
        vocab_size, hidden_size = map(int, hf.get_output_embeddings().weight.shape)
        max_tokens = getattr(hf.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        with head_refusal("teacher.path", folder):
            probe_on_meta(hf, n_layers=len(layer_list(hf)), packing=packing, fused=True)
    except ModelError as error:
        raise ConfigError("teacher.path", path, f"{error}", "name a whole model folder.") from error
    tokenizer = load_tokenizer(path, "teacher.path", trust_remote_code=trust)
    return TeacherInfo(
        teacher="",
        model_name=folder.resolve().name,
        model_path=str(folder.resolve()),
        fingerprint=fingerprint,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer.get_vocab()),
        max_tokens=max_tokens,
        n_workers=config.trainer.n_gpus_per_node * config.trainer.nnodes,
        n_streams=1,
        engine="local",
        device=device,
        dtype=config.model.dtype,
        protocol_version=0,
    )

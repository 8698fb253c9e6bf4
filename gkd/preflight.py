"""Everything that can be known to be wrong before any process starts, with an error that names key, value and fix."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gkd.actor.megatron.hf_config import read_hf_dims
from gkd.actor.megatron.layout import ParallelLayout
from gkd.config import Config
from gkd.config_check import check_config
from gkd.data import eos_token_ids, load_prompts, load_tokenizer
from gkd.errors import ConfigError
from gkd.log import get_logger
from gkd.run_folder import RunFolder, open_run_folder
from gkd.teacher.base import TeacherInfo
from gkd.teacher.client import ZmqTeacher
from gkd.types import Prompt
from teacher_server.protocol import tokenizer_fingerprint

log = get_logger("preflight")

# How long a running teacher server may take to say who it is.
TEACHER_HELLO_S = 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What the checks found out, for the wiring."""

    device: str  # "cpu" | "cuda"
    eos_ids: list[int]
    train_prompts: list[Prompt] = field(repr=False)
    val_prompts: list[Prompt] = field(repr=False)
    teacher: TeacherInfo
    n_vocab: int  # ids that student and teacher share
    total_steps: int  # optimizer steps of the whole run; the learning rate schedule ends there
    folder: RunFolder


def preflight(config: Config) -> Plan:
    """Check the whole run; the run folder is taken last, so a refused run leaves no trace.

    Raises:
        ConfigError, DataError, ModelError: the first thing that is wrong.
        TeacherUnavailable: no teacher server answers at teacher.server_ip:server_port.
    """
    check_config(config)
    device = resolve_device(config)
    tokenizer = load_tokenizer(config.model.path, "model.path", trust_remote_code=config.model.trust_remote_code)
    model = check_model_folder(config.model.path, "model.path")
    ParallelLayout(
        tp=config.actor.tp,
        pp=config.actor.pp,
        world_size=config.trainer.n_gpus_per_node * config.trainer.nnodes,
        rank=0,
    ).check_model(read_hf_dims(config.model.path))
    _check_context(config, model)
    train, dropped = load_prompts(config.data.train_files, config.data, tokenizer, "data.train_files")
    if dropped:
        log.warning("%d training prompts are over data.max_prompt_length and left out (truncation: drop)", dropped)
    val: list[Prompt] = []
    if config.data.val_files:
        val, _ = load_prompts(config.data.val_files, config.data, tokenizer, "data.val_files")
        if config.eval.metric == "exact_match" and any(p.answer is None for p in val):
            raise ConfigError(
                "data.answer_key",
                config.data.answer_key,
                "a row of data.val_files has no such column, and eval.metric is exact_match.",
                "name the column with the reference answer, or set eval.metric=none.",
            )
    teacher = ask_teacher(config)
    n_vocab = check_teacher(config, teacher, tokenizer, int(model["vocab_size"]))
    return Plan(
        device=device,
        eos_ids=eos_token_ids(config.model.path, tokenizer),
        train_prompts=train,
        val_prompts=val,
        teacher=teacher,
        n_vocab=n_vocab,
        total_steps=planned_steps(config, len(train)),
        folder=open_run_folder(config, {"name": teacher.model_name, "fingerprint": teacher.fingerprint}),
    )


def planned_steps(config: Config, n_prompts: int) -> int:
    """Optimizer steps of the run: total_epochs' worth, at least one, and at most total_steps (0 = no limit)."""
    by_epochs = max(1, n_prompts * config.trainer.total_epochs // config.trainer.global_batch_size)
    return min(by_epochs, config.trainer.total_steps) if config.trainer.total_steps else by_epochs


def resolve_device(config: Config) -> str:
    """ "cpu" or "cuda" for trainer.device, which may be auto."""
    import torch

    wanted = config.trainer.device
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available() and not config.cluster.ray_address:
        raise ConfigError("trainer.device", "cuda", "torch sees no GPU on this machine.", "use cpu, or auto.")
    return wanted


def check_model_folder(path: str, key: str) -> dict[str, Any]:
    """config.json of a model folder whose weight files are all there and readable; reads headers only.

    Raises:
        ConfigError: naming `key` and the file.
    """
    folder = Path(path)
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(key, path, "it has no config.json.", "give a folder in Hugging Face format.")
    try:
        model = json.loads(file.read_text())
        index = folder / "model.safetensors.index.json"
        listed = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(key, path, f"its config or index is corrupt ({error}).", "copy the folder again.") from error
    if not isinstance(model, dict) or not isinstance(model.get("vocab_size"), int):
        raise ConfigError(key, path, "its config.json names no vocab_size.", "copy the folder again.")
    for name in sorted(listed) or ["model.safetensors"]:
        try:
            with safe_open(folder / name, framework="numpy") as shard:
                shard.keys()
        except (SafetensorError, OSError) as error:
            raise ConfigError(key, path, f"{name} is missing or corrupt ({error}).", "copy it again.") from error
    return model


def ask_teacher(config: Config) -> TeacherInfo:
    """Who answers at the teacher's address. Raises TeacherUnavailable."""
    teacher = ZmqTeacher(
        config.teacher.server_ip,
        config.teacher.server_port,
        k=config.teacher.topk,
        temperature=config.teacher.temperature,
        n_vocab=0,
        n_in_flight=1,
        request_timeout_s=TEACHER_HELLO_S / 4,
        outage_budget_s=min(TEACHER_HELLO_S, config.teacher.outage_budget_s),
    )
    try:
        return teacher.info()
    finally:
        teacher.close()


def check_teacher(config: Config, teacher: TeacherInfo, tokenizer: Any, student_vocab: int) -> int:
    """Do the two speak the same token ids, and is the teacher big enough? Returns the ids they share.

    `vocab_size` may differ (models pad their embedding differently around one tokenizer); the map
    token -> id may not, or every score would be about other words.
    """
    own = tokenizer_fingerprint(tokenizer.get_vocab())
    if teacher.tokenizer_fingerprint != own:
        raise ConfigError(
            "model.path",
            config.model.path,
            f"its tokenizer maps tokens to other ids than that of the teacher {teacher.model_path} "
            f"({own[:12]} against {teacher.tokenizer_fingerprint[:12]}).",
            "use a student and a teacher of one model family, or start the server with another --model.",
        )
    n_vocab = min(student_vocab, teacher.vocab_size)
    if config.teacher.topk > n_vocab:
        raise ConfigError(
            "teacher.topk",
            config.teacher.topk,
            f"student and teacher share only {n_vocab} token ids.",
            f"use at most {n_vocab}.",
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if longest > teacher.max_tokens:
        raise ConfigError(
            "data.max_response_length",
            config.data.max_response_length,
            f"prompt and response may have {longest} tokens together, and the teacher scores at most "
            f"{teacher.max_tokens}.",
            "lower data.max_prompt_length or data.max_response_length.",
        )
    return n_vocab


def _check_context(config: Config, model: dict[str, Any]) -> None:
    longest = config.data.max_prompt_length + config.data.max_response_length
    limit = model.get("max_position_embeddings")
    if isinstance(limit, int) and longest > limit:
        raise ConfigError(
            "data.max_response_length",
            config.data.max_response_length,
            f"with data.max_prompt_length {config.data.max_prompt_length} a sequence may have {longest} tokens; the "
            f"student was made for {limit} (max_position_embeddings).",
            "lower one of the two.",
        )
    heads = model.get("num_attention_heads")
    if isinstance(heads, int) and heads % config.rollout.tp:
        raise ConfigError(
            "rollout.tp", config.rollout.tp, f"it does not divide the student's {heads} attention heads.", "lower it."
        )

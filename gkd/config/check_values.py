"""What each setting may be by itself: choices, ranges, what has to be there. Pure."""

from __future__ import annotations

import dataclasses
from typing import get_args

from gkd.config.loss_spec import LOSS_NAMES
from gkd.config.schedulers import AHEAD, STREAM
from gkd.config.schema import Config
from gkd.errors import ConfigError
from teacher_server.wire.protocol import MAX_K, Signal

CHOICES = {
    "data.truncation": ("error", "drop", "left", "right"),
    "data.chat_template": ("auto", "always", "never"),
    "model.dtype": ("bfloat16", "float32"),
    "trainer.device": ("auto", "cuda", "cpu"),
    "trainer.scheduler": (*AHEAD, STREAM),
    "actor.strategy": ("megatron", "fsdp2"),
    "actor.recompute": ("none", "selective", "full"),
    "actor.loss_kernel": ("auto", "torch", "triton"),
    "actor.optim.schedule": ("constant", "linear", "cosine", "wsd"),
    "teacher.backend": ("zmq", "local"),
    "teacher.signal": get_args(Signal),
    "teacher.wire": ("fp16", "fp32"),
    "distill.loss": LOSS_NAMES,
    "distill.tail": ("bucket", "renorm", "drop"),
    "weight_sync.transport": ("auto", "nccl", "gloo"),
    "weight_sync.verify": ("always", "first", "never"),
    "eval.metric": ("exact_match", "none"),
}
POSITIVE = (
    "data.max_prompt_length",
    "data.max_response_length",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.total_epochs",
    "trainer.global_batch_size",
    "trainer.keep_last",
    "trainer.init_timeout_s",
    "trainer.stage_timeout_s",
    "actor.tp",
    "actor.pp",
    "actor.vpp",
    "actor.ep",
    "actor.lora.alpha",
    "actor.micro_batch_size",
    "actor.logits_chunk_mib",
    "actor.optim.lr",
    "actor.optim.eps",
    "rollout.n_gpus_per_node",
    "rollout.nnodes",
    "rollout.tp",
    "rollout.n",
    "rollout.temperature",
    "rollout.max_num_seqs",
    "rollout.cpu_kv_cache_mib",
    "weight_sync.bucket_mib",
    "weight_sync.timeout_s",
)
NOT_NEGATIVE = (
    "data.seed",
    "trainer.max_staleness",
    "trainer.total_steps",
    "trainer.save_every",
    "trainer.keep_every",
    "actor.max_tokens_per_micro_batch",
    "actor.optim.weight_decay",
    "actor.optim.clip_grad",
    "actor.optim.warmup_steps",
    "actor.optim.decay_steps",
    "actor.lora.rank",
    "eval.every",
    "eval.max_prompts",
    "eval.keep_token_losses",
    "teacher.update_interval",
    "distill.reference_kl_weight",
)
# What the teacher's client and its protocol demand.
BETWEEN: dict[str, tuple[float, float]] = {
    "teacher.server_port": (1, 65535),
    "teacher.n_server_workers": (0, 1 << 20),
    "teacher.topk": (1, MAX_K),
    "teacher.temperature": (1e-4, 1e4),
    "teacher.request_timeout_s": (1e-3, 4e4),
    "teacher.outage_budget_s": (1e-3, 1e6),
}
_MAX_NAME = 128  # characters of a teacher's name
SHARES = (
    "rollout.top_p",
    "rollout.gpu_memory_utilization",
    "actor.optim.min_lr_ratio",
    "distill.on_policy_share",
    "memory.fragmentation_warn",
)
_MAY_BE_ZERO = ("actor.optim.min_lr_ratio", "distill.on_policy_share", "memory.fragmentation_warn")  # of the shares


def check_ranges(config: Config) -> None:
    for key, choices in CHOICES.items():
        value = _value(config, key)
        if value not in choices:
            raise ConfigError(key, value, "it is not one of the choices.", f"use one of: {', '.join(choices)}.")
    for key in (*POSITIVE, *NOT_NEGATIVE):
        value = _value(config, key)
        assert isinstance(value, int | float)
        lowest_ok = value > 0 if key in POSITIVE else value >= 0
        if not lowest_ok:  # also true of NaN
            bound = "greater than 0" if key in POSITIVE else "0 or more"
            raise ConfigError(key, value, "it is out of range.", f"use a number {bound}.")
    for key, (lowest, highest) in BETWEEN.items():
        value = _value(config, key)
        assert isinstance(value, int | float)
        if not lowest <= value <= highest:
            raise ConfigError(key, value, "it is out of range.", f"use a number of {lowest:g} to {highest}.")
    if len(config.teacher.name) > _MAX_NAME:
        fix = f"use one of the server's names, of at most {_MAX_NAME} characters."
        raise ConfigError("teacher.name", config.teacher.name, "it is too long.", fix)
    for key in SHARES:
        value = _value(config, key)
        assert isinstance(value, float)
        if not 0.0 <= value <= 1.0 or (value == 0.0 and key not in _MAY_BE_ZERO):
            raise ConfigError(key, value, "it is out of range.", "use a share between 0 and 1.")
    if len(config.actor.optim.betas) != 2 or not all(0.0 <= b < 1.0 for b in config.actor.optim.betas):
        raise ConfigError(
            "actor.optim.betas", config.actor.optim.betas, "Adam takes two, each in [0, 1).", "write e.g. [0.9, 0.95]."
        )


def check_required(config: Config) -> None:
    if not config.data.train_files:
        raise ConfigError("data.train_files", [], "there is nothing to train on.", "name one or more prompt files.")
    if not config.model.path:
        raise ConfigError("model.path", "", "there is no student.", "give a folder in Hugging Face format.")
    if config.eval.metric == "exact_match" and not config.eval.answer_marker:
        raise ConfigError("eval.answer_marker", "", "exact_match needs one.", "set it, or eval.metric=none.")
    if not config.trainer.run_dir:
        raise ConfigError("trainer.run_dir", "", "a run needs a folder for what it writes.", "e.g. runs/my_run.")


def all_keys() -> set[str]:
    """Dotted names of every leaf key (for the tables above and their test)."""

    def walk(obj: object, prefix: str) -> set[str]:
        names: set[str] = set()
        for item in dataclasses.fields(obj):  # type: ignore[arg-type]
            value = getattr(obj, item.name)
            name = f"{prefix}{item.name}"
            names |= walk(value, f"{name}.") if dataclasses.is_dataclass(value) else {name}
        return names

    return walk(Config(), "")


def _value(config: Config, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value

"""Convert values of ROLL: batches, GPUs, losses and lengths, which depend on several of its settings."""

from __future__ import annotations

import math
from typing import Any

from gkd.config.old_names.row import Convert, NotConvertible, OldSettings
from gkd.config.old_names.values import as_list, choices, devices, never_is_zero, share_of_steps

_TRAIN, _INFER = ("student_train", "actor_train", "student"), ("student_infer", "actor_infer")
_PARALLEL = "strategy_args.strategy_config"


def train(names: str) -> str:
    """Return settings of the training role, separated by spaces, under each name of the role."""
    return " ".join(f"{role}.{name}" for name in names.split() for role in _TRAIN)


def infer(names: str) -> str:
    """Return settings of the generating role, separated by spaces, under each name of the role."""
    return " ".join(f"{role}.{name}" for name in names.split() for role in _INFER)


def _is_on_policy(old: OldSettings) -> bool:
    return any(old.has(f"{role}.*") for role in _INFER)


def on_policy(convert: Convert) -> Convert:
    """Return a conversion that applies to the on-policy pipeline only."""
    return lambda value, old: convert(value, old) if _is_on_policy(old) else None


def on_dataset(convert: Convert) -> Convert:
    """Return a conversion that applies to the pipeline on datasets only."""
    return lambda value, old: None if _is_on_policy(old) else convert(value, old)


def _gpus(text: Any, old: OldSettings) -> tuple[int, int]:
    """Return GPUs per node and nodes of a list of GPUs."""
    count, per_node = len(set(devices(text))), int(old("num_gpus_per_node", 8))
    return (count, 1) if count <= per_node else (per_node, count // per_node)


def actor_pool(value: Any, old: OldSettings) -> dict[str, Any]:
    each, nodes = _gpus(value, old)
    return {"trainer.n_gpus_per_node": each, "trainer.nnodes": nodes}


def engine_pool(value: Any, old: OldSettings) -> dict[str, Any]:
    each, nodes = _gpus(value, old)
    pool: dict[str, Any] = {"rollout.n_gpus_per_node": each, "rollout.nnodes": nodes}
    if not _shares_training_gpus(value, old):
        return pool
    if set(devices(old("student_train.device_mapping"))) == set(devices(value)):
        return pool | {"trainer.colocate": True}
    raise NotConvertible("part of the GPUs train and generate: use the same GPUs for both, or two pools.")


def _shares_training_gpus(value: Any, old: OldSettings) -> bool:
    gpus = old("student_train.device_mapping")
    return gpus is not None and not set(devices(gpus)).isdisjoint(devices(value))


def teacher_place(value: Any, old: OldSettings) -> dict[str, Any] | None:
    return {"teacher.backend": "local"} if _shares_training_gpus(value, old) else None


def teacher_path(value: Any, old: OldSettings) -> dict[str, Any] | None:
    gpus = old("teacher.device_mapping")
    return {"teacher.path": value} if gpus is not None and _shares_training_gpus(gpus, old) else None


def student_path(value: Any, old: OldSettings) -> dict[str, Any]:
    path = {"model.path": value}
    return path if _is_on_policy(old) else path | {"distill.on_policy_share": 0.0}


def strategy(value: Any, old: OldSettings) -> str:
    names = {"megatron_train": "megatron", "fsdp2_train": "fsdp2", "deepspeed_train": "fsdp2"}
    return str(choices(names, "choose megatron or fsdp2.")(value, old))


def _samples(old: OldSettings) -> int:
    """Return the sequences of one optimizer step: per device x accumulation x data-parallel size."""
    parallel = math.prod(
        int(old(f"student_train.{name}", 1))
        for name in (
            f"{_PARALLEL}.tensor_model_parallel_size",
            f"{_PARALLEL}.pipeline_model_parallel_size",
            f"{_PARALLEL}.context_parallel_size",
            "model_args.ulysses_size",
        )
    )
    gpus = old("student_train.device_mapping")
    dp = max(len(set(devices(gpus))) // parallel, 1) if gpus is not None else 1
    per_device = old("student_train.training_args.per_device_train_batch_size")
    return int(per_device) * int(old("student_train.training_args.gradient_accumulation_steps", 1)) * dp


def responses(old: OldSettings) -> int:
    return int(old("num_return_sequences_in_group", 1)) if _is_on_policy(old) else 1


def global_batch(value: Any, old: OldSettings) -> int:
    samples, n = _samples(old), responses(old)
    if samples % n:
        raise NotConvertible(f"{samples} responses are not whole prompts of {n} each; set trainer.global_batch_size.")
    return samples // n


def micro_and_global_batch(value: Any, old: OldSettings) -> dict[str, Any]:
    return {"actor.micro_batch_size": int(value), "trainer.global_batch_size": global_batch(value, old)}


def optimizer_steps(value: Any, old: OldSettings) -> int:
    """Return steps of the pipeline as optimizer steps."""
    if not _is_on_policy(old):
        return never_is_zero(value, old)
    rollout = int(old("rollout_batch_size")) * responses(old) * int(old("ppo_epochs", 1))
    return never_is_zero(value, old) * max(rollout // _samples(old), 1)


def opd_loss(value: Any, old: OldSettings) -> dict[str, Any] | None:
    if not _is_on_policy(old):
        return None
    weight = 1.0 if value is None else float(value)
    loss = {"distill.loss": "k1"} if weight == 1.0 else {"distill.losses": [{"name": "k1", "weight": weight}]}
    return loss | {"teacher.signal": "sampled"}


def kd_losses(value: Any, old: OldSettings) -> dict[str, Any]:
    names = {"forward_kl": "forward_kl", "reverse_kl": "reverse_kl", "js_divergence": "jsd"}
    names |= {"skewed_forward_kl": "skew_kl", "skewed_reverse_kl": "skew_reverse_kl"}
    name = choices(names, "the adaptive KL does not exist here; choose distill.loss, see docs/losses.md.")(
        old("kd_objective"), old
    )
    weight = float(old("distill_loss_weight"))
    terms = [{"name": name, "weight": weight}, {"name": "sft", "weight": round(1.0 - weight, 9)}]
    loss = {"distill.losses": [term for term in terms if term["weight"] > 0]} if weight < 1 else {"distill.loss": name}
    alpha = {"distill.alpha": float(old("skew_lambda", 0.1))} if name.startswith("skew") else {}
    return loss | alpha | {"distill.tail": "renorm"}


def teacher_temperature(value: Any, old: OldSettings) -> float:
    if float(value) != 1.0:
        raise NotConvertible("teacher.temperature divides the logits of both models; the teacher has none of its own.")
    return float(old("kd_temperature", 1.0))


def response_length(value: Any, old: OldSettings) -> int:
    return int(old("response_length") or int(old("sequence_length")) - int(old("prompt_length")))


def lengths(value: Any, old: OldSettings) -> dict[str, Any] | None:
    if _is_on_policy(old):
        return None if old("response_length") else {"data.max_response_length": response_length(value, old)}
    half = int(value) // 2
    return {"data.max_prompt_length": half, "data.max_response_length": int(value) - half}


def warmup(value: Any, old: OldSettings) -> int:
    if steps := int(old("student_train.training_args.warmup_steps", 0)):
        return steps
    ratio, total = float(old("student_train.training_args.warmup_ratio", 0.0)), old("max_steps")
    return share_of_steps(ratio, total and optimizer_steps(total, old), "actor.optim.warmup_steps")


def betas(value: Any, old: OldSettings) -> list[float]:
    beta1 = old("student_train.training_args.adam_beta1", 0.9)
    return [float(beta1), float(old("student_train.training_args.adam_beta2", 0.999))]


def files(value: Any, old: OldSettings) -> list[str]:
    return [str(file) for file in as_list(value, old)]


def only_vllm(value: Any, old: OldSettings) -> None:
    if value != "vllm":
        raise NotConvertible("vLLM is the only rollout engine; nothing to set.")


def token_budget(switch: str) -> Convert:
    return lambda value, old: int(value) if old(f"student_train.{switch}") else None


def resume(value: Any, old: OldSettings) -> str:
    if isinstance(value, bool):
        return "auto" if value else "never"
    raise NotConvertible("checkpoints of ROLL cannot be resumed here; start from the exported model as model.path.")


def recompute(value: Any, old: OldSettings) -> dict[str, Any] | None:
    chosen = old("student_train.strategy_args.strategy_config.recompute_granularity")
    return None if value or chosen else {"actor.recompute": "full"}


def with_lora(number: type[int] | type[float]) -> Convert:
    """Return a conversion that applies with lora_target only."""
    return lambda value, old: number(value) if old("student_train.model_args.lora_target") else None


def lora_targets(value: Any, old: OldSettings) -> dict[str, Any]:
    rank = {"actor.lora.rank": int(old("student_train.model_args.lora_rank", 8))}
    return rank if value in ("all", "all-linear") else rank | {"actor.lora.targets": as_list(value, old)}


def staleness(ratio: Any, old: OldSettings) -> dict[str, Any] | None:
    return {"trainer.scheduler": "stream", "trainer.max_staleness": math.ceil(float(ratio))} if ratio else None

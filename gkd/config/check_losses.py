"""Do schedule, teacher, losses and reference agree? Pure."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from gkd.config.derived import Derived
from gkd.config.schedulers import AHEAD, STREAM
from gkd.config.schema import Config, ReferenceConfig, TeacherConfig, TrainerConfig
from gkd.errors import ConfigError


def check_scheduler(config: Config, derived: Derived) -> None:
    trainer = config.trainer
    if trainer.scheduler != STREAM and trainer.max_staleness != TrainerConfig().max_staleness:
        raise ConfigError(
            "trainer.max_staleness",
            trainer.max_staleness,
            f"trainer.scheduler: {trainer.scheduler} has a bound of its own ({AHEAD[trainer.scheduler]}).",
            "leave it out, or set trainer.scheduler=stream.",
        )
    if config.trainer.scheduler == STREAM and not config.teacher.overlap_rollout:
        raise ConfigError(
            "teacher.overlap_rollout",
            False,
            "with trainer.scheduler: stream there is no end of a rollout that the teacher could wait for.",
            "set it to true, or choose another scheduler.",
        )


def check_signal(config: Config, derived: Derived) -> None:
    """Does the teacher say what the losses need?"""
    t, spec = config.teacher, derived.loss
    if t.signal == "sampled" and spec.divergences:
        names = ", ".join(term.name for term in spec.divergences)
        raise ConfigError(
            "teacher.signal",
            t.signal,
            f"{names} compares distributions, and this is one token's probability.",
            "use topk, hidden or logits; or k1, k2 or k3 as distill.loss.",
        )
    if t.mass > 0.0 and "topk" not in derived.signals:
        reason = (
            f"with teacher.signal {t.signal}" if t.signal != "topk" else f"for {', '.join(x.name for x in spec.terms)}"
        )
        raise ConfigError("teacher.mass", t.mass, f"{reason} there is no list to cut.", "use 0.")


# Of the teacher server; teacher.wire, request_timeout_s and outage_budget_s are not among them, because shared files
# of settings have them and they change nothing.
_OF_SERVER = ("server_ip", "server_port", "name", "keys", "n_server_workers", "overlap_rollout")
_OF_LOCAL = ("path", "fsdp_cpu_offload", "update_interval", "update_ema")


def check_backend(config: Config, derived: Derived) -> None:
    """Is what is said of the teacher about the kind of teacher that there is?"""
    teacher, default, is_local = config.teacher, TeacherConfig(), derived.is_local_teacher
    for name in _OF_SERVER if is_local else _OF_LOCAL:
        value = getattr(teacher, name)
        if value != getattr(default, name):
            other = "zmq" if is_local else "local"
            problem = f"teacher.backend is {teacher.backend}, and this is a setting of {other}."
            raise ConfigError(f"teacher.{name}", value, problem, f"leave it out, or set teacher.backend={other}.")
    if not is_local:
        return
    if not teacher.path:
        raise ConfigError(
            "teacher.path", "", "teacher.backend is local, and there is no teacher.", "give a folder, or use zmq."
        )
    if config.trainer.scheduler != "sync" and not config.trainer.replay:
        raise ConfigError(
            "trainer.scheduler",
            config.trainer.scheduler,
            "teacher.backend is local: training and scoring share the actor's ranks, so nothing can be scored beside a "
            "training step, and two threads' calls could reach the ranks in different orders.",
            "use sync, or teacher.backend=zmq.",
        )
    if teacher.update_ema > 0.0 and not teacher.update_interval:
        problem = "teacher.update_interval is 0, so there is no refresh to average at."
        raise ConfigError("teacher.update_ema", teacher.update_ema, problem, "use 0, or set teacher.update_interval.")


def check_mixture(config: Config, derived: Derived) -> None:
    """Does every loss see tokens to learn from, in every step where it is alone?"""
    spec, share = derived.loss, config.distill.on_policy_share
    n_prompts = config.trainer.global_batch_size
    if spec.sft is not None and share == 1.0:
        raise ConfigError(
            "distill.on_policy_share",
            share,
            "sft is among the losses, and there would be no dataset response to learn from.",
            "use a share below 1, or leave sft out.",
        )
    if spec.policy_gradients and share == 0.0:
        names = ", ".join(term.name for term in spec.policy_gradients)
        raise ConfigError(
            "distill.on_policy_share",
            share,
            f"{names} learns from tokens that the student wrote, and there would be none.",
            "use a share above 0, or leave it out.",
        )
    # A step without a token to learn from would still move the weights: by momentum and weight decay.
    only_student, only_dataset = len(spec.policy_gradients) == len(spec.terms), spec.terms == (spec.sft,)
    exact = Fraction(repr(share))  # as written, and as `gkd.data.mixing` counts
    each_step = exact * n_prompts if only_student else (1 - exact) * n_prompts if only_dataset else 1
    if each_step < 1:
        kind = "student" if only_student else "dataset"
        raise ConfigError(
            "distill.on_policy_share",
            share,
            f"of trainer.global_batch_size {n_prompts} prompts less than one a step would be answered by the {kind}, "
            "and the losses learn from nothing else.",
            "change the share, use larger batches, or add a loss that compares distributions.",
        )


def check_reference(config: Config, derived: Derived) -> None:
    """Is there something to hold to the reference, if anything is said of one?"""
    weight, share = config.distill.reference_kl_weight, config.distill.on_policy_share
    for item in dataclasses.fields(ReferenceConfig):
        value = getattr(config.reference, item.name)
        if not weight and value != item.default:
            problem = "distill.reference_kl_weight is 0, so there is no reference."
            raise ConfigError(f"reference.{item.name}", value, problem, "leave it out, or set the weight.")
    if derived.reference_is_actor and not config.reference.fsdp_cpu_offload:
        problem = "with actor.lora the reference is the actor without its adapters, which has no shards of its own."
        raise ConfigError("reference.fsdp_cpu_offload", False, problem, "leave it out, or name a reference.path.")
    if weight and share == 0.0:
        problem = (
            "distill.on_policy_share is 0: it is estimated from tokens that the student wrote, and there are none."
        )
        raise ConfigError("distill.reference_kl_weight", weight, problem, "use 0, or a share above 0.")

"""Which roles the settings put on the same GPUs, what moves away there, and whether they can share. Pure."""

from __future__ import annotations

from gkd.config.schema import Config
from gkd.errors import ConfigError


def gpus_wanted(config: Config) -> int:
    """By both pools together, on all nodes."""
    t, r = config.trainer, config.rollout
    own = t.n_gpus_per_node * t.nnodes
    return own if t.colocate else own + r.n_gpus_per_node * r.nnodes


def reference_is_actor(config: Config) -> bool:
    """Does the actor score as the reference, with its adapters disabled?"""
    wanted = config.distill.reference_kl_weight > 0
    return wanted and config.actor.lora.rank > 0 and not config.reference.path


def reference_folder(config: Config) -> str:
    """Of the model that the actor's ranks hold as a reference; empty: there is none beside the actor."""
    if config.distill.reference_kl_weight == 0 or reference_is_actor(config):
        return ""
    return config.reference.path or config.model.path


def moves_states(config: Config) -> bool:
    """Do the actor's states go to the host after each call?

    Beside a local teacher or a reference whose shards stay on the GPU they do, too: so it has room for its forward
    pass. What `fsdp_cpu_offload` has on the host already does not move; under `colocate` the allocator's cache goes all
    the same.
    """
    teacher_stays = config.teacher.backend == "local" and not config.teacher.fsdp_cpu_offload
    reference_stays = bool(reference_folder(config)) and not config.reference.fsdp_cpu_offload
    wanted = config.actor.offload_train or teacher_stays or reference_stays
    return config.trainer.colocate or (wanted and not config.actor.fsdp_cpu_offload)


def check_sharing(config: Config) -> None:
    """Raises ConfigError: what shares GPUs has to have the same ones, and to take turns on them."""
    t, r = config.trainer, config.rollout
    if not t.colocate:
        return
    for name, own, other in (("n_gpus_per_node", r.n_gpus_per_node, t.n_gpus_per_node), ("nnodes", r.nnodes, t.nnodes)):
        if own != other:
            raise ConfigError(
                f"rollout.{name}",
                own,
                f"with trainer.colocate the engines are on the actor's GPUs, and trainer.{name} is {other}.",
                f"use {other}, or trainer.colocate=false.",
            )
    if t.scheduler != "sync":
        problem = "trainer.colocate lets actor and engines take turns, and this scheduler has both work at once."
        raise ConfigError("trainer.scheduler", t.scheduler, problem, "use sync, or trainer.colocate=false.")
    if config.teacher.backend == "local" and not config.teacher.fsdp_cpu_offload:
        problem = "with trainer.colocate the engines need the GPUs to themselves, and the teacher's shards would stay."
        raise ConfigError("teacher.fsdp_cpu_offload", False, problem, "use true, or trainer.colocate=false.")
    if reference_folder(config) and not config.reference.fsdp_cpu_offload:
        problem = (
            "with trainer.colocate the engines need the GPUs to themselves, and the reference's shards would stay."
        )
        raise ConfigError("reference.fsdp_cpu_offload", False, problem, "use true, or trainer.colocate=false.")
    if config.weight_sync.transport == "nccl":
        problem = "with trainer.colocate two members of its groups are on one GPU, which NCCL does not do."
        raise ConfigError("weight_sync.transport", "nccl", problem, "use auto or gloo, or trainer.colocate=false.")

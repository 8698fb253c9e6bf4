"""Can actor and engines share their GPUs as `trainer.colocate` asks? Pure; a part of `gkd.config_check`."""

from __future__ import annotations

from gkd.config import Config
from gkd.errors import ConfigError


def gpus_wanted(config: Config) -> int:
    """By both pools together, on all nodes."""
    t, r = config.trainer, config.rollout
    own = t.n_gpus_per_node * t.nnodes
    return own if t.colocate else own + r.n_gpus_per_node * r.nnodes


def moves_states(config: Config) -> bool:
    """Do the actor's states go to the host after each call?

    Beside a local teacher whose shards stay on the GPU they do, too: so it has room for its forward pass. What
    `fsdp_cpu_offload` has on the host already does not move; under `colocate` the allocator's cache goes all the same.
    """
    teacher_stays = config.teacher.backend == "local" and not config.teacher.fsdp_cpu_offload
    wanted = config.actor.offload_train or teacher_stays
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
    if config.weight_sync.transport == "nccl":
        problem = "with trainer.colocate two members of its groups are on one GPU, which NCCL does not do."
        raise ConfigError("weight_sync.transport", "nccl", problem, "use auto or gloo, or trainer.colocate=false.")

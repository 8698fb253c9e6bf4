"""Estimate the memory of every rank before any process starts, and compare it with the GPUs of this host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from gkd.cluster.gpus import machine_gpus, visible_gpus
from gkd.config.schema import ClusterConfig, Config
from gkd.errors import ConfigError, ModelError
from gkd.footprint import RankFootprint, check
from gkd.footprint.estimate import read_models
from gkd.footprint.limits import gib, state_fits
from gkd.footprint.report import footprint_table, kv_line, shared_phases_table, totals_line
from gkd.footprint.rollout import with_engine_cache
from gkd.log import get_logger

log = get_logger("preflight")


def check_memory(config: Config, device: str, teacher_hidden: int | None) -> None:
    """Log the estimate, and warn of shortages on CUDA.

    A shortage is a warning, because the worst case (every sequence of full length) is rare. It is an error if weights,
    gradients and optimizer state alone do not fit.

    Args:
        device: "cpu" | "cuda"; on the CPU only totals are logged.
        teacher_hidden: hidden size of the teacher, if it sends hidden states.

    Raises:
        ConfigError: naming trainer.n_gpus_per_node: the actor's state does not fit on its GPUs.
    """
    config = replace(config, trainer=replace(config.trainer, device=device))
    try:
        models = read_models(config)
        refit = partial(models.footprint, teacher_hidden=teacher_hidden)
        found: Sequence[RankFootprint] = refit(config)
    except ModelError as error:  # fsdp2 accepts models that name their sizes otherwise
        log.warning("cannot estimate memory: %s", error)
        return
    if device == "cpu":
        log.info("estimated memory per rank (without libraries): %s", totals_line(found))
        return
    gpu_bytes = smallest_gpu(config.cluster)
    found = with_engine_cache(found, gpu_bytes, config)
    log.info("estimated memory per rank:\n%s", footprint_table(found, gpu_bytes))
    log.info(kv_line(found, models.student.dims, gpu_bytes, config))
    if config.trainer.colocate:
        log.info(shared_phases_table(found, gpu_bytes, config))
    if gpu_bytes is None:
        address = config.cluster.ray_address
        reason = f"the GPUs are those of the Ray cluster at {address}" if address else "the driver does not report it"
        log.info("GPU memory size is unknown on this host (%s): compare the totals with it yourself", reason)
        return
    _refuse_state(found, gpu_bytes, config)
    for problem in check(found, gpu_bytes, config, refit):
        log.warning("memory: %s", problem)


def smallest_gpu(cluster: ClusterConfig) -> int | None:
    """Return the bytes of the GPU with the least memory among those that the pools may use; None: unknown.

    The GPUs of a Ray cluster are on other hosts, and may differ from this host's. The ids in cluster.gpus are
    nvidia-smi's; torch may count in another order.
    """
    if cluster.ray_address:
        return None
    if cluster.gpus:
        gpus = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), machine_gpus())
        found = [gpu.memory_total_mib for gpu in gpus if gpu.id in map(str, cluster.gpus)]
        known = [mib << 20 for mib in found if mib]
        return min(known) if len(known) == len(cluster.gpus) else None
    import torch

    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return min(sizes, default=None)


def _refuse_state(found: Sequence[RankFootprint], gpu_bytes: int, config: Config) -> None:
    for part in found:
        if part.role == "actor" and not state_fits(part, gpu_bytes):
            spread = "actor.tp, actor.pp or more GPUs" if config.actor.strategy == "megatron" else "more GPUs"
            raise ConfigError(
                "trainer.n_gpus_per_node",
                config.trainer.n_gpus_per_node,
                f"weights, gradients and optimizer state of actor rank {part.rank} need {gib(part.state_bytes)}, a GPU "
                f"has {gib(gpu_bytes)}.",
                f"spread them over {spread}, use actor.strategy=fsdp2 with actor.fsdp_cpu_offload=true, or, if only "
                "some GPUs are that small, name the others in cluster.gpus.",
            )

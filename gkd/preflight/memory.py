"""Estimate the memory of every rank before any process starts, and compare it with the GPUs of this host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from gkd.cluster.gpu_table import GpuInfo
from gkd.cluster.gpus import machine_gpus, visible_gpus
from gkd.cluster.host import host_memory_bytes
from gkd.config.schema import Config
from gkd.config.schema_sections import ClusterConfig
from gkd.errors import ModelError
from gkd.log import get_logger
from gkd.memory.footprint import RankFootprint
from gkd.memory.footprint.combination import OFFLOAD, Case, Combination
from gkd.memory.footprint.estimate import pool_totals, read_models
from gkd.memory.footprint.limits import gib, state_fits
from gkd.memory.footprint.report import (
    combination_lines,
    footprint_table,
    kv_line,
    margin_line,
    shared_phases_table,
    totals_line,
    totals_lines,
)

log = get_logger("preflight")

_IDLE_MIB = 1024  # an unused GPU has less memory than this allocated, by its driver


def check_memory(config: Config, device: str, teacher_hidden: int | None, scores_gib: float = 0.0) -> Config:
    """Log the estimate, and warn of shortages on CUDA, with the changes that make the run fit.

    A shortage is a warning, because the worst case (every sequence of full length) is rare. It is an error if weights,
    gradients and optimizer state alone do not fit.

    Args:
        device: "cpu" | "cuda"; on the CPU only totals are logged.
        teacher_hidden: hidden size of the teacher, if it sends hidden states.
        scores_gib: host memory of the teacher's scores.

    Returns:
        The settings with memory.strategy `auto` and rollout.max_num_seqs 0 replaced by what fits.

    Raises:
        ConfigError: naming trainer.n_gpus_per_node: the actor's state does not fit on its GPUs.
    """
    config = replace(config, trainer=replace(config.trainer, device=device))
    try:
        gpu_bytes = None if device == "cpu" else smallest_gpu(config.cluster)
        case = Case(
            config,
            read_models(config),
            gpu_bytes,
            host_memory_bytes(),
            scores_gib=lambda changed: scores_gib,
            teacher_hidden=teacher_hidden,
            in_use=memory_in_use(config) if device == "cuda" else 0,
        ).settled()
        found = case.footprints()
    except ModelError as error:  # fsdp2 accepts models that name their sizes otherwise
        log.warning("cannot estimate memory: %s", error)
        strategy = OFFLOAD if config.memory.strategy == "auto" else config.memory.strategy
        return replace(config, memory=replace(config.memory, strategy=strategy))
    config, dims = case.config, case.models.student.dims
    if device == "cpu":
        log.info("estimated memory per rank (without libraries): %s", totals_line(found))
        return config
    if case.choice:
        log.info("%s", case.choice)
    log.info("estimated memory per rank:\n%s", footprint_table(found, gpu_bytes))
    log.info(kv_line(found, dims, gpu_bytes, config))
    if config.trainer.colocate:
        log.info(shared_phases_table(found, gpu_bytes, config))
    if gpu_bytes is None:
        address = config.cluster.ray_address
        reason = f"the GPUs are those of the Ray cluster at {address}" if address else "the driver does not report it"
        log.info("GPU memory size is unknown on this host (%s): compare the totals with it yourself", reason)
        return config

    for line in totals_lines(pool_totals(found, gpu_bytes, config), case.hosts(config, found), case.host_bytes):
        log.info("%s", line)
    problems = case.problems()
    if not problems:
        log.info("%s", margin_line(found, gpu_bytes, config))
        return config
    combination = case.combination(gpu_bytes)
    _refuse_state(found, gpu_bytes, config, combination)
    for problem in problems:
        log.warning("memory: %s", problem)
    log.warning("%s", "\n".join(combination_lines(combination)))
    return config


def smallest_gpu(cluster: ClusterConfig) -> int | None:
    """Return the bytes of the GPU with the least memory that the pools may use, or None if it is unknown.

    The GPUs of a Ray cluster are on other hosts, and may differ from this host's. The ids in cluster.gpus are
    nvidia-smi's; torch may count in another order.
    """
    if cluster.ray_address:
        return None
    if cluster.gpus:
        known = [gpu.memory_total_mib << 20 for gpu in _pool_gpus(cluster) if gpu.memory_total_mib]
        return min(known) if len(known) == len(cluster.gpus) else None
    import torch

    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return min(sizes, default=None)


def _pool_gpus(cluster: ClusterConfig) -> list[GpuInfo]:
    """Return the GPUs of this host that the pools may use."""
    gpus = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), machine_gpus())
    return [gpu for gpu in gpus if not cluster.gpus or gpu.id in map(str, cluster.gpus)]


def memory_in_use(config: Config) -> int:
    """Return the bytes of the fullest GPU of the pools that processes have before the pools start; 0: none, or unknown.

    It is the memory of a teacher server, or of another job. What the driver reserves does not count.
    """
    if config.cluster.ray_address:
        return 0
    used = [
        gpu.memory_total_mib - gpu.memory_free_mib
        for gpu in _pool_gpus(config.cluster)[: config.derived.n_gpus]
        if gpu.memory_total_mib is not None and gpu.memory_free_mib is not None
    ]
    most = max(used, default=0)
    return most << 20 if most > _IDLE_MIB else 0


def _refuse_state(found: Sequence[RankFootprint], gpu_bytes: int, config: Config, combination: Combination) -> None:
    fix = "use more GPUs, or larger ones"
    if combination.fits or combination.more_gpus:
        fix = f"use {' '.join(combination.overrides)}"
    for part in found:
        if part.role == "actor" and not state_fits(part, gpu_bytes):
            problem = (
                f"weights, gradients and optimizer state of actor rank {part.rank} need {gib(part.state_bytes)}, a GPU "
                f"has {gib(gpu_bytes)}."
            )
            fix = f"{fix}; or, if only some GPUs are that small, name the others in cluster.gpus."
            raise config.error("trainer.n_gpus_per_node", problem, fix)

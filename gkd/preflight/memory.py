"""Predict the memory of every rank before any process starts, and compare it with the GPUs of this host."""

from __future__ import annotations

import os
from dataclasses import replace

from gkd.cluster.gpus import machine_gpus, visible_gpus
from gkd.cluster.host import host_memory_bytes
from gkd.config.schema import Config
from gkd.config.schema_sections import ClusterConfig
from gkd.errors import ModelError
from gkd.log import get_logger
from gkd.memory.footprint.estimate import STATES, read_models
from gkd.memory.footprint.fit import Case, gib, remedy_lines, table
from gkd.memory.remedies import overrides

log = get_logger("preflight")
# What a run cannot start without, by role, and the key that spreads it over more GPUs.
_SURE = {"actor": (STATES, "trainer.n_gpus_per_node"), "rollout": (("weights",), "rollout.tp")}


def check_memory(config: Config, device: str, teacher_hidden: int | None, scores_gib: float = 0.0) -> Config:
    """Log the prediction, and warn of shortages on CUDA, with the changes that make the run fit.

    A shortage is a warning, because the worst case (every sequence of full length) is rare.

    Args:
        device: "cpu" | "cuda"; on the CPU the prediction is compared with nothing.
        teacher_hidden: hidden size of the teacher, if it sends hidden states.
        scores_gib: host memory of the teacher's scores.

    Returns:
        The settings with memory.strategy `auto` and rollout.max_num_seqs 0 replaced by what fits.

    Raises:
        ConfigError: naming trainer.n_gpus_per_node or rollout.tp: the states do not fit on a GPU.
    """
    config = replace(config, trainer=replace(config.trainer, device=device))
    gpu_bytes = None if device == "cpu" else smallest_gpu(config.cluster)
    host_limit = None if device == "cpu" else host_memory_bytes()
    try:
        case = Case(config, read_models(config, teacher_hidden), gpu_bytes, host_limit, scores_gib).settled()
        log.info("predicted memory:\n%s", table(case))
    except ModelError as error:  # fsdp2 accepts models that name their sizes otherwise
        log.warning("cannot predict memory: %s", error)
        strategy = "offload" if config.memory.strategy == "auto" else config.memory.strategy
        return config.with_values({"memory.strategy": strategy})
    if gpu_bytes is not None and (problems := case.problems()):
        _refuse(case, gpu_bytes)
        log.warning("%s", "\n".join([*problems, *remedy_lines(case, "")]))
    return case.config


def smallest_gpu(cluster: ClusterConfig) -> int | None:
    """Return the bytes of the GPU with the least memory that the pools may use, or None if it is unknown."""
    if cluster.ray_address:  # its GPUs are on other hosts
        return None
    if cluster.gpus:  # ids of nvidia-smi; torch may count in another order
        gpus = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), machine_gpus())
        sizes = [(gpu.memory_total_mib or 0) << 20 for gpu in gpus if gpu.id in map(str, cluster.gpus)]
        return min(sizes, default=0) or None
    import torch

    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return min(sizes, default=None)


def _refuse(case: Case, gpu_bytes: int) -> None:
    """Raise ConfigError if parts that are always on a GPU are larger than it."""
    for part in case.footprints():
        names, key = _SURE[part.role]
        if (size := part.sum_of(names)) > gpu_bytes:
            problem = f"{' and '.join(names)} of {part.name} need {gib(size)}, and a GPU has {gib(gpu_bytes)}."
            changes, result = case.fitting()
            fix = "use more GPUs, or larger ones." if result.problems() else f"use {' '.join(overrides(changes))}"
            raise case.config.error(key, problem, fix)

"""Resolve trainer.device, and check that this machine has the GPUs of the config."""

from __future__ import annotations

import os

from gkd.config.schema import Config, has_expandable_segments
from gkd.config.schema_rollout import IPC, NCCL
from gkd.errors import ConfigError
from teacher_server.wire.nvidia_smi import visible_ids


def resolve_device(config: Config) -> str:
    """Return "cpu" or "cuda" for trainer.device. Raises ConfigError if this machine lacks the device or GPUs."""
    import torch

    wanted, n_gpus = config.trainer.device, torch.cuda.device_count()
    if config.cluster.ray_address:
        if wanted == "auto":
            problem = "the GPUs of cluster.ray_address are unknown here."
            raise config.error("trainer.device", problem, "use cuda or cpu.")
        if wanted == "cuda":
            _check_adapter_dtype(config)
        return wanted
    device = wanted if wanted != "auto" else "cuda" if n_gpus else "cpu"
    if device == "cpu" and n_gpus:
        problem = "this environment has the CUDA builds of torch and vLLM, and they see GPUs."
        fix = "use cuda, or make another environment: GKD_VENV=.venv-cpu bash launch/setup.sh --extra cpu."
        raise config.error("trainer.device", problem, fix)
    n_wanted = config.derived.n_gpus
    if device == "cuda" and not n_gpus:
        problem = "torch sees no GPU here."
        fix = "use cpu, or check nvidia-smi, CUDA_VISIBLE_DEVICES and that this environment has a CUDA build of torch."
        raise config.error("trainer.device", problem, fix)
    if device == "cuda" and n_gpus < n_wanted:
        problem = (
            f"with trainer.n_gpus_per_node {config.trainer.n_gpus_per_node} the pools need {n_wanted} GPUs, and torch "
            f"sees {n_gpus} here."
        )
        fix = "use smaller pools, or a larger cluster in cluster.ray_address."
        raise config.error("rollout.n_gpus_per_node", problem, fix)
    _check_transport(config.weight_sync.transport, device)
    if device == "cuda":
        _check_adapter_dtype(config)
        # On the CPU they are logical, so any number is valid.
        _check_gpus_are_here(config.cluster.gpus, n_gpus)
    return device


def _check_transport(transport: str, device: str) -> None:
    if device == "cpu" and transport in (NCCL, IPC):
        raise ConfigError("weight_sync.transport", transport, "there is no GPU here.", "use auto or gloo.")
    if transport == IPC and has_expandable_segments(os.environ):
        problem = "the environment asks torch for expandable segments, which other processes may be unable to open."
        fix = "take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or use auto or gloo."
        raise ConfigError("weight_sync.transport", transport, problem, fix)


def _check_adapter_dtype(config: Config) -> None:
    """Raise ConfigError if vLLM's LoRA kernels for GPUs do not support the dtype of the engines' adapters."""
    if config.model.dtype == "float32" and config.weight_sync.lora == "adapters":
        problem = "vLLM's LoRA kernels on GPUs compute in 16 bits, and model.dtype is float32."
        raise config.error("weight_sync.lora", problem, "use merged, or model.dtype=bfloat16.")


def _check_gpus_are_here(gpus: list[int], n_gpus: int) -> None:
    """Raise ConfigError if cluster.gpus names a GPU that is not on this machine or not in CUDA_VISIBLE_DEVICES.

    Args:
        n_gpus: GPUs that torch sees.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    have = visible_ids(visible) if visible is not None else tuple(map(str, range(n_gpus)))
    missing = [gpu for gpu in gpus if str(gpu) not in have]
    if missing:
        what = "this machine has" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} shows"
        raise ConfigError(
            "cluster.gpus",
            gpus,
            f"{what} no {', '.join(map(str, missing))}.",
            "name existing GPUs" + (", or unset CUDA_VISIBLE_DEVICES." if visible is not None else "."),
        )

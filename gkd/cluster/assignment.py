"""Report the GPU placement of the calling process: its host, pid and visible GPUs."""

from __future__ import annotations

import os
import socket
import sys

import ray

from gkd.cluster.gpu_table import RankPlacement
from gkd.cluster.gpus import machine_gpus, visible_gpus
from gkd.cluster.host import process_info


def this_placement(pool: str, rank: int, *, ask_driver: bool = False) -> RankPlacement:
    """Return the placement of the calling process without creating a CUDA context.

    Args:
        ask_driver: query the driver for details of the GPUs. Takes about a second, and at most 20 s.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible_gpus(visible, machine_gpus() if ask_driver else ())
    process = process_info(os.getpid())
    context = ray.get_runtime_context() if ray.is_initialized() else None
    ids = _ray_gpu_ids()
    return RankPlacement(
        pool=pool,
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        cuda_visible_devices=visible,
        node=str(context.get_node_id()) if context is not None else "",
        started=process.started if process is not None else None,
        ray_gpu_ids=tuple(ids) if ids is not None else None,
        current_device=_current_device() if ask_driver and gpus else None,
        gpus=gpus,
    )


def sort_visible_gpus() -> None:
    """Sort CUDA_VISIBLE_DEVICES, so that cuda:0, cuda:1, ... of this process are its GPUs in ascending order.

    Ray 2.60 writes the variable from a set. The order differs from process to process if Ray itself was started with
    the variable. A value that names other GPUs than Ray assigned is not changed; the GPU map reports it.
    """
    ids, visible = _ray_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if ids and visible is not None and sorted(visible.split(",")) == sorted(ids):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)


def _ray_gpu_ids() -> list[str] | None:
    """Return the ids that Ray assigned to this process, ascending; None outside of Ray."""
    if not ray.is_initialized():
        return None
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
    return sorted(ids, key=lambda gpu: (int(gpu) if gpu.isdecimal() else 0, gpu))


def _current_device() -> int:
    """Return the default CUDA device of this process; 0 before CUDA is initialized."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0

"""Which rank sits on which GPU: what one process can say about itself."""

from __future__ import annotations

import os
import socket
import sys

import ray

from gkd.cluster.gpu_table import RankPlace
from gkd.cluster.gpus import machine_cards, visible_cards
from gkd.cluster.processes import look_at


def this_place(pool: str, rank: int, *, ask_driver: bool = False) -> RankPlace:
    """The calling process's own place; makes no CUDA context.

    Args:
        ask_driver: for what the driver knows of the GPUs; takes a second or so, 20 s at the worst.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = visible_cards(visible, machine_cards() if ask_driver else ())
    process = look_at(os.getpid())
    context = ray.get_runtime_context() if ray.is_initialized() else None
    ids = _ray_gpu_ids()
    return RankPlace(
        pool=pool,
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        cuda_visible_devices=visible,
        node=str(context.get_node_id()) if context is not None else "",
        started=process.started if process is not None else None,
        ray_gpu_ids=tuple(ids) if ids is not None else None,
        current_device=_current_device() if ask_driver and cards else None,
        cards=cards,
    )


def sort_visible_gpus() -> None:
    """Makes cuda:0, cuda:1, ... of this process the GPUs that Ray gave it, lowest first, at every start.

    Ray 2.60 writes CUDA_VISIBLE_DEVICES from a set, whose order differs from process to process where Ray itself was
    started with the variable. One that names other GPUs than Ray gave is left for the table to show.
    """
    ids, visible = _ray_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if ids and visible is not None and sorted(visible.split(",")) == sorted(ids):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)


def _ray_gpu_ids() -> list[str] | None:
    """What Ray gave this process, ascending; None: it is not Ray's."""
    if not ray.is_initialized():
        return None
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
    return sorted(ids, key=lambda gpu: (int(gpu) if gpu.isdecimal() else 0, gpu))


def _current_device() -> int:
    """Where this process's CUDA calls go unless told otherwise: 0 until it has begun to use CUDA."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0


def free_port(host: str = "") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])

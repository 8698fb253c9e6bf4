"""The transports of the weight sync, and which one a run has (`weight_sync.transport`). No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gkd.config.schema import Config
from gkd.memory.advice import has_expandable_segments

GLOO, NCCL, SHARED_MEMORY, IPC, AUTO = "gloo", "nccl", "shared_memory", "ipc", "auto"


def transport_of(config: Config, device: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return how the bytes of a run travel; AUTO: the members of a group choose, by their hosts.

    Args:
        device: "cpu" | "cuda".
        environ: of the trainer; its ranks have the same.
    """
    wanted = config.weight_sync.transport
    if wanted != AUTO:
        return wanted
    if device != "cuda":
        return AUTO
    if not config.trainer.colocate:
        return NCCL
    # NCCL needs a GPU for each member. With pipeline stages no card has all tensors. Not every version of torch shares
    # expandable segments with other processes.
    return GLOO if config.actor.pp > 1 or has_expandable_segments(environ) else IPC

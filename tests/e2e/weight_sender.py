"""The actor's side of weight syncs with one real engine, in threads of the engine's process."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from gkd.weight_sync.buckets import TensorSpec, layout, plan_buckets
from gkd.weight_sync.group import GroupSpec, TransferGroup
from gkd.weight_sync.segment import Segment
from gkd.weight_sync.transfer import send


class WeightSender:
    """Rank 0 of a weight-sync group with all workers of `engine`; the constructor joins it.

    Args:
        transport: see `GroupSpec`.
    """

    def __init__(self, engine: Any, n_workers: int = 1, *, transport: str = "gloo") -> None:
        self._engine = engine
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

        def spec(rank: int) -> GroupSpec:
            return GroupSpec(transport, "127.0.0.1", store.port, rank, 1 + n_workers, 60.0, 60.0)

        with ThreadPoolExecutor(1) as thread:
            joined = thread.submit(TransferGroup, spec(0), torch.device("cpu"), store)
            engine.join_groups([spec(1)])
            self._group = joined.result()

    def push(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: int,
        *,
        bucket_bytes: int = 1 << 20,
        **receive: Any,
    ) -> tuple[dict[str, str], int]:
        """Sync the engine's weights. Return (digests of what was sent, bytes); raises the engine's error.

        Args:
            receive: further arguments of `RolloutEngine.receive`.
        """
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
        specs = [TensorSpec(name, tuple(tensor.shape), dtypes[name]) for name, tensor in tensors.items()]
        buckets = plan_buckets(specs, bucket_bytes)
        kept = Segment(layout(buckets)[1]) if self._group.shares_memory else None
        with ThreadPoolExecutor(1) as thread:
            sent = thread.submit(send, self._group, buckets, tensors.items(), with_digests=True, kept=kept)
            n_bytes = self._engine.receive([buckets], version, **receive)
        return sent.result(), n_bytes

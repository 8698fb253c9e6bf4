"""Receive weights in a session of vLLM's weight transfer (`weight_sync.transport: vllm`).

vLLM's part: the registry of transfer engines, the session of its worker (start, update, finish), and the layerwise
reload, which rebuilds each layer and repeats what vLLM does with loaded weights, for example quantizing or reordering
them. Our part: the bytes. The transfer engines of vLLM 0.32 carry them with CUDA (NCCL, CUDA IPC, RDMA), so none works
on a CPU, and none has checksums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import WeightTransferConfig, set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from gkd.weight_sync.buckets import Bucket
from gkd.weight_sync.group import TransferGroup
from gkd.weight_sync.transfer import receive

_NAME = "gkd_buckets"


@dataclass
class BucketInit(WeightTransferInitInfo):
    """One group for each sender."""

    groups: list[TransferGroup]


@dataclass
class BucketUpdate(WeightTransferUpdateInfo):
    """All weights: one plan for each sender. `loads` is called with the tensors of each bucket and the loaded names."""

    plans: list[list[Bucket]]
    loads: Callable[[list[tuple[str, torch.Tensor]], set[str]], None]
    n_bytes: list[int] = field(default_factory=list)


class BucketTransferEngine(WeightTransferEngine[BucketInit, BucketUpdate]):
    """A transfer engine of vLLM whose bytes travel as `gkd.weight_sync.transfer` sends them."""

    init_info_cls, update_info_cls = BucketInit, BucketUpdate
    groups: list[TransferGroup]

    def init_transfer_engine(self, init_info: BucketInit) -> None:
        self.groups = init_info.groups

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # the method of the base class does not work without an accelerator
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketUpdate) -> None:
        for group, buckets in zip(self.groups, update_info.plans, strict=True):

            def load(tensors: list[tuple[str, torch.Tensor]], in_place: bool = group.shares_memory) -> None:
                # The reload keeps the tensors of a layer until it has all of them.
                kept = tensors if in_place else [(name, tensor.clone()) for name, tensor in tensors]
                update_info.loads(tensors, self.model.load_weights(kept))

            update_info.n_bytes.append(receive(group, buckets, load))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: the worker closes its groups when it joins others."""


def open_sessions(worker: Any, groups: list[TransferGroup]) -> None:
    """Let a vLLM worker receive over these groups in its own sessions."""
    if worker.weight_transfer_engine is None:
        if _NAME not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(_NAME, BucketTransferEngine)
        worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=_NAME), worker.vllm_config, worker.device, worker.model_runner.get_model()
        )
    worker.init_weight_transfer_engine({"groups": groups})


def receive_in_session(
    worker: Any, plans: list[list[Bucket]], loads: Callable[[list[tuple[str, torch.Tensor]], set[str]], None]
) -> int:
    """Load all weights in one session; returns the bytes received. Arguments as for `BucketUpdate`."""
    n_bytes: list[int] = []
    worker.start_weight_update()
    try:
        worker.update_weights({"plans": plans, "loads": loads, "n_bytes": n_bytes})
    except BaseException:
        # vLLM leaves the layers of a failed session dismantled, and the next one would continue with what they have.
        with set_current_vllm_config(worker.vllm_config):
            worker.weight_transfer_engine.finish_weight_update()
        raise
    worker.finish_weight_update()
    return sum(n_bytes)

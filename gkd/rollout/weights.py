"""The part of a rollout engine that takes the student's new weights, and can show what it holds.

vLLM mixes `WeightReceiver` into each of its workers (`worker_extension_cls`), so the methods run where
the model is, under any executor and tensor-parallel size, through `LLM.collective_rpc`.

On CPU vLLM packs each linear layer's weight into an oneDNN handler and throws the original away.
A later `load_weights` would then change nothing that is computed with. So, before the model is
built, packing is replaced by the plain matrix product on the live parameter: slower by little, and
the weights that are computed with are the ones that can be loaded, read back and compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import vllm.model_executor.layers.utils as layer_utils
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from gkd.cluster import stacks
from gkd.errors import WeightSyncError
from gkd.rollout.experts import expert_names, expert_tensors, keep_cpu_experts_live
from gkd.rollout.sleeper import Sleeper
from gkd.weight_sync.buckets import Bucket, digest
from gkd.weight_sync.transfer import GroupSpec, TransferGroup, receive


def keep_cpu_weights_live() -> None:
    """Compute CPU linear layers from their parameter instead of a packed copy; no-op on GPUs."""
    if not current_platform.is_cpu():
        return

    def use_plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        del remove_weight  # the parameter stays: it is what the layer computes with
        setattr(layer, "cpu_linear", torch.nn.functional.linear)  # noqa: B010  (vLLM's attribute, not torch's)

    layer_utils.dispatch_cpu_unquantized_gemm = use_plain_linear
    keep_cpu_experts_live()


keep_cpu_weights_live()
# vLLM starts its workers itself where there are several, so nobody else tells them to.
stacks.listen()


class WeightReceiver(Sleeper):
    """Mixed into vLLM's worker class: `self.model_runner`, `self.device` and `self.rank` are the worker's."""

    model_runner: Any
    device: torch.device
    rank: int

    def gkd_join_groups(self, specs: list[GroupSpec]) -> None:
        """One group a sender; blocks until all members are there. `rank` is the engine's first; workers follow it."""
        self._gkd_groups = [
            TransferGroup(dataclasses.replace(spec, rank=spec.rank + self.rank), self.device) for spec in specs
        ]

    def gkd_receive(self, plans: list[list[Bucket]]) -> int:
        """Load one weight version, plan by plan (one a sender); returns bytes received.

        Raises:
            WeightSyncError: a parameter of the model, or an expert's part of one, was not written.
        """
        model = self.model_runner.get_model()
        received: set[str] = set()
        loaded: set[str] = set()

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            received.update(name for name, _ in tensors)
            loaded.update(model.load_weights(tensors))

        n_bytes = sum(receive(group, buckets, load) for group, buckets in zip(self._gkd_groups, plans, strict=True))
        missed = sorted(set(dict(model.named_parameters())) - loaded)
        for prefix, module in model.named_modules():
            if isinstance(module, RoutedExperts):  # one loaded expert makes the parameter of all of them a loaded one
                missed += sorted(set(expert_names(prefix, module)) - received)
        if missed:
            raise WeightSyncError(f"the sync left parameters of the rollout engine unwritten: {missed[:8]}")
        return n_bytes

    def gkd_settle(self) -> None:
        """Wait for all that this worker has given its device to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gkd_digests(self) -> dict[str, str]:
        """Digest of each tensor the engine computes with, by its Hugging Face name (full tensors, gathered over TP)."""
        return {name: digest(tensor) for name, tensor in held_tensors(self.model_runner.get_model())}


def held_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor) of what the engine holds, un-fusing what vLLM fuses.

    Collective over the tensor-parallel group. The names of fused parts come from the model's own
    `packed_modules_mapping`; their sizes from the layer.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            yield from expert_tensors(prefix, module, _all_gather)
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # tied embeddings: one tensor, and the export has it once
                continue
            seen.add(id(parameter))
            parent, _, own = prefix.rpartition(".")
            if own in packed:
                for part, tensor in zip(packed[own], _fused_parts(module, parameter), strict=True):
                    yield f"{parent}.{part}.{leaf}", tensor
            else:
                yield f"{prefix}.{leaf}", _gathered(module, leaf, parameter)


def _fused_parts(module: torch.nn.Module, parameter: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(module, QKVParallelLinear):
        sizes = [module.num_heads * module.head_size] + [module.num_kv_heads * module.head_size] * 2
        replicas = [1, module.num_kv_head_replicas, module.num_kv_head_replicas]
    else:
        sizes = list(module.output_partition_sizes)  # type: ignore[arg-type]
        replicas = [1] * len(sizes)
    return [
        _all_gather(part, dim=0, replicas=count)
        for part, count in zip(parameter.split(sizes, dim=0), replicas, strict=True)
    ]


def _gathered(module: torch.nn.Module, leaf: str, parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(module, VocabParallelEmbedding):
        return _all_gather(parameter, dim=0)[: module.org_vocab_size]
    if isinstance(module, RowParallelLinear) and leaf == "weight":
        return _all_gather(parameter, dim=1)
    if isinstance(module, ColumnParallelLinear):
        return _all_gather(parameter, dim=0)
    return parameter


def _all_gather(tensor: torch.Tensor, dim: int, replicas: int = 1) -> torch.Tensor:
    group = get_tp_group()
    if group.world_size == 1:
        return tensor
    parts = group.all_gather(tensor.contiguous(), dim=dim).chunk(group.world_size, dim=dim)
    return torch.cat(parts[::replicas], dim=dim)  # replicated KV heads: ranks r .. r + replicas - 1 hold the same

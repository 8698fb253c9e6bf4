"""LoRA adapters of a rollout engine: receive the student's, and read back what the engine computes with.

vLLM wraps each layer that may have an adapter; the layer itself is then its `base_layer`. The wrapper's two factors are
in `lora_a_stacked` and `lora_b_stacked`, [1, 1, ...], one tensor for each layer of the model's files that vLLM fuses.
The scale is part of B. New factors replace the old ones in place, so requests in flight need no change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

from gkd.errors import WeightSyncError

ADAPTER_ID = 1
_A, _B = ".lora_A.weight", ".lora_B.weight"


class EngineAdapters:
    """The adapters of one worker.

    Args:
        manager: vLLM's LoRAModelManager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._parts: dict[str, list[str]] = {
            name: manager.packed_modules.get(name, [name]) for name in manager.modules
        }  # layers of the files by the wrapped layer that computes them
        self._wrapped = {part for parts in self._parts.values() for part in parts}
        self._ranks: dict[str, int] = {}  # layer -> rank of its adapter, where one is set

    def replace(self, factors: Mapping[str, Tensor]) -> None:
        """Set all adapters; layers without one compute with the base weights.

        Args:
            factors: [r, I] and scale * [O, r] of each layer, by the name of the layer and the factor.

        Raises:
            WeightSyncError: a factor has no partner, or vLLM cannot add an adapter to its layer.
        """
        layers = {name.removesuffix(_A): None for name in factors if name.endswith(_A)}
        expected = {layer + factor for layer in layers for factor in (_A, _B)}
        if wrong := sorted((expected ^ factors.keys()) | (layers.keys() - self._wrapped)):
            raise WeightSyncError(f"the rollout engine cannot use these adapters of the weight sync: {wrong[:8]}")
        # On the host: vLLM keeps them, and copies them to the device once.
        pairs = {layer: (factors[layer + _A].cpu(), factors[layer + _B].cpu()) for layer in layers}
        rank = max(len(a) for a, _ in pairs.values())
        loras = {layer: LoRALayerWeights(layer, len(a), len(a), a, b) for layer, (a, b) in pairs.items()}
        self._manager.remove_adapter(ADAPTER_ID)
        self._manager.add_adapter(LoRAModel(ADAPTER_ID, rank, loras))
        self._manager.activate_adapter(ADAPTER_ID)
        self._ranks = {layer: len(a) for layer, (a, _) in pairs.items()}

    def held(self, gather: Callable[..., Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of each factor in the engine's memory. Collective over the tensor-parallel group.

        Args:
            gather: concatenates the parts of all tensor-parallel ranks along a dimension.
        """
        for wrapped, parts in self._parts.items():
            module = self._manager.modules[wrapped]
            for number, layer in enumerate(parts):
                if rank := self._ranks.get(layer):
                    a, b = (stacked[number][0, 0] for stacked in (module.lora_a_stacked, module.lora_b_stacked))
                    yield from zip(
                        (layer + _A, layer + _B),
                        _full(module.base_layer, number, a[:rank], b[:, :rank], gather),
                        strict=True,
                    )


def _full(
    base: torch.nn.Module, part: int, a: Tensor, b: Tensor, gather: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """Return whole factors; vLLM splits the factors that are next to the split side of a layer."""
    if isinstance(base, RowParallelLinear):
        return gather(a, dim=1), b
    replicas = base.num_kv_head_replicas if isinstance(base, QKVParallelLinear) and part else 1
    return a, gather(b, dim=0, replicas=replicas)


def unwrapped(name: str) -> str:
    """Return the name of a layer or parameter without the wrapper of its adapter, as in a model without adapters."""
    return ".".join(part for part in name.split(".") if part != "base_layer")

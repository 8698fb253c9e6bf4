"""Train LoRA adapters, W + scale B A with W frozen, and export the merged weights.

The adapters are peft's, in float32 for every model dtype.

Letters: r rank, I inputs and O outputs of a linear layer.
Source: arXiv:2106.09685.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.pytorch_utils import Conv1D

from gkd.actor.common.lora import first_a, is_target, merge
from gkd.actor.fsdp.weights import Place, first_row, full_tensor
from gkd.config.schema_actor import LoraConfig
from gkd.errors import ConfigError
from teacher_server.engines.hf import outside_parts

_ADAPTER = "default"  # peft's name of a single adapter


@dataclass(frozen=True, slots=True)
class Adapter:
    """The two matrices that adapt one weight."""

    a: Place  # [r, I] float32
    b: Place  # [O, r] float32
    scale: float
    transposed: bool  # the weight is [I, O]

    def merged(self, weight: Tensor) -> Tensor:
        """Return weight + scale B A of all rows of `weight`, see `merge`. Collective."""
        a, b = (full_tensor(place.tensor, weight.device) for place in (self.a, self.b))
        return merge(weight, a, b, self.scale, transposed=self.transposed)


def check_targets(hf: PreTrainedModel, lora: LoraConfig) -> None:
    """Raise ConfigError if an entry of actor.lora.targets matches no linear layer (except the LM head), or experts.

    The experts of a layer are one tensor, which gets no adapter. So their names would match dense layers alone.
    """
    towers = tuple(path for _, _, path in outside_parts(hf))
    layers = [name for name, module in hf.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    names = [name for name in layers if not name.startswith(towers)]
    unmatched = [target for target in lora.targets if not any(is_target(name, target) for name in names)]
    experts = _layers_of_experts(hf)
    frozen = [target for target in lora.targets if target in experts]
    if not (unmatched or frozen) and lora.targets:
        return
    paths = [name.split(".") for name in names]
    endings = sorted({".".join(part[-2:] if part[-1] in experts else part[-1:]) for part in paths})
    problem = "no layer is named."
    if unmatched:
        problem = f"a {hf.config.model_type} model has no linear layer named {', '.join(unmatched)}."
    elif frozen:
        what = ", ".join(frozen)
        problem = f"{what} names layers of the experts of a {hf.config.model_type} model, too, which get no adapters."
    raise ConfigError("actor.lora.targets", lora.targets, problem, f"choose among {', '.join(endings)}.")


def _layers_of_experts(hf: PreTrainedModel) -> set[str]:
    """Return the last parts of the names in the files of layers that are stacked in a parameter of all experts."""
    if not any(param.ndim == 3 for param in hf.parameters()):
        return set()
    converters = [rule for rule in get_model_conversion_mapping(hf) if isinstance(rule, WeightConverter)]
    patterns = [pattern for converter in converters for pattern in converter.source_patterns]
    return {pattern.removesuffix(".weight").rpartition(".")[2] for pattern in patterns}


def add_adapters(hf: PreTrainedModel, lora: LoraConfig, places: Mapping[str, Place]) -> dict[str, Adapter]:
    """Add an adapter, still on the meta device, to every weight in actor.lora.targets, and freeze the other weights.

    Args:
        places: of the model's tensors, by name; made before the adapters, so that the names do not depend on them.

    Returns:
        Adapter by the name of its weight.

    Raises:
        ConfigError: see `check_targets`.
    """
    check_targets(hf, lora)
    names = {id(place.module): name for name, place in places.items() if place.attribute == "weight"}
    # vLLM gives adapters to the language model alone.
    towers = "|".join(f"{re.escape(path)}.*" for _, _, path in outside_parts(hf)) or None
    settings = PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), exclude_modules=towers)
    inject_adapter_in_model(settings, hf, low_cpu_mem_usage=True)
    adapters = {}
    for layer in [module for module in hf.modules() if isinstance(module, LoraLayer)]:
        base = layer.get_base_layer()
        if id(base) not in names:
            class_name = type(base).__name__
            problem = f"a matching {class_name} of a {hf.config.model_type} model shares its weight with another layer."
            raise ConfigError("actor.lora.targets", lora.targets, problem, "remove that target.")
        a, b = (_float32_place(part[_ADAPTER]) for part in (layer.lora_A, layer.lora_B))
        adapters[names[id(base)]] = Adapter(a, b, layer.scaling[_ADAPTER], transposed=isinstance(base, Conv1D))
    return adapters


@torch.no_grad()
def init_adapters(adapters: Mapping[str, Adapter], seed: int) -> None:
    """Initialize A like a linear layer's weight and B with zeros. The full matrices do not depend on the world size."""
    generator = torch.Generator().manual_seed(seed)
    for adapter in adapters.values():
        whole = first_a(adapter.a.shape, generator)
        a = adapter.a.tensor
        b = adapter.b.tensor
        assert isinstance(a, DTensor)  # filled in after sharding
        local = a.to_local()
        start = first_row(a)
        local.copy_(whole[start : start + len(local)])
        b.zero_()


@contextmanager
def disabled_adapters(model: nn.Module) -> Iterator[None]:
    """Within the block, compute without the adapters. Only for forward passes without gradients."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    # peft's enable_adapters also changes requires_grad, which fully_shard reads only once.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _float32_place(part: nn.Module) -> Place:
    part.to(torch.float32)
    return Place(part, "weight", tuple(part.get_parameter("weight").shape))

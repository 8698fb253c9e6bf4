"""LoRA adapters of Megatron's linear layers: W + scale B A with W frozen.

A Megatron layer computes several Hugging Face layers at once (q, k, v; gate, up). Each of those has its own A and B, so
that the adapters are the same as on fsdp2 and in peft. They are float32 for every model dtype, and compute in the
model's dtype.

TP splits the outputs of the first matrix of a block: B's rows are split with them, and A is replicated. It splits the
inputs of the second matrix: A's columns are split with them, and B is replicated. Only A's output, r wide, is
communicated in addition to what the layer itself communicates.

Letters: S' positions of this rank, B sequences, r rank, I inputs and O outputs of this rank's part of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from gkd.actor.common.lora import first_a, is_target
from gkd.actor.megatron.hf_mapping import (
    REPLICATED,
    SPLIT_COLUMNS,
    SPLIT_ROWS,
    WHOLE,
    GatedMlp,
    GroupedQkv,
    TensorEntry,
    stage_entries,
)
from gkd.actor.megatron.layout import ParallelLayout
from gkd.config.schema_actor import LoraConfig
from gkd.errors import ConfigError
from gkd.hf.model_dims import ModelDims


@dataclass(frozen=True, slots=True)
class Adapter:
    """The two parameters that adapt one Hugging Face weight."""

    weight: str  # its HF name
    part: int  # its number among the HF weights of its Megatron layer
    linear: TensorEntry  # weight of that layer
    a: TensorEntry
    b: TensorEntry


def adapters_of(dims: ModelDims, layout: ParallelLayout, lora: LoraConfig) -> list[Adapter]:
    """Return the adapters of this pipeline stage, in model order; the same on all ranks of the stage."""
    return [
        _adapter(entry, part, lora.rank)
        for entry in _linear_entries(dims, layout)
        if entry.owner is None
        for part, name in enumerate(entry.hf_names)
        if any(is_target(_layer(name), target) for target in lora.targets)
    ]


def adapter_shapes(dims: ModelDims, lora: LoraConfig) -> dict[str, list[int]]:
    """Return the shapes of all factors of the whole model by HF name."""
    factors = [entry for adapter in adapters_of(dims, WHOLE, lora) for entry in (adapter.a, adapter.b)]
    return {entry.hf_names[0]: list(entry.hf_shapes[0]) for entry in factors}


def _linear_entries(dims: ModelDims, layout: ParallelLayout) -> list[TensorEntry]:
    """Return the weights of linear layers, except the LM head."""
    return [
        entry
        for entry in stage_entries(dims, layout)
        if (isinstance(entry.layout, GroupedQkv | GatedMlp) or _splits_inputs(entry))
        and entry.param.endswith(".weight")
    ]


def _layer(weight: str) -> str:
    return weight.removesuffix(".weight")


def _adapter(linear: TensorEntry, part: int, rank: int) -> Adapter:
    weight, (n_out, n_in) = linear.hf_names[part], linear.hf_shapes[part]
    name = _layer(weight)
    param = f"{_layer(linear.param)}.adapters.{name.rpartition('.')[2]}"
    a, b = (SPLIT_COLUMNS, REPLICATED) if _splits_inputs(linear) else (REPLICATED, SPLIT_ROWS)
    return Adapter(
        weight,
        part,
        linear,
        TensorEntry(f"{param}.a", (f"{name}.lora_A.weight",), ((rank, n_in),), a),
        TensorEntry(f"{param}.b", (f"{name}.lora_B.weight",), ((n_out, rank),), b),
    )


def _splits_inputs(linear: TensorEntry) -> bool:
    """Return whether TP splits the inputs of a layer, not its outputs."""
    return linear.layout is SPLIT_COLUMNS


def check_targets(dims: ModelDims, lora: LoraConfig) -> None:
    """Raise ConfigError if an entry of actor.lora.targets names no linear layer, or layers of experts."""
    owners = {_layer(name): entry.owner for entry in _linear_entries(dims, WHOLE) for name in entry.hf_names}
    dense = [layer for layer, owner in owners.items() if owner is None]
    experts = [layer for layer, owner in owners.items() if owner is not None]
    for target in lora.targets or [""]:
        if any(is_target(layer, target) for layer in experts):
            problem = f"{target} names layers of the experts of a {dims.model_type} model, which get no adapters."
        elif not any(is_target(layer, target) for layer in dense):
            problem = (
                f"a {dims.model_type} model has no linear layer named {target}." if target else "no layer is named."
            )
        else:
            continue
        endings = {layer.rpartition(".")[2] for layer in dense} - {layer.rpartition(".")[2] for layer in experts}
        raise ConfigError("actor.lora.targets", lora.targets, problem, f"choose among {', '.join(sorted(endings))}.")


class LinearAdapters(nn.Module):
    """The adapters of one Megatron layer; a hook of the layer adds what they compute to its output.

    Args:
        linear: Megatron's ColumnParallelLinear or RowParallelLinear.
        splits_inputs: TP splits the layer's inputs, not its outputs.
        sizes: rows of each HF weight in one group of the layer's output; there are `n_groups` of them.
    """

    def __init__(
        self, linear: nn.Module, *, splits_inputs: bool, sizes: Sequence[int], n_groups: int, scale: float
    ) -> None:
        super().__init__()
        self.enabled = True
        self._splits_inputs = splits_inputs
        self._sizes = sizes
        self._n_groups = n_groups
        self._scale = scale
        self._parts: dict[int, nn.Module] = {}  # number of the HF weight -> adapter, which is a submodule, too
        config: Any = linear.config
        self._splits_sequence = config.sequence_parallel
        self._tp = config.tensor_model_parallel_size
        self._tp_group: Any = linear.tp_group
        linear.register_forward_hook(self._add_to_output)

    def add(self, name: str, part: int, a: nn.Parameter, b: nn.Parameter) -> None:
        """Add the adapter of one HF weight: a [r, I], b [rows of the weight on this rank, r]."""
        self._parts[part] = nn.ParameterDict({"a": a, "b": b})
        self.add_module(name, self._parts[part])
        # A replicated factor is multiplied with this rank's positions only, so Megatron sums its gradient over TP.
        (b if self._splits_inputs else a).sequence_parallel = self._splits_sequence  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [S', B, O], which is added to the layer's output, from the layer's inputs, [S', B, I]."""
        every_a = torch.cat([part.get_parameter("a") for part in self._parts.values()])
        low = self._over_tp(F.linear(inputs, every_a.to(inputs.dtype)))
        blocks = {
            number: self._scale * F.linear(low_rank, part.get_parameter("b").to(low_rank.dtype))
            for (number, part), low_rank in zip(self._parts.items(), low.chunk(len(self._parts), dim=-1), strict=True)
        }
        groups = [
            blocks[number].unflatten(-1, (self._n_groups, size))
            if number in blocks
            else low.new_zeros(*low.shape[:-1], self._n_groups, size)
            for number, size in enumerate(self._sizes)
        ]
        return torch.cat(groups, dim=-1).flatten(-2)

    def _over_tp(self, low: Tensor) -> Tensor:
        """Return A's output at the positions of the layer's output; summed over TP if TP splits the inputs.

        If TP splits the outputs, each rank's gradient of A's output is of its rows of B. The backward pass sums it.
        """
        if self._tp == 1:
            return low
        if self._splits_inputs:
            sequence = reduce_scatter_to_sequence_parallel_region
            whole = reduce_from_tensor_model_parallel_region
        else:
            sequence = gather_from_sequence_parallel_region
            whole = copy_to_tensor_model_parallel_region
        moved: Tensor = (sequence if self._splits_sequence else whole)(low, group=self._tp_group)
        return moved

    def _add_to_output(self, linear: nn.Module, args: Sequence[Any], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return (output[0] + self(args[0]), output[1]) if self.enabled else output


def add_adapters(
    modules: Mapping[str, nn.Module], dims: ModelDims, layout: ParallelLayout, lora: LoraConfig, seed: int
) -> list[Adapter]:
    """Add this rank's part of the adapters to the layers of its stage.

    Args:
        modules: of the stage, by name as in `TensorEntry.param`.
        seed: of the first values, which do not depend on the layout and are the same as with fsdp2.
    """
    local_adapters = {adapter.weight: adapter for adapter in adapters_of(dims, layout, lora)}
    generator = torch.Generator().manual_seed(seed)
    for adapter in adapters_of(dims, WHOLE, lora):
        whole_a = first_a(adapter.a.hf_shapes[0], generator)  # drawn even for other stages, to advance the generator
        if (local_adapter := local_adapters.get(adapter.weight)) is not None:
            _add_adapter(modules[_layer(local_adapter.linear.param)], local_adapter, whole_a, dims, layout, lora)
    return list(local_adapters.values())


def _add_adapter(
    linear: nn.Module, adapter: Adapter, whole_a: Tensor, dims: ModelDims, layout: ParallelLayout, lora: LoraConfig
) -> None:
    entry = adapter.linear
    if not hasattr(linear, "adapters"):
        n_groups = dims.n_kv_heads // layout.tp if isinstance(entry.layout, GroupedQkv) else 1
        n_splits = n_groups if _splits_inputs(entry) else n_groups * layout.tp
        sizes = [n_rows // n_splits for n_rows, _ in entry.hf_shapes]
        linear.adapters = LinearAdapters(
            linear, splits_inputs=_splits_inputs(entry), sizes=sizes, n_groups=n_groups, scale=lora.scale
        )
    a, b = (
        _local_part(factor, whole, dims, layout, linear.get_parameter("weight").device)
        for factor, whole in ((adapter.a, whole_a), (adapter.b, torch.zeros(adapter.b.hf_shapes[0])))
    )
    linear.get_submodule("adapters").add(adapter.a.param.split(".")[-2], adapter.part, a, b)  # type: ignore[operator]


def _local_part(
    entry: TensorEntry, whole: Tensor, dims: ModelDims, layout: ParallelLayout, device: torch.device
) -> nn.Parameter:
    shape = list(whole.shape)
    if (dim := entry.layout.partition_dim) is not None:
        shape[dim] //= layout.tp
    param = torch.empty(shape, device=device)
    entry.layout.fill(param, [whole], dims, layout.tp, layout.tp_rank)
    return nn.Parameter(param)


@contextmanager
def disabled_adapters(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block, these parts of the model compute without their adapters."""
    adapters = [module for chunk in chunks for module in chunk.modules() if isinstance(module, LinearAdapters)]
    for module in adapters:
        module.enabled = False
    try:
        yield
    finally:
        for module in adapters:
            module.enabled = True

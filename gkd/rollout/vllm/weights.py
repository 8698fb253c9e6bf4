"""Receive the student's weights in a rollout engine's workers, and compute digests of the weights they hold.

vLLM mixes `WeightReceiver` into each of its workers (`worker_extension_cls`). Its methods run where the model is, under
any executor and tensor-parallel size, through `LLM.collective_rpc`.

On CPU vLLM packs each linear layer's weight into a oneDNN handle and discards the original, so a later `load_weights`
would have no effect. Importing this module, before the model is built, replaces packing by a matrix product with the
parameter itself: slightly slower, but the weights used in the forward pass can be loaded, read back and compared.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
import vllm._custom_ops as custom_ops
import vllm.model_executor.layers.utils as layer_utils
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.functional import linear, silu
from vllm.distributed import get_tp_group
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.sample import logit_bias

from gkd.cluster import stacks
from gkd.config.schema_rollout import IPC, MOST_MASKED, NCCL
from gkd.errors import ModelError, WeightSyncError
from gkd.memory.usage import STEP_KEEPS, trim_heap
from gkd.rollout.vllm.sleep_state import SleepMixin
from gkd.rollout.vllm.start import ADAPTER_ID, shared_nccl_env
from gkd.rollout.vllm.worker_errors import returns_sync_errors
from gkd.weight_sync.buckets import Bucket, differing, digest
from gkd.weight_sync.group import GroupSpec, TransferGroup
from gkd.weight_sync.transfer import receive
from teacher_server.engines.vllm_process import LoadRecord, Part, correct_cpu_kernels, load_record, record_loading


def keep_cpu_weights_live() -> None:
    """Compute CPU linear layers from their parameter instead of a packed copy; no-op on GPUs."""
    if not current_platform.is_cpu():
        return

    def use_plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        # The layer computes with the parameter, so it stays.
        setattr(layer, "cpu_linear", torch.nn.functional.linear)  # noqa: B010  (vLLM's attribute, not torch's)

    layer_utils.dispatch_cpu_unquantized_gemm = use_plain_linear
    for name in ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"):
        setattr(custom_ops, name, _convolution(getattr(custom_ops, name)))
    keep_cpu_experts_live()


def _convolution(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a convolution of vLLM's gated delta nets that computes with the parameter; vLLM has packed it here."""

    def convolve(*, weight: Tensor, is_weight_packed: bool, **arguments: Any) -> Tensor:
        return kernel(weight=weight.flatten(1), is_weight_packed=False, **arguments)

    return convolve


class WeightReceiver(SleepMixin):
    """Mixin for vLLM's worker class, which provides `rank`, too."""

    rank: int

    @returns_sync_errors
    def gkd_join_groups(self, specs: list[GroupSpec]) -> None:
        """Join one group per sender; blocks until all members joined. Leaves the groups joined before.

        Args:
            specs: by sender, with the rank of the engine's first worker; with CUDA IPC by worker, of its card's group.
        """
        for group in getattr(self, "_gkd_groups", []):
            group.close()
        local_specs = [dataclasses.replace(spec, rank=spec.rank + self.rank) for spec in specs]
        if specs[0].transport == IPC:
            local_specs = [specs[self.rank]]
        with shared_nccl_env() if local_specs[0].transport == NCCL else nullcontext():
            self._gkd_groups = [TransferGroup(spec, self.device) for spec in local_specs]

    @returns_sync_errors
    def gkd_receive(self, plans: list[list[Bucket]]) -> int:
        """Load one weight version, one plan per sender; returns the number of bytes received.

        Raises:
            WeightSyncError: a parameter of the model, or a tensor that it was loaded from, was not received.
        """
        model = self.model_runner.get_model()
        received: dict[str, torch.dtype] = {}
        loaded: set[str] = set()

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            received.update((name, tensor.dtype) for name, tensor in tensors)
            loaded.update(model.load_weights(tensors))

        n_bytes = self._gkd_receive_all(plans, load)
        self._gkd_dtypes = received
        derived: set[int] = set()
        for module in model.modules():
            if isinstance(module, MLAAttention):  # it computes with parts of a weight, which are its parameters
                module.process_weights_after_loading(self.model_runner.model_config.dtype)
                derived |= set(map(id, module.parameters(recurse=False)))
        held = self._gkd_places()
        # A layer with two names has its parameters twice, and vLLM reports one of them.
        named = {unwrapped(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
        filled = derived | {id(named[name]) for name in loaded & named.keys()}
        missed = sorted(name for name in named.keys() & held.keys() if id(named[name]) not in filled)
        # vLLM reports a fused parameter as loaded after one of its tensors.
        used = {name for name, (_, pieces) in load_record().read.items() if _is_held(pieces, held)}
        missed += sorted(used - received.keys())
        if missed:
            raise WeightSyncError(f"the weight sync did not send these parameters of the rollout engine: {missed[:8]}")
        return n_bytes

    def gkd_keep_digests(self) -> None:
        """Keep digests of all parameters and buffers, which vLLM has made of the folder, for `gkd_compare`."""
        self._gkd_of_folder = self._gkd_own_digests()

    @returns_sync_errors
    def gkd_compare(self) -> Changes:
        """Compare parameters and buffers with the digests that were kept; a new run has sent the folder's weights.

        Raises:
            WeightSyncError: some differ, although the weights that came are those of the folder.
        """
        changed = differing(self._gkd_of_folder, self._gkd_own_digests())
        dtypes = {name: tensor.dtype for name, tensor in self._gkd_own_tensors()}
        return sorted_changes(changed, dtypes, load_record(), self._gkd_dtypes)

    def _gkd_own_digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self._gkd_own_tensors()}

    def _gkd_own_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.model_runner.get_model()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            yield unwrapped(name), tensor

    @returns_sync_errors
    def gkd_receive_adapters(self, plans: list[list[Bucket]]) -> int:
        """Load one version of the adapters, one plan per sender; returns the number of bytes received.

        Raises:
            WeightSyncError: see `EngineAdapters.replace`.
        """
        factors: dict[str, torch.Tensor] = {}

        def keep(tensors: list[tuple[str, torch.Tensor]]) -> None:
            factors.update((name, tensor.clone()) for name, tensor in tensors)

        n_bytes = self._gkd_receive_all(plans, keep)
        assert self._gkd_adapters is not None
        self._gkd_adapters.replace(factors)
        return n_bytes

    def _gkd_receive_all(
        self, plans: list[list[Bucket]], load: Callable[[list[tuple[str, torch.Tensor]]], None]
    ) -> int:
        n_bytes = sum(receive(group, buckets, load) for group, buckets in zip(self._gkd_groups, plans, strict=True))
        if self.device.type == "cpu":
            trim_heap(STEP_KEEPS)  # buckets, and at the first sync what vLLM has used to load the model
        return n_bytes

    @cached_property
    def _gkd_adapters(self) -> EngineAdapters | None:
        """Return the adapters; None if the engine was started without."""
        manager = getattr(self.model_runner, "lora_manager", None)
        return None if manager is None else EngineAdapters(manager._adapter_manager)

    def _gkd_places(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers that are trained."""
        model = self.model_runner.get_model()
        held = (*model.named_parameters(), *model.named_buffers())
        trained = self._gkd_trained()
        trained_ids = set(map(id, (*trained.parameters(), *trained.buffers())))
        return {unwrapped(name): tensor for name, tensor in held if id(tensor) in trained_ids}

    def gkd_synchronize(self) -> None:
        """Wait for all work that this worker has queued on its device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gkd_digests(self) -> dict[str, str]:
        """Return Hugging Face name -> digest of every tensor of the model and of its adapters.

        They are full tensors, gathered over TP ranks. The digest is empty of those that vLLM holds in another form.
        """
        # Buffers, such as the bias of a router, are sent in their own dtype.
        dtypes = defaultdict(lambda: self.model_runner.model_config.dtype, getattr(self, "_gkd_dtypes", {}))
        tensors = held_tensors(self._gkd_places(), dtypes)
        held = {name: "" if tensor is None else digest(tensor) for name, tensor in tensors}
        if self._gkd_adapters is not None:
            held |= {name: digest(tensor) for name, tensor in self._gkd_adapters.held()}
        return held


def held_tensors(
    held: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name in the folder, full tensor) of what the model holds; None if it holds what vLLM computed from it.

    Collective over the tensor-parallel group: each rank copies back the parts that it loaded at its start. `dtypes` are
    those in which the tensors are sent.
    """
    group = get_tp_group()
    device = next(iter(held.values())).device
    for name, (shape, pieces) in load_record().read.items():
        dtype = dtypes[name]
        # vLLM has some in fewer bits than they are sent in, such as those of Apertus' activations.
        exact = (part for part in pieces if part.place in held and held[part.place].dtype.itemsize >= dtype.itemsize)
        sources = [(part, _view(held[part.place], part)) for part in exact]
        whole = torch.empty(shape, dtype=dtype, device="meta")
        if group.world_size == 1 and [(part.sizes, part.strides) for part, _ in sources] == [(shape, whole.stride())]:
            whole = sources[0][1].to(dtype).contiguous()  # no copy, as a rule
        else:
            whole = torch.zeros_like(whole, device=device)
            for part, source in sources:
                whole.as_strided(part.sizes, part.strides, part.offset).copy_(source)
            if group.world_size > 1:  # the other ranks have zeros, or the same numbers
                torch.distributed.all_reduce(whole.view(-1).view(torch.uint8), ReduceOp.MAX, group.device_group)
        if _is_held(pieces, held):
            yield name, whole if len(sources) == len(pieces) else None


class Changes(NamedTuple):
    """Tensors of an engine that differ from those that vLLM has made of the folder, after the first sync of a new run.

    Both lists are expected; other differences are errors.
    """

    n_tensors: int  # all parameters and buffers of the worker
    rounded: list[str]  # the student sends them, or what they are computed from, in fewer bits than the folder has
    sent: list[str]  # the student has sent other weights than those of the folder


def sorted_changes(
    changed: Sequence[str],
    dtypes: Mapping[str, torch.dtype],
    record: LoadRecord,
    sent: Mapping[str, torch.dtype],
) -> Changes:
    """Sort by its reason each tensor that differs from the one that vLLM has made of the folder.

    A tensor that holds numbers of the folder as they are differs if other numbers were sent: digests compare these with
    what was sent. All others follow from them, as a scan's A does, or are constants of the model.

    Args:
        dtypes: of all parameters and buffers of the worker.
        record: what the worker has read of the folder at its start.
        sent: dtypes of the tensors as they were sent.

    Raises:
        WeightSyncError: all numbers that were sent are those of the folder, so the sync has loaded them otherwise.
    """
    sources = defaultdict[str, set[str]](set)  # tensor -> the folder's tensors whose numbers it holds as they were sent
    for name in record.read.keys() & sent.keys():
        places = {part.place for part in record.read[name][1]}
        if all(place in dtypes and dtypes[place].itemsize >= sent[name].itemsize for place in places):
            for place in places:
                sources[place].add(name)
    # Rounding only reaches tensors with more bits than were sent: vLLM rounds the others as the student does.
    sizes = {name: dtype.itemsize for name, dtype in sent.items() if name in record.dtypes}
    rounded_to = {name: size for name, size in sizes.items() if size < record.dtypes[name].itemsize}
    rounded = list[str]()
    other = list[str]()
    wrong = list[str]()
    for place in changed:
        read = sources.get(place, rounded_to.keys())
        if any(rounded_to[name] < dtypes[place].itemsize for name in read & rounded_to.keys()):
            rounded.append(place)
        elif place in sources:
            other.append(place)
        else:
            wrong.append(place)
    if wrong and not other:
        raise WeightSyncError(
            f"{len(wrong)} of the rollout engine's {len(dtypes)} parameters and buffers differ after the first weight "
            f"sync from what vLLM has made of model.path, although the student sent the same weights: {wrong[:8]}. So "
            "vLLM loads this model otherwise at its start. Fix: use another model; weight_sync.verify = never "
            "trains without this comparison, with an engine that may compute something else"
        )
    return Changes(len(dtypes), rounded, [*other, *wrong])


def _is_held(pieces: Sequence[Part], held: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the model uses what it has read of a tensor. vLLM drops a copy of a tied head after loading."""
    return bool(pieces) and all(part.place in held for part in pieces if part.place)


def _view(place: torch.Tensor, part: Part) -> torch.Tensor:
    return place.as_strided(part.sizes, part.place_strides, place.storage_offset() + part.place_offset)


def _all_gather(tensor: torch.Tensor, dim: int, replicas: int = 1) -> torch.Tensor:
    group = get_tp_group()
    if group.world_size == 1:
        return tensor
    shards = group.all_gather(tensor.contiguous(), dim=dim).chunk(group.world_size, dim=dim)
    return torch.cat(shards[::replicas], dim=dim)  # replicated KV heads: ranks r .. r + replicas - 1 are identical


# LoRA adapters of a rollout engine: receive the student's, and read back what the engine computes with.
#
# vLLM wraps each layer that may have an adapter; the layer itself is then its `base_layer`. The wrapper's two factors
# are in `lora_a_stacked` and `lora_b_stacked`, [1, 1, ...], one tensor for each layer of the model's files that vLLM
# fuses. The scale is part of B. New factors replace the old ones in place, so requests in flight need no change.


_A = ".lora_A.weight"
_B = ".lora_B.weight"


class EngineAdapters:
    """The adapters of one worker, in vLLM's LoRAModelManager."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._parts: dict[str, list[str]] = {
            name: manager.packed_modules.get(name, [name]) for name in manager.modules
        }  # layers of the files by the wrapped layer that computes them
        self._wrapped = {part for layers in self._parts.values() for part in layers}
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)  # vLLM may have other prefixes
        self._own_name: Callable[[str], str] = str if mapper is None else mapper.get_rename_mapper().map_name
        self._sent: dict[str, tuple[str, int]] = {}  # layer -> its name in the sync, and the rank of its adapter

    def replace(self, factors: Mapping[str, Tensor]) -> None:
        """Set all adapters; layers without one compute with the base weights.

        Args:
            factors: [r, I] and scale * [O, r] of each layer, by the name of the layer and the factor.

        Raises:
            WeightSyncError: a factor has no partner, or vLLM cannot add an adapter to its layer.
        """
        layers = {name.removesuffix(_A): self._own_name(name.removesuffix(_A)) for name in factors if name.endswith(_A)}
        expected = {layer + factor for layer in layers for factor in (_A, _B)}
        unknown = {name for name, layer in layers.items() if layer not in self._wrapped}
        if wrong := sorted((expected ^ factors.keys()) | unknown):
            raise WeightSyncError(f"the rollout engine cannot use these adapters of the weight sync: {wrong[:8]}")
        # On the host: vLLM keeps them, and copies them to the device once.
        pairs = {layer: (factors[name + _A].cpu(), factors[name + _B].cpu()) for name, layer in layers.items()}
        rank = max(len(a) for a, _ in pairs.values())
        loras = {layer: LoRALayerWeights(layer, len(a), len(a), a, b) for layer, (a, b) in pairs.items()}
        self._manager.remove_adapter(ADAPTER_ID)
        self._manager.add_adapter(LoRAModel(ADAPTER_ID, rank, loras))
        self._manager.activate_adapter(ADAPTER_ID)
        self._sent = {layer: (name, len(pairs[layer][0])) for name, layer in layers.items()}

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of each factor in memory. Collective over the tensor-parallel group."""
        for wrapped, layers in self._parts.items():
            module = self._manager.modules[wrapped]
            for number, layer in enumerate(layers):
                if layer in self._sent:
                    name, rank = self._sent[layer]
                    a, b = (stacked[number][0, 0] for stacked in (module.lora_a_stacked, module.lora_b_stacked))
                    a = a[:rank]
                    b = b[:, :rank]
                    base = module.base_layer
                    # vLLM splits the factors that are next to the split side of a layer.
                    if isinstance(base, RowParallelLinear):
                        a = _all_gather(a, dim=1)
                    else:
                        replicas = base.num_kv_head_replicas if isinstance(base, QKVParallelLinear) and number else 1
                        b = _all_gather(b, dim=0, replicas=replicas)
                    yield name + _A, a
                    yield name + _B, b


def unwrapped(name: str) -> str:
    """Return the name of a layer or parameter without the wrapper of its adapter, as in a model without adapters."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


# Mixture-of-experts layers of a rollout engine: keep their weights loadable.
#
# vLLM keeps all experts of a layer in two parameters of its `RoutedExperts`. Each tensor-parallel rank holds a slice
# of every expert's MLP: w13_weight [E, 2 * I / tp, H] (gate rows, then up rows) and w2_weight [E, H, I / tp].
#
# On CPU vLLM packs both for its kernel and discards the originals, so a later `load_weights` would write into a
# packed matrix. Packing and kernel are replaced by plain matrix products, as for linear layers.


def keep_cpu_experts_live() -> None:
    """Compute CPU experts from their parameters instead of packed copies. Call before the model is built."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def keep(self: Any, layer: torch.nn.Module) -> None:
        """Keep the parameters as loaded."""

    for name, replacement in (("process_weights_after_loading", keep), ("apply", _plain_experts)):
        getattr(CPUUnquantizedExperts, name)  # fail if a vLLM upgrade renames it
        setattr(CPUUnquantizedExperts, name, replacement)


def _plain_experts(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: MoEActivation,
    global_num_experts: int,
    expert_map: Tensor | None,
    *_: Any,
    apply_router_weight_on_input: bool,
    **__: Any,
) -> None:
    """Write the weighted sum of each token's experts to `output` [T, H]; accumulates in float32."""
    if activation not in _ACTIVATIONS or expert_map is not None:
        raise ModelError(f"experts on CPU: {activation} with expert_map {expert_map is not None} is not supported")
    total = torch.zeros_like(output, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        token, rank = torch.where(topk_ids == expert)
        bias1, bias2 = (None if bias is None else bias[expert] for bias in (self.w1_bias, self.w2_bias))
        hidden = _ACTIVATIONS[activation](linear(hidden_states[token], w1[expert], bias1))
        hidden = linear(hidden, w2[expert], bias2).float()
        # Llama 4's hidden states are weighted before.
        total.index_add_(0, token, hidden if apply_router_weight_on_input else hidden * topk_weights[token, rank, None])
    output.copy_(total)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


def _swiglu_oai(x: Tensor) -> Tensor:
    """Return the activation of gpt-oss, whose columns of gate and up alternate."""
    gate = x[..., ::2].clamp(max=7.0)
    up = x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


_ACTIVATIONS = {MoEActivation.SILU: _swiglu, MoEActivation.SWIGLUOAI: _swiglu_oai}


# At import, because vLLM spawns its workers itself if tp > 1, and they need the handler of stack dumps, too.
keep_cpu_weights_live()
# vLLM's runner for GPUs masks 1,024 ids, and its first pass would fail; two more are of images and videos.
logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS = MOST_MASKED + 2
correct_cpu_kernels()
record_loading()
stacks.listen()

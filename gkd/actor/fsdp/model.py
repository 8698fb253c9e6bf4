"""Build this rank's shard of any causal language model of a HF folder, as one module from tokens to loss.

The model is built on the meta device and sharded by fully_shard. Then memory is allocated, which `weights.py` fills.

Letters: B sequences, S columns, N loss rows, H hidden size, V rows of the LM head.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from textwrap import shorten
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import alloc_storage
from transformers import AttentionInterface, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from gkd.actor.fsdp.attention import (
    CURRENT_PACK,
    PACKED_ATTENTION,
    Pack,
    packed_attention,
    refuse_packing,
    run_per_sequence,
)
from gkd.config.schema_sections import Vision
from gkd.data.columns import ALL_COLUMNS
from gkd.errors import ModelError
from gkd.loss.distill_loss import DistillLoss
from gkd.memory.host_buffer import page_lock
from gkd.types import TokenTargets
from teacher_server.engines.gpu_kernels import keep_kernels_on_gpus
from teacher_server.engines.hf import auto_class, change_of_logits, keep_language_model, outside_parts, own_attention
from teacher_server.vision.processor import ATTENDING_BOTH_WAYS, ImageProcessor
from teacher_server.vision.rows import ImageRows, forward_arguments

_FROZEN = "is_frozen_vision"  # attribute of modules


class LossModel(nn.Module):
    """The whole student. Its forward pass includes the loss, so that fully_shard gathers the LM head for the loss."""

    columns = ALL_COLUMNS  # the columns of a micro-batch that this rank computes
    image_processor: ImageProcessor | None = None  # None: no sequence has images
    fused = True  # a training pass computes LM head and loss together; else all logits of a micro-batch first
    packing = True  # it accepts packed micro-batches

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    @property
    def head(self) -> RowsHead:
        head: RowsHead = self.hf.get_output_embeddings()
        return head

    def forward(
        self,
        tokens: Tensor,
        rows: Tensor,
        *,
        position_ids: Tensor | None = None,
        pack: Pack | None = None,
        images: ImageRows | None = None,
        targets: TokenTargets | None = None,
        loss: DistillLoss | None = None,
        fused: bool = True,
        use: HeadUse | None = None,
    ) -> Any:
        """Run one micro-batch.

        Args:
            tokens: [B, S] int64.
            rows: [N] int64 into the flattened [B * S] positions.
            position_ids: [B, S] int64; None takes column numbers.
            pack: boundaries of the sequences of a packed row (B = 1).
            images: of the sequences, with positions that replace `position_ids`.
            loss: the loss to compute from `targets`; with None the logits are returned.
            fused: compute LM head and loss together; else all logits first.
            use: function of the hidden states of `rows` and the LM head's weight, instead of a loss.

        Returns:
            The result of `DistillLoss.from_hidden` or of `use`; [N, V] logits if there is neither.
        """
        arguments = {"position_ids": position_ids, "pack": pack}
        arguments = {name: value for name, value in arguments.items() if value is not None}
        if images is not None:
            arguments |= forward_arguments(self.hf, images)
        setattr(self.hf, CURRENT_PACK, pack)
        self.head.rows = rows
        try:
            if loss is not None and fused:
                if targets is None:
                    raise ModelError("the forward pass got a loss without targets")
                use = partial(loss.from_hidden, targets=targets)
            if use is not None:
                return self.head(self.hf.base_model(input_ids=tokens, use_cache=False, **arguments)[0], use)
            logits: Tensor = self.hf(input_ids=tokens, use_cache=False, **arguments).logits[0]
            if loss is None or targets is None:
                return logits
            return loss.from_logits(logits, targets)
        finally:
            self.head.rows = None


def read_config(model_path: str | Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read config.json of a local HF folder. Raise ModelError if it is missing or cannot be read."""
    folder = Path(model_path)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a HF model folder: it has no config.json.", "use a local folder.")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        fix = "set model.trust_remote_code=true, if you trust the code in the folder."
        needs_code = not trust_remote_code and "trust_remote_code" in str(error)
        reason = "the model has code of its own" if needs_code else error
        raise ModelError(f"{folder}/config.json cannot be read: {reason}.", fix if needs_code else "") from error


def build_on_meta(
    model_path: str | Path,
    *,
    dtype: torch.dtype,
    packing: bool,
    trust_remote_code: bool = False,
    images: bool = False,
) -> PreTrainedModel:
    """Build the model of a folder with parameters on the meta device and real buffers. Reads no weights.

    Args:
        dtype: of the parameters.
        packing: replace the attention by one that accepts packed sequences; else use the model's own.
        images: build the vision tower, too; else only the language model, because nothing else has a gradient.

    Raises:
        ModelError: the folder is not a causal language model, or its LM head is not one linear layer.
        ConfigError: the model's attention cannot be replaced; the key is actor.packing.
    """
    config = read_config(model_path, trust_remote_code=trust_remote_code)
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    attention: Any = PACKED_ATTENTION if packing else own_attention(config)
    if images and packing and config.model_type in ATTENDING_BOTH_WAYS:
        raise refuse_packing(config.model_type, "attends in both directions within an image")
    if images and packing:  # patches attend to all patches of their image
        attention = {"text_config": PACKED_ATTENTION, "vision_config": "sdpa"}
    try:
        # Buffers keep their values: non-persistent ones, such as rotary frequencies, are not in the files.
        with no_init_weights(), init_empty_weights(include_buffers=False):
            hf: PreTrainedModel = auto_class(config, images=images).from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # a model's own code may raise anything
        # Some models look up their attention in their own table: KeyError: 'gkd_packed'.
        if packing and ("attention" in str(error).lower() or PACKED_ATTENTION in str(error)):
            raise refuse_packing(config.model_type, f"has no attention that can be replaced ({error})") from error
        what = f"{type(error).__name__}: {shorten(str(error), 200)}"  # it may list 110 classes
        fix = "use a causal language model that transformers has."
        raise ModelError(f"{model_path} cannot be built as a causal language model: {what}", fix) from error
    if not images:
        keep_language_model(hf)
    head = hf.get_output_embeddings()
    if head is None or hf.base_model is hf:
        problem = f"{model_path}: transformers does not separate the LM head of a {config.model_type} model."
        raise ModelError(problem, "use another model.")
    hf.set_output_embeddings(RowsHead(head, *change_of_logits(hf)))
    hf.tie_weights()
    _use_fused_norms(hf)
    keep_kernels_on_gpus(hf)
    if packing:
        run_per_sequence(hf)
    for module in hf.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # a pad token may end each turn: its row gets a gradient, as in Megatron
        if type(module).__name__.endswith("Indexer"):  # sparse attention: its choice of tokens has no gradient
            module.requires_grad_(False)
    # No dropout, even if config.json sets it: responses are generated and scored without it.
    return hf.eval()


def _use_fused_norms(model: nn.Module) -> None:
    """Let the RMS norms of a model compute with torch's kernel: one launch on a GPU instead of eight.

    Launches limit the step of a small model (docs/results.md has a profile). Gemma's norm, for example, adds 1 to its
    weight, so each class is compared with the kernel first.
    """
    is_plain: dict[type[nn.Module], bool] = {}
    for module in model.modules():
        kind = type(module)
        if hasattr(module, "variance_epsilon"):  # the norms of transformers have it
            if kind not in is_plain:
                is_plain[kind] = _is_rms_norm(kind)
            if is_plain[kind]:
                module.forward = MethodType(_rms_norm, module)


def _rms_norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _is_rms_norm(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class compute `_rms_norm`, tried on random numbers.

    Those with further arguments do not, also where these have defaults: the gate of Mamba 2.
    """
    if len(inspect.signature(kind.forward).parameters) != 2:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 8, generator=generator)
    weight = torch.randn(8, generator=generator)
    try:
        norm: Any = kind(8, eps=0.1)
        norm.weight = nn.Parameter(weight)
        with torch.no_grad():
            return bool(torch.allclose(norm(x), _rms_norm(norm, x), atol=1e-6))
    except (TypeError, AttributeError, RuntimeError):  # another signature, or another kind of weight
        return False


def shard(
    hf: PreTrainedModel, *, device: torch.device, dtype: torch.dtype, recompute: bool, offload: bool
) -> LossModel:
    """Shard the model over all ranks and allocate this rank's shard, uninitialized. Collective.

    Each layer is gathered for its own forward and backward pass, and so are embeddings and LM head if they are not
    tied. The root holds the rest (last norm, tied embeddings).

    Args:
        dtype: of activations and gathered parameters; gradients are reduced in float32.
        recompute: keep only the layers' inputs for the backward pass.
        offload: keep shards, gradients and optimizer state in host memory.
    """
    layers = layer_list(hf)
    if recompute:
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    mixed = dtype != torch.float32
    # Inputs are not cast: the cast would include the targets, whose logprobs must stay float32. The model's own code
    # computes in the dtype of its parameters.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if mixed else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    place = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()  # pinned below as one block
    cut = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=place)
    for layer in layers:
        cut(layer)
    root = LossModel(hf)
    # A frozen tower is whole on every rank: no rank waits for one whose sequences have no images. One that is trained
    # is gathered with the root, by all ranks in every pass.
    kept = set(frozen_vision(hf).values())
    if root.head.weight is not hf.get_input_embeddings().weight:  # not tied
        cut(hf.get_input_embeddings())
        # Its backward pass comes right after its forward pass.
        cut(root.head, reshard_after_forward=False)
    cut(root, ignored_params=kept)
    home = torch.device("cpu") if offload else device
    for module in hf.modules():
        if hasattr(module, _FROZEN):  # its shards are not in host memory either
            allocate(module, device, device)
    allocate(root, home, device)
    if offload and device.type == "cuda":
        into_one_block(root, pinned=True)
    for module in fsdp_modules(root):
        # A plain sum, divided once by the global number of tokens; gloo supports neither averages nor factors.
        if mesh.size() > 1:  # one rank would divide all its gradients by 1
            module.set_gradient_divide_factor(1.0)
        elif not offload:
            cast_together(module)
        module.set_force_sum_reduction_for_comms(True)
        # A parameter without gradient on a rank, such as an expert without tokens, must join the reduction as zeros.
        module.set_reduce_scatter_unused_params(True, recurse=False)
    return root


def allocate(root: nn.Module, home: torch.device, device: torch.device) -> None:
    """Allocate all parameters on `home`, uninitialized, and move all buffers to `device`."""

    def place(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=home)
        # A tied weight is visited once for each module that has it; after the first visit it is on `home`.
        return tensor if isinstance(tensor, nn.Parameter) and tensor.device == home else tensor.to(device)

    root._apply(place)


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    """Return every module that is gathered separately, including the root."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def reshard(root: nn.Module) -> None:
    """Free all gathered parameters; a forward pass without a backward pass leaves some of them gathered."""
    for module in fsdp_modules(root):
        module.reshard()


@contextmanager
def passes_of(root: Any) -> Iterator[None]:
    """Free all gathered parameters after the passes in the block; after an error in one, gradients are lost."""
    try:
        yield
    except BaseException:
        root.reset_iter_state()
        raise
    reshard(root)


def freeze_vision(hf: PreTrainedModel, vision: Vision, dtype: torch.dtype) -> None:
    """Do not train what is not to be trained of a model that reads images, and hold it in the dtype of computations.

    Of a trained tower it is the end of CLIP: LLaVA takes its features from an earlier layer, and vLLM leaves it out.
    """
    modules: list[nn.Module] = []
    if vision == "frozen":
        modules = [getattr(parent, name) for parent, name, _ in outside_parts(hf)]
    elif vision == "trained" and hf.config.model_type == "llava":
        tower: Any = hf.base_model.vision_tower
        layers = tower.encoder.layers
        chosen = hf.config.vision_feature_layer
        # States are numbered from the embeddings, and negative numbers count from the last layer.
        numbers = [number % (len(layers) + 1) for number in (chosen if isinstance(chosen, list) else [chosen])]
        modules = [*layers[max(numbers) :], tower.post_layernorm]
    for part in modules:
        part.to(dtype).requires_grad_(False)
        setattr(part, _FROZEN, True)


def frozen_vision(hf: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return what `freeze_vision` has frozen, by name. It is whole on each rank, and neither sent nor saved."""
    names = tuple(f"{name}." for name, module in hf.named_modules() if hasattr(module, _FROZEN))
    return {name: parameter for name, parameter in hf.named_parameters() if name.startswith(names)} if names else {}


def layer_list(hf: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers. Raise ModelError if the model has no list of them."""
    body = hf.get_decoder() if outside_parts(hf) else hf.base_model
    lists = [module for module in body.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ModelError(f"{type(hf).__name__} has no nn.ModuleList of layers to shard.")
    named = set(hf._no_split_modules or ())
    # A list of experts may be longer than the list of layers, so prefer the classes that transformers names.
    blocks = [block for block in lists if any(type(module).__name__ in named for module in block)]
    return max(blocks or lists, key=len)


# Function of the [N, H] hidden states and the [V, H] weight. The weight is gathered only during the call.
# Its arguments `bias` and `cap` are those of `DistillLoss.from_hidden`.
HeadUse = Callable[..., Any]


class RowsHead(nn.Module):
    """Replacement of a model's LM head with the same parameter names.

    It applies the head to the rows that carry loss, optionally fused with the loss. fully_shard therefore gathers the
    parameters for exactly this forward pass and reduces their gradient after its backward pass.

    Letters: B sequences, S columns, N loss rows, H hidden size, V rows of the head.
    """

    rows: Tensor | None = None  # [N] int64 into the flattened [B * S] positions; set during a forward pass

    def __init__(self, head: nn.Module, factor: float = 1.0, cap: float | None = None) -> None:
        """Raise ModelError if the head is not one linear layer.

        Args:
            factor: of the logits, which the model applies to what this module returns, but not to what `use` computes.
            cap: likewise, a soft cap.
        """
        super().__init__()
        if not isinstance(head, nn.Linear):
            raise ModelError(f"the LM head is a {type(head).__name__}; actor.strategy=fsdp2 requires a linear layer.")
        self.weight = head.weight  # [V, H]
        self.bias = head.bias  # [V] or None
        self.factor = factor
        self.cap = cap

    def forward(self, hidden: Tensor, use: HeadUse | None = None) -> Any:
        """Return [1, N, V] logits of [B, S, H] hidden states, or the result of `use`."""
        if self.rows is not None:
            hidden = hidden.flatten(0, 1).index_select(0, self.rows)[None]
        hidden = hidden.to(self.weight.dtype)  # Mamba 2 adds its residuals in float32
        if use is None:
            return F.linear(hidden, self.weight, self.bias)
        if self.factor == 1:
            return use(hidden[0], self.weight, bias=self.bias, cap=self.cap)
        bias = None if self.bias is None else self.bias * self.factor
        return use(hidden[0] * self.factor, self.weight, bias=bias, cap=self.cap)


_ALIGN = 64  # bytes; a multiple of every item size
# Memory must not be freed while CUDA has it pinned; an actor's models live as long as its process.
_PINNED: list[Tensor] = []


def shard_records(module: Any) -> list[Any]:
    """Return fully_shard's internal records of the parameters that are gathered with one module."""
    return [record for group in module._get_fsdp_state()._fsdp_param_groups for record in group.fsdp_params]


def cast_together(module: Any) -> None:
    """Let one rank copy the weights that are gathered with `module` in one launch, in the dtype of computations.

    fully_shard copies them together on several ranks, but casts and copies each by itself on one. Depends on private
    names of torch 2.13, like `into_one_block`.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        group.wait_for_unshard = MethodType(_wait_for_cast, group)


@torch.no_grad()
def _wait_for_cast(group: Any) -> None:
    """Do what `FSDPParamGroup.wait_for_unshard` does with one rank."""
    if not group._all_gather_result:
        return
    pairs: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # one kernel has one pair of dtypes
    for record in group.fsdp_params:
        held = record._sharded_param_data
        dtype = record.param_dtype or held.dtype
        record.init_all_gather_outputs([held.numel()], [dtype], 1, group.device)
        whole = record.all_gather_outputs[0]
        alloc_storage(whole)
        pairs[held.dtype, dtype].append((whole, held))
    for same in pairs.values():
        copies, shards = zip(*same, strict=True)
        with torch.autograd._unsafe_preserve_version_counter(copies):
            torch._foreach_copy_(copies, shards)
    for record in group.fsdp_params:
        record.init_unsharded_param()
    group._to_unsharded()
    done = group.device_handle.Event()
    done.record()
    group._wait_all_gather_streams_on_event(done)
    group._all_gather_result = None


@torch.no_grad()
def into_one_block(root: nn.Module, *, pinned: bool) -> Tensor:
    """Move the shards of a model, with their values, into one block of memory. Call it before any forward pass.

    fully_shard pins each shard separately, and torch rounds each pinned allocation up to a power of two: a 7B model
    in bfloat16 would take 27 GiB instead of 14. One allocation of the exact size, registered with CUDA in place,
    has no such overhead. Depends on private names of torch 2.13: it replaces the memory of fully_shard's internal
    records.

    Args:
        root: its FSDP modules have their shards in host memory, unpinned.
        pinned: pin the block, so that copies to a GPU are asynchronous. It is never freed.

    Returns:
        The block, [n] uint8.

    Raises:
        MemoryError: not enough memory can be pinned.
        RuntimeError: not enough memory.
    """
    shards = [shard for module in fsdp_modules(root) for shard in shard_records(module)]
    n_bytes = [-(-shard._sharded_param_data.nbytes // _ALIGN) * _ALIGN for shard in shards]
    block = torch.empty(sum(n_bytes), dtype=torch.uint8)
    if pinned and block.numel():
        page_lock(block)
        _PINNED.append(block)
    offset = 0
    for shard, size in zip(shards, n_bytes, strict=True):
        old = shard._sharded_param_data
        local = shard.sharded_param._local_tensor
        new = block[offset : offset + old.nbytes].view(old.dtype)
        new.copy_(old)
        # Like `FSDPParam.reset_sharded_param`: padding rows at the end are only in the record.
        shard._sharded_param_data = new
        shard.sharded_param._local_tensor = new[: prod(local.shape)].view(local.shape)
        shard.pin_memory = pinned
        offset += size
    return block

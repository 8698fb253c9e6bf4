"""Compute the memory of an fsdp2 rank; all ranks are equal.

Weights, gradients and phases are float32 shards of equal size. A layer is gathered in the model's dtype for its own
forward and backward pass. Embedding and LM head are groups of their own; tied, they stay gathered from a micro-batch's
forward pass to the end of its backward pass. The gradient of a gathered group is whole until it is reduced, in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from gkd.config.schema import Config
from gkd.hf.model_dims import ModelDims, check_context_split
from gkd.hf.model_folder import Tensors, count_params
from gkd.memory.footprint.activations import Kernels, LossShape, largest_micro_batch
from gkd.memory.footprint.adapters import adapter_params
from gkd.memory.footprint.rank import RankFootprint, sync_buffers

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Groups:
    """Numbers of parameters that are gathered together."""

    total: int
    layer: int  # numbers of the largest layer
    embedding: int  # numbers of the embedding; an untied LM head has as many
    lora: int = 0  # numbers of all adapters, which are trained instead


def groups(config: Config, dims: ModelDims, tensors: Tensors | None) -> Groups:
    """Return the parameters of each group: exact for known architectures, else counted in the weight files."""
    return Groups(*gathered(dims, tensors), adapter_params(config, dims, range(dims.n_layers)))


def gathered(dims: ModelDims, tensors: Tensors | None) -> tuple[int, int, int]:
    """Return the parameters of the model, of its largest layer, and of its embedding."""
    if not dims.is_exact:
        return count_params(tensors or {})
    layers = [dims.dense_params(i) + dims.expert_params(i) for i in range(dims.n_layers)]
    return dims.n_params, max(layers), dims.embedding_params()


def fsdp_footprints(
    config: Config, dims: ModelDims, tensors: Tensors | None, *, on_cpu: bool, teacher_hidden: int | None
) -> Iterable[RankFootprint]:
    """Yield the footprint of rank 0, which stands for all ranks. Raises ConfigError as `check_context_split`."""
    actor, dp = config.actor, config.derived.n_shards
    b = _FLOAT32 if config.model.dtype == "float32" else 2
    check_context_split(actor.cp, (dims.n_heads,), (dims.n_kv_heads,))
    found, batch = groups(config, dims, tensors), largest_micro_batch(config)
    frozen = actor.lora.rank > 0
    trained = found.lora if frozen else found.total
    kept = found.total * (b if frozen else _FLOAT32) + (found.lora * _FLOAT32 if frozen else 0)
    state = {
        "weights": -(-kept // dp),
        "gradients": -(-_FLOAT32 * trained // dp),
        "optimizer": -(-2 * _FLOAT32 * trained // dp),
    }
    parts = dict(state)
    if actor.fsdp_cpu_offload and not on_cpu:
        # Shards are pinned in one block. Gradients come to the host one by one, and torch rounds the pinned memory of
        # each up to a power of two: less than twice its size.
        parts = {"offloaded": sum(state.values()) + state["gradients"]}
    kernels = Kernels(
        "fsdp2", on_cpu, b, batch.packed, actor.recompute, frozen=frozen, n_sequences=batch.n_sequences, cp=actor.cp
    )
    whole = [kernels.layer(dims, layer) * batch.n_tokens for layer in range(dims.n_layers)]
    boundary = kernels.boundary(dims) * batch.n_tokens
    activations = boundary * dims.n_layers if actor.recompute == "full" else sum(whole)
    activations += boundary + kernels.final_norm(dims) * batch.n_tokens
    loss = LossShape(
        config,
        batch,
        hidden=dims.hidden_size,
        rows_of_head=dims.vocab_size,
        itemsize=b,
        on_cpu=on_cpu,
        frozen=frozen,
    )
    layer, sums = _gathered_layer(found.layer, b, dp, on_cpu=on_cpu, offloads=actor.fsdp_cpu_offload)
    table = found.embedding * b
    layer_gradient = 0 if frozen else sums
    ending = max(b * (3 if dims.tied_embeddings else 1), b + _FLOAT32 + _FLOAT32 // dp)
    recomputed = max(whole) if actor.recompute == "full" else 0
    widths = batch.n_tokens * b * (2 * dims.hidden_size + 2 * dims.ffn_size)
    phases: list[dict[str, int]] = [
        {
            "activations": activations,
            "logits": loss.logits_bytes,
            "transient": loss.forward_bytes + table,
        },
        {
            "activations": activations,
            "logits": 0,
            "transient": loss.backward_bytes + table + layer + layer_gradient + recomputed + widths,
        },
        # The end of the backward pass: both gradients of a tied table and their sum; or one gradient, before it is
        # reduced.
        {"activations": 0, "logits": 0, "transient": table + (0 if frozen else found.embedding * ending)},
    ]
    peak = max(phases, key=lambda phase: sum(phase.values()))
    parts |= peak
    if config.teacher.signal == "hidden" and teacher_hidden is not None:
        parts["teacher_head"] = _FLOAT32 * dims.vocab_size * teacher_hidden
    largest = _largest_tensor(found, dims, tensors) * b
    parts["optimizer_step"] = 0  # fused: one pass, no copies
    parts["weight_sync"] = sync_buffers(config, largest, found.total * b) + largest
    parts["saved_copy"] = -(-3 * _FLOAT32 * trained // dp)
    yield RankFootprint("actor", 0, parts)


def _gathered_layer(n: int, b: int, dp: int, *, on_cpu: bool, offloads: bool) -> tuple[int, int]:
    """Return, for a layer of n parameters, (bytes of the gathered layer, bytes of its gradient until it is reduced).

    The gradient exists whole, and as a copy to reduce. On CUDA the next layer is prefetched from a shard in the model's
    dtype, which arrives in float32 from host memory; and the reduced part of a gradient is new memory.
    """
    if on_cpu:
        return n * b, n * (b + _FLOAT32)
    shard = -(-n // dp)
    return 2 * n * b + shard * (b + (_FLOAT32 if offloads else 0)), n * (b + _FLOAT32) + shard * _FLOAT32


def _largest_tensor(found: Groups, dims: ModelDims, tensors: Tensors | None) -> int:
    """Return the size of the largest tensor that is gathered for weight sync; experts of a layer join two matrices."""
    experts = 2 * dims.moe.n_experts * dims.moe.ffn_size * dims.hidden_size if dims.moe is not None else 0
    in_files = max((prod(size) for size in (tensors or {}).values()), default=0)
    return max(found.embedding, dims.hidden_size * dims.ffn_size, experts, in_files)

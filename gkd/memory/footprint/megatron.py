"""Compute the memory of the Megatron ranks, one per pipeline stage: all ranks of a stage are equal.

Weights are one buffer, and gradients are one float32 buffer for any dtype of the weights. The distributed optimizer has
both moments, and float32 masters of bfloat16 weights, for this rank's share of the stage; float32 weights are their own
masters. Experts are spread over fewer ranks than the other parameters. With LoRA, the float32 adapters have gradients
and moments, and the weights have neither.

Letters: b bytes per number of the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gkd.config.schema import Config
from gkd.hf.model_dims import ModelDims, check_actor_split, check_context_split, check_expert_ranks
from gkd.hf.model_folder import Tensors
from gkd.memory.footprint.activations import Kernels, LossShape, MicroBatchShape, largest_micro_batch
from gkd.memory.footprint.adapters import adapter_params
from gkd.memory.footprint.rank import RankFootprint, sync_buffers

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers and numbers of parameters of one rank of a pipeline stage."""

    number: int
    layers: tuple[int, ...]
    first: bool
    last: bool
    dense_params: int
    expert_params: int
    dense_owned: int  # parameters that the rank's optimizer updates
    expert_owned: int
    adapter_params: int  # which are trained instead of the others

    @property
    def params(self) -> int:
        return self.dense_params + self.expert_params


def stages(config: Config, dims: ModelDims) -> list[Stage]:
    """Return the pipeline's stages in their order; see `gkd.actor.megatron.layout`. Raises as `check_split`."""
    actor = config.actor
    check_split(config, dims)
    dp = config.derived.n_shards
    per_chunk = dims.n_layers // (actor.pp * actor.vpp)
    found = []
    for number in range(actor.pp):
        first, last = number == 0, number == actor.pp - 1
        starts = [(chunk * actor.pp + number) * per_chunk for chunk in range(actor.vpp)]
        layers = tuple(layer for start in starts for layer in range(start, start + per_chunk))
        dense = sum(dims.dense_params(layer, actor.tp) for layer in layers)
        # Both ends of a pipeline have a tied embedding.
        n_tables = int(first) + int(last) if not (dims.tied_embeddings and first and last) else 1
        dense += n_tables * dims.embedding_params(actor.tp) + (dims.hidden_size if last else 0)
        experts = sum(dims.expert_params(layer, actor.ep) for layer in layers)
        owners = max(1, actor.tp * dp // actor.ep)
        adapters = adapter_params(config, dims, layers, actor.tp)
        owned = (-(-adapters // dp), 0) if adapters else (-(-dense // dp), -(-experts // owners))
        found.append(Stage(number, layers, first, last, dense, experts, *owned, adapters))
    return found


def check_split(config: Config, dims: ModelDims) -> None:
    """Check that the actor's ranks can split the model, as `gkd.actor.megatron.layout` does on the ranks.

    Raises:
        ConfigError: naming the key that cannot split this model.
        ModelError: a sequence may be longer than the sliding window.
    """
    actor = config.actor
    check_expert_ranks(actor.ep, config.derived.world_size // actor.pp)
    check_actor_split(
        dims, tp=actor.tp, pp=actor.pp, vpp=actor.vpp, ep=actor.ep, sequence_parallel=actor.sequence_parallel
    )
    check_context_split(actor.cp, (dims.n_heads // actor.tp,), (dims.n_kv_heads // actor.tp,))
    dims.check_sequence_length(config.derived.max_sequence_length)


def megatron_footprints(
    config: Config, dims: ModelDims, tensors: Tensors | None, *, on_cpu: bool, teacher_hidden: int | None
) -> Iterable[RankFootprint]:
    """Yield the footprint of the first rank of every stage.

    Args:
        tensors: not read; `dims` is exact.
        teacher_hidden: hidden size of a teacher that sends hidden states; None: its LM head is left out.
    """
    b = _FLOAT32 if config.model.dtype == "float32" else 2
    batch = largest_micro_batch(config)
    ranks_of_stage = config.derived.world_size // config.actor.pp
    for stage in stages(config, dims):
        owned, adapters = stage.dense_owned + stage.expert_owned, stage.adapter_params
        parts = {
            "weights": b * stage.params + _FLOAT32 * adapters,
            "gradients": _FLOAT32 * (adapters or stage.params),
            "optimizer": _FLOAT32 * owned * (2 if b == _FLOAT32 or adapters else 3),
        }
        parts |= _training_peak(config, dims, stage, batch, itemsize=b, on_cpu=on_cpu)
        rows = dims.embedding_params(config.actor.tp) // dims.hidden_size
        if config.teacher.signal == "hidden" and stage.last and teacher_hidden is not None:
            parts["teacher_head"] = _FLOAT32 * rows * teacher_hidden
        parts["optimizer_step"] = _optimizer_step(config, dims, stage, on_cpu=on_cpu)
        parts["weight_sync"] = _weight_sync(config, dims, stage, itemsize=b)
        parts["saved_copy"] = _FLOAT32 * 3 * owned
        yield RankFootprint("actor", stage.number * ranks_of_stage, parts)


def _training_peak(
    config: Config, dims: ModelDims, stage: Stage, batch: MicroBatchShape, *, itemsize: int, on_cpu: bool
) -> dict[str, int]:
    """Return the activations, logits and transient bytes at the peak of a training step."""
    actor = config.actor
    kernels = Kernels(
        backend="megatron",
        on_cpu=on_cpu,
        itemsize=itemsize,
        packed=batch.packed,
        recompute=actor.recompute,
        tp=actor.tp,
        sequence_parallel=actor.sequence_parallel,
        frozen=stage.adapter_params > 0,
        n_sequences=batch.n_sequences,
        fused=not on_cpu and actor.layers != "torch",
        cp=actor.cp,
    )
    in_flight = _chunks_in_flight(config, stage, batch)
    whole = [kernels.layer(dims, layer) * batch.n_tokens for layer in stage.layers]
    boundary = kernels.boundary(dims) * batch.n_tokens
    kept = boundary * len(stage.layers) if actor.recompute == "full" else sum(whole)
    activations = round(kept * in_flight / actor.vpp)
    # Stages keep the activations that they received and sent.
    activations += 2 * boundary * in_flight if actor.pp > 1 else boundary
    layer = max(whole) if actor.recompute == "full" else 0
    if stage.last:
        activations += kernels.final_norm(dims) * batch.n_tokens
    embedding = dims.embedding_params(actor.tp)
    loss = LossShape(
        config,
        batch,
        hidden=dims.hidden_size,
        rows_of_head=embedding // dims.hidden_size,
        itemsize=itemsize,
        on_cpu=on_cpu,
        frozen=kernels.frozen,
        in_place=True,
    )
    # Recomputed activations of a layer, and gradients that are not reduced yet.
    transient = layer + _layer_gradients(dims, actor.tp, batch, itemsize, on_cpu=on_cpu, frozen=kernels.frozen)
    if kernels.fused and dims.moe is not None:  # the experts' first matrices as one tensor, and its gradient
        largest = max((dims.expert_params(layer, actor.ep) for layer in stage.layers), default=0)
        transient += itemsize * (1 if kernels.frozen else 2) * largest * 2 // 3
    embedding_bytes = 0 if kernels.frozen else embedding * itemsize
    # Both gradients of a tied table, and their sum.
    held = 2 * loss.head_grad_bytes if stage.last and dims.tied_embeddings and stage.first else 0
    # The layers' backward pass, the loss's forward pass, and the end of the backward pass.
    phases = [
        {"activations": activations, "logits": 0, "transient": transient + (loss.backward_bytes if stage.last else 0)}
    ]
    if stage.last:
        phases.append({"activations": activations, "logits": loss.logits_bytes, "transient": loss.forward_bytes})
    if stage.first:
        phases.append({"activations": 0, "logits": 0, "transient": transient + embedding_bytes + held})
    return max(phases, key=lambda parts: sum(parts.values()))


def _chunks_in_flight(config: Config, stage: Stage, batch: MicroBatchShape) -> int:
    """Return how many micro-batches, times the stage's chunks, have activations at a time (1F1B)."""
    pp, vpp = config.actor.pp, config.actor.vpp
    if vpp == 1:
        return min(pp - stage.number, batch.n_batches)
    ahead = (pp - stage.number - 1) * 2 + (vpp - 1) * pp + 1
    return min(ahead, -(-batch.n_batches // pp) * pp * vpp)


def _layer_gradients(
    dims: ModelDims, tp: int, batch: MicroBatchShape, itemsize: int, *, on_cpu: bool, frozen: bool
) -> int:
    """Return the bytes of unreduced gradients: of two widths of a layer, and of its largest matrix if it is trained."""
    ffn = dims.ffn_size if dims.moe is None else dims.moe.ffn_size * dims.moe.n_active
    widest = 2 * ffn // tp
    matrix = dims.hidden_size * max(widest, (dims.q_columns + 2 * dims.kv_columns) // tp)
    sums = 0 if frozen else itemsize + (_FLOAT32 if on_cpu and itemsize < _FLOAT32 else 0)
    return batch.n_tokens * itemsize * (2 * dims.hidden_size + widest) + matrix * sums


def _optimizer_step(config: Config, dims: ModelDims, stage: Stage, *, on_cpu: bool) -> int:
    """Return the temporary bytes of the update.

    Fused, on CUDA, none. On the CPU two copies of the largest parameter in torch's AdamW, or, if that is more, gloo's
    copy of the gradient buffer while it is reduced over several ranks.
    """
    if not on_cpu:
        return 0
    if stage.adapter_params:
        return _FLOAT32 * max(2 * stage.dense_owned, stage.adapter_params)  # at most
    dp = max(1, stage.dense_params // max(1, stage.dense_owned))
    largest = max(
        dims.embedding_params(config.actor.tp) if stage.first or stage.last else 0, dims.hidden_size * dims.ffn_size * 2
    )
    return _FLOAT32 * max(2 * largest // dp, stage.params if dp > 1 else 0)


def _weight_sync(config: Config, dims: ModelDims, stage: Stage, *, itemsize: int) -> int:
    """Return the bytes of the buckets, and with TP of the largest tensor, gathered and joined."""
    tensors = [dims.hidden_size * max(dims.ffn_size, dims.q_columns)]
    if stage.first or stage.last:
        tensors.append(dims.vocab_size * dims.hidden_size)
    largest = max(tensors) * itemsize
    gathered = largest * (2 if config.actor.tp > 1 else 0)
    return sync_buffers(config, largest, stage.params * config.actor.tp * itemsize) + gathered

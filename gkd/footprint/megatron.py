"""The memory of the Megatron ranks: one for each pipeline stage, since all ranks of a stage have the same.

Weights lie in one buffer, and so do float32 gradients, whatever dtype the weights have. The distributed optimizer has
both moments, and float32 masters of bfloat16 weights, of this rank's share of the stage; float32 weights are their own
masters. Experts are shared by fewer ranks than the rest.

Letters: b bytes of a number of the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gkd.config.check_parallel import Divisible, check_actor_split, check_expert_ranks
from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.errors import ModelError
from gkd.footprint.activations import Kernels
from gkd.footprint.batch import BatchShape, batch_shape
from gkd.footprint.loss import LossShape, loss_shape
from gkd.footprint.shapes import ModelShape
from gkd.footprint.types import RankFootprint

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Stage:
    """What is where in a pipeline: which layers, how many parameters."""

    number: int
    layers: tuple[int, ...]
    first: bool
    last: bool
    dense_params: int  # of this rank
    expert_params: int
    dense_owned: int  # that its optimizer updates
    expert_owned: int

    @property
    def params(self) -> int:
        return self.dense_params + self.expert_params


def stages(config: Config, shape: ModelShape) -> list[Stage]:
    """The pipeline's stages in their order; see `gkd.actor.megatron.layout`."""
    actor = config.actor
    check_split(config, shape)
    dp = derive(config).dp_size
    per_chunk = shape.n_layers // (actor.pp * actor.vpp)
    found = []
    for number in range(actor.pp):
        first, last = number == 0, number == actor.pp - 1
        starts = [(chunk * actor.pp + number) * per_chunk for chunk in range(actor.vpp)]
        layers = tuple(layer for start in starts for layer in range(start, start + per_chunk))
        dense = sum(shape.dense_params(layer, actor.tp) for layer in layers)
        # A shared embedding is held by both ends of a pipeline.
        n_tables = int(first) + int(last) if not (shape.tied and first and last) else 1
        dense += n_tables * shape.embedding_params(actor.tp) + (shape.hidden if last else 0)
        experts = sum(shape.expert_params(layer, actor.ep) for layer in layers)
        owners = max(1, actor.tp * dp // actor.ep)
        found.append(Stage(number, layers, first, last, dense, experts, -(-dense // dp), -(-experts // owners)))
    return found


def check_split(config: Config, shape: ModelShape) -> None:
    """As the actor itself does, see `gkd.actor.megatron.layout`.

    Raises:
        ConfigError: naming the key that cannot split this model.
        ModelError: a sequence may be longer than its sliding window.
    """
    actor = config.actor
    check_expert_ranks(actor.ep, derive(config).world_size // actor.pp)
    model = Divisible(
        shape.model_type,
        shape.n_layers,
        shape.n_heads,
        shape.n_kv_heads,
        dense_ffn=shape.dense_ffn,
        n_experts=0 if shape.experts is None else shape.experts.n,
    )
    check_actor_split(
        model, tp=actor.tp, pp=actor.pp, vpp=actor.vpp, ep=actor.ep, sequence_parallel=actor.sequence_parallel
    )
    longest = derive(config).max_sequence_length
    if shape.sliding_window is not None and longest > shape.sliding_window:
        raise ModelError(
            f"a sequence may have {longest} tokens, more than sliding_window = {shape.sliding_window} in config.json, "
            "and actor.strategy=megatron has full attention only."
        )


def megatron_footprints(
    config: Config, shape: ModelShape, *, on_cpu: bool, teacher_hidden: int | None
) -> Iterable[RankFootprint]:
    """The first rank of every stage.

    Args:
        teacher_hidden: D of a teacher that sends hidden states; None: unknown, and its LM head is left out.
    """
    b = _FLOAT32 if config.model.dtype == "float32" else 2
    batch = batch_shape(config)
    ranks_of_stage = derive(config).world_size // config.actor.pp
    for stage in stages(config, shape):
        owned = stage.dense_owned + stage.expert_owned
        parts = {
            "weights": b * stage.params,
            "gradients": _FLOAT32 * stage.params,
            "optimizer": _FLOAT32 * owned * (2 if b == _FLOAT32 else 3),
        }
        parts |= _training_moment(config, shape, stage, batch, itemsize=b, on_cpu=on_cpu)
        rows = shape.embedding_params(config.actor.tp) // shape.hidden
        if config.teacher.signal == "hidden" and stage.last and teacher_hidden is not None:
            parts["teacher_head"] = _FLOAT32 * rows * teacher_hidden
        parts["optimizer_step"] = _optimizer_step(config, shape, stage, on_cpu=on_cpu)
        parts["weight_sync"] = _weight_sync(config, shape, stage, itemsize=b)
        parts["saved_copy"] = _FLOAT32 * 3 * owned
        yield RankFootprint("actor", stage.number * ranks_of_stage, parts)


def _training_moment(
    config: Config, shape: ModelShape, stage: Stage, batch: BatchShape, *, itemsize: int, on_cpu: bool
) -> dict[str, int]:
    """activations, logits and passing: their sum is that of the fullest moment."""
    actor = config.actor
    kernels = Kernels(
        backend="megatron",
        on_cpu=on_cpu,
        itemsize=itemsize,
        packed=batch.packed,
        recompute=actor.recompute,
        tp=actor.tp,
        sequence_parallel=actor.sequence_parallel,
        n_sequences=batch.n_sequences,
    )
    in_flight = _chunks_in_flight(config, stage, batch)
    whole = [kernels.layer(shape, layer) * batch.n_tokens for layer in stage.layers]
    boundary = kernels.boundary(shape) * batch.n_tokens
    kept = boundary * len(stage.layers) if actor.recompute == "full" else sum(whole)
    activations = round(kept * in_flight / actor.vpp)
    # Stages keep what they were sent and what they sent.
    activations += 2 * boundary * in_flight if actor.pp > 1 else boundary
    layer = max(whole) if actor.recompute == "full" else 0
    if stage.last:
        activations += kernels.final_norm(shape) * batch.n_tokens
    embedding = shape.embedding_params(actor.tp)
    loss = loss_shape(
        config,
        batch,
        hidden=shape.hidden,
        rows_of_head=embedding // shape.hidden,
        itemsize=itemsize,
        on_cpu=on_cpu,
    )
    passing = layer + _layer_gradients(shape, actor.tp, batch, itemsize, on_cpu)
    return fullest_moment(activations, passing, loss, stage, tied=shape.tied, embedding_bytes=embedding * itemsize)


def fullest_moment(
    activations: int, passing: int, loss: LossShape, stage: Stage, *, tied: bool, embedding_bytes: int
) -> dict[str, int]:
    """The most of: the loss's forward pass; the layers' backward pass; its end, at the embedding.

    Args:
        passing: a layer's recomputed activations, and gradients on their way.
    """
    # Of one table used twice, both gradients and their sum.
    held = 2 * loss.head_grad_bytes if stage.last and tied and stage.first else 0
    moments = [
        {"activations": activations, "logits": 0, "passing": passing + (loss.backward_bytes if stage.last else 0)}
    ]
    if stage.last:
        moments.append({"activations": activations, "logits": loss.logits_bytes, "passing": loss.forward_bytes})
    if stage.first:
        moments.append({"activations": 0, "logits": 0, "passing": passing + embedding_bytes + held})
    return max(moments, key=lambda parts: sum(parts.values()))


def _chunks_in_flight(config: Config, stage: Stage, batch: BatchShape) -> int:
    """Micro-batches, times the stage's chunks, whose activations are alive together (1F1B)."""
    pp, vpp = config.actor.pp, config.actor.vpp
    if vpp == 1:
        return min(pp - stage.number, batch.n_batches)
    ahead = (pp - stage.number - 1) * 2 + (vpp - 1) * pp + 1
    return min(ahead, -(-batch.n_batches // pp) * pp * vpp)


def _layer_gradients(shape: ModelShape, tp: int, batch: BatchShape, itemsize: int, on_cpu: bool) -> int:
    """Of a layer's activations, two of its widths, and of its largest matrix before it is added to the others."""
    ffn = shape.ffn if shape.experts is None else shape.experts.ffn * shape.experts.n_active
    widest = 2 * ffn // tp
    matrix = shape.hidden * max(widest, (shape.q_columns + 2 * shape.kv_columns) // tp)
    sums = itemsize + (_FLOAT32 if on_cpu and itemsize < _FLOAT32 else 0)
    return batch.n_tokens * itemsize * (2 * shape.hidden + widest) + matrix * sums


def _optimizer_step(config: Config, shape: ModelShape, stage: Stage, *, on_cpu: bool) -> int:
    """torch's AdamW: on the CPU two copies of the largest parameter; on CUDA all second moments' roots at once."""
    if not on_cpu:
        return _FLOAT32 * (stage.dense_owned + stage.expert_owned)
    dp = max(1, stage.dense_params // max(1, stage.dense_owned))
    largest = max(
        shape.embedding_params(config.actor.tp) if stage.first or stage.last else 0, shape.hidden * shape.ffn * 2
    )
    return 2 * _FLOAT32 * largest // dp


def _weight_sync(config: Config, shape: ModelShape, stage: Stage, *, itemsize: int) -> int:
    """A bucket, at least the largest tensor, and with tensor parallelism that tensor, gathered and joined."""
    tensors = [shape.hidden * max(shape.ffn, shape.q_columns)]
    if stage.first or stage.last:
        tensors.append(shape.vocab_size * shape.hidden)
    largest = max(tensors) * itemsize
    gathered = largest * (2 if config.actor.tp > 1 else 0)
    return max(min(config.weight_sync.bucket_mib << 20, stage.params * config.actor.tp * itemsize), largest) + gathered

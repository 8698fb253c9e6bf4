"""Predict the bytes of an actor rank: states to the byte, and the peak of a training step.

Activations are a coefficient for each kind of layer. They leave out what takes a few percent, such as rotary tables.

Letters: b bytes per number of the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from gkd.config.schema import Config, logits_chunk_bytes
from gkd.config.schema_rollout import IPC
from gkd.hf.model_dims import (
    ModelDims,
    check_actor_split,
    check_context_split,
    check_expert_ranks,
    check_megatron_support,
)
from gkd.hf.model_folder import ModelFolder, count_params

FLOAT32 = 4
_TABLES = 12  # float32 numbers of the loss for each entry of a teacher's list
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_SPLIT_INPUTS = ("o_proj", "down_proj")  # TP splits their inputs, and the outputs of the others


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers and the numbers of parameters of one rank of a pipeline stage; of fsdp2, those before sharding."""

    layers: Sequence[int]
    last: bool
    params: int
    owned: int  # parameters that the rank's optimizer updates
    adapters: int  # parameters of adapters, which are trained instead of the others
    in_flight: int = 1  # micro-batches, times the stage's chunks, whose activations exist at a time


def itemsize(config: Config) -> int:
    """Return b."""
    return FLOAT32 if config.model.dtype == "float32" else 2


def largest_micro_batch(config: Config) -> tuple[int, int, int]:
    """Return (tokens of this rank, rows of them with a loss, micro-batches of a step) with sequences of full length.

    With a token budget all tokens may be of responses, as prompts may be short.
    """
    actor = config.actor
    longest = config.derived.max_sequence_length
    n_response = config.data.max_response_length
    n_in_group = -(-config.trainer.global_batch_size // config.derived.dp_size) * config.rollout.n
    n_sequences = min(actor.micro_batch_size, n_in_group)
    n_tokens = n_sequences * longest
    n_rows = n_sequences * n_response
    if actor.max_tokens_per_micro_batch:
        n_tokens = min(max(actor.max_tokens_per_micro_batch, longest), n_in_group * longest)
        n_rows = n_in_group * n_response
    n_own = -(-n_tokens // actor.cp)  # all of them may be response tokens
    return n_own, min(n_rows, n_own), -(-n_in_group * longest // n_tokens)


def adapter_params(config: Config, dims: ModelDims, layers: Sequence[int], tp: int = 1) -> int:
    """Return the parameters of the adapters of these layers on one of `tp` tensor-parallel ranks; experts have none."""
    h = dims.hidden_size
    f = dims.ffn_size
    q = dims.q_columns
    kv = dims.kv_columns
    sides = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h)}
    dense = [layer for layer in layers if not dims.is_moe_layer(layer)]
    if dims.moe is not None and not config.actor.backend.adapts_moe_models:
        dense = []
    # Columns of MLPs -> the layers that have them; those of experts get none.
    columns = ((f, len(dense)), (dims.shared_size, sum(map(dims.is_moe_layer, layers)) if dims.shared_size else 0))
    total = 0
    for target in config.actor.lora.targets:
        name = target.rpartition(".")[2]
        mlps = [((size, h) if name == "down_proj" else (h, size), n) for size, n in columns]
        for (n_in, n_out), n in [(sides[name], len(layers))] if name in _ATTENTION else mlps:
            total += n * (n_in // tp + n_out if name in _SPLIT_INPUTS else n_in + n_out // tp)
    return config.actor.lora.rank * total


def gathered(model: ModelFolder) -> tuple[int, int, int]:
    """Return the parameters of the model, of its largest layer, and of its embedding."""
    dims = model.dims
    if not dims.is_exact:
        return count_params(model.tensors or {})
    layers = [dims.dense_params(i) + dims.expert_params(i) for i in range(dims.n_layers)]
    return dims.n_params, max(layers), dims.embedding_params()


def tower_bytes(config: Config, model: ModelFolder, n_tokens: int) -> tuple[int, int]:
    """Return the bytes of a vision tower in a pass: (saved for the backward pass, of one layer).

    All tokens of prompts may be those of images.
    """
    if config.derived.vision == "none":
        return 0, 0
    vision = model.config_json["vision_config"]
    hidden = vision.get("hidden_size", 0)
    patches = n_tokens * config.data.max_prompt_length // config.derived.max_sequence_length
    merge = vision.get("spatial_merge_size") or round(1 / model.config_json.get("downsample_ratio", 1))
    patches *= merge**2
    layer = patches * itemsize(config) * (6 * hidden + 2 * vision.get("intermediate_size", 4 * hidden))
    n_layers = vision.get("depth") or vision.get("num_hidden_layers", 1)
    return n_layers * layer if config.derived.vision == "trained" else 0, layer


def megatron_stages(config: Config, model: ModelFolder) -> list[Stage]:
    """Return the pipeline's stages in their order; see `gkd.actor.megatron.layout`.

    Raises:
        ConfigError: naming the key that cannot split this model.
        ModelError: Megatron does not support the model.
    """
    dims = model.dims
    actor = config.actor
    n_shards = config.derived.n_shards
    check_megatron_support(model.config_json)
    check_expert_ranks(actor.ep, config.derived.world_size // actor.pp)
    sizes = {"tp": actor.tp, "pp": actor.pp, "vpp": actor.vpp, "ep": actor.ep}
    check_actor_split(dims, **sizes, sequence_parallel=actor.sequence_parallel, layers=actor.layers)
    check_context_split(actor.cp, (dims.n_heads // actor.tp,), (dims.n_kv_heads // actor.tp,))
    per_chunk = dims.n_layers // (actor.pp * actor.vpp)
    _, _, n_batches = largest_micro_batch(config)
    stages = []
    for number in range(actor.pp):
        first = number == 0
        last = number == actor.pp - 1
        starts = [(chunk * actor.pp + number) * per_chunk for chunk in range(actor.vpp)]
        layers = [layer for start in starts for layer in range(start, start + per_chunk)]
        # Both ends of a pipeline have a tied embedding.
        n_tables = int(first) + int(last) if not (dims.tied_embeddings and first and last) else 1
        dense = sum(dims.dense_params(layer, actor.tp) for layer in layers)
        dense += n_tables * dims.embedding_params(actor.tp) + (dims.hidden_size if last else 0)
        experts = sum(dims.expert_params(layer, actor.ep) for layer in layers)
        adapters = adapter_params(config, dims, layers, actor.tp)
        owned = -(-adapters // n_shards)
        if not adapters:
            owned = -(-dense // n_shards) + -(-experts // max(1, actor.tp * n_shards // actor.ep))
        in_flight = min(actor.pp - number, n_batches)  # 1F1B
        if actor.vpp > 1:
            ahead = (actor.pp - number - 1) * 2 + (actor.vpp - 1) * actor.pp + 1
            in_flight = min(ahead, -(-n_batches // actor.pp) * actor.pp * actor.vpp)
        stages.append(Stage(layers, last, dense + experts, owned, adapters, in_flight))
    return stages


def fsdp_stages(config: Config, model: ModelFolder) -> list[Stage]:
    """Return the one stage of all ranks. Raises ConfigError as `check_context_split`."""
    dims = model.dims
    layers = range(dims.n_layers)
    check_context_split(config.actor.cp, (dims.n_heads,), (dims.n_kv_heads,))
    total, _, _ = gathered(model)
    total += model.vision_params if config.derived.vision == "trained" else 0
    adapters = adapter_params(config, dims, layers)
    owned = -(-(adapters or total) // config.derived.n_shards)
    return [Stage(layers, True, total, owned, adapters)]


# Value of `actor.strategy` -> the function that returns its stages.
_STAGES = {"megatron": megatron_stages, "fsdp2": fsdp_stages}


def actor_parts(
    config: Config, model: ModelFolder, *, on_cpu: bool, teacher_hidden: int | None = None
) -> list[dict[str, int]]:
    """Return the bytes by part of the first rank of each pipeline stage; see `RankFootprint`.

    Args:
        teacher_hidden: hidden size of a teacher that sends hidden states; None: its LM head is left out.

    Raises:
        ConfigError, ModelError: as `megatron_stages`.
    """
    actor = config.actor
    stage_sizes = []
    for stage in _STAGES[actor.backend_name](config, model):
        sizes = _states(config, stage)
        if actor.fsdp_cpu_offload and not on_cpu:
            # Gradients come to the host one by one, and torch rounds the pinned memory of each up to a power of two.
            sizes = {"offloaded": sum(sizes.values()) + sizes["gradients"]}
        if config.derived.vision == "frozen":  # it is whole on each rank
            sizes["vision"] = itemsize(config) * model.vision_params
        sizes |= _training_step(config, model, stage, on_cpu=on_cpu)
        if config.teacher.signal == "hidden" and stage.last and teacher_hidden is not None:
            sizes["teacher_head"] = FLOAT32 * -(-model.dims.vocab_size // actor.tp) * teacher_hidden
        sizes["weight_sync"] = _weight_sync(config, model, stage)
        sizes["saved_copy"] = 3 * FLOAT32 * stage.owned
        stage_sizes.append(sizes)
    return stage_sizes


def _states(config: Config, stage: Stage) -> dict[str, int]:
    """Return weights, gradients and optimizer states: two moments, and with Megatron masters of bfloat16 weights.

    All are float32 but for Megatron's weights, and frozen weights, which have no gradients and moments.
    """
    b = itemsize(config)
    shards_all = config.actor.backend.shards_every_tensor
    n_shards = config.derived.n_shards if shards_all else 1
    of_weight = FLOAT32 if shards_all and not stage.adapters else b
    n_numbers = 2 if b == FLOAT32 or stage.adapters or shards_all else 3
    return {
        "weights": -(-(of_weight * stage.params + FLOAT32 * stage.adapters) // n_shards),
        "gradients": -(-FLOAT32 * (stage.adapters or stage.params) // n_shards),
        "optimizer": FLOAT32 * n_numbers * stage.owned,
    }


def layer_bytes(config: Config, dims: ModelDims, layer: int, *, on_cpu: bool) -> float:
    """Return the bytes per token that a layer saves for the backward pass, with recompute none or selective."""
    actor = config.actor
    b = itemsize(config)
    is_megatron = actor.backend_name == "megatron"
    share = 1 / actor.tp if actor.sequence_parallel else 1.0  # share of the tokens between two tensor-parallel regions
    q = dims.q_columns / actor.tp
    kv = dims.kv_columns / actor.tp
    attention = 2 * (q + kv) + (q if actor.cp > 1 else 0)  # queries, keys, values, context, and its own columns of it
    # Their input: on the CPU in float32, and normalized; so are Gemma's, which Megatron computes in one kernel on CUDA.
    norm = 2 * FLOAT32 if on_cpu else FLOAT32 * (1 if is_megatron else 2) if dims.is_gemma else b
    has_norms = dims.qk_norm or dims.post_norm
    is_fused = is_megatron and not on_cpu and actor.layers != "torch"
    if is_fused and not dims.post_norm:
        attention += q + 2 * kv if dims.qk_norm else 0  # the input of norms; values are a copy of a part of it
    elif is_megatron and (has_norms or on_cpu or actor.recompute == "selective"):
        attention += (q + kv) * (1 + has_norms * norm / b)  # values are a view of the projection, and keep all of it
    elif has_norms:
        attention += (q + kv) * norm / b
    hidden = (4 if dims.is_gemma else 2) * (norm + b) * dims.hidden_size * share
    per_column = 3 if is_fused else 5 if is_megatron else 4  # numbers per column of an MLP
    if dims.moe is None or not dims.is_moe_layer(layer):
        return hidden + b * (attention + per_column * dims.ffn_size / actor.tp)
    routed = dims.moe.n_active * share * ((1 if is_megatron else 2) * dims.hidden_size + per_column * dims.moe.ffn_size)
    return hidden + b * (attention + routed + per_column * dims.shared_size / actor.tp)


def _training_step(config: Config, model: ModelFolder, stage: Stage, *, on_cpu: bool) -> dict[str, int]:
    """Return activations, logits and transient bytes at the peak: in the loss, or in the backward pass of a layer."""
    dims = model.dims
    actor = config.actor
    b = itemsize(config)
    n_tokens, n_rows, _ = largest_micro_batch(config)
    frozen = stage.adapters > 0
    of_layers = [layer_bytes(config, dims, layer, on_cpu=on_cpu) * n_tokens for layer in stage.layers]
    hidden = b * dims.hidden_size * n_tokens
    boundary = hidden / (actor.tp if actor.sequence_parallel else 1)
    recomputes = actor.recompute == "full"
    kept = boundary * len(of_layers) if recomputes else sum(of_layers)
    saved, tower = tower_bytes(config, model, n_tokens)
    activations = saved + kept * stage.in_flight / actor.vpp
    # Stages keep what they received and sent; the last one keeps the input of the last norm.
    activations += boundary * ((2 * stage.in_flight if actor.pp > 1 else 1) + stage.last)
    layer = 2 * hidden + 2 * b * dims.ffn_size / actor.tp * n_tokens + (max(of_layers) if recomputes else 0)
    layer = max(layer, tower)
    table = gradient = 0
    ending = 2 * FLOAT32 * dims.embedding_params(actor.tp) if on_cpu else 0  # copies of a parameter in AdamW
    if actor.backend.shards_every_tensor:
        table, gradient, ending = _gathered(config, model, frozen=frozen, on_cpu=on_cpu)
    logits = in_loss = after_loss = 0
    if stage.last:
        logits, in_loss, after_loss = _loss(config, dims, n_rows, frozen=frozen, on_cpu=on_cpu)
    phases = [
        {"activations": round(activations), "logits": logits, "transient": in_loss + table},
        {"activations": round(activations), "logits": 0, "transient": round(after_loss + table + gradient + layer)},
        {"activations": 0, "logits": 0, "transient": table + ending},
    ]
    return max(phases, key=lambda phase: sum(phase.values()))


def _gathered(config: Config, model: ModelFolder, *, frozen: bool, on_cpu: bool) -> tuple[int, int, int]:
    """Return, for fsdp2, (bytes of the gathered embedding, of a layer and its gradient, of the embedding's gradient).

    On a GPU the next layer is gathered, too. A gradient is whole, and has a float32 copy, until it is reduced.
    """
    b = itemsize(config)
    n_shards = config.derived.n_shards
    _, layer, embedding = gathered(model)
    embedding += model.vision_params if config.derived.vision == "trained" else 0  # the root has both
    shard = 0 if on_cpu else -(-layer // n_shards)
    reduced = 0 if frozen else layer * (b + FLOAT32) + FLOAT32 * shard
    of_layer = b * (layer if on_cpu else 2 * layer + shard) + reduced
    return b * embedding, of_layer, 0 if frozen else embedding * (b + FLOAT32) + FLOAT32 * embedding // n_shards


def _loss(config: Config, dims: ModelDims, n_rows: int, *, frozen: bool, on_cpu: bool) -> tuple[int, int, int]:
    """Return the bytes of (logits and tables, the rest of the loss, what remains for the layers' backward pass).

    Fused, there are the logits of a chunk, and the gradients of the rows and of the LM head, which Megatron's loss adds
    to the gradient buffer. Otherwise all logits exist.
    """
    actor = config.actor
    b = itemsize(config)
    n_vocab = -(-dims.vocab_size // actor.tp)
    # The teacher's full distribution is logits in float32; the list of another tokenizer becomes a row of them, too.
    is_full = not {"logits", "hidden"}.isdisjoint(config.derived.signals) or bool(config.teacher.tokenizer)
    of_row = n_vocab * (b + (FLOAT32 if is_full else 0))
    chunk = min(n_rows, max(1, logits_chunk_bytes(on_cpu=on_cpu) // of_row))
    at_once = chunk if actor.fuses else n_rows
    topk = config.teacher.topk if "topk" in config.derived.signals else 0
    logits = at_once * n_vocab * b + (chunk * n_vocab * FLOAT32 if is_full else 0)
    tables = FLOAT32 * (3 * n_rows * topk + _TABLES * at_once * (topk + 1))
    rows = n_rows * dims.hidden_size * b
    head = 0 if frozen else n_vocab * dims.hidden_size
    if not actor.fuses:
        return logits + tables, rows, rows + n_rows * n_vocab * b + head * b
    if not actor.backend.shards_every_tensor:
        return logits + tables, 2 * rows, 2 * rows
    summed = head * (FLOAT32 if b == FLOAT32 else FLOAT32 + b)  # computed in float32, cast at the end
    return logits + tables, 2 * rows + summed, 2 * rows + head * b


def _weight_sync(config: Config, model: ModelFolder, stage: Stage) -> int:
    """Return the bytes of the buckets, and of the largest tensor: gathered, and with TP joined."""
    dims = model.dims
    b = itemsize(config)
    columns = max(dims.ffn_size, dims.q_columns, dims.shared_size)
    matrices = [dims.hidden_size * columns, dims.vocab_size * dims.hidden_size]
    joined = 2 if config.actor.tp > 1 else 0
    if config.actor.backend.shards_every_tensor:  # all experts of a layer are one tensor for two of their matrices
        experts = 0 if dims.moe is None else 2 * dims.moe.n_experts * dims.moe.ffn_size * dims.hidden_size
        matrices += [experts, *(prod(size) for size in (model.tensors or {}).values())]
        joined = 1
    largest = b * max(matrices)
    return sync_buffers(config, largest, b * stage.params * config.actor.tp) + joined * largest


def sync_buffers(config: Config, largest: int, total: int) -> int:
    """Return the bytes of the two buckets of a weight sync; one where gloo sends them from host memory.

    Args:
        largest, total: bytes of the largest tensor, which has a bucket of its own, and of all tensors.
    """
    one = max(min(config.weight_sync.bucket_mib << 20, total), largest)
    on_host = config.trainer.colocate and config.transport("cuda") != IPC
    return one if on_host else min(2 * one, total)

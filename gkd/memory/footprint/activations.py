"""Compute the largest micro-batch, and the bytes that its layers save for the backward pass and that its loss needs.

The tensors that autograd saves are counted one by one. Tests compare them with autograd's on the CPU. CUDA's norms and
attention save less; that is compared with torch's CUDA allocator on stand-in cards (`tests.bench.footprint_allocator`),
and not with a GPU.

The loss: fused, only the logits of a chunk of rows exist at a time, and the gradients of hidden states and head are
computed in the forward pass. Otherwise all logits of a micro-batch exist, and are overwritten by their gradient. See
`gkd.loss.distill_loss`.

Letters: H hidden size, Q and KV columns of queries and of keys, F columns of an MLP, N loss rows, V vocabulary rows of
this rank, K entries of the teacher's top-k list, b bytes per number.
"""

from __future__ import annotations

from dataclasses import dataclass

from gkd.config.schema import Config, logits_chunk_bytes
from gkd.hf.model_dims import ModelDims

_FLOAT32, _INT64 = 4, 8


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """A rank's columns of the largest micro-batch of its data-parallel group, with sequences of full length."""

    n_tokens: int  # padding included
    n_rows: int  # positions with a loss
    n_sequences: int
    n_batches: int  # micro-batches of one optimizer step
    packed: bool


def largest_micro_batch(config: Config) -> MicroBatchShape:
    """Return the worst case. With a token budget all tokens may be of responses, as prompts may be short."""
    data, actor, derived = config.data, config.actor, config.derived
    longest = derived.max_sequence_length
    n_in_group = -(-config.trainer.global_batch_size // derived.dp_size) * config.rollout.n
    budget = actor.max_tokens_per_micro_batch
    if budget:
        n_tokens = min(max(budget, longest), n_in_group * longest)
        n_sequences = max(1, n_tokens // longest)
        n_rows = min(n_tokens, n_in_group * data.max_response_length)
    else:
        n_sequences = min(actor.micro_batch_size, n_in_group)
        n_tokens, n_rows = n_sequences * longest, n_sequences * data.max_response_length
    n_batches = -(-n_in_group * longest // n_tokens)
    n_own = -(-n_tokens // actor.cp)  # of which all may be of responses
    return MicroBatchShape(n_own, min(n_rows, n_own), n_sequences, n_batches, actor.packing)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The properties that determine which tensors are saved, and the bytes that follow from them."""

    backend: str  # "megatron" | "fsdp2"
    on_cpu: bool
    itemsize: int  # b, of activations
    packed: bool
    recompute: str  # none | selective | full
    tp: int = 1
    sequence_parallel: bool = False
    frozen: bool = False  # only adapters are trained; the tensors that they save, r numbers per token, are left out
    n_sequences: int = 1  # sequences of a padded micro-batch, which share one table of positions
    fused: bool = False  # SwiGLU saves its input alone, the rotary embedding nothing
    cp: int = 1  # after the exchange for attention a rank has all columns of its heads

    @property
    def _share(self) -> float:
        """Share of the tokens that this rank has between two tensor-parallel regions."""
        return 1 / self.tp if self.sequence_parallel else 1.0

    def layer(self, dims: ModelDims, layer: int) -> int:
        """Return the bytes per token of one layer, with recompute none or selective."""
        if self.backend == "fsdp2":
            kept = self._hf_attention(dims) + self._hf_mlp(dims, layer)
        else:
            kept = self._megatron_attention(dims) + self._megatron_mlp(dims, layer)
        return round(kept)

    def boundary(self, dims: ModelDims) -> int:
        """Return the bytes per token of a layer's input, all that recompute full saves of it."""
        return round(self.itemsize * dims.hidden_size * self._share)

    def final_norm(self, dims: ModelDims) -> int:
        """Return the bytes per token of the norm after the last layer."""
        return round(self._norm(dims) * dims.hidden_size * self._share)

    def _norm(self, dims: ModelDims) -> int:
        """Return the bytes that an RMSNorm saves per input number, excluding its output."""
        # FSDP2 replaces the norms of transformers by torch's; those of an unknown architecture may differ, and stay.
        is_torchs = self.backend == "megatron" or dims.is_exact
        if not self.on_cpu and is_torchs:
            return self.itemsize  # its kernel saves the input
        # Elsewhere: the input in float32, and the normalized one if the weight is trained.
        return _FLOAT32 + (0 if self.frozen else _FLOAT32 if is_torchs else self.itemsize)

    def _in_one_call(self, dims: ModelDims) -> bool:
        """Return whether one kernel computes a pack, from copies of q, k and v; see `gkd.actor.common.attention`."""
        supported = self.itemsize < _FLOAT32 and dims.head_dim <= 256 and dims.head_dim % 8 == 0
        return self.packed and not self.on_cpu and supported

    def _pieces(self, dims: ModelDims) -> int:
        """Return 1 if the context of each packed sequence is saved as well as the joined one: a call per sequence."""
        return int(self.packed and not self._in_one_call(dims))

    def _repeats(self, dims: ModelDims) -> bool:
        """Return whether keys and values are saved once per query head: no float32 kernel on CUDA shares them."""
        own = self.backend == "megatron" or self.packed  # otherwise transformers' attention
        return own and not self.on_cpu and self.itemsize == _FLOAT32 and dims.n_kv_heads < dims.n_heads

    def _exchanged(self, dims: ModelDims) -> float:
        """Return the columns that attention saves if context-parallel ranks exchange them.

        Queries, keys, values, context, and the context of its own columns. Several ranks may get the same key head.
        """
        q, kv = dims.q_columns / self.tp, dims.kv_columns / self.tp
        return 3 * q + 2 * (q if self._repeats(dims) else kv * max(1, self.cp * self.tp // dims.n_kv_heads))

    def _megatron_attention(self, dims: ModelDims) -> float:
        b, q, kv = self.itemsize, dims.q_columns / self.tp, dims.kv_columns / self.tp
        hidden = dims.hidden_size * self._share
        kept = (self._norm(dims) + b) * hidden
        copies_values = (self._repeats(dims) or self._in_one_call(dims)) and self.recompute != "selective"
        copies_values = copies_values or (self.cp > 1 and self.recompute != "selective")
        if self.cp > 1 and copies_values:
            kept += b * self._exchanged(dims)
        elif self._repeats(dims) and copies_values:
            kept += b * 4 * q  # queries, keys, values and context
        else:
            # Rotated queries and keys, the context, and values that are copied for the kernel.
            kept += b * (2 * q + kv + (kv if copies_values else 0))
        if dims.qk_norm or not copies_values:
            # The input of the keys' norm and values that are not copied are views of the projection, which keep it.
            kept += b * (q + 2 * kv)
        if not self.fused:  # sines and cosines, twice
            kept += 4 * b * dims.head_dim / (1 if self.packed else self.n_sequences)
        if self.recompute != "selective":
            kept += _FLOAT32 * dims.n_heads / self.tp + b * q * (self._pieces(dims) if self.cp == 1 else 0)
        if dims.qk_norm:
            kept += self._query_key_norms(dims, q)
        return kept

    def _query_key_norms(self, dims: ModelDims, q: float) -> float:
        """Return the bytes of what the norms save.

        Inputs in their own dtype are views of the projection, except queries of several groups.
        """
        kv, copied = dims.kv_columns / self.tp, self.itemsize * q if dims.n_kv_heads > self.tp else 0
        if not self.on_cpu:
            return copied
        normed = 0 if self.frozen else _FLOAT32 * (q + kv)
        return normed + (copied if self.itemsize == _FLOAT32 else _FLOAT32 * (q + kv))

    def _megatron_mlp(self, dims: ModelDims, layer: int) -> float:
        b, hidden = self.itemsize, dims.hidden_size * self._share
        kept = (self._norm(dims) + b) * hidden
        if dims.moe is None or not dims.is_moe_layer(layer):
            # Both halves of the projection, and the product; unless fused a copy of the second half, and the activation
            # of the first.
            return kept + (3 if self.fused else 5) * b * dims.ffn_size / self.tp
        routed = dims.moe.n_active * self._share
        # As above; unless fused also the weighted product.
        kept += routed * b * (dims.hidden_size + (3 if self.fused else 6) * dims.moe.ffn_size)
        return kept + 3 * _FLOAT32 * dims.moe.n_experts * self._share  # the scores of the router

    def _hf_attention(self, dims: ModelDims) -> float:
        b, q, kv = self.itemsize, dims.q_columns, dims.kv_columns
        kept: float = (self._norm(dims) + b) * dims.hidden_size
        keys = q if self._repeats(dims) else kv
        of_attention = self._exchanged(dims) if self.cp > 1 else 2 * q + 2 * keys + q * self._pieces(dims)
        kept += b * of_attention + _FLOAT32 * dims.n_heads
        return kept + (self._norm(dims) * (q + kv) if dims.qk_norm else 0)

    def _hf_mlp(self, dims: ModelDims, layer: int) -> float:
        b = self.itemsize
        kept = (self._norm(dims) + b) * dims.hidden_size
        if dims.moe is None or not dims.is_moe_layer(layer):
            return kept + 4 * b * dims.ffn_size
        routed = dims.moe.n_active
        return kept + routed * b * (2 * dims.hidden_size + 4 * dims.moe.ffn_size) + 2 * _FLOAT32 * dims.moe.n_experts


# Numbers that the softmax kernels process at a time, see gkd.loss.row_kernels.
_PIECE = {True: 1 << 21, False: 1 << 22}  # on the CPU, on CUDA
# [n, K] tables of the loss of n rows, in addition to the teacher's: logprobs, shares, gradients.
_TABLES = 12


@dataclass(frozen=True, slots=True)
class LossShape:
    """The loss of one micro-batch on one rank with these settings."""

    config: Config
    batch: MicroBatchShape
    hidden: int
    rows_of_head: int  # V, padding included
    itemsize: int
    on_cpu: bool
    frozen: bool = False  # the LM head is not trained and has no gradient
    in_place: bool = False  # fused, the LM head's gradient is added to the gradient buffer by the loss

    @property
    def fused(self) -> bool:
        """Return whether LM head and loss run together, in chunks of rows."""
        return self.config.actor.fused_lm_head

    @property
    def is_full(self) -> bool:
        """Return whether the teacher's full distribution exists as logits."""
        # A list of a teacher with another tokenizer is written into a row of its vocabulary.
        return not {"logits", "hidden"}.isdisjoint(self.config.derived.signals) or bool(self.config.teacher.tokenizer)

    @property
    def rows_at_once(self) -> int:
        """Rows of logits that exist at a time."""
        if not self.fused:
            return self.batch.n_rows
        return min(self.batch.n_rows, self._chunk_rows)

    @property
    def _chunk_rows(self) -> int:
        of_row = self.rows_of_head * (self.itemsize + (_FLOAT32 if self.is_full else 0))
        return max(1, logits_chunk_bytes(on_cpu=self.on_cpu) // of_row)

    @property
    def logits_bytes(self) -> int:
        """Bytes of the logits, of the teacher's logits if any, of the kernels' working memory, and of tables."""
        n, v = self.rows_at_once, self.rows_of_head
        logits = n * v * self.itemsize
        if self.is_full:
            logits += min(self.batch.n_rows, self._chunk_rows) * v * _FLOAT32
        piece = max(min(_PIECE[self.on_cpu], n * v), v) * _FLOAT32 * (1 if self.itemsize == _FLOAT32 else 2)
        topk = self.config.teacher.topk if "topk" in self.config.derived.signals else 0
        listed = self.batch.n_rows * topk * (_INT64 + _FLOAT32)
        return logits + piece + listed + n * (topk + 1) * _FLOAT32 * _TABLES

    @property
    def forward_bytes(self) -> int:
        """Bytes while the loss is computed, without logits: hidden rows and, fused, both gradients."""
        b, head = self.itemsize, 0 if self.frozen else self.rows_of_head * self.hidden
        rows = self.batch.n_rows * self.hidden * b
        if not self.fused:
            return rows
        if self.in_place:
            return 2 * rows + (b * head if self.on_cpu and b < _FLOAT32 else 0)  # a chunk's part
        if b == _FLOAT32:
            return 2 * rows + _FLOAT32 * head
        # The sum over chunks is float32. In addition a chunk's part exists on the CPU, and at the end the cast sum.
        return 2 * rows + (_FLOAT32 + b) * head

    @property
    def head_grad_bytes(self) -> int:
        """Bytes of the LM head's gradient before it is added to the gradient buffer."""
        kept = not self.frozen and not (self.fused and self.in_place)
        return self.rows_of_head * self.hidden * self.itemsize if kept else 0

    @property
    def backward_bytes(self) -> int:
        """Bytes of the loss that remain when the layers' backward pass starts."""
        b, rows = self.itemsize, self.batch.n_rows * self.hidden * self.itemsize
        if self.fused:
            return 2 * rows + self.head_grad_bytes
        return rows + self.batch.n_rows * self.rows_of_head * b + self.head_grad_bytes

"""What a decoder layer keeps of a token for its backward pass: the tensors that autograd saves, counted one by one.

On the CPU they are compared with autograd's in tests/dist; CUDA's norms and attention save less, which is known from
torch's derivatives and not measured.

Letters: H hidden size, Q and KV columns of queries and of keys, F columns of an MLP, b bytes of a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from gkd.footprint.shapes import ModelShape

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Kernels:
    """What decides which tensors are saved."""

    backend: str  # "megatron" | "fsdp2"
    on_cpu: bool
    itemsize: int  # b, of activations
    packed: bool
    recompute: str  # none | selective | full
    tp: int = 1
    sequence_parallel: bool = False
    frozen: bool = False  # only adapters are trained; what they keep of their own, a rank's numbers, is left out
    n_sequences: int = 1  # of a padded micro-batch: its positions are counted once for all of them

    @property
    def _share(self) -> float:
        """Of the tokens between two tensor-parallel regions that this rank has."""
        return 1 / self.tp if self.sequence_parallel else 1.0

    def layer(self, shape: ModelShape, layer: int) -> int:
        """Bytes a token of one layer, nothing recomputed but what `selective` recomputes."""
        if self.backend == "fsdp2":
            kept = self._hf_attention(shape) + self._hf_mlp(shape, layer)
        else:
            kept = self._megatron_attention(shape) + self._megatron_mlp(shape, layer)
        return round(kept)

    def boundary(self, shape: ModelShape) -> int:
        """Bytes a token of a layer's input: all that `full` keeps of it."""
        return round(self.itemsize * shape.hidden * self._share)

    def final_norm(self, shape: ModelShape) -> int:
        """Bytes a token of the norm behind the last layer."""
        return round(self._norm() * shape.hidden * self._share)

    def _norm(self) -> int:
        """Bytes of an RMSNorm's saved tensors for each of its inputs, its output not counted."""
        if self.backend == "fsdp2":  # transformers': the input in float32, and normalised if its factor is trained
            return _FLOAT32 + (0 if self.frozen else self.itemsize)
        # torch's, in one kernel on CUDA, which keeps the input; in parts on the CPU, in float32.
        return 2 * _FLOAT32 if self.on_cpu else self.itemsize

    def _in_one_call(self, shape: ModelShape) -> bool:
        """Does a kernel take the pack as it is, from copies of q, k and v? See `gkd.actor.common.attention`."""
        takes = self.itemsize < _FLOAT32 and shape.head_dim <= 256 and shape.head_dim % 8 == 0
        return self.packed and not self.on_cpu and takes

    def _pieces(self, shape: ModelShape) -> int:
        """Are the contexts of packed sequences kept, beside the joined one? Without a kernel each is a call."""
        return int(self.packed and not self._in_one_call(shape))

    def _repeats(self, shape: ModelShape) -> bool:
        """Are keys and values kept once for each head of queries? In float32 no kernel on CUDA shares them."""
        own = self.backend == "megatron" or self.packed  # else it is transformers' attention
        return own and not self.on_cpu and self.itemsize == _FLOAT32 and shape.n_kv_heads < shape.n_heads

    def _megatron_attention(self, shape: ModelShape) -> float:
        b, q, kv = self.itemsize, shape.q_columns / self.tp, shape.kv_columns / self.tp
        hidden = shape.hidden * self._share
        kept = (self._norm() + b) * hidden
        if self._repeats(shape) and self.recompute != "selective":
            kept += b * 4 * q  # queries, keys, values, the context; nothing of the projection
        else:
            kept += b * (2 * q + kv)  # queries and keys, rotated, and the context
            # The values lie between queries and keys as they were projected, or are copied for the kernel.
            kept += b * (kv if self._in_one_call(shape) else q + 2 * kv)
        kept += 4 * b * shape.head_dim / (1 if self.packed else self.n_sequences)  # sines and cosines, twice
        if self.recompute != "selective":
            kept += _FLOAT32 * shape.n_heads / self.tp + b * q * self._pieces(shape)
        if shape.qk_norm:
            kept += self._query_key_norms(shape, q, kv)
        return kept

    def _query_key_norms(self, shape: ModelShape, q: float, kv: float) -> float:
        """Their inputs are parts of the projection, but for the queries of several groups, which are copied out."""
        copied = q if shape.n_kv_heads > self.tp else 0
        if not self.on_cpu:
            return self.itemsize * copied
        return _FLOAT32 * (copied + q + kv) if self.itemsize == _FLOAT32 else 2 * _FLOAT32 * (q + kv)

    def _megatron_mlp(self, shape: ModelShape, layer: int) -> float:
        b, hidden = self.itemsize, shape.hidden * self._share
        kept = (self._norm() + b) * hidden
        if shape.experts is None or not shape.has_experts(layer):
            # Both halves of the projection, the second half once more, the first's activation, their product.
            return kept + 5 * b * shape.ffn / self.tp
        routed = shape.experts.n_active * self._share
        kept += routed * b * (shape.hidden + 6 * shape.experts.ffn)  # as above, and the product times its weight
        return kept + 3 * _FLOAT32 * shape.experts.n * self._share  # the router's scores

    def _hf_attention(self, shape: ModelShape) -> float:
        b, q, kv = self.itemsize, shape.q_columns, shape.kv_columns
        kept = (self._norm() + b) * shape.hidden
        keys = q if self._repeats(shape) else kv
        kept += b * (2 * q + 2 * keys + q * self._pieces(shape)) + _FLOAT32 * shape.n_heads
        return kept + (self._norm() * (q + kv) if shape.qk_norm else 0)

    def _hf_mlp(self, shape: ModelShape, layer: int) -> float:
        b = self.itemsize
        kept = (self._norm() + b) * shape.hidden
        if shape.experts is None or not shape.has_experts(layer):
            return kept + 4 * b * shape.ffn
        routed = shape.experts.n_active
        return kept + routed * b * (2 * shape.hidden + 4 * shape.experts.ffn) + 2 * _FLOAT32 * shape.experts.n

"""What a decoder layer keeps of a token for its backward pass: the tensors that autograd saves, counted one by one.

On the CPU they are compared with autograd's in tests/dist; CUDA's norms and attention save less, which is known from
torch's derivatives and not measured.

Letters: H hidden size, Q and KV columns of queries and of keys, F columns of an MLP, b bytes of a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from gkd.hf.model_dims import ModelDims

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

    def layer(self, dims: ModelDims, layer: int) -> int:
        """Bytes a token of one layer, nothing recomputed but what `selective` recomputes."""
        if self.backend == "fsdp2":
            kept = self._hf_attention(dims) + self._hf_mlp(dims, layer)
        else:
            kept = self._megatron_attention(dims) + self._megatron_mlp(dims, layer)
        return round(kept)

    def boundary(self, dims: ModelDims) -> int:
        """Bytes a token of a layer's input: all that `full` keeps of it."""
        return round(self.itemsize * dims.hidden_size * self._share)

    def final_norm(self, dims: ModelDims) -> int:
        """Bytes a token of the norm behind the last layer."""
        return round(self._norm() * dims.hidden_size * self._share)

    def _norm(self) -> int:
        """Bytes of an RMSNorm's saved tensors for each of its inputs, its output not counted."""
        if self.backend == "fsdp2":  # transformers': the input in float32, and normalised if its factor is trained
            return _FLOAT32 + (0 if self.frozen else self.itemsize)
        # torch's, in one kernel on CUDA, which keeps the input; in parts on the CPU, in float32.
        return 2 * _FLOAT32 if self.on_cpu else self.itemsize

    def _in_one_call(self, dims: ModelDims) -> bool:
        """Does a kernel take the pack as it is, from copies of q, k and v? See `gkd.actor.common.attention`."""
        takes = self.itemsize < _FLOAT32 and dims.head_dim <= 256 and dims.head_dim % 8 == 0
        return self.packed and not self.on_cpu and takes

    def _pieces(self, dims: ModelDims) -> int:
        """Are the contexts of packed sequences kept, beside the joined one? Without a kernel each is a call."""
        return int(self.packed and not self._in_one_call(dims))

    def _repeats(self, dims: ModelDims) -> bool:
        """Are keys and values kept once for each head of queries? In float32 no kernel on CUDA shares them."""
        own = self.backend == "megatron" or self.packed  # else it is transformers' attention
        return own and not self.on_cpu and self.itemsize == _FLOAT32 and dims.n_kv_heads < dims.n_heads

    def _megatron_attention(self, dims: ModelDims) -> float:
        b, q, kv = self.itemsize, dims.q_columns / self.tp, dims.kv_columns / self.tp
        hidden = dims.hidden_size * self._share
        kept = (self._norm() + b) * hidden
        if self._repeats(dims) and self.recompute != "selective":
            kept += b * 4 * q  # queries, keys, values, the context; nothing of the projection
        else:
            kept += b * (2 * q + kv)  # queries and keys, rotated, and the context
            # The values lie between queries and keys as they were projected, or are copied for the kernel.
            kept += b * (kv if self._in_one_call(dims) else q + 2 * kv)
        kept += 4 * b * dims.head_dim / (1 if self.packed else self.n_sequences)  # sines and cosines, twice
        if self.recompute != "selective":
            kept += _FLOAT32 * dims.n_heads / self.tp + b * q * self._pieces(dims)
        if dims.qk_norm:
            kept += self._query_key_norms(dims, q, kv)
        return kept

    def _query_key_norms(self, dims: ModelDims, q: float, kv: float) -> float:
        """Their inputs are parts of the projection, but for the queries of several groups, which are copied out."""
        copied = q if dims.n_kv_heads > self.tp else 0
        if not self.on_cpu:
            return self.itemsize * copied
        return _FLOAT32 * (copied + q + kv) if self.itemsize == _FLOAT32 else 2 * _FLOAT32 * (q + kv)

    def _megatron_mlp(self, dims: ModelDims, layer: int) -> float:
        b, hidden = self.itemsize, dims.hidden_size * self._share
        kept = (self._norm() + b) * hidden
        if dims.moe is None or not dims.is_moe_layer(layer):
            # Both halves of the projection, the second half once more, the first's activation, their product.
            return kept + 5 * b * dims.ffn_size / self.tp
        routed = dims.moe.n_active * self._share
        kept += routed * b * (dims.hidden_size + 6 * dims.moe.ffn_size)  # as above, and the product times its weight
        return kept + 3 * _FLOAT32 * dims.moe.n_experts * self._share  # the router's scores

    def _hf_attention(self, dims: ModelDims) -> float:
        b, q, kv = self.itemsize, dims.q_columns, dims.kv_columns
        kept = (self._norm() + b) * dims.hidden_size
        keys = q if self._repeats(dims) else kv
        kept += b * (2 * q + 2 * keys + q * self._pieces(dims)) + _FLOAT32 * dims.n_heads
        return kept + (self._norm() * (q + kv) if dims.qk_norm else 0)

    def _hf_mlp(self, dims: ModelDims, layer: int) -> float:
        b = self.itemsize
        kept = (self._norm() + b) * dims.hidden_size
        if dims.moe is None or not dims.is_moe_layer(layer):
            return kept + 4 * b * dims.ffn_size
        routed = dims.moe.n_active
        return kept + routed * b * (2 * dims.hidden_size + 4 * dims.moe.ffn_size) + 2 * _FLOAT32 * dims.moe.n_experts

"""Values of the operations of vLLM's own libraries that a Llama or Qwen engine calls in eager mode."""
import torch

_kept = []


def _normed(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _rms_norm(result, x, weight, epsilon):
    result.copy_(_normed(x, weight, epsilon))


def _fused_add_rms_norm(x, residual, weight, epsilon):
    residual.add_(x)
    x.copy_(_normed(residual, weight, epsilon))


def _silu_and_mul(result, x):
    gate, up = x.chunk(2, -1)
    result.copy_(torch.nn.functional.silu(gate) * up)


def _rotary(positions, query, key, head_size, table, is_neox, *rest):
    assert is_neox and not any(rest), "[dry_card] rotary_embedding of this kind has no values"
    cos, sin = table[positions.flatten()].float().chunk(2, -1)
    width = 2 * cos.shape[-1]
    for x in (query, key):
        if x is not None:
            heads = x.view(len(cos), -1, head_size)
            a, b = heads[..., :width].float().chunk(2, -1)
            c, s = cos[:, None], sin[:, None]
            heads[..., :width] = torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def _store(key, value, key_cache, value_cache, slot_mapping, *_):
    slots, size = slot_mapping[: len(key)], key_cache.shape[1]
    rows = slots >= 0
    block, at = slots[rows] // size, slots[rows] % size
    n = len(slots)
    key_cache[block, at] = key[:n][rows].to(key_cache.dtype)
    value_cache[block, at] = value[:n][rows].to(value_cache.dtype)


def _attention(q, k, v, out, cu_q, used_k, scale, block_table):
    """k, v: [blocks, block size, heads, size]."""
    ends, lengths = cu_q.tolist(), used_k.tolist()
    for i, (first, last) in enumerate(zip(ends, ends[1:])):
        n, m = last - first, lengths[i]
        if n <= 0 or m <= 0:
            continue
        blocks = block_table[i, : -(-m // k.shape[1])].long()
        ks, vs = (t[blocks].flatten(0, 1)[:m].float().transpose(0, 1) for t in (k, v))
        share = q.shape[1] // ks.shape[0]
        ks, vs = ks.repeat_interleave(share, 0), vs.repeat_interleave(share, 0)
        scores = q[first:last].float().transpose(0, 1) @ ks.transpose(1, 2) * scale
        hidden = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(1 + m - n)
        out[first:last] = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ vs).transpose(0, 1).to(out.dtype)
    return out


def _unified(q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size, block_table, *_, **__):
    _attention(q, k, v, out, cu_seqlens_q, seqused_k, softmax_scale, block_table)


def _varlen(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, *, seqused_k, softmax_scale, block_table, out=None, **_):
    return _attention(q, k, v, torch.empty_like(q) if out is None else out, cu_seqlens_q, seqused_k, softmax_scale, block_table)


def after_custom_ops(module):
    ops, cache = torch.library.Library("_C", "IMPL"), torch.library.Library("_C_cache_ops", "IMPL")
    for name, made in {"rms_norm": _rms_norm, "fused_add_rms_norm": _fused_add_rms_norm, "silu_and_mul": _silu_and_mul,
                       "rotary_embedding": _rotary}.items():
        ops.impl(name, made, "CUDA", allow_override=True)
    cache.impl("reshape_and_cache_flash", _store, "CUDA", allow_override=True)
    _kept.extend((ops, cache))


def after_unified(module):
    module.unified_attention = _unified


def after_store(module):
    module.triton_reshape_and_cache_flash = _store


def after_flash(module):
    module.flash_attn_varlen_func = _varlen


def _add_lora_linear(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *_, **__):
    rows, out, first = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1]), 0
    of = self.token_lora_indices[: len(rows)]
    for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices):
        for k in range(len(a)):
            on = (of == k).nonzero()[:, 0]
            if len(on):
                delta = rows[on].float() @ a[k, 0].float().T @ b[k, 0].float().T * scale
                out[on, first : first + width] += delta.to(out.dtype)
        first += width


def after_punica(module):
    module.PunicaWrapperGPU.add_lora_linear = _add_lora_linear


HOOKS = {
    "vllm.lora.punica_wrapper.punica_gpu": after_punica,
    "vllm._custom_ops": after_custom_ops,
    "vllm.v1.attention.ops.triton_unified_attention": after_unified,
    "vllm.v1.attention.ops.triton_reshape_and_cache_flash": after_store,
    "vllm.vllm_flash_attn.flash_attn_interface": after_flash,
}

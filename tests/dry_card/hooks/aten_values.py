"""What values.so cannot give: attention kernels without a CPU form."""
import torch


def _per_sequence(q, k, v, cu_q, cu_k, is_causal, scale):
    """Yield (rows of q, rows of k, weights [h, n, m]) in float32, with shared heads repeated."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:]):
        share = q.shape[1] // k.shape[1]
        qs = q[a:b].float().transpose(0, 1)
        ks = k[c:d].float().transpose(0, 1).repeat_interleave(share, 0)
        vs = v[c:d].float().transpose(0, 1).repeat_interleave(share, 0)
        scores = qs @ ks.transpose(1, 2) * scale
        if is_causal:
            n, m = scores.shape[1:]
            hidden = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(1 + m - n)
            scores = scores.masked_fill(hidden, -torch.inf)
        yield slice(a, b), slice(c, d), qs, ks, vs, scores, scale, share


def _forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
             window_size_left=None, window_size_right=None, **_):
    if cu_q is None:
        raise NotImplementedError("[dry_card] padded flash attention has no values")
    causal = is_causal or window_size_right == 0
    out = torch.empty_like(q)
    log_sum = torch.zeros(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    for rows, _, _, _, vs, scores, _, _ in _per_sequence(q, k, v, cu_q, cu_k, causal, scale):
        out[rows] = (scores.softmax(-1) @ vs).transpose(0, 1).to(q.dtype)
        log_sum[:, rows] = scores.logsumexp(-1)
    rng = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return out, log_sum, rng, torch.zeros((), dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)


def _backward(grad_out, q, k, v, out, logsumexp, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
              scale=None, window_size_left=None, window_size_right=None, **_):
    causal = is_causal or window_size_right == 0
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, cols, qs, ks, vs, scores, factor, share in _per_sequence(q, k, v, cu_q, cu_k, causal, scale):
        g = grad_out[rows].float().transpose(0, 1)
        p = scores.softmax(-1)
        dp = g @ vs.transpose(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * factor
        shared = lambda t: t.unflatten(0, (-1, share)).sum(1).transpose(0, 1)  # noqa: E731
        dq[rows] = (ds @ ks).transpose(0, 1).to(q.dtype)
        dk[cols], dv[cols] = shared(ds.transpose(1, 2) @ qs).to(k.dtype), shared(p.transpose(1, 2) @ g).to(v.dtype)
    return dq, dk, dv


def _rms_backward(grad, x, normalized_shape, rstd, weight, output_mask):
    dims = tuple(range(-len(normalized_shape), 0))
    g, wide = grad.float(), x.float()
    normed = wide * rstd
    gw = g if weight is None else g * weight.float()
    dx = (gw - normed * (gw * normed).mean(dims, keepdim=True)) * rstd
    dw = None
    if weight is not None and output_mask[1]:
        dw = (g * normed).flatten(0, x.ndim - len(normalized_shape) - 1).sum(0).to(weight.dtype)
    return (dx.to(x.dtype) if output_mask[0] else None), dw


def _histc(x, bins=100, min=0, max=0):
    assert not x.dtype.is_floating_point, "[dry_card] histc has values for integers alone"
    counts = torch.histc(x.cpu().double(), bins, float(min), float(max))
    return counts.to(x.dtype).to(x.device)


def install():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CUDA")
    library.impl("_flash_attention_backward", _backward, "CUDA")
    library.impl("_fused_rms_norm_backward", _rms_backward, "CUDA")
    library.impl("histc", _histc, "CUDA")
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    return library

"""The loss on a CUDA device. Run by hand where there is one: pytest -m gpu tests/gpu

What this does not prove: Megatron on CUDA, NCCL, vLLM on CUDA.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_topk_logprobs_on_cuda_equal_float64() -> None:
    """If it fails, the loss on GPUs is not the loss that the CPU tests check."""
    from gkd.loss.vocab_parallel import vocab_parallel_topk_logprobs

    torch.manual_seed(0)
    logits = torch.randn(64, 32003, device="cuda") * 4
    ids = torch.randint(0, 32003, (64, 16), device="cuda")
    weight = torch.randn(64, 16, device="cuda")
    reference = logits.double().requires_grad_()
    expected = reference.log_softmax(-1).gather(1, ids)
    (expected * weight).sum().backward()
    local = logits.clone().requires_grad_()
    got = vocab_parallel_topk_logprobs(local, ids, vocab_start=0, n_valid_vocab=32003, tp_group=None, temperature=1.0)
    (got * weight).sum().backward()
    assert local.grad is not None and reference.grad is not None
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(local.grad.double(), reference.grad, atol=1e-4, rtol=1e-4)

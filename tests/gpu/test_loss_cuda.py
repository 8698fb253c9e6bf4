"""Test the loss on a CUDA device with real vocabulary sizes. Not run in CI: pytest -m gpu tests/gpu

What this does not prove: Megatron on CUDA, NCCL, vLLM on CUDA.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

N, V, K, PADDING = 64, 151_936, 64, 128
DTYPES = [torch.float32, torch.bfloat16]
TRUNCATED = pytest.mark.real_card("Triton's interpreter truncates to bfloat16 where a card rounds")


def make_logits(dtype: torch.dtype) -> Tensor:
    """Return [N, V] logits: rows of a wider matrix, with some tokens at -inf."""
    torch.manual_seed(0)
    logits = (torch.randn(N, V + PADDING, device="cuda") * 4).to(dtype)[:, :V]
    logits[0, : V // 2] = -torch.inf
    logits[1, 1:] = -torch.inf
    return logits


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_on_cuda_equal_float64(dtype: torch.dtype, temperature: float) -> None:
    """Fails if the GPU's exponential or summation order has a larger error than float32 rounding."""
    from gkd.loss.triton_rows import TritonRows

    logits = make_logits(dtype)
    log_sum, mean = TritonRows().statistics(logits, temperature)
    z = logits.double() / temperature
    assert_close(log_sum.double(), z.logsumexp(-1), atol=2e-5, rtol=2e-6)
    expected = (z.softmax(-1) * z.masked_fill(z == -torch.inf, 0.0)).sum(-1)
    assert_close(mean.double(), expected, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n_ids", [0, 1, K, 256])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=TRUNCATED)])
def test_gradient_on_cuda_equals_float64(dtype: torch.dtype, n_ids: int, in_place: bool) -> None:
    """Fails if a thread overwrites a logit before another reads it, or a value at an id after it was stored."""
    from gkd.loss.row_kernels import RowGradient
    from gkd.loss.triton_rows import TritonRows

    temperature, logits = 0.9, make_logits(dtype)
    columns = torch.randint(-1, V, (N, n_ids), device="cuda")
    columns[:, n_ids // 2 :] = columns[:, : n_ids - n_ids // 2]  # repeats
    column_grad, row_grad = torch.randn(N, n_ids, device="cuda"), torch.randn(N, device="cuda")
    z = logits.double() / temperature
    log_normalizer = z.logsumexp(-1).float()
    expected = -row_grad.double()[:, None] * (z - log_normalizer.double()[:, None]).exp()
    added = column_grad.double().masked_fill(columns < 0, 0.0)
    expected = expected.scatter_add(1, columns.clamp(min=0), added) / temperature
    out = logits if in_place else torch.empty_like(logits)
    TritonRows().write_gradient(logits, out, RowGradient(columns, column_grad, row_grad, log_normalizer, temperature))
    # Half a unit in the last place: one rounding, to nearest.
    assert_close(out.double(), expected, atol=2e-6, rtol=0.5 * torch.finfo(dtype).eps + 2e-5)


def test_rows_beyond_32_bits_on_cuda() -> None:
    """Fails if row offsets are 32-bit: 8192 rows of 300,000 columns have more than 2^31 elements."""
    from gkd.loss.row_kernels import RowGradient
    from gkd.loss.triton_rows import TritonRows

    rows = 2**31 // V + 3
    if torch.cuda.mem_get_info()[0] < 2 * 2 * rows * V:
        pytest.skip("needs about 9 GB of free GPU memory")
    logits = torch.zeros(rows, V, dtype=torch.bfloat16, device="cuda")
    logits[-1] = torch.arange(V, device="cuda") % 7
    log_sum, _ = TritonRows().statistics(logits, 1.0)
    assert_close(log_sum[-1].double(), logits[-1].double().logsumexp(-1), atol=2e-5, rtol=2e-6)
    ids = {"columns": torch.full((rows, 1), -1, device="cuda"), "column_grad": torch.zeros(rows, 1, device="cuda")}
    expected = -(logits[-1].double() - log_sum[-1].double()).exp()
    ones = torch.ones(rows, device="cuda")
    by = RowGradient(**ids, row_grad=ones, log_normalizer=log_sum, temperature=1.0)
    TritonRows().write_gradient(logits, logits, by)
    assert_close(logits[-1].double(), expected, atol=1e-12, rtol=0.5 * 2**-7 + 2e-5)


@pytest.mark.parametrize("choice", ["torch", "triton"])
def test_logprobs_on_cuda_equal_float64(choice: str) -> None:
    """Fails if the loss on GPUs differs from the one that the CPU tests check, with any kernels."""
    from gkd.loss.row_kernels import TorchRows, row_kernels
    from gkd.loss.vocab_parallel import VocabShard
    from tests.unit.loss_cases import logprobs_of

    torch.manual_seed(0)
    logits = torch.randn(64, 32003, device="cuda") * 4
    ids, weight = torch.randint(0, 32003, (64, 16), device="cuda"), torch.randn(64, 16, device="cuda")
    reference = logits.double().requires_grad_()
    expected = reference.log_softmax(-1).gather(1, ids)
    (expected * weight).sum().backward()
    leaf = logits.clone().requires_grad_()
    kernels = row_kernels(leaf.device) if choice == "triton" else TorchRows()
    got = logprobs_of(leaf, ids, VocabShard(start=0, n_valid=32003, group=None), kernels=kernels)
    (got.logprobs * weight).sum().backward()
    assert leaf.grad is not None and reference.grad is not None
    assert_close(got.logprobs.double(), expected, atol=1e-4, rtol=1e-5)
    assert_close(leaf.grad.double(), reference.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("in_one_call", [True, False])
def test_a_product_is_added_in_float32_on_cuda(monkeypatch: pytest.MonkeyPatch, in_one_call: bool) -> None:
    """Fails if the LM head's gradient is rounded to 16 bits before it is added, or this torch adds something else."""
    from gkd.loss import chunked

    if not in_one_call:
        monkeypatch.setattr(chunked, "adds_to_float32", lambda device, dtype: False)
    torch.manual_seed(0)
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((96, 512), (512, 64)))
    total = torch.randn(96, 64, device="cuda")
    expected = total.double() + a.double() @ b.double()
    chunked.add_product(total, a, b)
    assert_close(total.double(), expected, atol=1e-3, rtol=1e-5)

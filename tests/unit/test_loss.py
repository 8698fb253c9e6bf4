"""The loss in one process: its value, its exact gradient, its edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gkd.errors import ConfigError, DataError, NumericsError
from gkd.loss import vocab_parallel
from gkd.loss.divergence import DIVERGENCES, Tail, forward_kl, tail_logprob
from gkd.loss.reduce import sum_over_group, token_mean
from gkd.loss.spec import LossSpec
from gkd.loss.vocab_parallel import vocab_parallel_topk_logprobs

N, V, PADDED, K = 3, 11, 14, 4
TAILS: tuple[Tail, ...] = ("bucket", "renorm", "drop")


def _teacher(mass: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """[N, K] ids and float64 logprobs whose probabilities sum to `mass`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(V, generator=generator)[:K] for _ in range(N)])
    shares = torch.rand((N, K), generator=generator, dtype=torch.float64) + 0.1
    return ids, (mass * shares / shares.sum(dim=-1, keepdim=True)).log()


def _logits(seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn((N, PADDED), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _student(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    return vocab_parallel_topk_logprobs(
        logits, ids, vocab_start=0, n_valid_vocab=V, tp_group=None, temperature=temperature
    )


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("mass", [0.3, 0.7, 0.999])
def test_forward_kl_gradcheck(tail: Tail, mass: float) -> None:
    """Fails if the gradient is not that of the stated loss: q - p where truncation makes it mass * q - p, say."""
    ids, teacher = _teacher(mass)
    logits = _logits().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: forward_kl(_student(z, ids, 0.7), teacher, tail), (logits,))


@pytest.mark.parametrize("mass", [0.3, 0.999])
def test_drop_gradient_is_mass_q_minus_p(mass: float) -> None:
    """Fails if 'drop' loses the factor that the teacher's mass puts on the student's softmax."""
    ids, teacher = _teacher(mass)
    logits = _logits().requires_grad_()
    forward_kl(_student(logits, ids), teacher, "drop").sum().backward()
    q = torch.softmax(logits.detach()[:, :V], dim=-1)
    wanted = (mass * q).scatter_add(1, ids, -teacher.exp())
    torch.testing.assert_close(logits.grad[:, :V], wanted)  # type: ignore[index]


def test_values_against_written_out_sums() -> None:
    """Fails if a tail policy computes another sum than its definition."""
    ids, teacher = _teacher(0.7)
    student = _student(_logits(), ids)
    p, q = teacher.exp(), student.exp()
    inside = (p * (teacher - student)).sum(-1)
    bucket = inside + 0.3 * (torch.log(torch.tensor(0.3)) - (1 - q.sum(-1)).log())
    p_norm, q_norm = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    renorm = (p_norm * (p_norm.log() - q_norm.log())).sum(-1)
    torch.testing.assert_close(forward_kl(student, teacher, "drop"), inside)
    torch.testing.assert_close(forward_kl(student, teacher, "bucket"), bucket)
    torch.testing.assert_close(forward_kl(student, teacher, "renorm"), renorm)


@pytest.mark.parametrize("tail", TAILS)
def test_equal_distributions_cost_nothing(tail: Tail) -> None:
    """Fails if a student that equals its teacher still has a loss or a gradient (float32, as in training)."""
    logits = _logits(dtype=torch.float32).requires_grad_()
    ids = torch.arange(K).expand(N, K)
    teacher = _student(logits, ids).detach()
    loss = forward_kl(_student(logits, ids), teacher, tail)
    loss.sum().backward()
    assert float(loss.detach().abs().max()) < 1e-6
    if tail != "drop":  # there the teacher's missing mass still pulls
        assert float(logits.grad.abs().max()) < 1e-6  # type: ignore[union-attr]


@pytest.mark.parametrize("tail", TAILS)
def test_extremes_stay_finite(tail: Tail) -> None:
    """Fails if full mass, an absent (-inf) teacher entry or a student sure of one token makes a nan or an infinity."""
    ids = torch.arange(K).expand(N, K)
    teacher = torch.tensor([0.9, 0.1, 0.0, 0.0]).log().expand(N, K)
    logits = torch.zeros((N, PADDED))
    logits[:, 0] = 60.0
    logits.requires_grad_()
    loss = forward_kl(_student(logits, ids), teacher, tail)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(logits.grad).all()  # type: ignore[arg-type]


def test_tail_logprob_is_floored() -> None:
    """Fails if rounding that pushes the mass over 1 gives a nan, or if an ordinary tail is changed by the floor."""
    over = torch.tensor([[0.6, 0.4000002]]).log()
    assert float(tail_logprob(over)) == pytest.approx(float(torch.log(torch.tensor(torch.finfo().eps))), abs=1e-3)
    assert float(tail_logprob(torch.tensor([[0.5, 0.2]]).log())) == pytest.approx(-1.20397, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_equal_log_softmax(dtype: torch.dtype, temperature: float) -> None:
    """Fails if padding takes probability, statistics are not float32, or the temperature is applied twice."""
    logits = _logits(dtype=dtype)
    logits[:, V:] = 100.0  # padding that would swallow the softmax
    untouched = logits.clone()
    logits.requires_grad_()
    ids, _ = _teacher(0.5)
    logprobs = _student(logits, ids, temperature)
    dense = logits.detach().double()[:, :V].requires_grad_()
    wanted = torch.log_softmax(dense / temperature, dim=-1).gather(1, ids)
    assert logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(logprobs.double(), wanted, atol=2e-6, rtol=1e-6)
    weights = torch.linspace(-1, 2, N * K).view(N, K)
    (logprobs * weights).sum().backward()
    (wanted * weights).sum().backward()
    rounding = 1e-2 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(logits.grad[:, :V].double(), dense.grad, atol=rounding, rtol=rounding)  # type: ignore[index]
    assert not logits.grad[:, V:].any()  # type: ignore[index]
    assert torch.equal(logits, untouched)  # the primitive works in place on copies only


def test_repeated_ids_accumulate() -> None:
    """Fails if two entries with one id lose a gradient to each other."""
    logits = _logits().requires_grad_()
    ids = torch.tensor([[2, 2, 0, 0]]).expand(N, K)
    assert torch.autograd.gradcheck(lambda z: _student(z, ids), (logits,))


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a row at a chunk border is skipped or computed twice."""
    ids, _ = _teacher(0.5)
    whole, chunked = _logits().requires_grad_(), _logits().requires_grad_()
    _student(whole, ids).square().sum().backward()
    monkeypatch.setattr(vocab_parallel, "_CHUNK_ELEMENTS", 2 * V)
    _student(chunked, ids).square().sum().backward()
    assert torch.equal(whole.grad, chunked.grad)  # type: ignore[arg-type]


def test_no_loss_rows() -> None:
    """Fails if a micro-batch without loss rows cannot be differentiated (idle DP ranks run one)."""
    logits = torch.zeros((0, PADDED), requires_grad=True)
    _student(logits, torch.zeros((0, K), dtype=torch.int64)).sum().backward()
    assert logits.grad is not None and logits.grad.shape == (0, PADDED)


@pytest.mark.parametrize("bad_id", [-1, V, PADDED - 1])
def test_foreign_ids_are_refused(bad_id: int) -> None:
    """Fails if ids of another tokenizer, or of padding rows, are scored as if they were tokens."""
    ids = torch.full((N, K), bad_id)
    with pytest.raises(NumericsError, match="tokenizer"):
        _student(_logits(), ids)


def test_spec_names_the_wrong_key() -> None:
    """Fails if a bad loss setting is accepted, or its error does not name key and choices."""
    with pytest.raises(ConfigError, match=r"distill\.loss = 'kl'.*forward_kl"):
        LossSpec(name="kl")
    with pytest.raises(ConfigError, match=r"distill\.tail = 'keep'.*bucket"):
        LossSpec(tail="keep")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"teacher\.temperature = 0"):
        LossSpec(temperature=0.0)
    with pytest.raises(ConfigError, match=r"distill\.tail"):
        forward_kl(torch.zeros(1, 1), torch.zeros(1, 1), "keep")  # type: ignore[arg-type]


def test_spec_evaluates_the_registered_divergence() -> None:
    """Fails if a LossSpec computes another loss than the one it names."""
    ids, teacher = _teacher(0.7)
    student = _student(_logits(), ids)
    for name, divergence in DIVERGENCES.items():
        for tail in TAILS:
            got = LossSpec(name=name, tail=tail).per_token(student, teacher)
            assert torch.equal(got, divergence(student, teacher, tail))


def test_token_mean() -> None:
    """Fails if sums are averaged, or an empty batch divides by zero instead of explaining itself."""
    assert token_mean(6.0, 4) == 1.5
    assert torch.equal(sum_over_group(torch.tensor([1.5, 2.0]), None), torch.tensor([1.5, 2.0], dtype=torch.float64))
    with pytest.raises(DataError, match="no loss token"):
        token_mean(0.0, 0)

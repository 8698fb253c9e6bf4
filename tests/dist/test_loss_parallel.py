"""Compare every loss over a vocabulary that is split over ranks with dense autograd in one process.

What this does not prove: Triton kernels, bfloat16 rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gkd.config.loss_spec import (
    DIVERGENCE_NAMES,
    POLICY_GRADIENT_NAMES,
    SFT,
    LossSpec,
    LossTerm,
    Signal,
    Tail,
    teacher_signals,
)
from gkd.config.schema_teacher import TOKEN_WEIGHTS
from gkd.loss.choices import N_CHOICES
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.row_kernels import TorchRows
from gkd.loss.vocab_parallel import VocabShard
from gkd.types import TokenTargets
from tests.device import rank_device
from tests.dist.dense_loss import dense_factors, dense_losses
from tests.dist.helpers import run_ranks

Setting: TypeAlias = tuple[int, torch.dtype, float]

OWN = "examples.own_loss:alpha_divergence"  # a loss by its import path
TAILS: tuple[Tail, ...] = ("bucket", "renorm", "drop")
SIGNALS: tuple[Signal, ...] = ("topk", "logits", "hidden")
# (vocabulary, dtype, temperature). 21: divided by neither 2 nor 4. 5: at TP 4 two rows per rank, so rank 2 holds one
# padded row and rank 3 only padding. The row kernels use other code paths at temperature 1.
QUICK = ((21, torch.float64, 0.7), (5, torch.float64, 1.0), (21, torch.float32, 1.0))
ALL = tuple(product((21, 5), (torch.float64, torch.float32), (1.0, 0.7)))
N, H, D, CHUNK_ROWS = 9, 6, 4, 4  # three chunks, the last one of a single row
SEQUENCES = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2, 2], device=rank_device())
SCALE = 1.5  # the loss is scaled before its backward pass
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6}
MIXTURE = (LossTerm("forward_kl", 0.5), LossTerm("jsd", 0.3, beta=0.2), LossTerm("k2", 0.7), LossTerm(SFT, 0.4))


def _specs(temperature: float) -> Iterator[tuple[str, LossSpec, Signal]]:
    """Yield (label, loss, signal): each single loss and a mixture, with each signal and tail that affects it."""
    losses = {name: (LossTerm(name, 2.0),) for name in (*DIVERGENCE_NAMES, *POLICY_GRADIENT_NAMES, SFT)}
    losses[OWN] = (LossTerm(OWN, 2.0, alpha=0.5),)  # its differences lose digits near alpha 0 and 1
    for name, terms in {**losses, "mixture": MIXTURE}.items():
        tails = TAILS if name in (*DIVERGENCE_NAMES, OWN, "mixture") else TAILS[:1]
        for signal in SIGNALS:
            for tail in tails if signal == "topk" else TAILS[:1]:
                yield f"{name} {signal} {tail}", LossSpec(terms, tail, temperature), signal
    for weight, signal in product(TOKEN_WEIGHTS[1:], SIGNALS):
        spec = LossSpec(MIXTURE, temperature=temperature, token_weight=weight, token_share=0.6)
        yield f"{weight} {signal}", spec, signal
    terms = (LossTerm("forward_kl"), LossTerm("k1", 0.5), LossTerm("k3"))
    for signal in SIGNALS:
        more = {"reference_weight": 0.3, "teacher_reward_scale": 1.25, "reward_weight": 0.7, "reward_clip": (0.1, 0.3)}
        yield f"rewards {signal}", LossSpec(terms, temperature=temperature, **more), signal
    for signal in SIGNALS:
        yield f"clipped {signal}", LossSpec(MIXTURE, temperature=temperature, token_clip=0.4), signal
    yield "residual topk", LossSpec((LossTerm("reverse_kl", 2.0), LossTerm("k3")), "residual", temperature), "topk"


@dataclass
class Case:
    """Rows for one vocabulary and tensor-parallel size; float64 values, rounded to the dtype under test."""

    hidden: Tensor  # [N, H]
    head: Tensor  # [padded V, H], with large padding values
    teacher_hidden: Tensor  # [N, D]
    teacher_head: Tensor  # [V, D]
    topk_ids: Tensor  # [N, K], on every shard boundary; two rows have shorter lists
    sampled_ids: Tensor  # [N], likewise
    rollout_logprobs: Tensor  # [N]
    on_policy: Tensor  # [N]
    reference_logprobs: Tensor  # [N]
    advantages: Tensor  # [N], of the sequences

    @property
    def n_vocab(self) -> int:
        return len(self.teacher_head)

    def teacher_logits(self, temperature: float) -> Tensor:
        return self.teacher_hidden.double() @ self.teacher_head.double().T / temperature

    def targets(self, spec: LossSpec, signal: Signal) -> TokenTargets:
        """Return targets with the signals that the loss needs."""
        dtype = self.hidden.dtype
        logits = self.teacher_logits(spec.temperature)
        log_p = logits.log_softmax(dim=-1)
        targets = TokenTargets(self.sampled_ids, self.rollout_logprobs, self.on_policy, sequences=SEQUENCES)
        if spec.has_rewards:
            targets.reference_logprobs, targets.advantages = self.reference_logprobs, self.advantages
        signals = teacher_signals(spec, signal)
        if "topk" in signals:
            picked = log_p.gather(1, self.topk_ids.clamp(min=0)).masked_fill(self.topk_ids < 0, -torch.inf)
            targets.topk_ids, targets.topk_logprobs = self.topk_ids, picked.to(dtype)
            targets.tail_mass = (1 - picked.exp().sum(dim=-1)).to(dtype)
        if "sampled" in signals:
            targets.sampled_logprobs = log_p.gather(1, self.sampled_ids[:, None])[:, 0].to(dtype)
        if "logits" in signals:
            targets.logits = logits.to(dtype)
        if "hidden" in signals:
            targets.hidden = self.teacher_hidden
        return targets


def make_case(vocab: int, tp: int, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(vocab)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    rows = -(-vocab // tp)
    borders = {min(max(r * rows + d, 0), vocab - 1) for r in range(tp + 1) for d in (-1, 0)}
    edges = torch.tensor(sorted(borders)[: vocab - 1])  # not the whole vocabulary: there is mass outside the list
    topk_ids = torch.stack([edges[torch.randperm(len(edges), generator=generator)] for _ in range(N)])
    topk_ids[3, 1:] = -1
    topk_ids[N - 1, len(edges) // 2 + 1 :] = -1
    # Flat enough to leave mass outside the list: without it, 1 - mass has no significant digits in float32.
    head = 0.3 * normal(rows * tp, H)
    head[vocab:] = 50.0
    made = Case(
        hidden=normal(N, H),
        head=head,
        teacher_hidden=normal(N, D),
        teacher_head=normal(vocab, D),
        topk_ids=topk_ids,
        sampled_ids=torch.tensor(sorted(borders))[torch.arange(N) % len(borders)],
        rollout_logprobs=(normal(N).double() / 2 - 1.5).to(dtype),
        on_policy=torch.arange(N) % 3 != 1,
        reference_logprobs=(normal(N).double() / 2 - 1.5).to(dtype),
        advantages=torch.tensor([1.2, -0.7, 0.4], dtype=dtype)[SEQUENCES.cpu()],
    )
    return Case(**{field.name: getattr(made, field.name).to(rank_device()) for field in fields(made)})


def _distill_loss(case: Case, spec: LossSpec, signal: Signal, rank: int, tp: int) -> DistillLoss:
    rows = len(case.head) // tp
    group = dist.group.WORLD if tp > 1 else None
    shard = VocabShard(rank * rows, case.n_vocab, group)
    n_real = shard.n_columns(rows)
    loss = DistillLoss(spec, teacher_signals(spec, signal), shard, TorchRows(), chunk_bytes=1)
    loss.teacher_head = case.teacher_head[shard.start : shard.start + n_real]
    loss.chunk_bytes = CHUNK_ROWS * rows * (case.head.element_size() + (4 if loss.is_full_vocab else 0))
    return loss


def _dense(case: Case, spec: LossSpec, targets: TokenTargets) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, gradient of the hidden states, gradient of the head without padding) in float64."""
    hidden = case.hidden.to(torch.float64, copy=True).requires_grad_()
    head = case.head[: case.n_vocab].to(torch.float64, copy=True).requires_grad_()
    is_full = targets.logits is not None or targets.hidden is not None
    log_p = case.teacher_logits(spec.temperature).log_softmax(dim=-1) if is_full else None
    logits = hidden @ head.T
    losses = dense_losses(spec, targets, logits, log_p)
    loss = (losses if spec.token_weight == "none" else losses * dense_factors(spec, targets, logits, log_p)).sum()
    (loss * SCALE).backward()
    return loss.detach(), hidden.grad, head.grad


def differences(rank: int, world_size: int, settings: Sequence[Setting]) -> dict[str, float]:
    """Return, in a rank, the largest difference from dense of loss and gradients by case, in units of the tolerance."""
    measured: dict[str, float] = {}
    for vocab, dtype, temperature in settings:
        case = make_case(vocab, world_size, dtype)
        for label, spec, signal in _specs(temperature):
            for fused in (True, False):
                name = f"{label} T={temperature} V={vocab} {dtype} {'fused' if fused else 'logits'}"
                measured[name] = _difference(case, spec, signal, fused, rank, world_size) / TOLERANCE[dtype]
    return measured


def _difference(case: Case, spec: LossSpec, signal: Signal, fused: bool, rank: int, tp: int) -> float:
    loss = _distill_loss(case, spec, signal, rank, tp)
    targets = case.targets(spec, signal)
    start, rows = loss.shard.start, len(case.head) // tp
    n_real = loss.shard.n_columns(rows)
    hidden, head = case.hidden.clone().requires_grad_(), case.head[start : start + rows].clone().requires_grad_()
    if fused:
        value, sums = loss.from_hidden(hidden, head, targets)
    else:
        value, sums = loss.from_logits(hidden @ head.T, targets)
    (value * SCALE).backward()
    if not fused and tp > 1:  # done by a column-parallel LM head
        dist.all_reduce(hidden.grad)
    expected, hidden_grad, head_grad = _dense(case, spec, targets)
    assert float(sums[0]) == pytest.approx(float(value.detach()), rel=1e-6)
    assert not head.grad[n_real:].any(), "a padded row has a gradient"
    pairs = [(value, expected), (hidden.grad, hidden_grad), (head.grad[:n_real], head_grad[start : start + n_real])]
    # Relative to the larger of 1 and the largest value.
    return max(
        float((got.detach() - want).abs().max() / want.abs().max().clamp(min=1.0))
        for got, want in pairs
        if want.numel()
    )


def same_on_all_ranks(rank: int, world_size: int) -> bool:
    """Return, in a rank, whether loss, sums and gradient of the hidden states are bit-exact on all ranks."""
    case = make_case(21, world_size, torch.float32)
    spec = LossSpec(MIXTURE)
    hidden = case.hidden.clone().requires_grad_()
    head = case.head.chunk(world_size)[rank].clone().requires_grad_()
    loss = _distill_loss(case, spec, "hidden", rank, world_size)
    value, sums = loss.from_hidden(hidden, head, case.targets(spec, "hidden"))
    value.backward()
    own = torch.cat([value.detach()[None].double(), sums, hidden.grad.flatten().double()])
    largest = own.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return torch.equal(own, largest)


def no_rows(rank: int, world_size: int) -> float:
    """Return, in a rank, the largest of loss, sums and gradients of a batch without loss tokens and tables."""
    largest = 0.0
    case = make_case(5, world_size, torch.float32)
    with rank_device():
        ids, logprobs, flags = (torch.zeros(0, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.bool))
    for label, spec, signal in _specs(1.0):
        if not label.startswith(("mixture", "entropy", "rewards")):
            continue
        loss = _distill_loss(case, spec, signal, rank, world_size)
        targets = TokenTargets(ids, logprobs, flags)
        for fused in (True, False):
            hidden = torch.zeros((0, H), device=rank_device(), requires_grad=True)
            head = case.head.chunk(world_size)[rank].clone().requires_grad_()
            if fused:
                value, sums = loss.from_hidden(hidden, head, targets)
            else:
                value, sums = loss.from_logits(hidden @ head.T, targets)
            value.backward()
            assert hidden.grad is not None and head.grad is not None and hidden.grad.shape == (0, H)
            assert len(sums) == len(loss.report_names)
            largest = max(largest, float(value.detach()), float(sums.abs().max()), float(head.grad.abs().max()))
    return largest


def choices_error(rank: int, world_size: int) -> float:
    """Return, in a rank, the largest error of the teacher's most probable tokens and their probabilities."""
    errors = []
    for vocab, signal in product((21, 5), ("logits", "hidden")):
        case, spec = make_case(vocab, world_size, torch.float64), LossSpec((LossTerm("jsd"),), temperature=0.7)
        loss, found = _distill_loss(case, spec, signal, rank, world_size), list[Tensor]()
        with torch.no_grad(), loss.evaluating(None, found.append):
            loss.from_hidden(case.hidden, case.head.chunk(world_size)[rank], case.targets(spec, signal))
        p, ids = case.teacher_logits(0.7).softmax(dim=-1).topk(N_CHOICES)
        q = (case.hidden @ case.head[:vocab].T / 0.7).softmax(dim=-1).gather(1, ids)
        errors.append(float((torch.cat(found) - torch.stack([ids.double(), p, q], dim=2)).abs().max()))
    return max(errors)


def _world(rank: int, world_size: int, settings: Sequence[Setting]) -> tuple[dict[str, float], bool, float, float]:
    zeros = no_rows(rank, world_size), choices_error(rank, world_size)
    return differences(rank, world_size, settings), same_on_all_ranks(rank, world_size), *zeros


def test_one_rank_equals_dense() -> None:
    """Fails if a loss, a tail, a signal, the temperature or the chunks are wrong without a split."""
    torch.set_num_threads(1)  # as in a rank; threads only slow such small tensors down
    measured = differences(0, 1, ALL)
    assert max(measured.values()) <= 1.0, _worst(measured)
    assert no_rows(0, 1) == 0.0
    assert choices_error(0, 1) < 1e-10


@pytest.mark.dist
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equals_dense(tp: int) -> None:
    """Fails if a collective is missing or repeated, a shard boundary loses gradient, or ranks differ.

    A rank without a real vocabulary row and a batch without a loss token must not hang the others.
    """
    _check(run_ranks(_world, tp, QUICK, timeout_s=120.0))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_equals_dense_everywhere(tp: int) -> None:
    """Check the same for every vocabulary, dtype and temperature."""
    _check(run_ranks(_world, tp, ALL, timeout_s=290.0))


def _check(ranks: list[tuple[dict[str, float], bool, float, float]]) -> None:
    for measured, same, of_no_rows, of_choices in ranks:
        assert max(measured.values()) <= 1.0, _worst(measured)
        assert same
        assert of_no_rows == 0.0
        assert of_choices < 1e-10, "the report would show other tokens than the teacher's most probable ones"


def _worst(measured: dict[str, float]) -> str:
    """Return the cases with the largest errors, in multiples of their tolerance."""
    names = sorted(measured, key=lambda name: -measured[name])[:8]
    return ", ".join(f"{name}: {measured[name]:.2g}" for name in names)

"""Provide small batches for the loss tests, and every loss written out in probabilities.

Letters as in `gkd.types`; V_PADDED columns of the student's LM head, the last ones padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gkd.config.loss_spec import LossSpec, LossTerm, Tail
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.reference import kl, outcomes, token_losses
from gkd.loss.row_kernels import RowKernels, TorchRows
from gkd.loss.vocab_parallel import RowLogprobs, VocabShard, row_logprobs, write_logits_gradient
from gkd.types import TokenTargets
from teacher_server.wire.protocol import Signal

N, H, D, V, V_PADDED, K = 7, 4, 3, 11, 14, 4
TAILS: tuple[Tail, ...] = ("bucket", "renorm", "drop")
OWN = "examples.own_loss:alpha_divergence"  # a loss by its import path
SHARD = VocabShard(0, V, None)
KERNELS = TorchRows()


class _Logprobs(torch.autograd.Function):
    """`row_logprobs` with the gradient of `write_logits_gradient`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
        logits = logits.detach().clone()
        rows = row_logprobs(logits, ids, **options)
        ctx.save_for_backward(logits, ids, *rows)
        ctx.options = options
        ctx.mark_non_differentiable(rows.entropy, rows.log_normalizer)
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, *rows = ctx.saved_tensors
        out, of_rows = torch.empty_like(logits), RowLogprobs(*rows)
        given = {"grad_logprobs": grads[0], "grad_tail": grads[1]}
        write_logits_gradient(logits, out, ids, of_rows, **given, **ctx.options)
        return out, None, None


def logprobs_of(
    logits: Tensor,
    ids: Tensor,
    shard: VocabShard = SHARD,
    *,
    kernels: RowKernels = KERNELS,
    n_listed: int = 0,
    temperature: float = 1.0,
) -> RowLogprobs:
    """Return `row_logprobs`, differentiable in the logits."""
    options = {"shard": shard, "kernels": kernels, "n_listed": n_listed, "temperature": temperature}
    return RowLogprobs(*_Logprobs.apply(logits, ids, options))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def topk_of_mass(mass: float, n: int = N, v: int = V, k: int = K, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return [n, k] distinct ids and float64 logprobs whose probabilities sum to `mass`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(v, generator=generator)[:k] for _ in range(n)])
    shares = torch.rand((n, k), generator=generator, dtype=torch.float64) + 0.1
    return ids, (mass * shares / shares.sum(dim=-1, keepdim=True)).log()


def topk_targets(ids: Tensor, logprobs: Tensor, tail_mass: Tensor | None = None) -> TokenTargets:
    """Return targets of rows that have only a top-k table."""
    n = len(ids)
    on_policy = torch.ones(n, dtype=torch.bool)
    sampled = torch.zeros(n, dtype=torch.int64)
    return TokenTargets(
        sampled, logprobs.new_zeros(n), on_policy, topk_ids=ids, topk_logprobs=logprobs, tail_mass=tail_mass
    )


def distill_loss(
    spec: LossSpec,
    *signals: Signal,
    chunk_rows: int = 100,
    teacher_head: Tensor | None = None,
    shard: VocabShard = SHARD,
) -> DistillLoss:
    """Return a loss for float64 logits [n, V_PADDED] whose chunks have `chunk_rows` rows."""
    loss = DistillLoss(spec, signals, shard, KERNELS, 1, teacher_head)
    loss.chunk_bytes = chunk_rows * V_PADDED * (8 + (4 if loss.is_full_vocab else 0))
    return loss


@dataclass(frozen=True)
class Batch:
    """N rows of a student and a teacher in float64, with targets for every signal."""

    hidden: Tensor = field(default_factory=lambda: normal(N, H, seed=1))
    head: Tensor = field(default_factory=lambda: normal(V_PADDED, H, seed=2))
    teacher_hidden: Tensor = field(default_factory=lambda: normal(N, D, seed=3))
    teacher_head: Tensor = field(default_factory=lambda: normal(V, D, seed=4))
    # 0 and V - 1 are the edges of the vocabulary.
    sampled_ids: Tensor = field(default_factory=lambda: torch.tensor([0, 3, V - 1, 5, 0, 7, 2]))
    rollout_logprobs: Tensor = field(default_factory=lambda: normal(N, seed=5) / 2 - 3.0)
    on_policy: Tensor = field(default_factory=lambda: torch.tensor([True, True, False, True, False, True, False]))
    # Without a signal; clipped and not, with either sign (see the ratios of `written_out`).
    advantages: Tensor = field(default_factory=lambda: torch.tensor([1.5, 0.5, 1.0, -2.0, 1.0, -1.0, 0.5]))
    ends: Tensor = field(default_factory=lambda: torch.tensor([False, True, False, True, False, False, False]))

    def teacher_logprobs(self, temperature: float) -> Tensor:
        """Return [N, V] nats."""
        return (self.teacher_hidden @ self.teacher_head.T / temperature).log_softmax(dim=-1)

    def targets(self, signal: Signal, temperature: float) -> TokenTargets:
        """Return the targets for `signal`; with topk also the logprob of the sampled token."""
        log_p = self.teacher_logprobs(temperature)
        targets = TokenTargets(self.sampled_ids, self.rollout_logprobs, self.on_policy, ends=self.ends)
        if signal in ("topk", "sampled"):
            targets.sampled_logprobs = log_p.gather(1, self.sampled_ids[:, None])[:, 0]
        if signal == "topk":
            targets.topk_logprobs, targets.topk_ids = log_p.topk(K)
            targets.tail_mass = 1 - targets.topk_logprobs.exp().sum(dim=-1)
        if signal == "logits":
            targets.logits = log_p + normal(len(log_p), 1, seed=6)  # logits are defined up to a constant per row
        if signal == "hidden":
            targets.hidden = self.teacher_hidden
        return targets

    def loss(self, spec: LossSpec, signal: Signal, chunk_rows: int = 100) -> DistillLoss:
        signals: tuple[Signal, ...] = ("topk", "sampled") if signal == "topk" else (signal,)
        return distill_loss(spec, *signals, chunk_rows=chunk_rows, teacher_head=self.teacher_head)


def train(loss: DistillLoss, batch: Batch, targets: TokenTargets, *, fused: bool, scale: float = 1.0) -> list[Tensor]:
    """Return [loss, its sums, gradient of hidden states, of the head], with the loss scaled like a global mean."""
    hidden, head = batch.hidden.clone().requires_grad_(), batch.head.clone().requires_grad_()
    total, sums = loss.from_hidden(hidden, head, targets) if fused else loss.from_logits(hidden @ head.T, targets)
    (total * scale).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None and head.grad is not None
    return [total.detach(), sums, hidden.grad, head.grad]


def _alpha_divergence(q: Tensor, p: Tensor, term: LossTerm) -> Tensor:
    a = term.alpha
    return ((a * p + (1 - a) * q - p**a * q ** (1 - a)) / (a * (1 - a))).sum(dim=-1)


def written_out(spec: LossSpec, batch: Batch, signal: Signal, logits: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return all numbers of each token by name, and a scalar with the gradient of the summed loss."""
    q = (logits[:, :V] / spec.temperature).softmax(dim=-1)
    p = batch.teacher_logprobs(spec.temperature).exp()
    values: dict[str, Tensor] = {"student_entropy": -(q * q.log()).sum(dim=-1)}
    outcomes_q, outcomes_p = q, p
    if signal == "topk":
        p_list, ids = p.topk(K)
        q_list = q.gather(1, ids)
        outcomes_q = outcomes(q_list, spec.tail)
        outcomes_p = outcomes(p_list, spec.tail)
        values |= {"teacher_topk_mass": p_list.sum(dim=-1), "student_topk_mass": q_list.sum(dim=-1)}
        values["overlap"] = (p_list + q_list - (p_list - q_list).abs()).sum(dim=-1) / 2
    else:
        values["overlap"] = 1 - (p - q).abs().sum(dim=-1) / 2
    values["token_kl"] = kl(outcomes_p, outcomes_q)
    log_q = q.gather(1, batch.sampled_ids[:, None])[:, 0].log()
    log_p = p.gather(1, batch.sampled_ids[:, None])[:, 0].log()
    rho = (log_q.detach() - batch.rollout_logprobs).exp()
    values["engine_kl"] = (rho - 1 - rho.log()) * batch.on_policy
    values["teacher_end_probability"], values["ended"] = log_p.exp() * batch.ends, batch.ends.double()
    if spec.policy_gradients:
        values["importance_clipped"] = ((rho > spec.importance_clip) & batch.on_policy).double()
        rho = rho.clamp(max=spec.importance_clip)
        values["importance_weight"] = rho * batch.on_policy
    ratio = log_q.detach() - log_p
    values["sampled_reverse_kl"] = ratio * batch.on_policy
    clipped = torch.zeros_like(batch.on_policy)
    limit = spec.token_clip or math.inf
    if spec.policy_gradients:
        clipped |= (ratio.abs() > limit) & batch.on_policy
        ratio = ratio.clamp(-limit, limit)
    estimates = {"k1": ratio, "k2": ratio**2 / 2, "k3": (-ratio).exp() - 1 + ratio}
    scalar, total = logits.new_zeros(()), logits.new_zeros(len(logits))
    divergences = logits.new_zeros(len(logits))
    if spec.has_rewards:
        values |= _reward_values(spec, batch, log_q.detach())
        slope = -values["reward_ratio"] * batch.advantages * (1 - values["reward_clipped"])
        scalar = scalar + spec.reward_weight * (slope * log_q * batch.on_policy).sum()
        total = total + spec.reward_weight * values["reward"]
    for term in spec.terms:
        if term in spec.divergences:
            values[term.name] = _divergence(term, spec, batch, signal, logits, outcomes_q, outcomes_p)
            divergences = divergences + term.weight * values[term.name]
            continue
        if term.name == "sft":
            values["sft"] = carrier = -log_q * ~batch.on_policy
        else:
            values[term.name] = rho * estimates[term.name] * batch.on_policy
            carrier = rho * ratio * log_q * batch.on_policy
        scalar = scalar + term.weight * carrier.sum()
        total = total + term.weight * values[term.name].detach()
    clipped |= divergences.detach() > limit
    if spec.token_clip:
        values["token_clipped"] = clipped.double()
    divergences = divergences.clamp(max=limit)
    scalar, total = scalar + divergences.sum(), total + divergences.detach()
    return {name: value.detach() for name, value in values.items()} | {"total": total}, scalar


def _divergence(
    term: LossTerm, spec: LossSpec, batch: Batch, signal: Signal, logits: Tensor, q: Tensor, p: Tensor
) -> Tensor:
    """Return one divergence of each token; q and p are the outcomes."""
    if term.name == OWN:
        return _alpha_divergence(q, p, term)
    k = K if signal == "topk" else 0
    teacher = batch.teacher_hidden @ batch.teacher_head.T
    return token_losses(logits[:, :V], teacher, term, temperature=spec.temperature, k=k, tail=spec.tail)


def _reward_values(spec: LossSpec, batch: Batch, log_q: Tensor) -> dict[str, Tensor]:
    """Return the numbers of the clipped policy-gradient loss, token by token as equation 7 of arXiv:1707.06347."""
    values: dict[str, list[float]] = {"reward": [], "reward_ratio": [], "reward_clipped": []}
    low, high = spec.reward_clip
    for now, before, a, own in zip(
        *(log_q.tolist(), batch.rollout_logprobs.tolist(), batch.advantages.tolist(), batch.on_policy.tolist()),
        strict=True,
    ):
        ratio = math.exp(now - before)
        limited = min(max(ratio, 1 - low), 1 + high)
        values["reward"].append(-min(ratio * a, limited * a) * own)
        values["reward_ratio"].append(ratio * own)
        values["reward_clipped"].append(float(own and limited * a < ratio * a))
    return {name: torch.tensor(each, dtype=torch.float64) for name, each in values.items()}

"""Check that the loss is the same for padded and for packed sequences.

`gkd.data.collate` makes both. If attention respects the boundaries of packed sequences, both give the same [N, H]
hidden states of the loss rows, and the rest of the computation depends only on these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gkd.config.loss_spec import LossSpec, LossTerm, teacher_signals
from gkd.data.batching import make_micro_batches
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.row_kernels import TorchRows
from gkd.loss.vocab_parallel import VocabShard
from gkd.types import MicroBatch, Rollout, TokenTargets, VersionSpan
from teacher_server.wire.protocol import Signal

V, H, D, K = 53, 16, 6, 5
LENGTHS = [(3, 5), (1, 9), (4, 1), (2, 7)]  # (prompt, response) tokens
SPEC = LossSpec((LossTerm("forward_kl", 0.7), LossTerm("k2", 0.5), LossTerm("sft", 0.3)))
SIGNALS: tuple[Signal, ...] = ("topk", "hidden")
Loss = Callable[[list[int]], Tensor]  # sequences -> the sum of the losses of their response tokens


class Attention(torch.nn.Module):
    """One layer of attention over tokens with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.positions = torch.nn.Embedding(V, H), torch.nn.Embedding(16, H)
        self.qkv, self.out = torch.nn.Linear(H, 3 * H), torch.nn.Linear(H, H)
        self.head = torch.nn.Parameter(torch.randn(V, H) / 4)

    def forward(self, tokens: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        """Return [B, S, H] for [B, S] tokens and positions and a [S, S] or [B, S, S] bool attention mask `sees`."""
        x = self.tokens(tokens) + self.positions(positions)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        hidden: Tensor = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=sees))
        return hidden


def _sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, V, (p + r,), generator=generator) for p, r in LENGTHS]


def _targets(signal: Signal) -> list[TokenTargets]:
    """Return the targets of each sequence; the response of the second one is from the dataset."""
    generator = torch.Generator().manual_seed(2)
    targets = []
    for i, ((prompt, n), tokens) in enumerate(zip(LENGTHS, _sequences(), strict=True)):
        hidden = torch.randn((n, D), generator=generator)
        log_p = (hidden @ _teacher_head().T).log_softmax(dim=-1)
        written = torch.full((n,), i != 1)
        row = TokenTargets(tokens[prompt:], written * (torch.rand(n, generator=generator) - 4.0), written)
        if signal == "topk":
            row.topk_logprobs, row.topk_ids = log_p.topk(K)
            row.tail_mass = 1 - row.topk_logprobs.exp().sum(dim=-1)
            row.sampled_logprobs = log_p.gather(1, row.sampled_ids[:, None])[:, 0]
        else:
            row.hidden = hidden
        targets.append(row)
    return targets


def _micro_batch(group: list[int], *, packed: bool) -> MicroBatch:
    """Collate the tokens of some sequences like the product."""
    rollouts = [
        Rollout(i, i, ids[:prompt], ids[prompt:], np.zeros(n), (VersionSpan(0, n, 0),), "stop")
        for i, (ids, (prompt, n)) in enumerate(zip([s.numpy() for s in _sequences()], LENGTHS, strict=True))
    ]
    (batch,) = make_micro_batches([rollouts[i] for i in group], None, micro_batch_size=len(group), packed=packed)
    assert [index for index, _ in batch.samples] == group and (batch.cu_seqlens is not None) == packed
    return batch


def _teacher_head() -> Tensor:
    return torch.randn((V, D), generator=torch.Generator().manual_seed(4))


def _joined(targets: list[TokenTargets]) -> TokenTargets:
    """Concatenate the rows of some sequences."""

    def column(name: str) -> Any:
        tables = [getattr(t, name) for t in targets]
        return None if tables[0] is None else torch.cat(tables)

    return TokenTargets(**{f.name: column(f.name) for f in fields(TokenTargets)})


def _losses(model: Attention, signal: Signal, *, fused: bool, blocks: bool = True) -> tuple[Loss, Loss]:
    """Return the (padded, packed) loss functions. Without `blocks`, packed sequences attend to each other."""
    shard = VocabShard(0, V, None)
    # A few rows per chunk, so that chunk and sequence boundaries differ.
    loss = DistillLoss(SPEC, teacher_signals(SPEC, signal), shard, TorchRows(), 7 * V * 4, _teacher_head())
    targets = _targets(signal)

    def of_rows(hidden: Tensor, group: list[int]) -> Tensor:
        rows = _joined([targets[i] for i in group])
        if fused:
            return loss.from_hidden(hidden, model.head, rows)[0]
        return loss.from_logits(hidden @ model.head.T, rows)[0]

    def hidden_rows(batch: MicroBatch) -> Tensor:
        length = batch.tokens.shape[1]
        sees = torch.ones(length, length).tril().bool()
        if batch.cu_seqlens is not None and blocks:
            owner = torch.repeat_interleave(torch.arange(len(batch.samples)), batch.cu_seqlens.diff())
            sees &= owner[:, None] == owner
        return model(batch.tokens, batch.position_ids, sees).flatten(0, 1)[batch.loss_index]

    def padded(group: list[int]) -> Tensor:
        return of_rows(hidden_rows(_micro_batch(group, packed=False)), group)

    def packed(group: list[int]) -> Tensor:
        return of_rows(hidden_rows(_micro_batch(group, packed=True)), group)

    return padded, packed


def _step(model: Attention, loss: Loss, groups: list[list[int]], *, mean_of_means: bool = False) -> Tensor:
    """Return the [1 + parameters] token mean over all groups and its gradient, or the mean of means."""
    model.zero_grad()
    n_all = sum(n for _, n in LENGTHS)
    value = torch.zeros(())
    for group in groups:
        n_tokens = sum(LENGTHS[i][1] for i in group)
        value = value + loss(group) / (n_tokens * len(groups) if mean_of_means else n_all)
    value.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    assert len(grads) == len(list(model.parameters()))
    return torch.cat([value.detach()[None], *grads])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("signal", SIGNALS)
def test_packed_equals_padded(signal: Signal, fused: bool) -> None:
    """Fails if a row's loss depends on its neighbors, its position, or the size of its micro-batch."""
    model = Attention()
    padded, packed = _losses(model, signal, fused=fused)
    whole, pairs, single = [[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]
    expected = _step(model, padded, single)
    for groups in (whole, pairs, single):
        for loss in (padded, packed):
            torch.testing.assert_close(_step(model, loss, groups), expected, rtol=0, atol=1e-6)

    def off(got: Tensor) -> tuple[float, float]:
        """Return the difference of the loss from `expected`, and the largest one of the gradient."""
        return float((got - expected)[0].abs()), float((got - expected)[1:].abs().max())

    _, leaking = _losses(model, signal, fused=fused, blocks=False)
    for wrong in (_step(model, packed, pairs, mean_of_means=True), _step(model, leaking, whole)):
        assert min(off(wrong)) > 1e-3, off(wrong)

"""Compare the loss of a teacher with another tokenizer, over split vocabularies, with plain loops in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gkd.config.loss_spec import LossSpec, LossTerm
from gkd.loss.choices import N_CHOICES
from gkd.loss.vocab_parallel import VocabShard
from tests.device import rank_device
from tests.dist.helpers import run_ranks
from tests.unit.text_cases import STUDENT, TextCase

SPEC = LossSpec((LossTerm("forward_kl"), LossTerm("jsd", 0.5)), temperature=1.3)


def difference(rank: int, world_size: int, n_student: int) -> float:
    """Return, in a rank, the largest difference from plain loops of loss, gradients, and what evaluations show."""
    largest = 0.0
    for with_nodes, k, by_units in ((True, 0, False), (False, 0, False), (True, 3, False), (True, 4, True)):
        case = TextCase(student=STUDENT[:n_student], n_sequences=3, k=k, by_units=by_units)
        rows = -(-n_student // world_size)
        shard = VocabShard(rank * rows, n_student, dist.group.WORLD if world_size > 1 else None)
        head = torch.full((rows * world_size, case.head.shape[1]), 50.0, dtype=torch.float64)  # padding
        head[:n_student] = case.head
        device = rank_device()
        own = head[rank * rows : (rank + 1) * rows].to(device, copy=True).requires_grad_()
        hidden = case.hidden.to(device, copy=True).requires_grad_()
        options = {"chunk_bytes": 5000, "shard": shard, "n_local": rows, "device": device}
        loss = case.loss(SPEC, with_nodes=with_nodes, **options)
        value, _ = loss.from_hidden(hidden, own, case.targets())
        value.backward()
        case.hidden.requires_grad_(), case.head.requires_grad_()
        expected, _ = case.written_out(SPEC, with_nodes=with_nodes)
        expected.backward()
        n_real = shard.n_columns(rows)
        assert not own.grad[n_real:].any(), "a padded row has a gradient"
        pairs = [(value, expected), (hidden.grad, case.hidden.grad)]
        pairs += [(own.grad[:n_real], case.head.grad[shard.start : shard.start + n_real])]
        largest = max(largest, *(float((a.cpu() - b).detach().abs().max()) for a, b in pairs if b.numel()))
    choices: list[torch.Tensor] = []
    with torch.no_grad(), loss.evaluating(None, choices.append):
        loss.from_hidden(hidden, own, case.targets())
    found = torch.cat(choices)
    assert found.shape == (len(case.hidden), N_CHOICES, 3)
    shown = found[found[:, 0, 0] >= 0]
    assert len(shown) and (shown[:, :-1, 1] >= shown[:, 1:, 1]).all(), "the most probable strings come first"
    return largest


@pytest.mark.parametrize("n_student", [len(STUDENT), 9])  # 9: with 4 ranks the last one holds only padding
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_split_vocabulary_gives_the_loss_and_gradient_of_plain_loops(tp: int, n_student: int) -> None:
    """If it fails, ranks sum the tokens of a string twice or not at all, and the student learns something else."""
    assert max(run_ranks(difference, tp, n_student)) < 1e-10

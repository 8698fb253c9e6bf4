"""Check the loss of a teacher with another tokenizer against plain loops, and against the loss of equal tokenizers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gkd.config.loss_spec import LossSpec, LossTerm
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.row_kernels import TorchRows
from gkd.loss.vocab_parallel import VocabShard
from gkd.text.byte_vocab import END
from gkd.types import TokenTargets
from tests.unit.text_cases import LETTERS, TEACHER, TextCase

SPECS = {
    "forward_kl": LossSpec(),
    "reverse_kl": LossSpec((LossTerm("reverse_kl", 0.7),), temperature=1.4),
    "mixture": LossSpec((LossTerm("jsd", 0.5, beta=0.3), LossTerm("skew_kl"), LossTerm("skew_reverse_kl", 0.2))),
    "dataset": LossSpec((LossTerm("forward_kl", 0.5), LossTerm("sft", 0.3))),
    "own": LossSpec((LossTerm("examples.own_loss:alpha_divergence", 2.0, alpha=0.5),)),
}


def _with_gradients(loss: DistillLoss, case: TextCase, targets: TokenTargets) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, its gradients in hidden states and LM head, and the table of the rows."""
    tables: list[Tensor] = []
    loss.on_rows = tables.append
    hidden, head = (tensor.clone().requires_grad_() for tensor in (case.hidden, case.head))
    total, _ = loss.from_hidden(hidden, head, targets)
    return total.detach(), *torch.autograd.grad(total, (hidden, head)), torch.cat(tables)


@pytest.mark.parametrize(
    ("name", "with_nodes", "scale", "k"),
    [
        *((name, True, scale, k) for name in SPECS for scale, k in ((0.5, 0), (4.0, 0), (0.5, 2), (2.0, 4))),
        *(("own", False, 4.0, k) for k in (0, 3)),
    ],
)
def test_loss_and_gradient_are_those_of_plain_loops(name: str, with_nodes: bool, scale: float, k: int) -> None:
    """If it fails, a range, a node, a mixture or a gradient is wrong: the student learns something else.

    With a list of k tokens: or what the list leaves out is compared as if it were impossible.
    """
    table = _compare_with_loops(TextCase(scale=scale, k=k), SPECS[name], with_nodes)
    if with_nodes and name == "forward_kl":
        by_nodes = table[:, TextCase().loss(LossSpec()).evaluation_names.index("by_nodes")]
        assert 0 < by_nodes.sum() < len(by_nodes), "the case compares some rows by nodes, and some by text"


@pytest.mark.parametrize("k", [3, 12])
@pytest.mark.parametrize("with_nodes", [True, False])
@pytest.mark.parametrize("name", ["mixture", "own"])
def test_units_are_compared_as_far_as_they_tell_tokens_apart(name: str, with_nodes: bool, k: int) -> None:
    """If it fails, the student learns from bytes behind the string of a unit, which may be any, or from an end of a
    token that may have been a longer one.
    """
    # In the node of "a" are "a", "aa", which may begin a longer token, and "aaab", which may not.
    case = TextCase(scale=6.0, k=k, by_units=True, teacher=[*TEACHER, b"aaab"], letters=b"aaab ", seed=4)
    _compare_with_loops(case, SPECS[name], with_nodes)


def _compare_with_loops(case: TextCase, spec: LossSpec, with_nodes: bool) -> Tensor:
    """Compare loss and gradient with loops, and return the table of the rows."""
    close = 1e-7 if case.k else 1e-12  # what a list leaves out is 1 - its sum, which has few digits
    case.hidden.requires_grad_(), case.head.requires_grad_()
    expected, rows = case.written_out(spec, with_nodes=with_nodes)
    grads = torch.autograd.grad(expected, (case.hidden, case.head))
    found = _with_gradients(case.loss(spec, with_nodes=with_nodes), case, case.targets())
    torch.testing.assert_close(found[0], expected.detach(), rtol=close, atol=1e-14)
    for one, other in zip(found[1:3], grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e2 * close, atol=close)
    torch.testing.assert_close(found[3][:, 0], rows * case.weights, rtol=close, atol=close)
    return found[3]


@pytest.mark.parametrize("name", SPECS)
def test_a_list_of_all_tokens_is_the_whole_distribution(name: str) -> None:
    """If it fails, hidden states and a list differ where the list leaves nothing out but rounding."""
    spec = replace(SPECS[name], temperature=1.0)
    whole, listed = TextCase(scale=0.5), TextCase(scale=0.5, k=len(TEACHER))
    one, other = (_with_gradients(case.loss(spec), case, case.targets()) for case in (whole, listed))
    for found, expected in zip(one, other, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_a_token_that_the_teacher_finds_impossible_does_not_spoil_the_next_one() -> None:
    """Fails if a probability that float32 rounds to 0 makes everything behind the token as improbable as can be."""
    case = TextCase(scale=0.5, k=4)
    targets = case.targets(torch.float32)
    likely = _with_gradients(case.loss(SPECS["reverse_kl"]), case.in_float32(), targets)[3][:, 0]
    targets.sampled_logprobs -= 300.0
    table = _with_gradients(case.loss(SPECS["reverse_kl"]), case, targets)[3][:, 0]
    assert table.isfinite().all() and table.max() < likely.max() + 10.0


@pytest.mark.parametrize(("k", "by_units"), [(1, False), (14, True)])
def test_tokens_that_a_list_cannot_tell_do_not_overlap(k: int, by_units: bool) -> None:
    """Fails if tokens without a loss count as full agreement, which hides a teacher of other tokens from the checks."""
    whole = TextCase(scale=0.5, teacher=[*TEACHER, b"aaab"], letters=b"aaab ", seed=4)
    listed = TextCase(scale=0.5, teacher=whole.teacher, letters=whole.letters, k=k, by_units=by_units, seed=4)
    names = whole.loss(LossSpec()).evaluation_names
    tables = [_with_gradients(case.loss(LossSpec()), case, case.targets())[3] for case in (whole, listed)]
    kl, overlap = (tables[1][:, names.index(name)] for name in ("token_kl", "overlap"))
    untold = (tables[0][:, names.index("token_kl")] > 0) & (kl == 0)
    assert untold.any() and not overlap[untold].any() and overlap[kl > 0].all()


@pytest.mark.parametrize("chunk_bytes", [1, 3000, 9000])
def test_the_result_does_not_depend_on_the_chunks(chunk_bytes: int) -> None:
    """If it fails, the loss depends on the memory limit of a chunk: a chunk lacks a row of the one before."""
    case, spec = TextCase(), SPECS["mixture"]
    whole = _with_gradients(case.loss(spec), case, case.targets())
    parts = _with_gradients(case.loss(spec, chunk_bytes=chunk_bytes), case, case.targets())
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", SPECS)
def test_with_the_same_tokens_it_is_the_loss_of_tokens(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """If it fails, nodes are not a refinement of what the trainer does with equal tokenizers."""
    vocab = [END, *LETTERS, b"ab", b"abc", b"ca", b" a"]
    case, spec = TextCase(student=vocab, teacher=vocab), SPECS[name]
    case.responses = [(ours, ours) for ours, _ in case.responses]
    generator = torch.Generator().manual_seed(5)
    n = sum(len(ours) for ours, _ in case.responses)
    case.hidden, case.teacher_hidden = case.hidden.to(dtype), torch.randn(n, 5, generator=generator).to(dtype)
    case.head, case.teacher_head = case.head.to(dtype), case.teacher_head.to(dtype)
    targets = case.targets(dtype)
    found = _with_gradients(case.loss(spec), case, targets)
    plain = DistillLoss(spec, ("hidden",), VocabShard(0, len(vocab), None), TorchRows(), 1 << 30, case.teacher_head)
    targets.text = None
    expected = _with_gradients(plain, case, targets)
    for one, other in zip([*found[:3], found[3][:, 0]], [*expected[:3], expected[3][:, 0]], strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


def test_rows_without_a_pair_have_no_loss() -> None:
    """If it fails, tokens behind a special token without a pair are compared with a shifted text."""
    case = TextCase(n_sequences=2)
    table = _with_gradients(case.loss(LossSpec()), case, case.targets())[3]
    names = case.loss(LossSpec()).evaluation_names
    start = len(case.responses[0][0]) + 4  # where the token without a pair stands
    paired = table[:, names.index("paired")]
    assert paired[:start].all() and not paired[start:].any()
    assert not table[start:, names.index("total")].any()

"""Measure a Megatron student in any layout, in its ranks, and compare it with the reference of plain HF + AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gkd.types import MicroBatch
from tests.dist.megatron_reference import CLIP, Reference, make_micro_batches
from tests.dist.student_cases import grads_of, packed, share, step_in_parts, weights

N_STEPS = 5


def measure(student: Any, folder: Path) -> dict[str, Any]:
    """Return the differences of a new student of `folder` from `folder`.pt, the model and N_STEPS of its reference."""
    reference = reference_of(folder)
    layout = student.layout
    groups = student.model.groups
    result: dict[str, Any] = {
        "coordinates": (layout.tp_rank, layout.pp_rank, layout.dp_rank, layout.ep_rank),
        "megatron_coordinates": tuple(group.rank() for group in (groups.tp, groups.pp, groups.dp, groups.ep)),
    }
    (logprobs,) = student.compute_logprobs([_every_token(reference.probe)])
    result["logprobs_diff"] = _max_diff(logprobs, _logprobs(reference))
    original = load_file(folder / "model.safetensors")
    exported = weights(student) if layout.exports else {}
    result["round_trip"] = all(torch.equal(tensor, original[name]) for name, tensor in exported.items())
    result["names"], result["expected_names"] = sorted(exported), sorted(original)
    own = share_of(layout, 0)
    grads = grads_of(student, own)
    result["grad_diff"] = max(_max_diff(grad, reference.grads[name]) for name, grad in grads.items())
    result["grad_names"] = sorted(grads)
    result["eval_loss"] = student.evaluate(own).loss
    stats = [student.train_step(own)]
    after_one = weights(student).items()
    result["weight_diff"] = max(_max_diff(w, reference.weights_after_one[name]) for name, w in after_one)
    stats += [student.train_step(share_of(layout, step)) for step in range(1, N_STEPS - 1)]
    stats.append(step_in_parts(student, share_of(layout, N_STEPS - 1)))
    result["losses"] = [s.loss for s in stats]
    result["grad_norms"] = [s.grad_norm for s in stats]
    result["n_tokens"] = [s.n_loss_tokens for s in stats]
    result["teacher_mass"] = stats[0].extra["loss/teacher_topk_mass"]
    # Without padding, experts process the same tokens in other batches.
    of_packs = student.evaluate([packed(batch) for batch in own]).loss
    result["packed_diff"] = abs(of_packs - student.evaluate(own).loss)
    return result


def share_of(layout: Any, step: int) -> list[MicroBatch]:
    """Return a DP rank's share. With experts, ranks must run equally many."""
    return share(make_micro_batches(step), layout.dp_rank, layout.dp)


def reference_of(folder: Path) -> Reference:
    reference: Reference = torch.load(folder.with_name(f"{folder.name}.pt"), weights_only=False)
    return reference


def check(ranks: list[dict[str, Any]], folder: Path) -> None:
    """Check what `measure` found of a folder: forward pass, gradients, training."""
    assert max(r["logprobs_diff"] for r in ranks) <= 1e-4
    assert all(r["round_trip"] for r in ranks)
    assert sorted({name for r in ranks for name in r["names"]}) == ranks[0]["expected_names"]
    assert all(r["coordinates"] == r["megatron_coordinates"] for r in ranks)
    reference = reference_of(folder)
    grads = reference.grads
    experts = sorted(float(g.abs().max()) for name, g in grads.items() if ".experts." in name)
    # Otherwise 1e-5 is not a test.
    assert max(float(g.abs().max()) for g in grads.values()) > 0.01
    assert not experts or experts[len(experts) // 3] > 1e-3
    assert max(r["grad_diff"] for r in ranks) <= 1e-5
    assert sorted({name for r in ranks for name in r["grad_names"]}) == sorted(grads)
    assert min(reference.grad_norms) > CLIP  # every step is clipped
    assert ranks[0]["teacher_mass"] < 0.95  # the distributions are truncated
    for r in ranks:
        assert r["weight_diff"] <= 1e-5
        assert r["losses"] == pytest.approx(reference.losses, abs=1e-5)
        assert r["grad_norms"] == pytest.approx(reference.grad_norms, abs=1e-4)
        assert r["eval_loss"] == pytest.approx(r["losses"][0], abs=1e-6)
        assert r["packed_diff"] <= 1e-6
        assert r["losses"] == ranks[0]["losses"] and r["n_tokens"] == ranks[0]["n_tokens"]


def _every_token(tokens: Tensor) -> MicroBatch:
    """Return a micro-batch of whole sequences whose loss rows are all but the last one of each."""
    rows = torch.arange(tokens.numel()).view_as(tokens)
    return MicroBatch(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), rows[:, :-1].flatten(), None)


def _logprobs(reference: Reference) -> Tensor:
    rows = reference.probe_logits[:, :-1].log_softmax(dim=-1)
    return rows.gather(-1, reference.probe[:, 1:, None]).flatten()


def _max_diff(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a.cpu() - b.cpu()).abs().max())

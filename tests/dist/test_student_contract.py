"""Test what both student backends must do. float32; 1 and 2 data-parallel ranks.

Elsewhere: tensor and pipeline parallelism (test_megatron_parity.py), packed sequences (test_product_step.py), saves
(test_megatron_resume.py, test_fsdp_student.py). What this does not prove: bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.types import MicroBatch
from tests.dist.helpers import Measured, caught, run_ranks
from tests.dist.megatron_reference import VOCAB, make_micro_batches, save_references
from tests.dist.parity_cases import reference_of
from tests.dist.student_cases import (
    as_numpy,
    build_student,
    same_weights,
    share,
    step_in_parts,
    weights,
    with_hidden,
    with_nan,
)

N_STEPS = 5
KINDS = {1: "qwen2_tied", 2: "qwen3"}  # world size -> model
BACKENDS = ("megatron", "fsdp2")
CASES = [(backend, world_size) for world_size in KINDS for backend in BACKENDS]
TEACHER_HIDDEN = 8


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = save_references(tmp_path_factory.mktemp("contract"), KINDS.values(), N_STEPS)
    for kind in KINDS.values():
        _pad(root / kind, root / f"{kind}_padded")
    return root


@pytest.fixture(scope="module")
def results(references: Path) -> Measured:
    """Return the measurements of all ranks by (backend, world size); one spawn per world size."""
    worlds = Measured(lambda world_size: run_ranks(_measure_all, world_size, references, timeout_s=250.0))
    return Measured(lambda key: [rank[key[0]] for rank in worlds[key[1]]])


def _pad(folder: Path, padded: Path) -> None:
    """Write a copy with five more rows of the embedding, whose logits are the largest ones."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.resize_token_embeddings(VOCAB + 5, mean_resizing=False)
    head = model.get_output_embeddings().weight.data
    head[VOCAB:] = 3 * head[:5]
    model.save_pretrained(padded)


def _measure_all(rank: int, world_size: int, root: Path) -> dict[str, dict[str, Any]]:
    """Measure both backends in a rank."""
    from megatron.core import parallel_state

    measured = {}
    for backend in BACKENDS:
        measured[backend] = _measure(backend, rank, world_size, root)
        parallel_state.destroy_model_parallel()
    return measured


def _measure(backend: str, rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Measure, in a rank, everything that the tests below check."""
    folder = root / KINDS[world_size]

    def build(**changes: Any) -> Any:
        return build_student(backend, folder, rank, world_size, **changes)

    def mine(step: int) -> list[MicroBatch]:
        return share(make_micro_batches(step), rank, world_size)

    result: dict[str, Any] = {}
    student = build()
    result["n_vocab"] = student.n_vocab
    before = weights(student)
    result["exported"] = as_numpy(before)
    result["plan_is_export"] = student.export_plan() == [(n, tuple(t.shape), t.dtype) for n, t in before.items()]
    evaluated = [student.evaluate(mine(0)).loss for _ in range(2)]
    result["evaluations"] = [*evaluated, student.step, same_weights(before, weights(student))]
    rows: list[torch.Tensor] = []
    student.evaluate(mine(0), on_rows=lambda table: rows.append(table.clone()))
    result["rows"] = torch.cat(rows)[:, student.loss.report_names.index("total")].sum().item()

    # Steps, and between them calls that must not affect them.
    stats = [student.train_step(mine(0))]
    halfway = weights(student)
    bad = [with_nan(batch) for batch in mine(1)] if rank == world_size - 1 else mine(1)
    result["nan"] = caught(lambda: student.train_step(bad))
    result["nan_evaluated"] = caught(lambda: student.evaluate(bad))
    result["no_tokens"] = caught(lambda: student.evaluate([]))
    result["untouched"] = [student.step, same_weights(halfway, weights(student))]
    stats += [student.train_step(mine(step)) for step in range(1, N_STEPS)]
    result["stats"] = [(s.loss, s.grad_norm, s.n_loss_tokens, s.lr) for s in stats]

    cut = build_student(backend, folder.with_name(f"{folder.name}_padded"), rank, world_size, n_vocab=VOCAB)
    result["masked"] = [(s.loss, s.grad_norm) for s in (cut.train_step(mine(step)) for step in range(2))]
    result["rows_of_masked"] = {tuple(t.shape)[0] for n, t in weights(cut).items() if "embed" in n}
    dealt = build()
    everything = [dealt.train_step(make_micro_batches(step) if rank == 0 else []) for step in range(2)]
    result["one_rank_has_all"] = [s.loss for s in everything]
    result["in_parts"] = _in_parts(build(), mine, bad)
    result |= _hidden_signal(build(signals=("hidden",)), mine(0))
    return result


def _in_parts(student: Any, mine: Any, bad: list[MicroBatch]) -> dict[str, Any]:
    """Make steps whose batches come in parts, one of them after a part that is refused, and return their numbers."""
    stats = [step_in_parts(student, mine(0))]
    student.accumulate(mine(1))
    refused = caught(lambda: student.train_step(bad))
    stats += [student.train_step(mine(1)), step_in_parts(student, mine(2))]
    return {"refused": refused, "stats": [(s.loss, s.grad_norm, s.n_loss_tokens) for s in stats], "step": student.step}


def _hidden_signal(student: Any, batches: list[MicroBatch]) -> dict[str, Any]:
    """Return the error of a short LM head of the teacher, and the loss with a valid one."""
    generator = torch.Generator().manual_seed(5)
    head = torch.randn((VOCAB, TEACHER_HIDDEN), generator=generator).numpy()
    out: dict[str, Any] = {"no_head": student.teacher_hidden_size}
    out["short_head"] = caught(lambda: student.set_teacher_head(head[:-1]))
    student.set_teacher_head(head)
    out["hidden_size"] = student.teacher_hidden_size
    out["hidden_loss"] = student.evaluate([with_hidden(batch, TEACHER_HIDDEN) for batch in batches]).loss
    return out


def _hidden_reference(folder: Path) -> float:
    """Compute the token mean of KL(teacher || student) over the whole vocabulary, densely."""
    from transformers import AutoModelForCausalLM

    head = torch.randn((VOCAB, TEACHER_HIDDEN), generator=torch.Generator().manual_seed(5))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    total, n_tokens = 0.0, 0
    with torch.no_grad():
        for batch in make_micro_batches(0):
            log_q = model(batch.tokens).logits.flatten(0, 1)[batch.loss_index].double().log_softmax(-1)
            log_p = (with_hidden(batch, TEACHER_HIDDEN).targets.hidden @ head.T).double().log_softmax(-1)
            total += float((log_p.exp() * (log_p - log_q)).sum())
            n_tokens += batch.n_loss_tokens
    return total / n_tokens


@pytest.mark.dist
@pytest.mark.parametrize(("backend", "world_size"), CASES)
class TestContract:
    """One class, so that a failure names backend and world size."""

    def test_masked_rows_do_not_count(self, results: Any, backend: str, world_size: int) -> None:
        """Fails if rows of ids that the teacher does not have change the loss or the gradient, or are cut off."""
        for rank in results[backend, world_size]:
            for (loss, norm), (expected, expected_norm, *_) in zip(rank["masked"], rank["stats"], strict=False):
                assert loss == pytest.approx(expected, rel=1e-5) and norm == pytest.approx(expected_norm, rel=1e-4)
            assert rank["rows_of_masked"] == {VOCAB + 5}

    def test_steps_are_those_of_plain_training(
        self, results: Any, references: Path, backend: str, world_size: int
    ) -> None:
        """Fails if loss, gradient, clipping, AdamW or weight decay differ from HF's model under torch's AdamW."""
        reference = reference_of(references / KINDS[world_size])
        for rank in results[backend, world_size]:
            losses, norms, n_tokens, lrs = zip(*rank["stats"], strict=True)
            assert losses == pytest.approx(reference.losses, abs=1e-5)
            assert norms == pytest.approx(reference.grad_norms, abs=1e-4)
            assert list(n_tokens) == [sum(b.n_loss_tokens for b in make_micro_batches(i)) for i in range(N_STEPS)]
            assert rank["stats"] == results[backend, world_size][0]["stats"] and set(lrs) == {1e-3}

    def test_steps_in_parts(self, results: Any, references: Path, backend: str, world_size: int) -> None:
        """Fails if a part's gradients are lost, counted twice, divided by its own tokens, or kept after an error."""
        reference = reference_of(references / KINDS[world_size])
        for rank in results[backend, world_size]:
            losses, norms, n_tokens = zip(*rank["in_parts"]["stats"], strict=True)
            assert losses == pytest.approx(reference.losses[:3], abs=1e-5)
            assert norms == pytest.approx(reference.grad_norms[:3], abs=1e-4)
            assert list(n_tokens) == [sum(b.n_loss_tokens for b in make_micro_batches(i)) for i in range(3)]
            assert rank["in_parts"]["refused"][0] == "NumericsError" and rank["in_parts"]["step"] == 3

    def test_a_rank_without_data(self, results: Any, references: Path, backend: str, world_size: int) -> None:
        """Fails if a rank without micro-batches hangs the others or changes the mean."""
        reference = reference_of(references / KINDS[world_size])
        for rank in results[backend, world_size]:
            assert rank["one_rank_has_all"] == pytest.approx(reference.losses[:2], abs=1e-5)

    def test_evaluation_changes_nothing(self, results: Any, references: Path, backend: str, world_size: int) -> None:
        """Fails if the loss differs from the step's, gradients or weights change, or rows are missing."""
        reference = reference_of(references / KINDS[world_size])
        n_tokens = sum(b.n_loss_tokens for b in make_micro_batches(0))
        for rank in results[backend, world_size]:
            first, second, step, same = rank["evaluations"]
            assert first == second == pytest.approx(reference.losses[0], abs=1e-5)
            assert step == 0 and same
        rows = sum(rank["rows"] for rank in results[backend, world_size])
        assert rows / n_tokens == pytest.approx(reference.losses[0], abs=1e-5)

    def test_what_is_not_finite_is_refused(self, results: Any, backend: str, world_size: int) -> None:
        """Fails if a NaN on one rank changes weights or the step, or only some ranks raise an error."""
        for rank in results[backend, world_size]:
            assert rank["nan"][0] == "NumericsError" and "nan" in rank["nan"][1]
            assert rank["nan_evaluated"][0] == "NumericsError"
            assert rank["no_tokens"][0] == "DataError"
            assert rank["untouched"] == [1, True]

    def test_export(self, results: Any, references: Path, backend: str, world_size: int) -> None:
        """Fails if a weight is not exported as it was loaded, under its name, and according to the plan."""
        from safetensors.torch import load_file

        original = load_file(references / KINDS[world_size] / "model.safetensors")
        for rank in results[backend, world_size]:
            assert rank["n_vocab"] == VOCAB
            assert rank["plan_is_export"]
            exported = {name: torch.from_numpy(array) for name, array in rank["exported"].items()}
            assert same_weights(exported, original)

    def test_the_teachers_head(self, results: Any, references: Path, backend: str, world_size: int) -> None:
        """Fails if the teacher's hidden states and head do not give its distribution, or a short head is accepted."""
        expected = _hidden_reference(references / KINDS[world_size])
        for rank in results[backend, world_size]:
            assert rank["no_head"] is None and rank["hidden_size"] == TEACHER_HIDDEN
            assert rank["short_head"][0] == "DataError" and np.isfinite(rank["hidden_loss"])
            assert rank["hidden_loss"] == pytest.approx(expected, abs=1e-5)

"""Compare training with context parallelism with one rank, which other tests compare with transformers. float32.

What this does not prove: bfloat16, CUDA and NCCL (tests/dry_card runs this file), the speed of the exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.config.loss_spec import LossSpec
from gkd.data.batching import make_micro_batches
from tests.dist.helpers import Measured, caught, destroy_groups, run_ranks
from tests.dist.hf_models import make_model_folder
from tests.dist.megatron_reference import VOCAB, make_hf_folder
from tests.dist.peft_reference import LORA
from tests.dist.student_cases import as_numpy, build_student, step_in_parts, weights, with_nan
from tests.dist.test_product_step import scored_batch

TEACHER_HIDDEN, DEEP = 8, "deep"

# What is computed, by name: arguments of the student.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"loss": LossSpec(token_weight="teachability", token_share=0.7)},
    "weighted not fused": {"loss": LossSpec(token_weight="entropy", token_share=0.5), "fused_lm_head": False},
    "hidden": {"signals": ("hidden",)},
    "lora": {"lora": LORA},
}


@dataclass(frozen=True)
class Case:
    """One layout of the ranks."""

    backend: str
    kind: str = "qwen3"
    variant: str = "plain"
    packed: bool = True
    cp: int = 2
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    dp: int = 1
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in ("cp", "tp", "pp", "ep", "vpp", "dp")} | self.options
        form = "packed" if self.packed else "padded"
        return f"{self.backend} {self.kind} {self.variant} {form} {[f'{k}={n}' for k, n in sizes.items() if n != 1]}"

    @property
    def n_ranks(self) -> int:
        return self.cp * self.tp * self.pp * self.dp

    @property
    def alone(self) -> Case:
        """The same computation on one rank."""
        return Case(self.backend, self.kind, self.variant, cp=1)


FULL, SP = {"recompute": "full"}, {"sequence_parallel": True}
BACKENDS, FORMS = ("megatron", "fsdp2"), (True, False)
# Some mistakes show in only one of cp 2 and cp 4: with cp 4 two ranks have the same key head.
BOTH: list[dict[str, Any]] = [{}, {"cp": 4}, {"dp": 2}, {"kind": "qwen2_tied", "options": FULL}]
CASES = [
    *(Case(backend, variant="weighted", packed=backend == "fsdp2", cp=4) for backend in BACKENDS),
    *(Case(backend, variant=name) for backend in BACKENDS for name in ("weighted not fused", "hidden", "lora")),
    *(Case(backend, "qwen2_tied", packed=False, options=FULL) for backend in BACKENDS),
    Case("megatron", tp=2, options=SP),
    Case("megatron", pp=2),
    Case("megatron", "qwen3_moe", ep=2),
    Case("fsdp2", dp=2),
    Case("fsdp2", "gpt_oss"),
]
_MORE = [
    *(Case(backend, variant="weighted", packed=packed, cp=4) for backend in BACKENDS for packed in FORMS),
    *(Case(backend, packed=packed, **sizes) for backend in BACKENDS for packed in FORMS for sizes in BOTH),
    *(Case("megatron", packed=packed, tp=2, options=options) for packed in FORMS for options in ({}, SP)),
    Case("megatron", packed=False, pp=2),
    Case("megatron", "qwen2_tied", pp=2, options=FULL),
    Case("megatron", DEEP, pp=2, vpp=2),
    Case("megatron", options={"recompute": "selective"}),
    Case("megatron", variant="weighted", tp=2),
    Case("megatron", "qwen3_moe", packed=False, tp=2, ep=2, options=SP),
    Case("fsdp2", "qwen3_moe"),
]
SLOW = [case for case in _MORE if case not in CASES]


def _run(rank: int, world_size: int, root: Path, cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Runs in a rank: train each case, and return its numbers."""
    return {str(case): _one(rank, world_size, root, case) for case in cases}


def _one(rank: int, world_size: int, root: Path, case: Case) -> dict[str, Any]:
    sizes = {"cp": case.cp, "tp": case.tp, "pp": case.pp, "ep": case.ep, "vpp": case.vpp}
    student = build_student(
        case.backend, root / case.kind, rank, world_size, **sizes, **VARIANTS[case.variant], **case.options
    )
    is_last = student.stage == student.n_stages - 1
    # Megatron's order of ranks is tp, cp, dp, pp; fsdp2 has neighbors in a group, too.
    group = rank // (case.tp * case.cp) % case.dp
    if case.variant == "hidden":
        student.set_teacher_head(np.random.default_rng(1).normal(size=(VOCAB, TEACHER_HIDDEN)).astype(np.float32))

    rollouts, scores = scored_batch()
    rng = np.random.default_rng(0)
    hidden = [rng.normal(size=(r.n_own, TEACHER_HIDDEN)).astype(np.float32) for r in rollouts]
    scores = [replace(score, hidden=table) for score, table in zip(scores, hidden, strict=True)]
    own = [i for i in range(len(rollouts)) if case.dp == 1 or (i < 5) == (group == 0)]  # unequal numbers
    chosen = [scores[i] for i in own] if is_last else None
    limit = 30 if case.packed else 0
    rollouts = [rollouts[i] for i in own]
    mine = make_micro_batches(rollouts, chosen, micro_batch_size=3, max_tokens=limit, packed=case.packed)

    def by_sample(tables: list[torch.Tensor]) -> dict[int, np.ndarray]:
        samples = list(mine.samples)
        rows = torch.cat(tables).split([n for _, n in samples])
        return {index: part.numpy() for (index, _), part in zip(samples, rows, strict=True)}

    rows: list[torch.Tensor] = []
    evaluated = student.evaluate(mine, on_rows=(lambda table: rows.append(table.cpu())) if is_last else None)
    found: dict[str, Any] = {
        "groups": float(student.sum_over_groups(torch.ones(1))),
        "logprobs": by_sample(student.compute_logprobs(mine)),
    }
    if is_last:
        found["rows"] = by_sample(student.columns.whole(rows, mine))
    errors = []
    if case.variant != "hidden":  # a NaN in the rows of one rank is an error of all ranks, and changes nothing
        bad = [with_nan(batch) for batch in mine] if is_last else mine
        errors = [caught(call)[0] for call in (partial(student.train_step, bad), partial(student.evaluate, []))]
    stats = [evaluated, student.train_step(mine), student.train_step(mine)]
    stats.append(step_in_parts(student, mine))
    numbers = [{"loss": s.loss, "norm": s.grad_norm, "tokens": s.n_loss_tokens, **s.extra} for s in stats]
    trained = as_numpy(weights(student))
    if case.backend == "megatron":
        destroy_groups()
    return {"numbers": numbers, "weights": trained, "errors": errors, **found}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Return the results of all ranks by number of ranks, of the slow cases or the others; each is one world."""
    root = tmp_path_factory.mktemp("context_parallel")
    torch.set_num_threads(1)
    for kind in ("qwen3", "qwen2_tied", "qwen3_moe"):
        make_hf_folder(root / kind, kind)
    make_model_folder(root / "gpt_oss", "gpt_oss")
    make_hf_folder(root / DEEP, "qwen2_tied", n_layers=4)

    def measure(key: tuple[int, bool]) -> list[dict[str, Any]]:
        n_ranks, cases = key[0], SLOW if key[1] else CASES
        alone = {str(case.alone): case.alone for case in cases}
        cases = [case for case in cases if case.n_ranks == n_ranks] if n_ranks > 1 else list(alone.values())
        return run_ranks(_run, n_ranks, root, cases, timeout_s=250.0)

    return Measured(measure)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_ranks_that_share_sequences_compute_what_one_rank_computes(results: Measured, case: Case) -> None:
    """Fails if a rank trains on other columns or targets, or the exchange or a sum over the ranks is wrong."""
    is_slow = case in SLOW
    (alone,) = [rank[str(case.alone)] for rank in results[1, is_slow]]
    # B of an adapter starts at 0: Adam divides the tiny gradients of A by themselves, and rounding decides.
    limit = 2e-5 if case.variant == "lora" else 1e-6
    found: set[str] = set()
    for rank in (each[str(case)] for each in results[case.n_ranks, is_slow]):
        for ours, one in zip(rank["numbers"], alone["numbers"], strict=True):
            assert ours == {name: pytest.approx(value, rel=limit, abs=1e-7) for name, value in one.items()}
        assert case.variant == "hidden" or rank["errors"] == ["NumericsError", "DataError"]
        assert rank["groups"] == case.dp
        for name, tensor in rank["weights"].items():
            one = alone["weights"][name]
            assert np.linalg.norm(tensor - one) <= limit * np.linalg.norm(one), name
        for kind in rank.keys() & {"logprobs", "rows"}:
            for sample, table in rank[kind].items():
                assert np.abs(table - alone[kind][sample]).max() <= 1e-5, (kind, sample)
        found |= rank["weights"].keys()
    assert found == alone["weights"].keys()

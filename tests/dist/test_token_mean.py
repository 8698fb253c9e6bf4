"""Check that splitting a global batch does not change its loss or gradient. Real Megatron student, float32.

    token mean = sum over all loss tokens of the global batch / their number

A mean of means of micro-batches or ranks differs; the tests compute it and check that the difference is large. The same
for the other values of distill.normalize, which count tokens and sequences over the global batch. Reference: float64.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.config.loss_spec import LossSpec, LossTerm, teacher_signals
from gkd.config.schema import Route
from gkd.config.schema_teacher import NORMALIZATIONS, TeacherConfig
from gkd.data.batching import make_micro_batches, trained_on
from gkd.data.collate import route_counts, sequence_weights
from gkd.data.scatter import even_groups
from gkd.types import Rollout, TeacherScores
from tests.bench.student_case import random_sequences
from tests.device import host
from tests.dist.dense_loss import dense_factors, dense_losses
from tests.dist.helpers import run_ranks
from tests.dist.megatron_reference import TOP_K, VOCAB, make_hf_folder
from tests.dist.student_cases import as_numpy, build_student, grads_of

SPEC = LossSpec((LossTerm("forward_kl", 0.7), LossTerm("k2", 0.5), LossTerm("sft", 0.3)))
LENGTHS = [(3, 5), (1, 9), (6, 1), (2, 12), (4, 4), (5, 7), (2, 2)]  # (prompt, response) tokens
UNEVEN = (range(5), range(5, 7))  # sequences of each of two DP ranks: 47 and 16 tokens


def _balanced() -> tuple[list[int], ...]:
    """Return `UNEVEN` as the driver balances it."""
    n_tokens = np.array([p + r for p, r in LENGTHS], np.int32)
    groups = even_groups([np.array(share, np.int32) for share in UNEVEN], [n_tokens[list(s)] for s in UNEVEN])
    return tuple(group.tolist() for group in groups)


ROUTE_OF = (0, 0, 1, 0, 1, 1, 0)  # of each sequence; both ranks have both
ROUTES = (Route("code", TeacherConfig(), 0.5), Route("math", TeacherConfig(), 2.0))
SHARES = {1: [(range(7),)], 2: [UNEVEN, _balanced()]}  # DP size -> assignments
LAYOUTS = {"dp1_tp2": (2, 1, 1), "dp2": (1, 1, 2), "pp2": (1, 2, 1)}  # name -> (TP, PP, DP), of two processes
# Factors of the tokens, which hold for the sequence and so for no layout.
WEIGHED = replace(SPEC, token_weight="teachability", token_share=0.6)
SKIPPED = 7  # distill.skip_first_tokens; then the second of the uneven ranks has no loss token
Sums = tuple[int, float, dict[str, np.ndarray]]  # of a sequence: loss tokens, sum of losses, its gradients
BATCHES = ((1, False), (2, False), (8, False), (8, True))  # (micro-batch size, packed)


def _factors(size: int, packed: bool, fused: bool) -> tuple[str, ...]:
    """Return the settings of distill.normalize to test with these batches: some of each kind, for CI's time."""
    if not fused:
        return ("domain",) if size == 2 else ()
    return NORMALIZATIONS if size == 2 or packed else ()


def _scored_batch() -> tuple[list[Rollout], list[TeacherScores]]:
    """Return seven sequences, two of which are from the dataset."""
    rng = np.random.default_rng(11)
    rollouts, scores = random_sequences(LENGTHS, rng, VOCAB, TOP_K)
    for i, rollout in enumerate(rollouts):
        written, sampled = rng.uniform(-8.0, -6.0, (2, len(rollout.response_ids))).astype(np.float32)
        if i in (1, 5):
            rollout = replace(rollout, on_policy=False, version_spans=())
        else:
            rollout = replace(rollout, rollout_logprobs=written)
        rollouts[i] = replace(rollout, route=ROUTE_OF[i])
        scores[i] = replace(scores[i], sampled_logprobs=sampled)
    return rollouts, scores


def _per_sequence(folder: Path, skipped: int = 0, spec: LossSpec = SPEC) -> list[Sums]:
    """Return (loss tokens, loss sum, gradients of the sum) of each sequence by itself, unpadded, on the HF model.

    Args:
        skipped: first tokens of each response that do not count.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    measured = []
    for rollout, score in zip(*_scored_batch(), strict=True):
        (batch,) = make_micro_batches([rollout], [score], micro_batch_size=1)
        logits = model(batch.tokens).logits.flatten(0, 1)[batch.loss_index]
        losses = dense_losses(spec, batch.targets, logits)[skipped:]
        if spec.token_weight != "none":
            losses = losses * dense_factors(spec, batch.targets, logits)
        loss = losses.sum()
        model.zero_grad()
        loss.backward()
        grads = {name: p.grad.double().numpy() for name, p in model.named_parameters() if p.grad is not None}
        measured.append((max(0, len(batch.targets) - skipped), float(loss.detach()), grads))
    return measured


def _weighted(sequences: list[Sums], factors: list[float]) -> tuple[float, dict[str, np.ndarray]]:
    """Return loss and gradients of the sum over the sequences, each times its factor."""
    pairs = list(zip(factors, sequences, strict=True))
    grads = {name: sum(factor * grads[name] for factor, (_, _, grads) in pairs) for name in sequences[0][2]}
    return sum(factor * total for factor, (_, total, _) in pairs), grads


def _mean_of_means(sequences: list[Sums], groups: list[list[int]]) -> tuple[float, dict[str, np.ndarray]]:
    """Return loss and gradients of the mean of the groups' token means; with one group, the token mean."""
    n_tokens = {i: sum(sequences[j][0] for j in group) for group in groups for i in group}
    return _weighted(sequences, [1 / (n_tokens[i] * len(groups)) for i in range(len(sequences))])


def _normalized(sequences: list[Sums], normalize: str) -> tuple[float, dict[str, np.ndarray]]:
    """Return loss and gradients by the definition of distill.normalize."""
    factors = []
    for (n, _, _), own in zip(sequences, ROUTE_OF, strict=True):
        divisor = {
            "token": sum(each[0] for each in sequences),
            "sequence": len(sequences) * n,
            "domain": sum(each[0] for each, route in zip(sequences, ROUTE_OF, strict=True) if route == own),
        }[normalize]
        factors.append(ROUTES[own].weight / divisor)
    return _weighted(sequences, factors)


def _measure(rank: int, world_size: int, root: Path) -> dict[tuple[Any, ...], tuple[float, Any]]:
    """Return, in a rank, (loss, gradients) by (distill.normalize, layout, assignment to ranks, batches, fused).

    Without distill.normalize: batches without weights; "skip": and without the first tokens of the responses; "weigh":
    with token weights.
    """
    from megatron.core import parallel_state

    rollouts, scores = _scored_batch()
    measured = {}
    for name, (tp, pp, dp) in LAYOUTS.items():
        for fused in (True, False):
            settings = {"loss": SPEC, "signals": teacher_signals(SPEC, "topk"), "fused_lm_head": fused}
            student = build_student("megatron", root, rank, world_size, tp=tp, pp=pp, **settings)
            layout = student.layout
            for (number, shares), (size, packed) in product(enumerate(SHARES[dp]), BATCHES):
                mine = [rollouts[i] for i in shares[layout.dp_rank]]
                own = [scores[i] for i in shares[layout.dp_rank]] if layout.is_last_stage else None
                plain = make_micro_batches(mine, own, micro_batch_size=size, packed=packed)
                counts = host(student.sum_over_groups(torch.from_numpy(route_counts(mine, len(ROUTES)))))
                for normalize in (None, *_factors(size, packed, fused)):
                    batches = plain
                    if normalize:
                        batches = replace(plain, weights=sequence_weights(mine, counts, ROUTES, normalize))
                    grads = as_numpy(grads_of(student, batches))
                    measured[normalize, name, number, size, packed, fused] = student.evaluate(batches).loss, grads
                if fused and _factors(size, packed, fused):
                    rest = make_micro_batches(*trained_on(mine, own, SKIPPED), micro_batch_size=size, packed=packed)
                    grads = as_numpy(grads_of(student, rest))
                    measured["skip", name, number, size, packed, fused] = student.evaluate(rest).loss, grads
                    student.loss.spec = WEIGHED
                    loss = student._run(plain, backward=False)  # an evaluation has no token weights
                    grads = as_numpy(grads_of(student, plain))
                    mean = loss.values["total"] / loss.n_loss_tokens
                    measured["weigh", name, number, size, packed, fused] = mean, grads
                    student.loss.spec = SPEC
        parallel_state.destroy_model_parallel()
    return measured


def _difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() <= b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


@pytest.mark.dist
def test_micro_batches_and_ranks_do_not_change_a_step(tmp_path: Path) -> None:
    """Fails if means are averaged, so that short sequences or small ranks get more weight, or if balancing matters."""
    torch.set_num_threads(1)
    folder = make_hf_folder(tmp_path / "hf", "qwen3")
    ranks = run_ranks(_measure, 2, folder, timeout_s=100.0)
    sequences = _per_sequence(folder)
    loss, grads = _mean_of_means(sequences, [list(range(len(LENGTHS)))])
    expected = {normalize: _normalized(sequences, normalize) for normalize in NORMALIZATIONS}
    expected["skip"] = _mean_of_means(_per_sequence(folder, SKIPPED), [list(range(len(LENGTHS)))])
    expected["weigh"] = _mean_of_means(_per_sequence(folder, spec=WEIGHED), [list(range(len(LENGTHS)))])
    for measured in ranks:
        assert {case[0] for case in measured} == {None, "skip", "weigh", *NORMALIZATIONS}
        for case, (got_loss, got_grads) in measured.items():
            wanted_loss, wanted_grads = expected.get(case[0], (loss, grads))
            tolerance = 4e-6 if case[0] else 1e-6  # weights are up to 4
            assert got_loss == pytest.approx(wanted_loss, abs=tolerance), case
            assert _difference(got_grads, wanted_grads) <= tolerance, case
    whole = [{*first[1], *second[1]} for first, second in zip(*(rank.values() for rank in ranks), strict=True)]
    assert all(names == grads.keys() for names in whole), "both pipeline stages together have all gradients"

    by_two = [[0, 1], [2, 3], [4], [5, 6]]  # the micro-batches of size 2 with two ranks
    for groups in (by_two, [list(share) for share in UNEVEN]):
        wrong_loss, wrong_grads = _mean_of_means(sequences, groups)
        assert abs(wrong_loss - loss) > 1e-3 and _difference(wrong_grads, grads) > 1e-3, groups

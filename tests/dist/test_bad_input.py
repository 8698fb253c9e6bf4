"""A bad batch on one rank stops the step on all ranks and changes nothing. Two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.actor.common.agree import same_error
from gkd.config.loss_spec import LossSpec, LossTerm, teacher_signals
from gkd.data.batching import check_batch, make_micro_batches
from gkd.errors import ConfigError, DataError, GkdError, NumericsError, TeacherError, TeacherRefusal
from gkd.types import Rollout, TeacherScores, VersionSpan
from teacher_server.wire.table import TopKTable
from tests.device import rank_device
from tests.dist.helpers import caught, run_ranks
from tests.dist.megatron_reference import TOP_K, VOCAB, make_hf_folder
from tests.dist.student_cases import build_student

SPEC = LossSpec((LossTerm("forward_kl"), LossTerm("k2", 0.5)))
SIGNALS = teacher_signals(SPEC, "topk")
LAYOUTS = {"dp2": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}  # name -> (TP, PP), all of two processes
Share = tuple[list[Rollout], list[TeacherScores]]


def _sequences(step: int) -> Share:
    """Return four valid sequences and their teacher scores."""
    rng = np.random.default_rng(step)
    rollouts, scores = [], []
    for i, n in enumerate((4, 1, 6, 3)):
        tokens = rng.integers(0, VOCAB, n + 3).astype(np.int32)
        logprobs = rng.uniform(-8.0, -6.0, (2, n)).astype(np.float32)
        rollouts.append(Rollout(i, i, tokens[:3], tokens[3:], logprobs[0], (VersionSpan(0, n, 0),), "stop"))
        ids = np.stack([rng.permutation(VOCAB)[:TOP_K] for _ in range(n)]).astype(np.int32)
        probs = -np.sort(-rng.dirichlet(np.ones(TOP_K), n)) * 0.7
        topk = TopKTable(ids, np.log(probs).astype(np.float32), np.full(n, 0.3, np.float32))
        scores.append(TeacherScores(topk, logprobs[1]))
    return rollouts, scores


def _step(student: Any, share: Share, rank: int, *, checked: bool = True) -> Any:
    """Make one step like the actor's worker; `checked=False` skips the check of the sequences."""
    rollouts, scores = share[0], share[1] if student.layout.is_last_stage else None
    with same_error(rank_device()):
        if checked:
            check_batch(rollouts, scores, where=f"actor rank {rank}", n_vocab=VOCAB, signals=SIGNALS)
    return student.train_step(make_micro_batches(rollouts, scores, micro_batch_size=2))


def _with_bad_token(share: Share) -> Share:
    rollouts, scores = share
    ids = rollouts[1].response_ids + np.int32(VOCAB)
    return [rollouts[0], replace(rollouts[1], response_ids=ids), *rollouts[2:]], scores


def _with_nan(share: Share, table: str) -> Share:
    """Put NaNs into the second sequence's scores: its top-k ("topk") or its sampled tokens ("sampled")."""
    rollouts, scores = share
    topk, sampled = scores[1].topk, scores[1].sampled_logprobs
    nan = np.float32(np.nan)
    bad = replace(scores[1], sampled_logprobs=sampled * nan)
    if table == "topk":
        bad = replace(scores[1], topk=replace(topk, logprobs=topk.logprobs * nan))
    return rollouts, [scores[0], bad, *scores[2:]]


def _layout(rank: int, root: Path, name: str) -> dict[str, Any]:
    """Runs in a rank: a good step, bad ones, a good step; compare with a student that only makes the good ones."""
    from gkd.actor.common.optim_spec import OptimSpec

    tp, pp = LAYOUTS[name]
    # With a changing learning rate and moments, the weights depend on anything that a bad step has changed.
    optim = OptimSpec(lr=1e-3, schedule="cosine", total_steps=4)
    settings = {"tp": tp, "pp": pp, "optim": optim, "loss": SPEC, "signals": SIGNALS}
    undisturbed, student = (build_student("megatron", root, rank, 2, **settings) for _ in range(2))
    layout = student.layout

    def share(step: int) -> Share:
        rollouts, scores = _sequences(step)
        return rollouts[layout.dp_rank :: layout.dp], scores[layout.dp_rank :: layout.dp]

    good = [_step(undisturbed, share(step), rank) for step in range(2)]
    stats = [_step(student, share(0), rank)]
    errors = {}
    token = _with_bad_token(share(1))
    errors["token on rank 1"] = caught(lambda: _step(student, token if rank == 1 else share(1), rank))
    errors["token on both"] = caught(lambda: _step(student, token, rank))
    scores = _with_nan(share(1), "topk")
    errors["scores on rank 1"] = caught(lambda: _step(student, scores if rank == 1 else share(1), rank))
    for table in ("topk", "sampled"):
        # On the last data-parallel rank; ranks that split one model have the same batch.
        bad = _with_nan(share(1), table) if layout.dp_rank == layout.dp - 1 else share(1)
        errors[f"unchecked {table}"] = caught(lambda bad=bad: _step(student, bad, rank, checked=False))
    step_after_errors = student.step
    stats.append(_step(student, share(1), rank))
    pairs = zip(undisturbed.export(), student.export(), strict=True)
    return {
        "errors": errors,
        "step": step_after_errors,
        "stats_equal": stats == good,
        "weights_equal": all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs),
    }


def _every_type(rank: int) -> dict[str, tuple[str, str]]:
    """Runs in a rank: return this rank's error for each type of error that rank 1 raises."""

    def fail(error: GkdError) -> None:
        with same_error(rank_device()):
            if rank == 1:
                raise error

    # Errors whose constructors have more arguments than the message.
    special: list[GkdError] = [
        ConfigError("a.b", 3, "it is odd.", "use 2."),
        TeacherRefusal("TeacherRefusal of rank 1", "c"),
    ]
    kinds = set(_subclasses(GkdError)) - {type(error) for error in special}
    others = [kind(f"{kind.__name__} of rank 1") for kind in sorted(kinds, key=lambda kind: kind.__name__)]
    return {type(error).__name__: caught(lambda error=error: fail(error)) for error in [*special, *others]}


def _subclasses(kind: type[GkdError]) -> list[type[GkdError]]:
    """Return the subclasses in `gkd.errors` and `teacher_server.errors`."""
    modules = (ConfigError.__module__, GkdError.__module__)
    direct = [k for k in kind.__subclasses__() if k.__module__ in modules]
    return direct + [k for child in direct for k in _subclasses(child)]


def _world(rank: int, world_size: int, root: Path) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    from megatron.core import parallel_state

    measured = {}
    for name in LAYOUTS:
        measured[name] = _layout(rank, root, name)
        parallel_state.destroy_model_parallel()
    return measured, _every_type(rank)


@pytest.mark.dist
def test_a_bad_batch_stops_all_ranks_and_changes_nothing(tmp_path: Path) -> None:
    """Fails if a bad sequence on one rank hangs the others, raises different errors, or changes the student."""
    results = run_ranks(_world, 2, make_hf_folder(tmp_path / "hf", "qwen3"), timeout_s=100.0)
    for name in LAYOUTS:
        first, second = (result[name] for result, _ in results)
        errors = first["errors"]
        assert errors == second["errors"], name
        for case, kind, text in (
            ("token on rank 1", DataError, "actor rank 1: prompt"),
            ("token on both", DataError, "actor rank 0: prompt"),
            ("scores on rank 1", TeacherError, "actor rank 1: prompt"),
            ("unchecked topk", NumericsError, "step 1"),
            ("unchecked sampled", NumericsError, "step 1"),
        ):
            assert errors[case][0] == kind.__name__ and text in errors[case][1], (name, case, errors[case])
        for result in (first, second):
            assert result["step"] == 1
            assert result["stats_equal"] and result["weights_equal"], name
    for _, types in results:
        assert types["ConfigError"] == ("ConfigError", "a.b = 3: it is odd. Fix: use 2.")
        assert len(types) >= 8
        for kind, seen in types.items():
            assert kind == "ConfigError" or seen == (kind, f"{kind} of rank 1")

"""Test the per-pool metrics, and the bottleneck in the step line."""

from __future__ import annotations

import pytest

from gkd.console.state import bottleneck_of
from gkd.metrics.step import bottleneck, shares, step_numbers
from gkd.rollout.vllm.engine import PassMeter
from gkd.types import ScoredChunk, SyncReport, TrainStats
from tests.rollout_chunks import chunk_of


def numbers(rollout_s: float, teacher_s: float, train_s: float, step_s: float) -> dict[str, float]:
    times = {"rollout": rollout_s, "teacher": teacher_s, "train": train_s, "weight_sync": 0.1, "step": step_s}
    return {f"time/{name}_s": seconds for name, seconds in times.items()}


@pytest.mark.parametrize(
    ("scheduler", "times", "pool", "share"),
    [
        ("sync", (6.0, 1.0, 3.0, 10.0), "rollout", 0.6),
        ("sync", (3.0, 1.0, 6.0, 10.0), "actor", 0.6),
        ("sync", (2.0, 5.0, 3.0, 10.0), "teacher", 0.5),
        # the engines overlap with training and finish after it
        ("one_step_off", (3.0, 0.5, 6.0, 10.0), "rollout", 0.3),
        ("two_step_off", (0.2, 2.0, 7.0, 10.0), "teacher", 0.2),
        ("stream", (1.0, 0.1, 8.0, 10.0), "rollout", 0.1),
        ("stream", (0.2, 0.1, 9.0, 10.0), "actor", 0.9),
        ("one_step_off", (0.0, 0.0, 9.0, 10.0), "actor", 0.9),
    ],
)
def test_the_step_line_names_the_bottleneck(
    scheduler: str, times: tuple[float, float, float, float], pool: str, share: float
) -> None:
    """Fails if the step line names the wrong pool as the bottleneck."""
    m = numbers(*times)
    m |= shares(m, scheduler)
    assert bottleneck(m, scheduler) == (pool, pytest.approx(share))
    assert {name: m[f"perf/bound_by_{name}"] for name in ("rollout", "teacher", "actor")} == {
        name: float(name == pool) for name in ("rollout", "teacher", "actor")
    }
    assert bottleneck_of(m) == (pool, pytest.approx(share)), "what the step line and the panel show"


@pytest.mark.parametrize("stage", ["eval", "checkpoint", "record"])
def test_an_evaluation_or_a_save_does_not_change_the_bottleneck(stage: str) -> None:
    """Fails if a step with an evaluation, a save or a recording names another bottleneck than its neighbors."""
    usual = numbers(0.6, 0.1, 1.2, 2.0)
    with_more = usual | {f"time/{stage}_s": 20.0, "time/step_s": 22.0}
    assert shares(with_more, "one_step_off") == pytest.approx(shares(usual, "one_step_off"))
    assert shares(usual, "one_step_off")["perf/bound_by_rollout"] == 1.0
    busy = shares(with_more, "stream", 0.5)["perf/rollout_busy_share"]
    assert busy == pytest.approx(0.25 if stage == "eval" else 0.5 / 22.0)


def test_reference_time_counts_for_the_actor() -> None:
    """Fails if the time of the reference model is not counted for the actor."""
    m = numbers(3.0, 0.5, 2.5, 10.0) | {"time/reference_s": 2.5}
    assert bottleneck(shares(m, "sync"), "sync") == ("actor", pytest.approx(0.5))


def test_the_time_of_an_engine_is_that_of_its_passes() -> None:
    """Fails if the time between two passes counts as work, or the time of a pass is counted twice."""
    now = [0.0]
    meter = PassMeter(clock=lambda: now[0])

    def one_pass() -> None:
        now[0] += 0.5

    meter.time_pass(one_pass)
    now[0] += 5.0
    meter.time_pass(one_pass)
    assert (meter.n_passes, meter.pop_busy_s(), meter.pop_busy_s()) == (2, 1.0, 0.0)


def test_group_tokens_max_is_the_largest_group() -> None:
    """Fails if perf/group_tokens_max is not the token count of the slowest data-parallel group."""
    chunks = [chunk_of(range(n), 3, n_prompt=2, dp_rank=rank) for n, rank in ((2, 0), (1, 1), (2, 1))]
    batch = [ScoredChunk(chunk, None, None, 8) for chunk in chunks]
    assert step_numbers(batch, TrainStats(1.0, 1), SyncReport(8, 0), version=0)["perf/group_tokens_max"] == 15

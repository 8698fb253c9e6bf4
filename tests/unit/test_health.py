"""Test the health checks on series of metrics: healthy ones, sick ones, and series with missing or infinite values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from gkd.config.load import load_config
from gkd.config.schema_sections import HEALTH_CHECKS
from gkd.metrics.catalog import ROWS
from gkd.metrics.health import PREFIX, Changes, Monitor
from gkd.metrics.health_checks import CHECKS, FLOAT32_LIMITS, N_RECENT, NEED_EQUAL_SAMPLING, History, NoNumbers

ROOT = Path(__file__).resolve().parents[2]
Series = dict[str, Sequence[float | None]]
FALLING = [0.5 * 0.97**i for i in range(60)]
STEPS = {"staleness/max": [0.0] * 60}
HEALTHY: Series = {
    **STEPS,
    "loss/token_kl": FALLING,
    "loss/overlap": [1 - kl / 2 for kl in FALLING],
    "loss/teacher_end_probability": [0.6] * 60,
    "loss/engine_kl": [0.001] * 60,
    "rollout/truncated_share": [0.1, 0.9] + [0.1] * 58,
    "rollout/repeated_4gram_share": [0.1] * 60,
}
# Check -> (series that differ from the healthy ones, first step of its alarm).
SICK: dict[str, tuple[Series, int]] = {
    "truncated": ({"rollout/truncated_share": [0.2] * 10 + [0.8] * 50}, 12),
    "repetition": ({"rollout/repeated_4gram_share": [0.1] * 10 + [0.9] * 50}, 12),
    "end_of_sequence": ({"loss/teacher_end_probability": [0.001] * 60}, 3),
    "teacher_mismatch": ({"loss/overlap": [0.1] * 60}, 3),
    "overlap_falls": ({"loss/overlap": [0.8] * 20 + [0.6] * 40}, 23),
    "no_gap": ({"loss/token_kl": [0.001] + [0.02] * 59}, 1),
    "kl_rises": ({"loss/token_kl": [0.2] * 10 + [0.8] * 50}, 12),
    "engine_logprobs": ({"loss/engine_kl": [0.0] * 10 + [0.1] * 50}, 11),
    "stale_rollouts": ({"loss/engine_kl": [0.6] * 60, "staleness/max": [0.0] + [1.0] * 59}, 4),
}
LOWER_BOUNDS = ("end_of_sequence", "teacher_mismatch", "no_gap")


def feed(monitor: Monitor, series: Series, first_step: int = 1) -> list[Changes]:
    n = max(len(values) for values in series.values())
    lines = (
        {"step": step, **{key: values[step - first_step] for key, values in series.items()}}
        for step in range(first_step, first_step + n)
    )
    return [monitor.feed(line) for line in lines]


def started(changes: Sequence[Changes]) -> list[tuple[str, int]]:
    return [(alarm.check.name, alarm.step) for change in changes for alarm in change.started]


def test_a_healthy_run_has_verdicts_and_no_alarm() -> None:
    """Fails if a check sees an illness in falling KL, single peaks or one truncated batch, or gives no verdict."""
    changes = feed(Monitor(), HEALTHY)
    assert started(changes) == []
    assert {name.removeprefix(PREFIX) for name in changes[-1].numbers} == SICK.keys() - {"stale_rollouts"}
    assert set(changes[-1].numbers.values()) == {0.0}


@pytest.mark.parametrize("name", SICK)
def test_each_check_finds_its_illness_in_time(name: str) -> None:
    """Fails if a check misses what it is for, alarms later than documented, its key is not 1 from then on, or
    health.limits has no effect on it, or 0 does not leave it out.
    """
    series, step = SICK[name]
    changes = feed(Monitor(), HEALTHY | series)
    assert (name, step) in started(changes)
    assert [change.numbers.get(PREFIX + name, 0.0) for change in changes[: step - 1]] == [0.0] * (step - 1)
    assert changes[step - 1].numbers[PREFIX + name] == 1.0
    assert PREFIX + name not in feed(Monitor({name: 0}), HEALTHY | series)[-1].numbers
    changed = feed(Monitor({name: 1e-9 if name in LOWER_BOUNDS else 1e9}), HEALTHY | series)
    assert name not in dict(started(changed)) and PREFIX + name in changed[-1].numbers


@pytest.mark.parametrize(
    ("share", "kl", "step"),
    [
        ([0.2, 0.4], 0.2, 2),
        ([0.9, 0.9], 0.04, 0),  # no KL worth the question
        ([0.2, 0.29], 0.2, 0),
    ],
)
def test_where_an_evaluation_has_its_kl(share: list[float], kl: float, step: int) -> None:
    """Fails if ends that differ raise no alarm, small numbers do, or a good evaluation does not clear the alarm."""
    check, series = "ends_disagree", {"eval/end_kl_share": share, "eval/kl": [kl] * 2}
    monitor = Monitor()
    assert dict(started(feed(monitor, series))).get(check, 0) == step
    between = monitor.feed({"step": 3, "loss/token_kl": 0.2})  # keeps the verdict
    assert between.numbers[PREFIX + check] == float(step > 0)
    cleared = monitor.feed({"step": 9, "eval/end_kl_share": 0.1, "eval/kl": kl}).cleared
    assert [alarm.check.name for alarm in cleared] == [check] * (step > 0)
    assert check not in dict(started(feed(Monitor({check: 1e9}), series)))


def test_engines_that_compute_another_model_are_found_in_the_first_step() -> None:
    """Fails if a model that vLLM computes differently trains three steps unnamed, or float32 is as loose."""
    tight = Monitor(FLOAT32_LIMITS)
    for monitor, kl, step in ((Monitor(), 0.05, 1), (Monitor(), 0.01, 0), (tight, 0.0017, 1), (tight, 1e-6, 0)):
        changes = feed(monitor, {"loss/engine_kl": [kl] * 9, "staleness/max": [0.0] * 9})
        assert dict(started(changes)).get("engine_logprobs", 0) == step
    named = Monitor.of(load_config(None, ["model.path=ORG/MODEL"]))
    (alarm,) = named.feed({"step": 1, "loss/engine_kl": 0.05, "staleness/max": 0.0}).started
    assert "ORG/MODEL" in alarm.evidence and "vllm" in alarm.evidence
    resumed = feed(Monitor(), {"loss/engine_kl": [0.05] * 9, "staleness/max": [0.0] * 9}, first_step=40)
    assert dict(started(resumed)) == {"engine_logprobs": 42}


def test_without_a_distribution_the_sampled_kl_is_judged() -> None:
    """Fails if runs with teacher.signal=sampled have no check of the gap to the teacher."""
    plain: Series = {"loss/sampled_reverse_kl": [0.5] * 5 + [9.0] * 15}
    assert dict(started(feed(Monitor(), plain))) == {"kl_rises": 6, "teacher_mismatch": 7}
    assert dict(started(feed(Monitor(), {"loss/sampled_reverse_kl": [1e-4, -1e-4] * 5}))) == {"no_gap": 5}


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_missing_numbers_give_no_verdict(value: float | None) -> None:
    """Fails if null, NaN or a missing key counts as an illness, or raises."""
    empty = feed(Monitor(), {key: [value] * 30 for key in [*HEALTHY, "eval/kl", "eval/accuracy"]})
    assert started(empty) == [] and empty[-1].numbers == {}
    assert feed(Monitor(), {"perf/x": [1.0] * 30})[-1].numbers == {}
    gaps: Series = {"rollout/truncated_share": [0.1, 0.9, value, value, 0.9]}
    assert started(feed(Monitor(), gaps)) == [("truncated", 5)]


def test_answers_that_are_cut_from_the_first_step_on_are_a_remark() -> None:
    """Fails if a small data.max_response_length is an alarm or has two remarks, or a rise from there gives no alarm."""
    for series, alarms, n_remarks in (
        ([0.8] * 30, [], 1),
        ([0.8] * 10 + [0.3] * 10 + [0.8] * 10, [], 1),
        ([0.6] * 10 + [0.95] * 10, [("truncated", 12)], 1),
        ([0.4] * 30, [], 0),
    ):
        changes = feed(Monitor(), {"rollout/truncated_share": series})
        assert started(changes) == alarms
        remarks = [remark for change in changes for remark in change.remarks]
        assert len(remarks) == n_remarks and all("data.max_response_length" in remark for remark in remarks)


def test_a_value_around_the_limit_gives_one_alarm() -> None:
    """Fails if a flapping value writes a line at every change, or an alarm never clears."""
    flapping = [0.5] + [1.0] * 4 + ([0.0] * 5 + [1.0] * 5) * 4 + [0.0] * 20
    changes = feed(Monitor(), {"rollout/truncated_share": flapping})
    assert started(changes) == [("truncated", 3)]
    cleared = [i + 1 for i, change in enumerate(changes) if change.cleared]
    assert cleared == [45 + 1 + 10]  # step 46 still has two truncated batches of three
    assert changes[-1].numbers == {"health/truncated": 0.0}


def test_a_branch_that_begins_late_has_no_check_of_the_gap_at_the_start() -> None:
    """Fails if a branch that continues a distilled student raises the alarm no_gap."""
    assert started(feed(Monitor(), {"loss/token_kl": [0.001] * 9}, first_step=101)) == []


def test_other_sampling_than_the_loss_switches_off_the_comparison_with_the_engine() -> None:
    """Fails if a run with rollout.top_p or another temperature has a permanent alarm about its engines."""
    series = HEALTHY | {"loss/engine_kl": [0.5] * 60}
    for overrides, n in (
        ([], 1),
        (["rollout.top_p=0.9"], 0),
        (["rollout.top_k=20"], 0),
        (["rollout.min_p=0.05"], 0),
        (["rollout.temperature=0.7"], 0),
        (["trainer.replay=r"], 0),
    ):
        found = dict(started(feed(Monitor.of(load_config(None, overrides)), series)))
        assert len(found.keys() & set(NEED_EQUAL_SAMPLING)) == n


def test_the_history_is_bounded() -> None:
    """Fails if a run of 100,000 steps keeps all its numbers in the driver's memory."""
    history = History()
    for step in range(1000):
        history.add({"step": step, "x": float(step)})
    assert history.first("x", 2) == 0.5 and history.means("x", 1)[-2:].tolist() == [998.0, 999.0]
    assert len(history.means("x", 1)) == N_RECENT
    with pytest.raises(NoNumbers):
        history.mean("x", N_RECENT + 1)


def test_names_keys_and_page_belong_together() -> None:
    """Fails if docs/health.md lacks what a check has, or names a metric or a key that does not exist."""
    assert tuple(check.name for check in CHECKS) == HEALTH_CHECKS
    page = (ROOT / "docs" / "health.md").read_text()
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `")}
    assert tuple(rows) == HEALTH_CHECKS
    pages = (ROOT / "docs" / "configuration.md").read_text()
    sections = set(re.findall(r"^## (\w+)", pages, re.MULTILINE))
    for check in CHECKS:
        row = rows[check.name]
        assert f"**{check.limit:g}**" in row
        for word in re.findall(r"`([^`]+)`", row):
            if "." in word and word.partition(".")[0] in sections:
                assert f"| `{word}` |" in pages, word
            elif "/" in word and not word.endswith("/"):
                assert any(row.matches(word) for row in ROWS), word
        assert any(key in check.change for key in sections)

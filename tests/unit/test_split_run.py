"""Test that the split tuner reads exact rates from a run folder, reports unknown ones and refuses invalid input."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gkd.errors import CheckpointError, ClusterError, ConfigError, GkdError
from gkd.metrics.bottleneck import LONGEST, REFERENCE_S, WITH_EVALUATION
from gkd.tools.split_tuner.rates import fit_line, fit_non_negative, fit_passes, read_run, read_steps
from gkd.tools.split_tuner.splits import Rates, Sizes, estimate
from tests.unit.split_run import PROMPT, settings, write_run

RATES = Rates(
    pass_s=0.02,
    sequence_s=0.001,
    prefill_s=5e-5,
    hand_over_s=0.002,
    batch_s=0.02,
    score_s=0.01,
    score_token_s=7e-4,
    train_s=0.1,
    train_token_s=9e-4,
    sync_s=0.05,
    other_s=0.02,
)


def keep(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Write all numbers to metrics.jsonl, where they are found, too."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in lines))
    (folder / "tuner.jsonl").unlink(missing_ok=True)


@pytest.mark.parametrize("more", [[], ["rollout.max_num_seqs=5"]])
def test_a_run_s_rates_come_out_of_its_metrics(tmp_path: Path, more: list[str]) -> None:
    """Fails if the tuner takes a wait for a stage's time, or one stage's part for another's."""
    run = read_run([write_run(tmp_path, settings(tmp_path, *more), RATES)])
    for name, value in asdict(RATES).items():
        assert getattr(run.rates, name) == pytest.approx(value, rel=0.02), name
    assert run.sizes == Sizes(2, 2, 2) and run.gpus_per_worker == 1 and run.n_steps == 10
    assert run.workload.prompt_tokens == PROMPT and run.workload.max_num_seqs == (5 if more else 128)
    assert not any("differ too little" in note or "all passes had" in note for note in run.notes)


def test_the_run_s_own_step_is_predicted(tmp_path: Path) -> None:
    """Fails if the long tail, which all wait for, is lost between the metrics and the estimate."""
    run = read_run([write_run(tmp_path, settings(tmp_path), RATES, n_steps=40)])
    estimated = estimate("sync", 0, run.sizes, run.workload, run.rates)
    # The 0.01 s that the written run waited for its teacher are made up.
    stages_s = estimated.rollout_s + estimated.training_s + run.rates.sync_s + run.rates.other_s
    assert stages_s == pytest.approx(run.step_s - 0.01, rel=0.05) and run.scheduler == "sync"


def test_a_reference_s_pass_is_part_of_the_training(tmp_path: Path) -> None:
    """Fails if the time of a reference's pass, which all actor ranks share, does not shrink with more ranks."""
    folder = write_run(tmp_path, settings(tmp_path), RATES)
    lines = read_steps(folder)
    for step in lines:
        step[REFERENCE_S] = 0.5 * step["time/train_s"]
        step["time/reference_s"] = step[REFERENCE_S]
        step["time/step_s"] += step[REFERENCE_S]
    keep(folder, lines)
    rates = read_run([folder]).rates
    assert rates.train_token_s == pytest.approx(1.5 * RATES.train_token_s, rel=0.02)
    assert rates.other_s == pytest.approx(RATES.other_s, rel=0.02)


def test_what_equal_steps_cannot_show_is_assumed_and_said(tmp_path: Path) -> None:
    """Fails if a rate that nothing was measured for looks like the others."""
    config = settings(tmp_path)
    run = read_run([write_run(tmp_path, config, RATES, lengths=lambda rng, n: np.full(n, 40))])
    assert (run.rates.sequence_s, run.rates.score_s, run.rates.train_s) == (0.0, 0.0, 0.0)
    texts = " ".join(run.notes)
    assert "12.0" in texts and "training" in texts and "scoring" in texts
    # a second run with another concurrency shows what a sequence costs
    fewer = write_run(
        tmp_path / "fewer", settings(tmp_path, "rollout.max_num_seqs=3"), RATES, lengths=lambda rng, n: np.full(n, 40)
    )
    both = read_run([tmp_path, fewer])
    assert both.rates.sequence_s == pytest.approx(RATES.sequence_s, rel=0.02)
    assert both.rates.pass_s == pytest.approx(RATES.pass_s, rel=0.02) and both.workload.max_num_seqs == 128


def test_a_step_of_a_stream_without_a_response_has_no_length(tmp_path: Path) -> None:
    """Fails if a step in which no response finished counts as one with responses of length 0, or ends the tool."""
    folder = write_run(tmp_path, settings(tmp_path, "trainer.scheduler=stream"), RATES)
    lines = read_steps(folder)
    assert read_run([folder]).rates.hand_over_s == pytest.approx(RATES.hand_over_s)
    lines[-3][LONGEST] = 0.0
    keep(folder, lines)
    workload = read_run([folder]).workload
    counted = [lines[i] for i in range(2, 11)]  # steps 3 to 11
    shown = [(step["time/step_s"], step[LONGEST]) for step in counted if step[LONGEST]]
    longest = sum(step_s * n for step_s, n in shown) / sum(step_s for step_s, _ in shown)
    assert len(shown) == 8 and workload.longest_tokens == pytest.approx(longest)
    assert workload.response_tokens == pytest.approx(
        np.mean([step["rollout/response_tokens"] / 24 for step in counted])
    )


def test_steps_after_an_evaluation_beside_a_stream_do_not_count(tmp_path: Path) -> None:
    """Fails if an evaluation's passes are fitted as those of a step."""
    folder = write_run(tmp_path, settings(tmp_path, "trainer.scheduler=stream"), RATES)
    lines = read_steps(folder)
    lines[5] |= {WITH_EVALUATION: 1.0, "perf/pass_n": 9999.0, "perf/gap_s": 99.0}
    keep(folder, lines)
    run = read_run([folder])
    assert run.n_steps == 8 and run.rates.pass_s == pytest.approx(RATES.pass_s, rel=0.02)
    assert run.rates.hand_over_s == pytest.approx(RATES.hand_over_s)


def test_the_teacher_s_numbers_belong_to_an_earlier_step(tmp_path: Path) -> None:
    """Fails if a teacher that is still starting counts, since what it did is known some steps later."""
    folder = write_run(tmp_path, settings(tmp_path, "trainer.scheduler=two_step_off"), RATES)
    rates = read_run([folder]).rates
    assert rates.score_s == pytest.approx(RATES.score_s) and rates.score_token_s == pytest.approx(RATES.score_token_s)
    lines = read_steps(folder)
    assert [name in lines[2] for name in ("perf/teacher_busy_1_s", "perf/teacher_sequences")] == [True, True]
    assert "perf/teacher_busy_1_s" not in lines[1], "the run promises staleness 2"
    for told in lines[2:4]:  # the teacher's numbers of steps 1 and 2
        told |= {name: 9.0 for name in told if name.startswith("perf/teacher_busy_")}
    keep(folder, lines)
    assert read_run([folder]).rates == rates


def test_only_what_a_run_did_since_its_last_start_counts(tmp_path: Path) -> None:
    """Fails if steps of one layout are read with another one's sizes, or a resumed run's first steps count."""
    before = write_run(tmp_path / "before", settings(tmp_path), replace(RATES, pass_s=9.0), n_steps=7)
    wide = settings(tmp_path, "trainer.n_gpus_per_node=6", "rollout.n_gpus_per_node=4", "rollout.max_num_seqs=5")
    after = write_run(tmp_path / "after", wide, RATES)
    alone = read_run([after])
    lines = read_steps(after)
    keep(after, [*read_steps(before), *lines])
    assert read_run([after]).rates == alone.rates and read_run([after]).n_steps == 10
    keep(after, [*read_steps(before), *lines[:5]])
    refused(after, ConfigError, "it has 3 steps")
    keep(after, read_steps(before))  # it was resumed, and stopped before its first step
    refused(after, ConfigError, "perf/dp is 6 .* 2 in")
    keep(after, [])
    refused(after, ConfigError, "it has 0 steps")
    old = [{name: value for name, value in line.items() if name != "perf/steps_since_start"} for line in lines]
    keep(after, old)
    refused(after, ConfigError, "perf/steps_since_start")


@pytest.mark.parametrize("shared", ["trainer.colocate=true", "teacher.backend=local"])
def test_roles_that_share_gpus_cannot_be_split(tmp_path: Path, shared: str) -> None:
    """Fails if a run whose roles take turns on the same GPUs is planned as one whose pools have their own."""
    folder = write_run(tmp_path, settings(tmp_path, shared), RATES)
    with pytest.raises(ConfigError, match=shared.split("=")[0]):
        read_run([folder])


def test_a_run_that_had_nothing_to_do_is_refused(tmp_path: Path) -> None:
    """Fails if the error for a replay advises an update, or a value of 0 raises an unrelated error."""
    folder = write_run(tmp_path / "replay", settings(tmp_path, "trainer.replay=other/batches"), RATES)
    refused(folder, ConfigError, "trainer.replay")
    for name in ("perf/pass_n", "perf/teacher_busy_1_s", LONGEST):
        folder = write_run(tmp_path / name, settings(tmp_path), RATES)
        lines = read_steps(folder)
        for step in lines:
            step |= {key: 0.0 for key in step if key == name or key.startswith("perf/teacher_busy")}
        keep(folder, lines)
        refused(folder, ConfigError, f"{name} is 0 in 10 steps of its metrics, the first is 3")


def refused(folder: Path, error: type[GkdError], text: str, **more: int) -> None:
    with pytest.raises(error, match=text):
        read_run([folder], **more)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """Fails if a ranking is made of nothing, or a traceback meets the user."""
    refused(tmp_path / "none", ConfigError, "metrics.jsonl")
    config = settings(tmp_path)
    refused(write_run(tmp_path / "short", config, RATES, n_steps=5), ConfigError, "it has 3 steps")
    unknown = write_run(tmp_path / "unknown", config, RATES, workers=0)
    refused(unknown, ConfigError, "gpus.json")
    told = read_run([unknown], workers=3)
    assert told.sizes.workers == 3 and told.gpus_per_worker == 1 and any("teacher worker" in n for n in told.notes)
    (unknown / "gpus.json").write_text("{")
    refused(unknown, ClusterError, "is not the GPU table")
    (unknown / "gpus.json").unlink()
    refused(unknown, ConfigError, "gpus.json")
    garbled = write_run(tmp_path / "garbled", config, RATES)
    with (garbled / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "loss/to\n')
    refused(garbled, CheckpointError, "line 13")


@pytest.mark.parametrize("name", ["perf/teacher_busy_1_s", LONGEST])
def test_metrics_without_a_number_are_refused_by_its_name(tmp_path: Path, name: str) -> None:
    """Fails if a missing number, or a null, becomes a rate of zero."""
    folder = write_run(tmp_path, settings(tmp_path), RATES)
    lines = read_steps(folder)
    for step in lines:
        step[name] = None
    keep(folder, lines)
    refused(folder, ConfigError, name)


def test_a_line_is_believed_if_its_slope_is_sure() -> None:
    """Fails if noise becomes a fixed cost, which decides between many and few groups."""
    x = np.linspace(80, 120, 20)
    assert fit_line(x, 3.0 + 0.1 * x) == (pytest.approx(3.0), pytest.approx(0.1), False)
    noise = np.random.default_rng(0).normal(0, 5, 20)
    fixed, _, is_assumed = fit_line(x, 3.0 + 0.1 * x + noise)
    assert is_assumed and fixed == 0.0
    assert fit_line(x, 0.2 * x - 1)[0] == 0.0 and fit_line(x[:3], x[:3])[2]


@given(st.lists(st.floats(0, 5), min_size=3, max_size=3), st.integers(0, 1000))
@hypothesis_settings(max_examples=60)
def test_the_fit_finds_what_made_the_times(true: list[float], seed: int) -> None:
    """Fails if a pass's parts are not told apart, or one of them is below zero."""
    rng = np.random.default_rng(seed)
    x = np.stack([np.ones(200), rng.integers(1, 50, 200), rng.integers(0, 900, 200) * (rng.random(200) < 0.2)])
    y = np.array(true) @ x
    # The sums have lost some digits of the small terms.
    close = {"rtol": 1e-4, "atol": 1e-4 * max(1e-2, *true)}
    np.testing.assert_allclose(fit_non_negative(x @ x.T, x @ y), true, **close)
    noisy = fit_non_negative(x @ x.T, x @ (y + rng.normal(0, 1, 200)))
    assert (noisy >= 0).all()
    rows = np.vstack([x, y])
    got, assumed = fit_passes(rows @ rows.T)
    np.testing.assert_allclose(got, true, **close)
    assert not assumed

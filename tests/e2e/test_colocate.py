"""Test time-sharing of actor and engines on the same slots (trainer.colocate), with real offloads and reloads.

Run manually. In CI, test_lora.py has colocated pools, and tests/dist compares results with and without offloading.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gkd.cluster.gpu_table import gpu_map_from_json
from gkd.metrics.writer import read_metrics
from tests.e2e.conftest import Lab
from tests.e2e.exactness import differences
from tests.e2e.kill_matrix import Kill, Runs, torture

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(lab: Lab, teacher_port: int) -> Path:
    """Run `base_run` on one slot instead of two."""
    run_dir = lab.root / "colocated"
    lab.finished_run(
        run_dir,
        teacher_port,
        "trainer.colocate=true",
        "trainer.save_every=2",
        "trainer.keep_last=9",
        "weight_sync.verify=always",
    )
    return run_dir


def test_colocated_training_equals_separate_slots(run: Path, base_run: Path) -> None:
    """Fails if time-sharing changes rollouts, training or weight syncs."""
    assert not differences(base_run, run)


def test_actor_and_engine_share_one_slot(run: Path) -> None:
    """Fails if the engine has its own slot, or the GPU map reports the shared slot as a problem."""
    table = gpu_map_from_json((run / "gpus.json").read_bytes(), "gpus.json")
    assert [(row.label, row.cuda_visible_devices) for row in table.rows[:2]] == [("actor 0", "0"), ("rollout 0", "0")]
    assert table.findings == ()


def test_states_are_offloaded_and_reloaded_around_every_call(run: Path) -> None:
    """Fails if the actor keeps its states during generation, or the cost of switching is not reported."""
    for line in read_metrics(run / "metrics.jsonl")[1:]:
        assert line["time/switch_s"] > 0 and line["time/train/onload"] > 0 and line["time/train/offload"] > 0
        assert line["memory/train/before_onload"] == line["memory/train/after_onload"], "reloaded during the scoring"
        # A training step leaves the weights for the sync.
        assert line["memory/train/after_offload"] == line["memory/sync/after_onload"] > 0
        assert line["memory/sync/after_offload"] == 0
        assert line["memory/offloading_states/rollout_params_gib"] == 0, "engine weights during training"
        assert line["memory/receiving_weights/rollout_kv_cache_gib"] == 0 < line["memory/generating/rollout_params_gib"]
        # float32 weights and gradients, plus two moments from the second step on. The sync needs the weights alone.
        held, n_times = line["memory/train/after_onload"], 2 if line["step"] == 1 else 4
        assert held > 0 and line["memory/sync/after_onload"] == pytest.approx(held / n_times, rel=0.02)


def test_a_run_killed_in_a_switch_resumes_bit_exactly(base_run: Path, lab: Lab, teacher_port: int) -> None:
    """If it fails, a SIGKILL during an offload or reload changes the resumed run."""
    settings = ("trainer.save_every=1", "trainer.resume=auto", "trainer.colocate=true")
    runs = Runs(lab, teacher_port, lab.root / "killed_colocated_logs", settings)
    kills = [Kill("switch", 3, 0.0, "all"), Kill("train", 2, 0.0, "all")]
    outcomes = torture(runs, base_run, lab.root / "killed_colocated", kills)
    assert [o.killed for o in outcomes] == [True, True], "a run finished before its kill, so nothing was tested"

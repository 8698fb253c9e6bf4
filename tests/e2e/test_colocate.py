"""Actor and engines on the same slots, taking turns; the states of both really go and come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from gkd.cluster.gpu_table import gpu_map_from_json
from gkd.metrics.writer import read_metrics
from tests.e2e.conftest import Lab
from tests.e2e.exactness import differences
from tests.e2e.kill_matrix import Kill, Runs, torture

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def run(lab: Lab, teacher_port: int) -> Path:
    """What `base_run` does, with one slot in the place of two."""
    run_dir = lab.root / "colocated"
    done = lab.train_run(
        run_dir,
        teacher_port,
        "trainer.colocate=true",
        "trainer.save_every=2",
        "trainer.keep_last=9",
        "weight_sync.verify=always",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return run_dir


def test_it_trains_as_with_slots_for_both(run: Path, base_run: Path) -> None:
    """Fails if taking turns changes what is written, learned or synced."""
    assert not differences(base_run, run)


def test_both_are_on_one_slot(run: Path) -> None:
    """Fails if the engine has a slot of its own, or the table takes the two for a mistake."""
    table = gpu_map_from_json((run / "gpus.json").read_bytes(), "gpus.json")
    assert [(row.label, row.cuda_visible_devices) for row in table.rows[:2]] == [("actor 0", "0"), ("rollout 0", "0")]
    assert table.findings == ()


def test_the_states_move_around_every_call(run: Path) -> None:
    """Fails if the actor keeps its states while the engine works, or nobody can see what the turns cost."""
    for line in read_metrics(run / "metrics.jsonl")[1:]:
        assert line["time/switch_s"] > 0 and line["time/train/onload"] > 0 and line["time/train/offload"] > 0
        assert line["memory/train/before_onload"] == line["memory/train/after_onload"], "reloaded during the scoring"
        assert line["memory/train/after_offload"] == 0
        assert line["memory/offloading_states/rollout_params_gib"] == 0, "the engine's, while the actor trains"
        assert line["memory/receiving_weights/rollout_kv_cache_gib"] == 0 < line["memory/generating/rollout_params_gib"]
        # float32 weights and gradients, from the second step on two moments as well; the sync needs the weights alone.
        held, n_times = line["memory/train/after_onload"], 2 if line["step"] == 1 else 4
        assert held > 0 and line["memory/sync/after_onload"] == pytest.approx(held / n_times, rel=0.02)


@pytest.mark.slow
def test_a_run_killed_in_a_switch_is_the_same_run(base_run: Path, lab: Lab, teacher_port: int) -> None:
    """If it fails, a kill -9 while states move changes what is learned, or loses it."""
    settings = ("trainer.save_every=1", "trainer.resume=auto", "trainer.colocate=true")
    runs = Runs(lab, teacher_port, lab.root / "killed_colocated_logs", settings)
    kills = [Kill("switch", 3, 0.0, "all"), Kill("train", 2, 0.0, "all")]
    outcomes = torture(runs, base_run, lab.root / "killed_colocated", kills)
    assert [o.killed for o in outcomes] == [True, True], "a run was over before its kill: the test shows nothing"

"""Values that change during a run: trainer.schedules."""

from __future__ import annotations

from pathlib import Path

import pytest

from gkd.config.check import check_config
from gkd.config.load import config_yaml, load_config
from gkd.config.schedule import value_at
from gkd.metrics.writer import read_metrics
from gkd.types import ResponseLimits
from tests.unit.world import World, make

MINIMAL = ["data.train_files=[a.jsonl]", "model.path=m", "trainer.run_dir=r"]
LENGTH = (
    "trainer.schedules={data.max_response_length: {from: 2, to: 8, steps: 3}, rollout.temperature: [[1, 1], [3, 0.5]]}"
)
LOSSES = (
    "distill.losses=[{name: forward_kl}, {name: reverse_kl, weight: 3}]",
    "trainer.schedules={distill.losses.forward_kl: {from: 1, to: 0, steps: 4}, "
    "distill.losses.reverse_kl: [[0, 0], [4, 2]], distill.reward_weight: [[2, 0.5], [4, 1]]}",
    *("reward.functions=[{path: length}]", "distill.reward_weight=1", "rollout.n=2"),
)


def test_values_are_linear_between_points() -> None:
    """Fails if a value differs from the line between its points, or changes before the first or after the last one."""
    points = [[2, 10.0], [4, 20.0], [5, 0.0]]
    assert [value_at(points, step) for step in range(8)] == [10, 10, 10, 15, 20, 0, 0, 0]
    assert [value_at([[0, 3.0]], step) for step in (0, 9)] == [3, 3]


def test_both_forms_are_the_same_and_are_kept(tmp_path: Path) -> None:
    """Fails if {from, to, steps} means other points, or a resumed run reads others from its own configuration."""
    config = load_config(None, [*MINIMAL, "data.max_response_length=8", LENGTH])
    assert config.trainer.schedules["data.max_response_length"] == [[0, 2], [3, 8]]
    file = tmp_path / "config.yaml"
    file.write_text(config_yaml(config))
    assert load_config(file) == config


@pytest.mark.parametrize("scheduler", ["sync", "one_step_off"])
def test_each_batch_has_the_limits_of_its_step(scheduler: str, tmp_path: Path) -> None:
    """Fails if a batch that is generated early has the limits of another step, or evaluations follow the schedule."""
    world = World()
    settings = (LENGTH, "data.max_response_length=8", "trainer.total_steps=4", f"trainer.scheduler={scheduler}")
    make(tmp_path, world, *settings, "eval.metric=none", "eval.every=2", val=[]).fit()
    assert world.limits == [ResponseLimits(n, 8) for n in (2, 4, 6, 8)]
    lines = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if "loss/total" in line]
    assert [line["schedule/data.max_response_length"] for line in lines] == [2, 4, 6, 8]
    assert [line["schedule/rollout.temperature"] for line in lines] == [1, 1, 0.75, 0.5]


def test_weights_of_losses_follow_their_schedules() -> None:
    """Fails if a term keeps its weight, a term with weight 0 is computed, or rewards stay after their weight is 0."""
    spec = check_config(load_config(None, [*MINIMAL, *LOSSES])).loss
    weights = [{term.name: term.weight for term in spec.at(step).used} for step in (0, 1, 4)]
    assert weights == [{"forward_kl": 1}, {"forward_kl": 0.75, "reverse_kl": 0.5}, {"reverse_kl": 2}]
    assert [spec.at(step).reward_weight for step in (0, 2, 3, 9)] == [0.5, 0.5, 0.75, 1]
    assert spec.at(1).at(4) == spec.at(4), "the loss of a step does not depend on the one before"

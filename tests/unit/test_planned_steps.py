"""The number of optimizer steps of a run, and the remark on it."""

from __future__ import annotations

import pytest

from gkd.config.load import load_config
from gkd.preflight.settings import check_schedule, early_end_warning
from tests.refusals import refuses


@pytest.mark.parametrize(
    ("epochs", "limit", "n_prompts", "steps", "is_early"),
    [(1, 0, 100, 3, False), (1, 6, 100, 3, True), (2, 6, 100, 6, False), (9, 6, 100, 6, False), (1, 6, 5, 1, True)],
)
def test_the_epochs_may_end_a_run_early(epochs: int, limit: int, n_prompts: int, steps: int, is_early: bool) -> None:
    """Fails if a run that ends before trainer.total_steps logs no warning, or one that reaches it does."""
    settings = [f"trainer.total_epochs={epochs}", f"trainer.total_steps={limit}", "trainer.global_batch_size=32"]
    config = load_config(None, settings)
    warning = early_end_warning(config, n_prompts)
    assert config.planned_steps(n_prompts) == steps and bool(warning) is is_early
    if is_early:
        assert all(f"{key} = {value}" in warning for key, value in (("total_steps", limit), ("total_epochs", epochs)))


def test_a_decay_that_is_longer_than_the_run_is_refused_before_the_ranks_start() -> None:
    """Fails if wsd with few prompts ends only after the ranks have loaded the model."""
    config = load_config(None, [f"actor.optim.{x}" for x in ("schedule=wsd", "warmup_steps=2", "decay_steps=8")])
    check_schedule(config, 10)
    with refuses("actor.optim.decay_steps"):
        check_schedule(config, 9)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_that_ends_with_its_warm_up_says_so(schedule: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a run never reaches its learning rate, or reaches it at its end, without a word."""
    config = load_config(None, [f"actor.optim.schedule={schedule}", "actor.optim.warmup_steps=10"])
    for steps, warned in ((11, False), (10, True), (4, True)):
        caplog.clear()
        check_schedule(config, steps)
        assert bool(caplog.records) is warned

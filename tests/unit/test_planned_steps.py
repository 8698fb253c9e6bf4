"""The number of optimizer steps of a run, and the remark on it."""

from __future__ import annotations

import pytest

from gkd.config.load import load_config
from gkd.config.schema import planned_steps
from gkd.preflight.run import early_end_warning


@pytest.mark.parametrize(
    ("epochs", "limit", "n_prompts", "steps", "is_early"),
    [(1, 0, 100, 3, False), (1, 6, 100, 3, True), (2, 6, 100, 6, False), (9, 6, 100, 6, False), (1, 6, 5, 1, True)],
)
def test_the_epochs_may_end_a_run_early(epochs: int, limit: int, n_prompts: int, steps: int, is_early: bool) -> None:
    """Fails if a run that ends before trainer.total_steps logs no warning, or one that reaches it does."""
    settings = [f"trainer.total_epochs={epochs}", f"trainer.total_steps={limit}", "trainer.global_batch_size=32"]
    config = load_config(None, settings)
    warning = early_end_warning(config, n_prompts)
    assert planned_steps(config, n_prompts) == steps and bool(warning) is is_early
    if is_early:
        assert all(f"{key} = {value}" in warning for key, value in (("total_steps", limit), ("total_epochs", epochs)))

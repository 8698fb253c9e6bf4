"""Test the warning about losses that lose quality with stale rollouts."""

from __future__ import annotations

import pytest

from gkd.config.load import load_config
from gkd.preflight.run import stale_losses, warn_about_losses

STALE = "trainer.scheduler=one_step_off"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["distill.loss=reverse_kl", STALE], ["reverse_kl"]),
        (["distill.loss=k1", "trainer.scheduler=two_step_off"], ["k1"]),
        (["distill.loss=k2", STALE], ["k2"]),
        (["distill.loss=k3", "trainer.scheduler=stream"], ["k3"]),
        (["distill.losses=[{name: jsd, weight: 1.0}, {name: k1, weight: 0.1}]", STALE], ["k1"]),
        (["distill.loss=k3", "trainer.scheduler=stream", "trainer.max_staleness=0"], []),
        (["distill.loss=reverse_kl"], []),
        (["distill.loss=forward_kl", STALE], []),
        (["distill.loss=jsd", STALE], []),
        (["distill.loss=reverse_kl", "distill.on_policy_share=0", STALE], []),
    ],
)
def test_stale_losses(settings: list[str], expected: list[str], gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if a run that may lose quality starts without a warning, or any other run warns."""
    config = load_config(None, settings)
    assert stale_losses(config) == expected
    warn_about_losses(config, 0.0)
    about = [text for text in gkd_log.messages if "trainer.scheduler" in text]
    assert len(about) == bool(expected) and all(name in about[0] for name in expected)

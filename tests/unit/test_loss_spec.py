"""Test the settings of the loss: what they mean, refusals, and the warning about stale rollouts."""

from __future__ import annotations

import pytest

from gkd.config.load import load_config
from gkd.config.loss_spec import LossSpec, LossTerm, loss_spec, teacher_signals
from gkd.config.schema_teacher import DistillConfig, LossTermConfig
from gkd.preflight.settings import stale_losses, warn_about_settings
from teacher_server.wire.protocol import Signal

STALE = "trainer.scheduler=one_step_off"


def test_limits_that_have_a_meaning() -> None:
    """Fails if alpha 0 (the plain KL), clip 0 (none) or clip 1 is refused."""
    for entry, clip in ((LossTermConfig("skew_kl", alpha=0.0), 0.0), (LossTermConfig("k1"), 1.0)):
        assert loss_spec(DistillConfig(losses=[entry], importance_clip=clip), 1.0).importance_clip == clip


def test_spec_from_the_settings() -> None:
    """Fails if a term of a list ignores its own parameters, does not inherit, or the list does not replace the loss."""
    single = loss_spec(DistillConfig(loss="jsd", beta=0.2, alpha=0.3, tail="drop", importance_clip=3.0), 0.7)
    assert single == LossSpec((LossTerm("jsd", 1.0, 0.2, 0.3),), "drop", 0.7, 3.0)
    losses = [LossTermConfig("skew_kl", 2.0, alpha=0.0), LossTermConfig("k3", 0.5), LossTermConfig("sft", 0.25)]
    mixed = loss_spec(DistillConfig(losses=losses, beta=0.2, alpha=0.3), 1.0)
    assert mixed.terms == (
        LossTerm("skew_kl", 2.0, 0.2, 0.0),
        LossTerm("k3", 0.5, 0.2, 0.3),
        LossTerm("sft", 0.25, 0.2, 0.3),
    )
    assert [t.name for t in mixed.divergences] == ["skew_kl"]
    assert [t.name for t in mixed.policy_gradients] == ["k3"]
    assert mixed.sft == mixed.terms[2] and single.sft is None


@pytest.mark.parametrize(
    ("names", "signal", "expected"),
    [
        (("jsd",), "topk", ("topk",)),
        (("jsd", "sft"), "topk", ("topk",)),
        (("k3", "sft"), "topk", ("sampled",)),
        (("jsd", "k3"), "topk", ("topk", "sampled")),
        (("jsd", "k3"), "logits", ("logits",)),
        (("k1",), "hidden", ("hidden",)),
        (("k2",), "sampled", ("sampled",)),
    ],
)
def test_signals_of_a_mixture(names: tuple[str, ...], signal: Signal, expected: tuple[Signal, ...]) -> None:
    """Fails if fewer tables than the loss needs are requested from the teacher, or unused ones."""
    assert teacher_signals(LossSpec(tuple(map(LossTerm, names))), signal) == expected


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
    warn_about_settings(config, 0.0)
    about = [text for text in gkd_log.messages if "trainer.scheduler" in text]
    assert len(about) == bool(expected) and all(name in about[0] for name in expected)

"""GPU time-sharing of actor and engines, against roles that record their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from gkd.config.load import load_config
from gkd.metrics.run_metrics import StepMetrics
from gkd.pipeline.colocation import GpuSharing
from gkd.roles import Roles


class Recorded:
    """A role that records its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def offload_states(self, include: Sequence[str] | None = None, level: int = 1) -> None:
        self._calls.append(f"offload {self._name} {level}")

    def reload_states(self, include: Sequence[str] | None = None, *, blocking: bool = True) -> Recorded:
        self._calls.append(f"reload {self._name}{'' if blocking else ' early'}")
        return self

    def wait(self) -> None:
        self._calls.append("wait")


def sharing(calls: list[str], *, shared: bool, reload_early: bool = False) -> GpuSharing:
    actor, engines = cast(Any, Recorded("actor", calls)), cast(Any, Recorded("engines", calls))
    config = load_config(None, [f"trainer.colocate={shared}"])
    gpus = GpuSharing(config, Roles(actor=actor, rollout=engines, scoring=actor, weight_sync=actor))
    gpus.reload_early = reload_early
    return gpus


def test_the_actor_reloads_while_the_teacher_scores() -> None:
    """Fails if a training step waits for a reload that could have overlapped, or the reload's error is lost."""
    calls: list[str] = []
    gpus = sharing(calls, shared=True, reload_early=True)
    with gpus.for_training(new_weights_follow=True):
        calls.append("score")
    assert calls == ["offload engines 2", "reload actor early", "score", "wait"]
    calls.clear()
    with gpus.for_training():
        calls.append("evaluate")  # needs the weights alone
    assert calls == ["offload engines 1", "evaluate"]


@pytest.mark.parametrize(
    ("settings", "early"),
    [
        (["trainer.colocate=true"], True),
        (["trainer.colocate=true", "distill.reference_kl_weight=0.1"], False),
        (["trainer.colocate=true", "teacher.backend=local"], False),
    ],
)
def test_no_early_reload_if_another_model_shares_the_gpus(settings: list[str], early: bool) -> None:
    """Fails if the student's states are on a GPU on which a local teacher or a reference needs their memory."""
    calls: list[str] = []
    role = cast(Any, Recorded("role", calls))
    gpus = GpuSharing(load_config(None, settings), Roles(actor=role, rollout=role, scoring=role, weight_sync=role))
    with gpus.for_training(new_weights_follow=True):
        pass
    assert ("reload role early" in calls) == early


def test_one_side_offloads_before_the_other_reloads() -> None:
    """Fails if both models are on a GPU that holds one, or weights are copied although new ones follow."""
    calls: list[str] = []
    gpus = sharing(calls, shared=True)
    with gpus.for_rollout():
        assert calls == ["offload actor 1", "reload engines"]
        calls.clear()
    with gpus.for_training():
        assert calls == ["offload engines 1"]
        calls.clear()
    with gpus.for_training(new_weights_follow=True):
        assert calls == ["offload engines 2"]


@pytest.mark.parametrize(("shared", "needed"), [(False, True), (True, False)])
def test_no_offload_without_shared_gpus_or_generation(shared: bool, needed: bool) -> None:
    """Fails if disjoint pools, or a replay that generates nothing, pay for switches."""
    calls: list[str] = []
    m = StepMetrics(1)
    with sharing(calls, shared=shared).for_rollout(m, needed=needed):
        pass
    if not shared:
        with sharing(calls, shared=shared).for_training(m, new_weights_follow=True):
            pass
    assert calls == [] and "time/switch_s" not in m.times()


def test_a_switch_is_timed_as_a_stage() -> None:
    """Fails if the time of a switch is not reported, or the stages inside the block cannot be measured."""
    m = StepMetrics(1)
    with sharing([], shared=True).for_rollout(m), m.stage("rollout"):
        pass
    assert {"time/switch_s", "time/rollout_s"} <= m.times().keys()


def test_errors_pass_through() -> None:
    """Fails if an error in the block is lost."""
    with pytest.raises(KeyError), sharing([], shared=True).for_training():
        raise KeyError


@pytest.mark.parametrize(("content", "level"), [("merged", 2), ("adapters", 1)])
def test_engines_keep_weights_that_are_not_sent_again(content: str, level: int) -> None:
    """Fails if engines discard the base weights although only adapters follow, or copy weights that are replaced."""
    calls: list[str] = []
    role = cast(Any, Recorded("role", calls))
    config = load_config(None, ["trainer.colocate=true", "actor.lora.rank=4", f"weight_sync.lora={content}"])
    gpus = GpuSharing(config, Roles(actor=role, rollout=role, scoring=role, weight_sync=role))
    with gpus.for_training(new_weights_follow=True):
        pass
    assert calls[0] == f"offload role {level}"

"""Verification of weight syncs: when it is made, and that a difference stops the run. Only the Ray actors are fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gkd.config.load import load_config
from gkd.errors import GkdError, RankFailed, RankTimeout, SenderFailed, TransferCutOff, WeightSyncError
from gkd.rollout.driver.weight_sync import WeightSync
from gkd.weight_sync.buckets import TensorSpec
from tests.unit.local_ray import LocalRay, Method, Ref

CUT_OFF = TransferCutOff("connection closed by peer")
DIED = RankFailed("the process died")
NO_MEMORY = WeightSyncError("no shared memory")


class Exporter:
    def __init__(self, digests: dict[str, str], adapters: dict[str, str] | None = None) -> None:
        self.sent: list[str] = []

        def of(content: str) -> dict[str, str]:
            return adapters or {} if content == "adapters" else digests

        def send(buckets: Any, with_digests: bool, content: str) -> dict[str, str]:
            self.sent.append(content)
            return of(content) if with_digests else {}

        self.export_plan = Method(lambda content: [TensorSpec(name, (2,), "float32") for name in of(content)])
        self.rendezvous = Method(lambda: ("here", 1))
        self.join_group = Method(lambda spec: spec.transport)
        self.send_weights = Method(send)
        self.send_kept = Method(lambda spec, contents: digests)


class Engine:
    def __init__(self, digests: dict[str, str] | None = None) -> None:
        self.ranks: list[int] = []
        self.join_groups = Method(lambda specs: self.ranks.extend(spec.rank for spec in specs))
        self.receive = Method(lambda plans, version, content: 16)
        self.digests = Method(lambda: digests or {"a": "1", "b": "2", "c": "3"})


def make(engines: list[Engine], *settings: str) -> tuple[WeightSync, list[Exporter]]:
    """Return the sync of two stages' senders, with the senders."""
    exporters = [Exporter({"a": "1", "b": "2"}), Exporter({"c": "3"})]
    return WeightSync([[e] for e in exporters], engines, load_config(None, list(settings)), "cpu", 60), exporters


def first(n: int, error: GkdError, then: Callable[..., Any]) -> Method:
    """Return a method of which the first n calls fail."""
    left = [error] * n
    return Method(lambda *args: Ref(error=left.pop()) if left else then(*args))


@pytest.mark.parametrize(("verify", "expected"), [("always", [3, 3, 3]), ("first", [3, 3, 0]), ("never", [0, 0, 0])])
@pytest.mark.usefixtures("local_ray")
def test_syncs_are_verified_as_configured(verify: str, expected: list[int]) -> None:
    """Fails if weight_sync.verify has no effect, or `first` verifies only the sync before any training step."""
    engines = [Engine() for _ in range(2)]
    sync, _ = make(engines, f"weight_sync.verify={verify}", "rollout.tp=2")
    assert [sync.push(version).verified_tensors for version in range(3)] == expected
    assert [engine.ranks for engine in engines] == [[1, 1], [3, 3]], "each engine's two workers have ranks of their own"


@pytest.mark.parametrize("digests", [{"a": "1", "b": "x", "c": "3"}, {"a": "1", "c": "3"}])
@pytest.mark.usefixtures("local_ray")
def test_a_difference_in_any_engine_stops_the_run(digests: dict[str, str]) -> None:
    """Fails if the run continues although an engine has different weights than the trained student."""
    sync, _ = make([Engine(), Engine(digests)], "weight_sync.verify=first")
    with pytest.raises(WeightSyncError, match=r"rollout engine 1.*\['b'\]"):
        sync.push(0)


@pytest.mark.usefixtures("local_ray")
def test_a_tensor_in_another_form_is_not_counted_as_verified() -> None:
    """Fails if a tensor that an engine cannot read back ends the run, or counts as compared."""
    held = {"a": "1", "b": "", "c": "3"}
    sync, _ = make([Engine(held)], "weight_sync.verify=always")
    assert [sync.push(version).verified_tensors for version in range(2)] == [2, 2]
    held["c"] = "x"
    with pytest.raises(WeightSyncError, match="'c'"):
        sync.push(2)


@pytest.mark.usefixtures("local_ray")
def test_adapters_follow_the_base_alone() -> None:
    """Fails if the base is sent again after the first sync, adapters are not, or a changed base passes verification."""
    held = {"a": "1", "q.lora_A.weight": "2"}
    exporter, engine = Exporter({"a": "1"}, {"q.lora_A.weight": "2"}), Engine(held)
    config = load_config(None, ["weight_sync.lora=adapters", "actor.lora.rank=4", "weight_sync.verify=always"])
    sync = WeightSync([[exporter]], [engine], config, "cpu", 60)
    assert [sync.push(version).n_bytes for version in range(3)] == [32, 16, 16]
    assert exporter.sent == ["base", "adapters", "adapters", "adapters"]
    held["a"] = "another base"
    with pytest.raises(WeightSyncError, match="'a'"):
        sync.push(3)


@pytest.mark.usefixtures("local_ray")
def test_a_sender_that_dies_while_it_restores_an_engine_is_named() -> None:
    """Fails if the engine is started again, and blamed in the end, for the death of an actor rank."""
    engine = Engine()
    sync, exporters = make([engine], "weight_sync.verify=never")
    sync.push(1)
    assert sync.restore_engine(0, engine) == 1
    exporters[1].send_kept = Method(lambda spec, contents: Ref(error=DIED, late=True))
    engine.receive = first(9, CUT_OFF, lambda *_: 16)  # Ray reports the engine's broken connection first
    with pytest.raises(SenderFailed, match=str(DIED)):
        sync.restore_engine(0, engine)


def test_a_sync_that_takes_too_long_ends_the_run(local_ray: LocalRay) -> None:
    """Fails if trainer.stage_timeout_s has no effect, a hang is a lost engine, or the groups are used again."""
    engine = Engine()
    sync, _ = make([engine], "weight_sync.verify=never", "trainer.stage_timeout_s=7")
    received, engine.receive = engine.receive, Method(lambda *_: Ref(hangs=True))
    with pytest.raises(RankTimeout) as caught:
        sync.push(1)
    assert local_ray.waits_s == [pytest.approx(7, abs=0.5)] and caught.value.late == ("rollout engine 0",)
    engine.receive = received
    sync.push(1)
    assert engine.ranks == [1, 1, 1, 1], "two groups at the start, and two new ones"


@pytest.mark.parametrize(
    ("sender", "engine", "expected"),
    [
        (DIED, CUT_OFF, DIED),
        (CUT_OFF, WeightSyncError("a bucket was damaged"), "damaged"),
        (NO_MEMORY, CUT_OFF, NO_MEMORY),
        (CUT_OFF, CUT_OFF, CUT_OFF),
    ],
)
@pytest.mark.usefixtures("local_ray")
def test_the_member_that_failed_first_is_the_cause(
    sender: GkdError, engine: GkdError, expected: GkdError | str
) -> None:
    """Fails if a dead actor rank, which Ray reports late, or a shortage is hidden by the broken connections."""
    receiver = Engine()
    sync, exporters = make([receiver], "weight_sync.verify=never")
    exporters[0].send_weights = Method(lambda *_: Ref(error=sender, late=True))
    receiver.receive = Method(lambda *_: Ref(error=engine))
    with pytest.raises(GkdError) as caught:
        sync.push(1)
    assert caught.value is expected or expected in str(caught.value).split()


def test_a_sender_leaves_the_call_before_it_is_repeated(local_ray: LocalRay) -> None:
    """Fails if the next call of a sender waits behind one with a dead engine, so that the others time out, or a sender
    that died meanwhile is taken for a lost engine.
    """
    engine = Engine()
    sync, exporters = make([engine], "weight_sync.verify=never")
    engine.receive = Method(lambda *_: Ref(error=DIED))
    exporters[0].send_weights = Method(lambda *_: Ref(hangs=True))
    with pytest.raises(WeightSyncError) as caught:
        sync.push(1)
    assert caught.value.lost == {0: DIED} and len(local_ray.waits_s) == 1 and local_ray.waits_s[0] > 60
    engine.join_groups = Method(lambda *_: Ref(error=DIED))
    exporters[0].join_group = Method(lambda *_: Ref(error=SenderFailed("the rank died"), late=True))
    with pytest.raises(SenderFailed):
        sync.push(1)


@pytest.mark.parametrize("n_failures", [1, 2])
@pytest.mark.usefixtures("local_ray")
def test_members_that_missed_each_other_join_once_more(n_failures: int) -> None:
    """Fails if a member that was late for new groups ends the run, or groups that never form are tried forever."""
    engine = Engine()
    sync, exporters = make([engine], "weight_sync.verify=never")
    exporters[0].join_group = first(n_failures, NO_MEMORY, lambda spec: spec.transport)
    if n_failures == 1:
        sync.push(1, {0: engine, 1: Engine()})
        assert len(engine.ranks) == 2 * 3, "groups of two stages: at the start, late, and once more"
    else:
        with pytest.raises(WeightSyncError):
            sync.push(1, {0: engine, 1: Engine()})

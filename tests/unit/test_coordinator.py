"""Verification of weight syncs: when it is made, and that a difference stops the run. Only the Ray actors are fakes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gkd.config.load import load_config
from gkd.errors import GkdError, RankFailed, RankTimeout, SenderFailed, TransferCutOff, WeightSyncError
from gkd.weight_sync import coordinator
from gkd.weight_sync.buckets import TensorSpec


class Method:
    """`worker.method.remote(...)` returns the fake's result instead of a handle."""

    def __init__(self, function: Any) -> None:
        self.remote = function


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


class Engine:
    def __init__(self, digests: dict[str, str]) -> None:
        self.ranks: list[int] = []
        self.join_groups = Method(lambda specs: self.ranks.extend(spec.rank for spec in specs))
        self.receive = Method(lambda plans, version, content: 16)
        self.digests = Method(lambda: digests)


def gather(refs: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
    return dict(refs)


STAGES = [{"a": "1", "b": "2"}, {"c": "3"}]


def make(monkeypatch: pytest.MonkeyPatch, engines: list[Engine], verify: str) -> coordinator.WeightSync:
    monkeypatch.setattr(coordinator, "gather", gather)
    config = load_config(None, [f"weight_sync.verify={verify}", "rollout.tp=2"])
    return coordinator.WeightSync([[Exporter(stage)] for stage in STAGES], engines, config, "cpu", 60)


@pytest.mark.parametrize(("verify", "expected"), [("always", [3, 3, 3]), ("first", [3, 3, 0]), ("never", [0, 0, 0])])
def test_syncs_are_verified_as_configured(monkeypatch: pytest.MonkeyPatch, verify: str, expected: list[int]) -> None:
    """Fails if weight_sync.verify has no effect, or `first` verifies only the sync before any training step."""
    engines = [Engine({"a": "1", "b": "2", "c": "3"}) for _ in range(2)]
    sync = make(monkeypatch, engines, verify)
    assert [sync.push(version).verified_tensors for version in range(3)] == expected
    assert [engine.ranks for engine in engines] == [[1, 1], [3, 3]], "each engine's two workers have ranks of their own"


@pytest.mark.parametrize("digests", [{"a": "1", "b": "x", "c": "3"}, {"a": "1", "c": "3"}])
def test_a_difference_in_any_engine_stops_the_run(monkeypatch: pytest.MonkeyPatch, digests: dict[str, str]) -> None:
    """Fails if the run continues although an engine has different weights than the trained student."""
    sync = make(monkeypatch, [Engine({"a": "1", "b": "2", "c": "3"}), Engine(digests)], "first")
    with pytest.raises(WeightSyncError, match=r"rollout engine 1.*\['b'\]"):
        sync.push(0)


def test_adapters_follow_the_base_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the base is sent again after the first sync, adapters are not, or a changed base passes verification."""
    monkeypatch.setattr(coordinator, "gather", gather)
    held = {"a": "1", "q.lora_A.weight": "2"}
    exporter, engine = Exporter({"a": "1"}, {"q.lora_A.weight": "2"}), Engine(held)
    config = load_config(None, ["weight_sync.lora=adapters", "actor.lora.rank=4", "weight_sync.verify=always"])
    sync = coordinator.WeightSync([[exporter]], [engine], config, "cpu", 60)
    assert [sync.push(version).n_bytes for version in range(3)] == [32, 16, 16]
    assert exporter.sent == ["base", "adapters", "adapters", "adapters"]
    held["a"] = "another base"
    with pytest.raises(WeightSyncError, match="'a'"):
        sync.push(3)


def test_a_sender_that_dies_while_it_restores_an_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the engine is started again, and blamed in the end, for the death of an actor rank."""
    engine = Engine({"a": "1", "b": "2", "c": "3"})
    sync = make(monkeypatch, [engine], "never")
    sync.push(1)
    for stage, exporters in zip(STAGES, sync._exporters, strict=True):
        exporters[0].send_kept = Method(lambda spec, contents, sent=stage: sent)
    assert sync.restore_engine(0, engine) == 1

    def dying_gather(refs: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
        if "actor stage 1" in refs and what == "restoring the weights":
            raise DIED if len(refs) == 1 else CUT_OFF  # Ray reports the engine's broken connection first
        return dict(refs)

    monkeypatch.setattr(coordinator, "gather", dying_gather)
    with pytest.raises(SenderFailed, match=str(DIED)):
        sync.restore_engine(0, engine)


def test_a_sync_that_takes_too_long_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if weight_sync.timeout_s has no effect, a hang is taken for a lost engine, or the groups are used again."""
    engine = Engine({"a": "1", "b": "2", "c": "3"})
    monkeypatch.setattr(coordinator, "gather", gather)
    config = load_config(None, ["weight_sync.verify=never", "weight_sync.timeout_s=7"])
    sync = coordinator.WeightSync([[Exporter(stage)] for stage in STAGES], [engine], config, "cpu", 60)

    def hanging_gather(refs: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
        if what == "weight sync":
            raise RankTimeout(f"{timeout_s}")
        return dict(refs)

    monkeypatch.setattr(coordinator, "gather", hanging_gather)
    with pytest.raises(RankTimeout) as caught:
        sync.push(1)
    assert float(str(caught.value)) == 7
    monkeypatch.setattr(coordinator, "gather", gather)
    sync.push(1)
    assert engine.ranks == [1, 1, 1, 1], "two groups at the start, and two new ones"


CUT_OFF = TransferCutOff("connection closed by peer")
DIED = RankFailed("the process died")
NO_MEMORY = WeightSyncError("no shared memory")


@pytest.mark.parametrize(
    ("sender", "engine", "expected"),
    [
        (DIED, CUT_OFF, DIED),
        (CUT_OFF, WeightSyncError("a bucket was damaged"), "damaged"),
        (NO_MEMORY, CUT_OFF, NO_MEMORY),
        (CUT_OFF, CUT_OFF, CUT_OFF),
    ],
)
def test_the_member_that_failed_first_is_the_cause(
    monkeypatch: pytest.MonkeyPatch, sender: GkdError, engine: GkdError, expected: GkdError | str
) -> None:
    """Fails if a dead actor rank, which Ray reports late, or a shortage is hidden by the broken connections."""
    now, late = {"engine": engine}, {"sender": sender}

    def late_gather(refs: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
        for name in refs:
            if name in now:
                raise now[name]
            if name in late and len(refs) == 1:
                raise late[name]
        return dict(refs)

    sync = make(monkeypatch, [Engine({})], "never")
    monkeypatch.setattr(coordinator, "gather", late_gather)
    with pytest.raises(GkdError) as caught:
        sync._gather({"sender": 1}, {"engine": 2}, "weight sync", 60.0)
    assert caught.value is expected or expected in str(caught.value).split()


JOINING = "joining the weight-sync groups"


def test_a_sender_leaves_the_call_before_it_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the next call of a sender waits behind one with a dead engine, so that the others time out, or a sender
    that died meanwhile is taken for a lost engine.
    """
    waits: list[float] = []
    left: GkdError = CUT_OFF

    def slow_gather(refs: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
        if set(refs) == {"sender"}:
            waits.append(timeout_s)
            raise left
        raise DIED

    sync = make(monkeypatch, [Engine({})], "never")
    monkeypatch.setattr(coordinator, "gather", slow_gather)
    with pytest.raises(WeightSyncError) as caught:
        sync._gather({"sender": 1}, {"rollout engine 0": 2}, JOINING, 60.0)
    assert caught.value.lost == {0: DIED} and len(waits) == 1 and 60 < waits[0] <= coordinator._LEAVE_S
    left = SenderFailed("the rank died")
    with pytest.raises(SenderFailed):
        sync._gather({"sender": 1}, {"rollout engine 0": 2}, JOINING, 60.0)


@pytest.mark.parametrize("n_failures", [1, 2])
def test_members_that_missed_each_other_join_once_more(monkeypatch: pytest.MonkeyPatch, n_failures: int) -> None:
    """Fails if a member that was late for new groups ends the run, or groups that never form are tried forever."""
    engine = Engine({"a": "1", "b": "2", "c": "3"})
    sync = make(monkeypatch, [engine], "never")
    failures = [NO_MEMORY] * n_failures

    def late_gather(refs: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
        if what == JOINING and len(refs) > 1 and failures:
            raise failures.pop()
        return dict(refs)

    monkeypatch.setattr(coordinator, "gather", late_gather)
    sync._stale = True
    if n_failures == 1:
        sync.push(1)
        assert len(engine.ranks) == 2 * 3, "groups of two stages: at the start, late, and once more"
    else:
        with pytest.raises(WeightSyncError):
            sync.push(1)

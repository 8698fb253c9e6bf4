"""CUDA IPC without a GPU: which runs have it, which ranks send, its handles, and the checksum on a device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gkd.actor.pool import ActorPool
from gkd.config.load import load_config
from gkd.errors import WeightSyncError
from gkd.preflight.machine import resolve_device
from gkd.rollout.driver.weight_sync import WeightSync
from gkd.weight_sync import buckets, segment
from gkd.weight_sync.buckets import TensorSpec, word_sum
from gkd.weight_sync.group import GroupSpec
from tests.refusals import refuses
from tests.unit.local_ray import Method

COLOCATE = "trainer.colocate=true"
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8,expandable_segments:True"}


@pytest.mark.parametrize(
    ("overrides", "device", "environ", "expected"),
    [
        ([], "cuda", {}, "nccl"),
        ([COLOCATE], "cuda", {}, "ipc"),
        ([COLOCATE, "weight_sync.transport=gloo"], "cuda", {}, "gloo"),
        ([COLOCATE], "cuda", EXPANDABLE, "gloo"),
        ([COLOCATE, "actor.pp=2", "trainer.n_gpus_per_node=2"], "cuda", {}, "gloo"),
        ([COLOCATE], "cpu", {}, "auto"),
    ],
)
def test_runs_on_shared_cards_use_cuda_ipc(
    overrides: list[str], device: str, environ: dict[str, str], expected: str
) -> None:
    """Fails if a colocated run sends its weights through host memory, or uses CUDA IPC where it cannot work."""
    assert load_config(None, overrides).transport(device, environ) == expected


def test_cuda_ipc_is_refused_with_expandable_segments(
    torch_sees: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a run whose memory others may be unable to open starts."""
    torch_sees(1)
    config = load_config(None, [COLOCATE, "weight_sync.transport=ipc", "trainer.device=auto"])
    assert resolve_device(config) == "cuda"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE["PYTORCH_CUDA_ALLOC_CONF"])
    with refuses("weight_sync.transport"):
        resolve_device(config)


class Rank:
    """Records the group that it joins."""

    def __init__(self, rank: int) -> None:
        self.spec: GroupSpec | None = None
        self.kept: list[int] = []
        self.export_plan = Method(lambda content: [TensorSpec("a", (2,), "float32")])
        self.rendezvous = Method(lambda: ("here", 100 + rank))
        self.join_group = Method(self.join)
        self.send_weights = Method(lambda plan, with_digests, content: {"a": "1"})
        self.send_kept = Method(lambda spec, contents: self.kept.append(rank) or {"a": "1"})

    def join(self, spec: GroupSpec | None) -> str:
        self.spec = spec
        return "ipc"


class Engine:
    def __init__(self) -> None:
        self.specs: list[GroupSpec] = []
        self.join_groups = Method(self.join)
        self.receive = Method(lambda plans, version, content: 8)
        self.digests = Method(lambda: {"a": "1"})

    def join(self, specs: list[GroupSpec]) -> None:
        self.specs = specs


@pytest.mark.usefixtures("local_ray")
def test_each_rank_sends_to_the_worker_on_its_card() -> None:
    """Fails if a handle reaches another card, a rank waits in a group whose engine is lost, or no rank is left that
    keeps the weights for it.
    """
    ranks, engines = [Rank(i) for i in range(4)], [Engine(), Engine()]
    settings = [COLOCATE, "trainer.n_gpus_per_node=4", "rollout.n_gpus_per_node=4", "rollout.tp=2"]
    config = load_config(None, settings)
    sync = WeightSync(ActorPool(ranks, config).exporters("cuda"), engines, config, "cuda", 60)
    members = [spec for engine in engines for spec in engine.specs]
    for rank, member in zip(ranks, members, strict=True):
        assert rank.spec.port == member.port
        assert (rank.spec.rank, member.rank, member.world_size, member.transport) == (0, 1, 2, "ipc")
    assert [rank.spec is not None and rank.spec.keeps for rank in ranks] == [True, False, False, False]
    sync.push(1)
    sync.push(2, {1: engines[1]})
    assert [rank.spec is None for rank in ranks] == [True, True, False, False]
    assert ranks[2].spec is not None and ranks[2].spec.keeps and engines[1].specs[0].port == 102
    assert sync.restore_engine(0, engines[0]) == 2
    assert [rank.kept for rank in ranks] == [[], [], [2], []] and engines[0].specs[0].transport == "auto"
    sync.push(3)
    assert [spec.port for spec in engines[0].specs] == [100, 101]


SHARED = (0, b"\x01\xff" * 33, 512, 1024, b"/torch_1_2_3", 7, b"\x00" * 64, True)  # as torch describes a storage


def test_a_handle_survives_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a part of torch's handle is lost or its type changed, or it needs more room than there is."""
    found: list[Any] = []
    memory = SimpleNamespace(untyped_storage=lambda: SimpleNamespace(_share_cuda_=lambda: SHARED))
    handle = segment.shared_handle(memory)  # type: ignore[arg-type]
    assert len(handle) < segment.HANDLE_BYTES / 2

    def new_shared(*args: Any) -> torch.UntypedStorage:
        found.append(args)
        return torch.arange(8, dtype=torch.uint8).untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new_shared)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    buffer = torch.zeros(5, dtype=torch.uint8)
    segment.copy_shared(handle.ljust(segment.HANDLE_BYTES), buffer)
    assert buffer.tolist() == [0, 1, 2, 3, 4] and found == [(None, *SHARED[1:])]


def test_memory_that_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if CUDA's error lacks key and fix."""

    def fails(*args: Any) -> None:
        raise RuntimeError("CUDA error: invalid device context")

    memory = SimpleNamespace(untyped_storage=lambda: SimpleNamespace(_share_cuda_=fails))
    with pytest.raises(WeightSyncError, match=r"weight_sync.transport"):
        segment.shared_handle(memory)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", fails)
    with pytest.raises(WeightSyncError, match=r"weight_sync.transport"):
        segment.copy_shared(b"[1, 2]", torch.zeros(5, dtype=torch.uint8))


@given(st.binary(min_size=1, max_size=300), st.integers(1, 9), st.data())
def test_the_checksum_on_a_device(content: bytes, n_words: int, data: st.DataObject) -> None:
    """Fails if it is not the sum that its formula gives, or a damaged byte leaves it as it is."""
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    words = [int.from_bytes(content[i : i + 8].ljust(8, b"\0"), "little") for i in range(0, len(content), 8)]
    expected = 0
    for start in range(0, len(words), n_words):
        part = enumerate(words[start : start + n_words])
        expected = (expected * buckets._FACTOR + sum(((i * buckets._FACTOR) | 1) * word for i, word in part)) % 2**64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_SUMMED_BYTES", 8 * n_words)
        assert word_sum(tensor) == expected
    tensor[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    assert word_sum(tensor) != expected

"""Shims for older torch and vLLM: against stubs of their names, and on real groups of the installed fully_shard."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import make_dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.attention.varlen import varlen_attn

from gkd.actor.common import attention
from gkd.actor.common.torch_versions import gqa_option, param_groups, reduce_unused_params, reset
from teacher_server.engines import vllm_versions

# torch


def _per_sequence(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, scale: float | None) -> Tensor:
    heads = [[t.transpose(0, 1)[None] for t in parts] for parts in zip(
        *(t.split(borders.diff().tolist()) for t in (q, k, v)), strict=True
    )]  # fmt: skip
    done = [attention._sdpa(*one, scale)[0].transpose(0, 1) for one in heads]
    return torch.cat(done)


def old_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """Has the arguments of torch 2.11's varlen_attn."""
    assert window_size == (-1, 0)
    return _per_sequence(q, k, v, cu_q, scale)


def new_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Has the arguments of torch 2.12 and 2.13, and refuses shared heads that are not announced."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return _per_sequence(q, k, v, cu_q, scale)


@pytest.mark.parametrize("kernel", [old_varlen, new_varlen])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_varlen_attention_of_both_versions(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor], n_kv_heads: int
) -> None:
    """Fails if torch 2.11 gets an argument that it does not have, or 2.13 no word of shared heads."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 12, 8, dtype=torch.float64) for heads in (4, n_kv_heads, n_kv_heads))
    borders = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    expected = attention.causal_attention(q, k, v, borders)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_has_varlen_kernel", lambda q: True)
    torch.testing.assert_close(attention.causal_attention(q, k, v, borders), expected, atol=0, rtol=0)


def test_the_installed_torch() -> None:
    """Fails if shared heads are no longer announced to a torch that refuses them then."""
    has_option = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 12)
    assert gqa_option(varlen_attn, True) == ({"enable_gqa": True} if has_option else {})


class Choice(nn.Module):
    """Uses one of two layers, as a token uses some of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, broken: bool = False) -> Tensor:
        y: Tensor = self.a(x)
        if broken:
            raise ArithmeticError
        return y


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[Choice]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        yield fully_shard(Choice(), mesh=init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


@pytest.fixture(params=["pinned", "older"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Older: without the two methods of FSDPModule that torch 2.13 has added."""
    if request.param == "older":
        for name in ("set_reduce_scatter_unused_params", "reset_iter_state"):
            monkeypatch.delattr(FSDPModule, name, raising=False)
    return str(request.param)


@pytest.mark.usefixtures("version")
def test_a_parameter_without_gradient_is_reduced_as_zeros(sharded: Choice) -> None:
    """Fails if an unused parameter gets no gradient: ranks that use it would wait in another reduction."""
    reduce_unused_params(sharded)
    for n_backward in (1, 2):
        sharded(torch.ones(2, 4)).sum().backward()
        grads = [param.grad.to_local() for param in (sharded.a.weight, sharded.b.weight)]  # type: ignore[union-attr]
        assert torch.equal(grads[0], torch.full((4, 4), 2.0 * n_backward)) and not grads[1].any()


@pytest.mark.usefixtures("version")
def test_a_pass_after_a_failed_one(sharded: Choice) -> None:
    """Fails if parameters stay gathered after an error, or the next pass has another result."""
    expected = sharded(torch.ones(2, 4)).detach().clone()
    with pytest.raises(ArithmeticError):
        sharded(torch.ones(2, 4), broken=True)
    (group,) = param_groups(sharded)
    assert not group.is_sharded
    reset(sharded)
    assert group.is_sharded
    again = sharded(torch.ones(2, 4))
    assert torch.equal(again, expected)
    again.sum().backward()
    assert torch.equal(sharded.a.weight.grad.to_local(), torch.full((4, 4), 2.0))  # type: ignore[union-attr]


@pytest.mark.parametrize("group", [None, "g"])
def test_one_group_or_a_list_of_groups(group: str | None) -> None:
    """Fails if a module without parameters, or torch 2.11's single group, is read otherwise."""
    found = [group] if group else []
    for state in (SimpleNamespace(_fsdp_param_group=group), SimpleNamespace(_fsdp_param_groups=found)):
        assert param_groups(SimpleNamespace(_get_fsdp_state=lambda state=state: state)) == found  # type: ignore


# vLLM


class Allocation:
    """One of vLLM's allocations. The driver refuses to map or unmap memory twice."""

    def __init__(self, tag: str) -> None:
        self.tag, self.handle, self.is_asleep, self.mapped = tag, self, False, True


def unmap_and_release(allocation: Allocation) -> None:
    assert allocation.mapped, "CUDA error: unmapped twice"
    allocation.mapped = False


class OldWorker:
    """Sleeps and wakes as the worker of vLLM 0.26."""

    def __init__(self, allocations: dict[int, Allocation]) -> None:
        self.allocations, self._sleep_saved_buffers = allocations, dict[str, str]()

    def sleep(self, level: int) -> None:
        if level == 2:
            self._sleep_saved_buffers = {"rope": "cos"}
        for allocation in self.allocations.values():
            unmap_and_release(allocation)
            allocation.is_asleep = True

    def wake_up(self, tags: list[str]) -> None:
        for allocation in self.allocations.values():
            if allocation.tag in tags:
                assert not allocation.mapped, "CUDA error: mapped twice"
                allocation.mapped, allocation.is_asleep = True, False
        if self._sleep_saved_buffers:
            assert self.allocations[0].mapped, "CUDA error: illegal memory access"
            self._sleep_saved_buffers = {}

    @property
    def saved(self) -> dict[str, str]:
        return self._sleep_saved_buffers

    @property
    def awake(self) -> list[str]:
        return [allocation.tag for allocation in self.allocations.values() if allocation.mapped]


class NewWorker:
    """Records the calls of vLLM 0.32's worker."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for name in ("sleep", "wake_up", "discard"):
            setattr(self, name, lambda argument, name=name: self.calls.append((name, argument)))


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """Install a module with these contents."""
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> OldWorker:
    """Return a worker, whose allocator is vLLM's as far as the shims import it."""
    allocations = {0: Allocation("weights"), 1: Allocation("kv_cache"), 2: Allocation("kv_cache")}
    instance = SimpleNamespace(pointer_to_data=allocations)
    stub(monkeypatch, "vllm")
    stub(monkeypatch, "vllm.device_allocator", get_mem_allocator_instance=lambda: instance)
    stub(monkeypatch, "vllm.device_allocator.cumem", unmap_and_release=unmap_and_release)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return OldWorker(allocations)


def test_the_kv_cache_alone_sleeps_on_the_older_vllm(old: OldWorker) -> None:
    """Fails if the weights are released too, or memory that sleeps is released or mapped once more."""
    vllm_versions.discard(old, "kv_cache")
    vllm_versions.discard(old, "kv_cache")
    assert old.awake == ["weights"]
    vllm_versions.sleep(old, 1)
    assert old.awake == [] and len(old.allocations) == 3
    vllm_versions.wake_up(old, ["kv_cache"])
    vllm_versions.wake_up(old, ["weights"])
    assert old.awake == ["weights", "kv_cache", "kv_cache"]


def test_buffers_return_with_the_weights_on_the_older_vllm(old: OldWorker) -> None:
    """Fails if the buffers saved at level 2 are written into weights that still sleep, or lost."""
    vllm_versions.sleep(old, 2)
    vllm_versions.wake_up(old, ["kv_cache"])
    assert old.saved == {"rope": "cos"}
    vllm_versions.wake_up(old, ["weights"])
    assert old.saved == {}


def test_the_newer_vllm_does_all_of_it_itself() -> None:
    """Fails if the pinned vLLM gets other calls than its own."""
    worker = NewWorker()
    vllm_versions.discard(worker, "kv_cache")
    vllm_versions.sleep(worker, 2)
    vllm_versions.wake_up(worker, ["kv_cache"])
    assert worker.calls == [("discard", ("kv_cache",)), ("sleep", 2), ("wake_up", ["kv_cache"])]


@pytest.mark.parametrize("has_base", [True, False])
def test_error_classes_of_both_versions(monkeypatch: pytest.MonkeyPatch, has_base: bool) -> None:
    """Fails if the teacher cannot be imported with vLLM 0.26, or an error of vLLM escapes."""
    base = type("VLLMError", (Exception,), {"__module__": "vllm.exceptions"}) if has_base else Exception
    names = {"VLLMNotFoundError": type("VLLMNotFoundError", (base,), {"__module__": "vllm.exceptions"})}
    others = {"VLLMError": base} if has_base else {"Any": Any, "OSError": OSError}
    stub(monkeypatch, "vllm", exceptions=stub(monkeypatch, "vllm.exceptions", **names, **others))
    found = vllm_versions.with_vllm_errors(KeyError)
    assert found == (KeyError, base if has_base else names["VLLMNotFoundError"])
    assert not issubclass(OSError, found) and issubclass(names["VLLMNotFoundError"], found)


@pytest.mark.parametrize(("lacks", "chosen"), [("", None), ("num_computed_tokens_np", "0")])
def test_the_teacher_reads_the_batch_of_the_model_runner(
    monkeypatch: pytest.MonkeyPatch, lacks: str, chosen: str | None
) -> None:
    """Fails if vLLM's first model runner is forced where the second one can be read, or is not where it cannot."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    names = [name for name in ("req_ids", "query_start_loc_np", "num_computed_tokens_np") if name != lacks]
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        stub(monkeypatch, name)
    batch = SimpleNamespace(InputBatch=make_dataclass("InputBatch", names))
    stub(monkeypatch, "vllm.v1.worker.gpu", input_batch=batch)
    vllm_versions.choose_model_runner()
    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == chosen
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


def _pinned_nccl(monkeypatch: pytest.MonkeyPatch, *, before: dict[str, str | None] | None) -> None:
    """Install vLLM's module for NCCL.

    Args:
        before: what its pins have replaced; None: a vLLM that cannot take them back.
    """
    monkeypatch.setenv("NCCL_ALGO", "ring")

    @contextmanager
    def unpinned_nccl_env() -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name in before or {}:
                patch.delenv(name)
            yield

    functions = {} if before is None else {"unpinned_nccl_env": unpinned_nccl_env}
    stub(monkeypatch, "vllm")
    stub(monkeypatch, "vllm.utils", nccl=stub(monkeypatch, "vllm.utils.nccl", _unpinned_env=before, **functions))


def test_a_shared_nccl_group_has_no_pinned_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if only the engine's side of the weight sync has vLLM's NCCL settings: both sides would hang."""
    _pinned_nccl(monkeypatch, before={"NCCL_ALGO": None})
    for invariant, inside in (("0", "ring"), ("1", None)):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
        with vllm_versions.shared_nccl_env():
            assert os.environ.get("NCCL_ALGO") == inside
        assert os.environ["NCCL_ALGO"] == "ring", "vLLM's own groups need it"


@pytest.mark.parametrize("before", [None, {}])
def test_nccl_settings_that_stay_are_refused(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str | None] | None
) -> None:
    """Fails if the first weight sync hangs with an older vLLM, or an NCCL that never reads its settings again."""
    _pinned_nccl(monkeypatch, before=before)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(RuntimeError, match="weight_sync.transport"), vllm_versions.shared_nccl_env():
        pass
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    with vllm_versions.shared_nccl_env():
        assert os.environ["NCCL_ALGO"] == "ring"


def test_the_installed_vllm_takes_its_nccl_settings_back() -> None:
    """Fails if the pinned vLLM has no `unpinned_nccl_env`, or `_unpinned_env`, any more: every such run is refused."""
    source = Path(str(find_spec("vllm").origin)).parent.joinpath("utils", "nccl.py").read_text()  # type: ignore[union-attr]
    assert "def unpinned_nccl_env" in source and "_unpinned_env: dict[str, str | None] | None = None" in source

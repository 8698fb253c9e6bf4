"""Find the holders of a tensor: real objects of the kinds that keep memory by mistake."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from gkd.memory.referrers import Holder, held_by, holders

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def only_what_the_test_makes() -> Iterator[None]:
    """Hide all older objects from the garbage collector, and so from the search, which then takes no time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Keeper:
    def __init__(self, kept: Any) -> None:
        self.kept = kept


class Nested(Keeper):
    pass


class Viewing(Keeper):
    pass


class Storing(Keeper):
    pass


class Slotted:
    __slots__ = ("kept", "empty")

    def __init__(self, kept: Any) -> None:
        self.kept = kept


def by_shape(*shapes: tuple[int, ...]) -> list[Holder]:
    """Return the holders of tensors with these shapes, which are unique in the process."""
    return [holder for holder in holders(CPU) if holder.shape in shapes]


def held() -> dict[str, int]:
    sizes: dict[str, int] = {}
    for holder in holders(CPU):
        sizes[holder.name] = sizes.get(holder.name, 0) + holder.n_bytes
    return sizes


def closure(kept: Tensor) -> Callable[[], Tensor]:
    return lambda: kept


def failing() -> None:
    local = torch.ones(1013, 7)
    raise ValueError(local.shape)


def test_a_model_and_its_optimizer_are_told_apart() -> None:
    """Fails if the report does not tell a remaining parameter from its gradient or Adam's moments."""
    model = torch.nn.Linear(1009, 3, bias=False)
    model.register_buffer("mask", torch.ones(1009, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1009)).sum().backward()
    optimizer.step()
    found = {holder.name: holder for holder in by_shape((3, 1009), (1009, 5))}
    moments = {"AdamW.state[...]['exp_avg']", "AdamW.state[...]['exp_avg_sq']"}
    assert set(found) == {"Linear.weight", "Linear.weight.grad", "Linear.mask"} | moments
    assert all(holder.dtype == "float32" for holder in found.values())
    assert found["Linear.weight"].n_bytes == found["Linear.weight.grad"].n_bytes == 4 * 3 * 1009
    assert found["Linear.mask"].n_bytes == 4 * 5 * 1009


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "Keeper.kept": Keeper,
    "Slotted.kept": Slotted,
    "Keeper.kept['a'][...]": lambda t: Keeper({"a": [t]}),
    "Nested.kept": lambda t: Keeper(Nested(t)),
    "Keeper.kept (a key)": lambda t: Keeper({t: 1}),
    "a variable in closure.<locals>.<lambda>()'s closure": closure,
    "Viewing.kept": lambda t: Viewing(t[:1]),
    "Storing.kept": lambda t: Storing(t.untyped_storage()),
}


def test_whoever_refers_to_it_is_named() -> None:
    """Fails if one of these ways to keep a tensor alive goes unnamed, or the tensor still counts when it is let go."""
    before = held()
    keepers = {name: keep(torch.ones(1021 + i)) for i, (name, keep) in enumerate(WAYS.items())}
    after = held()
    more = {name: after[name] - before.get(name, 0) for name in keepers}
    assert more == {name: 4 * (1021 + i) for i, name in enumerate(WAYS)}, "the storage, whole, once"
    keepers.clear()
    assert {name: n_bytes for name, n_bytes in held().items() if name in WAYS} == {
        name: n_bytes for name, n_bytes in before.items() if name in WAYS
    }


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Keep only holders of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_the_parts_of_a_sharded_student_are_told_apart(mesh: DeviceMesh) -> None:
    """Fails if the tensors within FSDP2's parameters, their gradients or Adam's moments count twice or go unnamed."""
    model = fully_shard(torch.nn.Linear(1039, 3, bias=False), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1039)).sum().backward()
    optimizer.step()
    moments = {f"AdamW.state[...]['{name}']._local_tensor" for name in ("exp_avg", "exp_avg_sq")}
    found = by_shape((3, 1039), (3117,))
    assert {holder.name for holder in found} == moments | {
        "FSDPParam.sharded_param.grad",
        "FSDPParam._sharded_param_data",
    }
    assert [holder.n_bytes for holder in found] == [4 * 3117] * 4


def test_a_class_is_an_owner_and_what_is_odd_is_no_error() -> None:
    """Fails if an attribute of a class, or an object whose `__dict__` is none, ends the search with an error."""

    class Shared:
        kept = torch.ones(41)

    class Odd:
        __slots__ = ("kept",)
        __dict__ = property(lambda self: Shared.__dict__)  # type: ignore[assignment]

    odd = Odd()
    odd.kept = torch.ones(43)
    names = {holder.shape: holder.name for holder in holders(CPU)}
    assert names[(41,)].startswith("Shared") and "kept" in names[(41,)]
    assert names[(43,)] == "Odd.kept"
    del odd


def test_what_a_failed_call_left_is_found_in_its_frame() -> None:
    """Fails if the report on an error does not name the local variables that the error keeps alive."""
    with pytest.raises(ValueError) as raised:
        failing()
    (holder,) = by_shape((1013, 7))
    assert holder.name == "local in failing()" and raised.tb is not None


def test_alike_tensors_are_one_line_and_views_count_once() -> None:
    """Fails if 80 layers are 80 lines, or two views of a tensor are twice its memory."""
    one = torch.ones(1031, 2)
    kept = Keeper({"layers": [one, one[:3], one.view(-1), *(torch.ones(1031, 2) for _ in range(3))]})
    found = by_shape((1031, 2), (3, 2), (2062,))
    assert sum(holder.n_bytes for holder in found) == 4 * 4 * 2062
    assert sum(holder.count for holder in found) == 4
    assert {holder.name for holder in found} == {"Keeper.kept['layers'][...]"} and len(found) <= 2
    assert len(kept.kept["layers"]) == 6


def test_what_was_let_go_is_not_there() -> None:
    """Fails if a storage that was emptied, as an offload does, or a tensor on another device still counts."""
    emptied, elsewhere = torch.ones(1033, 3), torch.ones(1033, 3, device="meta")
    assert [holder.count for holder in by_shape((1033, 3))] == [1]
    emptied.untyped_storage().resize_(0)
    assert by_shape((1033, 3)) == []
    assert (emptied.shape, elsewhere.shape) == ((1033, 3), (1033, 3))


def test_largest_first_and_the_rest_in_one_line() -> None:
    """Fails if the one that matters is not on top, or what is left out is not told."""
    found = [Holder(f"h{n}", "float32", (n,), 1, n << 30) for n in (5, 4, 3, 2)]
    assert held_by(found, limit=2) == [
        "5.00 GiB: h5, 1 x float32 [5]",
        "4.00 GiB: h4, 1 x float32 [4]",
        "5.00 GiB: 2 other kinds",
    ]
    assert held_by(found) == [holder.line() for holder in found]
    sizes = [holder.n_bytes for holder in holders(CPU)]
    assert sizes == sorted(sizes, reverse=True)

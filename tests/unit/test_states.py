"""States that move to host memory and back, with the CPU as the device, and the settings that decide it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.memory.host_buffer import HostBuffer
from gkd.memory.states import GRADS, OPTIMIZER, PARAMS, States
from gkd.preflight.run import preflight
from tests.dist.megatron_reference import VOCAB, make_hf_folder
from tests.random_models import word_tokenizer

CPU = torch.device("cpu")


class Role:
    """A little model with its optimizer, after a step; one parameter is a view of another's storage."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(37, 41), nn.Tanh(), nn.Linear(41, 5, dtype=torch.bfloat16))
        self.model[0].bias = nn.Parameter(self.model[0].weight.detach().view(-1)[3:44])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()

    def found(self) -> Mapping[str, Sequence[Tensor]]:
        params = list(self.model.parameters())
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return {PARAMS: params, GRADS: [p.grad for p in params if p.grad is not None], OPTIMIZER: params + moments}

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        x = torch.linspace(-1, 1, 74).view(2, 37)
        self.model[2](self.model[1](self.model[0](x)).bfloat16()).float().square().sum().backward()
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        found = self.found()
        return [tensor.detach().clone() for tensor in [*found[PARAMS], *found[OPTIMIZER]]]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_all_of_it_goes_and_comes_back_to_the_bit() -> None:
    """Fails if a byte of the states is lost, changed or left on the device, whatever pieces the host takes them in."""
    role, other = Role(), Role()
    states = States(CPU, role.found, slab_bytes=64)
    before, sizes = role.values(), states.device_bytes()
    assert all(sizes.values()) and sizes[OPTIMIZER] >= 2 * sizes[PARAMS], "moments; parameters are not counted again"
    states.offload_states()
    assert states.allocated_bytes() == 0 and states.away() == [PARAMS, GRADS, OPTIMIZER]
    assert all(tensor.untyped_storage().nbytes() == 0 for tensors in role.found().values() for tensor in tensors)
    states.reload_states()
    assert states.device_bytes() == sizes and states.away() == [] and same(role.values(), before)
    # Views of a storage stay valid.
    role.step()
    other.step()
    assert same(role.values(), other.values())


def test_kinds_move_on_their_own_and_twice_is_harmless() -> None:
    """Fails if a part of the states cannot be moved alone, or a second call moves what is already there."""
    role = Role()
    states = States(CPU, role.found)
    before, sizes = role.values(), states.device_bytes()
    states.offload_states([OPTIMIZER])
    states.offload_states([OPTIMIZER, GRADS])
    assert states.device_bytes() == {PARAMS: sizes[PARAMS], GRADS: 0, OPTIMIZER: 0}
    states.reload_states([PARAMS])
    states.reload_states([OPTIMIZER])
    states.reload_states([OPTIMIZER])
    assert states.away() == [GRADS] and same(role.values(), before)
    states.reload_states()
    assert states.device_bytes() == sizes


def test_gradients_come_back_as_zeros() -> None:
    """Fails if gradients take host memory, or a step would add to what memory happened to hold."""
    role = Role()
    states = States(CPU, role.found)
    states.offload_states([GRADS])
    assert states.host_bytes() == 0
    states.reload_states()
    assert all(not grad.any() for grad in role.found()[GRADS])


def test_the_host_buffers_are_used_again() -> None:
    """Fails if memory on the host grows with every cycle, or with states that come and go."""
    role = Role()
    states = States(CPU, role.found, slab_bytes=1 << 12)
    states.offload_states()
    once, before = states.host_bytes(), None
    states.reload_states()
    before = role.values()
    for _ in range(200):
        states.offload_states([OPTIMIZER])
        states.offload_states([PARAMS])
        states.reload_states([PARAMS])
        states.offload_states()
        states.reload_states()
    assert states.host_bytes() == once and same(role.values(), before)


def test_no_memory_on_the_host_leaves_all_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if half of the states are gone when the host is full."""
    role = Role()
    states = States(CPU, role.found, slab_bytes=64)
    before, sizes, real, n_left = role.values(), states.device_bytes(), torch.empty, [20]

    def scarce(*args: int, **options: object) -> Tensor:
        n_left[0] -= 1
        return real(2**60 if n_left[0] < 0 else args[0], **options)  # type: ignore[call-overload,no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr("gkd.memory.host_buffer.torch.empty", scarce)
        with pytest.raises(RuntimeError, match="allocate"):
            states.offload_states()
    assert states.device_bytes() == sizes and same(role.values(), before)
    states.offload_states()
    states.reload_states()
    assert same(role.values(), before)


def test_no_memory_on_the_device_leaves_all_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a reload that runs out of memory loses what it had not yet brought, or leaves half of it there."""
    role = Role()
    states = States(CPU, role.found)
    before, n_left = role.values(), [3]
    real = torch.UntypedStorage.resize_

    def scarce(storage: torch.UntypedStorage, n_bytes: int) -> object:
        n_left[0] -= n_bytes > 0
        return real(storage, 2**60 if n_left[0] < 0 and n_bytes else n_bytes)

    states.offload_states()
    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", scarce)
        with pytest.raises(RuntimeError, match="allocate"):
            states.reload_states()
        assert sum(states.device_bytes().values()) == 0
    states.reload_states()
    assert same(role.values(), before)


def test_storages_of_another_owner_do_not_move(gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if states in an object store, which cannot be released here, are lost, or stay on the device unlogged."""
    foreign, own = torch.from_numpy(np.arange(5.0)), torch.arange(3.0)
    states = States(CPU, lambda: {PARAMS: [foreign, own]})
    states.offload_states()
    states.reload_states()
    states.offload_states()
    assert len(gkd_log.messages) == 1 and "MiB of states" in gkd_log.text, "logged once, not at every step"
    assert foreign.tolist() == [0, 1, 2, 3, 4] and own.untyped_storage().nbytes() == 0
    assert states.device_bytes()[PARAMS] == 0
    states.reload_states()
    assert own.tolist() == [0, 1, 2]


def test_an_unknown_kind_of_states_is_an_error() -> None:
    """Fails if a misspelled kind moves nothing, or everything, without an error."""
    states = States(CPU, lambda: {})
    for wrong in (["parameters"], "params"):
        with pytest.raises(ValueError, match="params, grads, optimizer"):
            states.offload_states(wrong)
        with pytest.raises(ValueError, match="params, grads, optimizer"):
            states.reload_states(wrong)


def test_whoever_reads_the_states_is_asked_first() -> None:
    """Fails if a checkpoint's pending copy would read released memory."""
    role, asked = Role(), []

    def settle() -> None:
        asked.append(all(p.untyped_storage().nbytes() for p in role.found()[PARAMS]))

    States(CPU, role.found, before=settle).offload_states()
    assert asked == [True]


def test_pieces_of_a_buffer_lie_side_by_side() -> None:
    """Fails if two storages share bytes on the host, or a piece is not aligned for what it holds."""
    buffer = HostBuffer(pinned=False, slab_bytes=128)
    runs = [buffer.take(n) for n in (100, 1, 300, 128)]
    assert [sum(map(len, pieces)) for pieces in runs] == [100, 1, 300, 128]
    places = [set(range(p.data_ptr(), p.data_ptr() + len(p))) for pieces in runs for p in pieces]
    assert sum(map(len, places)) == len(set().union(*places))
    assert all(pieces[0].data_ptr() % 64 == 0 for pieces in runs) and buffer.n_bytes == 5 * 128
    buffer.clear()
    assert buffer.take(100)[0].data_ptr() == runs[0][0].data_ptr() and buffer.n_bytes == 5 * 128


ON_HOST = ("actor.strategy=fsdp2", "actor.fsdp_cpu_offload=true")
MOVED = "actor.offload_train=true"
RESIDENT_TEACHER = ("teacher.backend=local", "teacher.path=t", "teacher.fsdp_cpu_offload=false")


@pytest.mark.parametrize(
    ("overrides", "moves"),
    [
        ((MOVED,), True),
        (RESIDENT_TEACHER, True),
        ((*RESIDENT_TEACHER, "memory.strategy=resident"), False),
        (("teacher.backend=local", "teacher.path=t", "memory.strategy=offload"), False),
        (ON_HOST, False),
        ((*ON_HOST, *RESIDENT_TEACHER), False),
        ((*ON_HOST, "trainer.colocate=true"), True),
    ],
)
def test_states_on_the_host_are_not_moved(overrides: tuple[str, ...], moves: bool) -> None:
    """Fails if states that fsdp_cpu_offload keeps in host memory are moved before and after each call, or others are
    not moved although the settings require it.
    """
    settings = ["data.train_files=[a]", "model.path=student", "trainer.run_dir=r", *overrides]
    assert check_config(load_config(None, settings)).moves_states == moves


def test_the_setting_without_effect_is_named(tmp_path: Path, gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if a run ignores actor.offload_train without a warning, or warns of settings that have their effect."""
    folder = make_hf_folder(tmp_path / "qwen3", "qwen3", head_dim=32)  # vLLM's attention on the CPU lacks 16
    prompts = tmp_path / "prompts.jsonl"
    word_tokenizer(VOCAB, eos_token="w1").save_pretrained(folder)
    prompts.write_text(json.dumps({"prompt": "w2", "answer": "w3"}) + "\n")
    sizes = ("data.max_prompt_length=8", "data.max_response_length=8", "trainer.device=cpu")
    paths = (f"model.path={folder}", "teacher.backend=local", f"teacher.path={folder}", f"data.train_files=[{prompts}]")
    for name, overrides in (("moved", (MOVED,)), ("host", ON_HOST), ("both", (*ON_HOST, MOVED))):
        plan = preflight(load_config(None, [*sizes, *paths, f"trainer.run_dir={tmp_path / name}", *overrides]))
        assert plan.config.derived.moves_states == (name == "moved")
        warnings = [record.getMessage() for record in gkd_log.records if record.levelno == logging.WARNING]
        keys = [key for key in ("actor.offload_train", "actor.fsdp_cpu_offload") if any(key in w for w in warnings)]
        assert len(keys) == (2 if name == "both" else 0), warnings

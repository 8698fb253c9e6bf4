"""Test the choice of FlashAttention-3 or -4: what is refused before weights are loaded, and what is compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import attention as torch_attention

from gkd.actor.common import attention
from gkd.actor.common.attention import Heads, activate, causal_attention, check_heads, use_flash_attention
from gkd.actor.rank import _heads
from gkd.config.load import load_config
from tests.refusals import refuses

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS = Heads(4, 2, 8)
MODULES = {"fa3": "flash_attn_interface", "fa4": "flash_attn"}


@pytest.fixture
def registered() -> Iterator[list[str]]:
    """Register kernels as FA3 that only record that they were chosen."""
    chosen: list[str] = []
    from torch.nn.attention import _fa3  # its own registration comes back afterwards

    torch_attention.register_flash_attention_impl("FA3", register_fn=lambda: _Handle(chosen))
    yield chosen
    torch_attention.restore_flash_attention_impl(_raise_warn=False)
    torch_attention.register_flash_attention_impl("FA3", register_fn=_fa3.register_flash_attention_fa3)


class _Handle:
    def __init__(self, chosen: list[str]) -> None:
        chosen.append("FA3")

    def remove(self) -> None: ...


def test_chosen_kernels_are_torch_s(registered: list[str]) -> None:
    """Fails if torch keeps FlashAttention-2, although the settings name another."""
    activate("fa3")
    assert registered == ["FA3"] and torch_attention.current_flash_attention_impl() == "FA3"


@pytest.mark.parametrize("attention", [name for name, module in MODULES.items() if find_spec(module) is None])
def test_a_missing_package_is_named(attention: str) -> None:
    """Fails if a run without the package trains with other kernels than it asks for, or ends with an ImportError."""
    with refuses("actor.attention", attention) as caught:
        use_flash_attention(attention, [HEADS], torch.bfloat16, CUDA)
    assert isinstance(caught.value.__cause__, ImportError)
    assert torch_attention.current_flash_attention_impl() is None


def test_the_cpu_is_refused(registered: list[str]) -> None:
    """Fails if a run on the CPU ignores the key."""
    with refuses("actor.attention"):
        use_flash_attention("fa3", [HEADS], torch.bfloat16, CPU)
    assert not registered


def test_right_kernels_pass() -> None:
    """Fails if bfloat16's rounding alone is refused."""
    check_heads("fa3", HEADS, torch.bfloat16, CPU)


def _refuses(q: Tensor, k: Tensor, v: Tensor, pack: Tensor | None, **options: int) -> Tensor:
    raise RuntimeError("FA4 flash_attention forward unsupported: head size")


KERNELS: dict[str, Callable[..., Tensor]] = {
    "across sequences": lambda q, k, v, pack, **options: causal_attention(q, k, v, None, **options),
    "wrong padded": lambda q, k, v, pack, **options: causal_attention(
        q, k, v if pack is not None else v.roll(1, dims=1), pack, **options
    ),
    "wrong gradient": lambda q, k, v, pack, **options: causal_attention(q, k.detach() + 0 * k, v, pack, **options),
    "nan": lambda q, k, v, pack, **options: causal_attention(q, k, v, pack, **options) * torch.nan,
    "refuses": _refuses,
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_wrong_kernels_are_refused(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor]) -> None:
    """Fails if a kernel that mixes sequences, has a wrong gradient, or refuses the model's heads starts to train."""

    def in_16_bits(q: Tensor, k: Tensor, v: Tensor, pack: Tensor | None, **options: int) -> Tensor:
        return (kernel if q.dtype == torch.bfloat16 else causal_attention)(q, k, v, pack, **options)

    monkeypatch.setattr(attention, "causal_attention", in_16_bits)
    with refuses("actor.attention", "fa4"):
        check_heads("fa4", HEADS, torch.bfloat16, CPU)


def test_every_model_of_a_rank_is_compared(tmp_path: Path) -> None:
    """Fails if a local teacher's or reference's head size is first refused in the middle of a run."""
    for name, (n_heads, n_kv_heads, head_dim) in {"student": (8, 4, 64), "teacher": (16, 2, 128)}.items():
        config_json = {
            "model_type": "qwen3", "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads, "head_dim": head_dim,
        }  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config_json))
    settings = ["data.train_files=[a]", f"model.path={tmp_path / 'student'}", "trainer.n_gpus_per_node=2"]
    settings += ["actor.tp=2", "actor.strategy=megatron"]
    assert list(_heads(load_config(None, settings))) == [Heads(4, 2, 64)]
    settings += ["teacher.backend=local", f"teacher.path={tmp_path / 'teacher'}"]
    settings += ["distill.reference_kl_weight=0.1"]
    assert list(_heads(load_config(None, settings))) == [Heads(4, 2, 64), Heads(16, 2, 128), Heads(8, 4, 64)]

"""Use what this project relies on in torch and vLLM, with stubs of their names."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gkd.actor.common import attention
from gkd.errors import WeightSyncError
from gkd.rollout.vllm.start import shared_nccl_env

# torch


def _per_sequence(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, scale: float | None) -> Tensor:
    heads = [[t.transpose(0, 1)[None] for t in parts] for parts in zip(
        *(t.split(borders.diff().tolist()) for t in (q, k, v)), strict=True
    )]  # fmt: skip
    options: Any = {"is_causal": True, "enable_gqa": q.shape[1] != k.shape[1], "scale": scale}
    return torch.cat([F.scaled_dot_product_attention(*one, **options)[0].transpose(0, 1) for one in heads])


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Has the arguments of torch 2.13, and refuses shared heads that are not announced."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return _per_sequence(q, k, v, cu_q, scale)


class OnCard(Tensor):
    is_cuda = True


@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_shared_heads_are_announced_to_the_kernel(monkeypatch: pytest.MonkeyPatch, n_kv_heads: int) -> None:
    """Fails if the kernel gets no word of shared heads, which it then refuses."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 12, 8, dtype=torch.bfloat16) for heads in (4, n_kv_heads, n_kv_heads))
    borders = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    expected = attention.causal_attention(q, k, v, borders)
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    found = attention.causal_attention(q.as_subclass(OnCard), k, v, borders)
    torch.testing.assert_close(found.as_subclass(Tensor), expected, atol=0, rtol=0)


# vLLM


def _pinned_nccl(monkeypatch: pytest.MonkeyPatch, *, before: dict[str, str | None]) -> None:
    """Install vLLM's module for NCCL.

    Args:
        before: what its pins have replaced; empty: an NCCL that cannot take them back.
    """
    monkeypatch.setenv("NCCL_ALGO", "ring")
    package, nccl = ModuleType("vllm.utils"), ModuleType("vllm.utils.nccl")
    nccl._unpinned_env = before  # type: ignore[attr-defined]
    package.nccl = nccl  # type: ignore[attr-defined]

    @contextmanager
    def unpinned_nccl_env() -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name in before:
                patch.delenv(name)
            yield

    nccl.unpinned_nccl_env = unpinned_nccl_env  # type: ignore[attr-defined]
    for module in (ModuleType("vllm"), package, nccl):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_a_shared_nccl_group_has_no_pinned_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if only the engine's side of the weight sync has vLLM's NCCL settings: both sides would hang."""
    _pinned_nccl(monkeypatch, before={"NCCL_ALGO": None})
    for invariant, inside in (("0", "ring"), ("1", None)):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
        with shared_nccl_env():
            assert os.environ.get("NCCL_ALGO") == inside
        assert os.environ["NCCL_ALGO"] == "ring", "vLLM's own groups need it"


def test_nccl_settings_that_stay_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the first weight sync hangs with an NCCL that never reads its settings again."""
    _pinned_nccl(monkeypatch, before={})
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(WeightSyncError, match="weight_sync.transport"), shared_nccl_env():
        pass
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    with shared_nccl_env():
        assert os.environ["NCCL_ALGO"] == "ring"


def test_the_installed_vllm_takes_its_nccl_settings_back() -> None:
    """Fails if the pinned vLLM has no `unpinned_nccl_env`, or `_unpinned_env`, any more: every such run is refused."""
    source = Path(str(find_spec("vllm").origin)).parent.joinpath("utils", "nccl.py").read_text()  # type: ignore[union-attr]
    assert "def unpinned_nccl_env" in source and "_unpinned_env: dict[str, str | None] | None = None" in source

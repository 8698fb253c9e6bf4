"""Test packs of gated delta nets and of Mamba 2 with the kernels of flash-linear-attention (fla). Not run in CI.

    pip install --no-deps --target DIR flash-linear-attention==0.6.0 fla-core==0.6.0
    PYTHONPATH=DIR bash tests/dry_card/run.sh tests/gpu/test_recurrent_packs_cuda.py

On a card with the extra `hybrid`: pytest -m gpu tests/gpu/test_recurrent_packs_cuda.py. On stand-in cards Triton's
interpreter runs the kernels. TileLang's, which fla prefers in the backward pass on Hopper, cannot run there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from gkd.config.loss_spec import LossSpec, LossTerm
from gkd.data.batching import make_micro_batches
from gkd.errors import ConfigError
from gkd.types import Rollout, TeacherScores
from tests.device import VARIABLE, environment, on_stand_in
from tests.dist.helpers import group_of_one
from tests.dist.megatron_reference import by_file_name, read_model
from tests.dist.student_cases import build_student, grads_of
from tests.model_families import N_BYTES, save_family
from tests.vision_reference import logits_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention, the extra hybrid"),
]
SIZES = ((20, 50), (1, 2), (9, 25))  # tokens of prompts and responses: more and less than a chunk of 64
BOUND = 1e-5 if on_stand_in() else 3e-2  # relative; a card computes products of float32 in TF32
# Their gradients are small sums of large terms: against float64, transformers' code in torch has errors of 1e-4.
DECAYS = ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_ba.weight")
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
MAMBA_2 = ("nemotron_h_dense", "granitemoehybrid", "bamba", "falcon_h1", "zamba2")
# Modules and names of kernels.
CONVOLUTION = ("fla.modules.causal_conv1d", "causal_conv1d")
DELTA_RULE = ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
STATE_SPACE = ("fla.ops.simple_gla", "chunk_simple_gla")


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    if on_stand_in():
        import_module("dry_card_operations").adapt_triton()
        os.environ["FLA_TILELANG"] = "0"
    with environment({VARIABLE: "cuda"}), group_of_one():
        yield


def _rollouts() -> list[Rollout]:
    rng = np.random.default_rng(0)

    def ids(n: int) -> np.ndarray:
        return rng.integers(0, N_BYTES, n).astype(np.int32)

    none = np.zeros(0, np.float32)
    return [Rollout(i, i, ids(p), ids(r), none, (), "stop", on_policy=False) for i, (p, r) in enumerate(SIZES)]


def _student(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    settings = {"packing": True, "loss": LossSpec((LossTerm("sft"),)), "signals": (), "dtype": dtype}
    return build_student("fsdp2", folder, 0, 1, **settings)


@pytest.mark.parametrize("name", [*DELTA_NETS, *MAMBA_2])
def test_a_pack_is_computed_in_one_call(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a pack's logprobs or gradients are not those of transformers' code in torch for each sequence alone, or
    if a kernel runs more than once for a pack.
    """
    folder = save_family(tmp_path, name, seed=1)
    student = _student(folder)
    calls: list[int] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, cu_seqlens: torch.Tensor, **kwargs: Any) -> Any:
            calls.append(len(cu_seqlens) - 1)
            return function(*args, cu_seqlens=cu_seqlens, **kwargs)

        return call

    for place, kernel in (CONVOLUTION, DELTA_RULE if name in DELTA_NETS else STATE_SPACE):
        monkeypatch.setattr(import_module(place), kernel, counted(getattr(import_module(place), kernel)))
    scores = [TeacherScores()] * len(SIZES)  # the loss needs none
    batches = make_micro_batches(_rollouts(), scores, micro_batch_size=len(SIZES), packed=True)
    (logprobs,) = student.compute_logprobs(batches)
    model = read_model(folder, dtype=torch.float32, attn_implementation="eager").eval()  # on the CPU, without kernels
    n_layers = sum(hasattr(module, "A_log") for module in model.modules())
    assert calls == [len(SIZES)] * 2 * n_layers
    grads = grads_of(student, batches)

    tables = [(logits_of(model, None, each).log_softmax(-1), each.response_ids) for each in _rollouts()]
    expected = torch.cat([table.gather(1, torch.from_numpy(ids).long()[:, None])[:, 0] for table, ids in tables])
    (-expected.mean()).backward()
    assert_close(logprobs.cpu(), expected.detach(), atol=BOUND, rtol=BOUND)
    reference = by_file_name(model, lambda parameter: parameter.grad)
    assert grads.keys() == reference.keys()
    errors = {key: float((grad.cpu() - reference[key]).norm() / reference[key].norm()) for key, grad in grads.items()}
    bounds = {key: max(1e-3, BOUND) if key.endswith(DECAYS) else BOUND for key in errors}
    assert not {key: error for key, error in errors.items() if not error <= bounds[key]}


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
def test_rounding_is_not_taken_for_a_wrong_kernel(tmp_path: Path, name: str) -> None:
    """Fails if a student in bfloat16 is refused."""
    _student(save_family(tmp_path, name, seed=1), torch.bfloat16)


@pytest.mark.parametrize("what", ["both passes", "backward pass"])
@pytest.mark.parametrize(
    ("name", "place", "kernel"),
    [("qwen3_5_text", *CONVOLUTION), ("qwen3_5_text", *DELTA_RULE), ("nemotron_h_dense", *STATE_SPACE)],
)
def test_a_kernel_without_boundaries_is_found(
    tmp_path: Path, name: str, place: str, kernel: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a student starts to train with a kernel that mixes sequences, or that mixes their gradients alone."""
    module = import_module(place)
    right = getattr(module, kernel)

    def wrong(*args: Any, cu_seqlens: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        mixed = right(*args, **kwargs)[0]
        if what == "both passes":
            return mixed, None
        with torch.no_grad():
            apart = right(*args, cu_seqlens=cu_seqlens, **kwargs)[0]
        return mixed + (apart - mixed).detach(), None

    folder = save_family(tmp_path, name, seed=1)
    monkeypatch.setattr(module, kernel, wrong)
    with pytest.raises(ConfigError) as caught:
        _student(folder)
    assert caught.value.key == "actor.packing"

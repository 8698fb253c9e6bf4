"""Test packs of gated delta nets with the kernels of flash-linear-attention (fla). Not run in CI.

    pip install --no-deps --target DIR flash-linear-attention==0.6.0 fla-core==0.6.0
    PYTHONPATH=DIR bash tests/dry_card/run.sh tests/gpu/test_delta_nets_cuda.py

On a card with the extra `hybrid`: pytest -m gpu tests/gpu/test_delta_nets_cuda.py. On stand-in cards Triton's
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


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_a_pack_is_computed_in_one_call(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a pack's logprobs or gradients are not those of transformers' code in torch for each sequence alone, or
    if a kernel runs more than once for a pack.
    """
    import fla.modules.causal_conv1d as convolution
    import fla.ops.gated_delta_rule as rule

    folder = save_family(tmp_path, name, seed=1)
    student = _student(folder)
    calls: list[int] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, cu_seqlens: torch.Tensor, **kwargs: Any) -> Any:
            calls.append(len(cu_seqlens) - 1)
            return function(*args, cu_seqlens=cu_seqlens, **kwargs)

        return call

    monkeypatch.setattr(convolution, "causal_conv1d", counted(convolution.causal_conv1d))
    monkeypatch.setattr(rule, "chunk_gated_delta_rule", counted(rule.chunk_gated_delta_rule))
    scores = [TeacherScores()] * len(SIZES)  # the loss needs none
    batches = make_micro_batches(_rollouts(), scores, micro_batch_size=len(SIZES), packed=True)
    (logprobs,) = student.compute_logprobs(batches)
    n_layers = read_model(folder).config.layer_types.count("linear_attention")
    assert calls == [len(SIZES)] * 2 * n_layers
    grads = grads_of(student, batches)

    model = read_model(folder, dtype=torch.float32, attn_implementation="eager").eval()  # on the CPU, without kernels
    tables = [(logits_of(model, None, each).log_softmax(-1), each.response_ids) for each in _rollouts()]
    expected = torch.cat([table.gather(1, torch.from_numpy(ids).long()[:, None])[:, 0] for table, ids in tables])
    (-expected.mean()).backward()
    assert_close(logprobs.cpu(), expected.detach(), atol=BOUND, rtol=BOUND)
    reference = by_file_name(model, lambda parameter: parameter.grad)
    assert grads.keys() == reference.keys()
    errors = {key: float((grad.cpu() - reference[key]).norm() / reference[key].norm()) for key, grad in grads.items()}
    bounds = {key: max(1e-3, BOUND) if key.endswith(DECAYS) else BOUND for key in errors}
    assert not {key: error for key, error in errors.items() if not error <= bounds[key]}


def test_rounding_is_not_taken_for_a_wrong_kernel(tmp_path: Path) -> None:
    """Fails if a student in bfloat16 is refused."""
    _student(save_family(tmp_path, "qwen3_5_text", seed=1), torch.bfloat16)


@pytest.mark.parametrize("what", ["both passes", "backward pass"])
@pytest.mark.parametrize("kernel", ["convolution", "rule"])
def test_a_kernel_without_boundaries_is_found(
    tmp_path: Path, kernel: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a student starts to train with a kernel that mixes sequences, or that mixes their gradients alone."""
    import fla.modules.causal_conv1d as convolution
    import fla.ops.gated_delta_rule as rule

    module, name = {"convolution": (convolution, "causal_conv1d"), "rule": (rule, "chunk_gated_delta_rule")}[kernel]
    right = getattr(module, name)

    def wrong(*args: Any, cu_seqlens: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        mixed = right(*args, **kwargs)[0]
        if what == "both passes":
            return mixed, None
        with torch.no_grad():
            apart = right(*args, cu_seqlens=cu_seqlens, **kwargs)[0]
        return mixed + (apart - mixed).detach(), None

    folder = save_family(tmp_path, "qwen3_5_text", seed=1)
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(ConfigError) as caught:
        _student(folder)
    assert caught.value.key == "actor.packing"

"""Choice of a student's layers; the formulas of the rotary embedding. Compiled: tests/dist/test_fused_layers.py."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd as megatron_rotates
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd as megatron_rotates_packed

from gkd.actor.megatron import fused, student
from gkd.actor.megatron.fused import rotate
from gkd.actor.megatron.layer_spec import GroupedProduct, check_transformer_engine, is_fused
from gkd.actor.megatron.layout import ParallelLayout
from gkd.actor.megatron.model_config import PositionAngles
from gkd.actor.rank import build_student
from gkd.config.load import load_config
from gkd.start.pools import actor_env
from tests.refusals import refuses

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart_cpu.yaml"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class OneRank:
    """A context-parallel group of one rank."""

    size, rank = (lambda self: 1), (lambda self: 0)


@torch.compiler.set_stance("force_eager")
def test_rotation_is_that_of_megatron() -> None:
    """Fails if a position in a pack, or the pairs that are rotated, differ from Megatron's."""
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor([0, 3, 4, 10], dtype=torch.int32)
    angles_of = PositionAngles(torch.rand(4, generator=generator))
    angles_of.positions = torch.arange(6)
    whole = angles_of()
    angles_of.positions = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3, 4, 5])
    angles = angles_of()
    heads = torch.randn(10, 2, 8, generator=generator, requires_grad=True)
    plain = megatron_rotates_packed(heads, cu_seqlens, whole, cp_group=OneRank())
    ours = rotate(heads[:, None], angles)[:, 0]
    assert torch.equal(ours, plain)
    weights = torch.randn(ours.shape, generator=generator)
    (mine,), (theirs,) = (torch.autograd.grad((out * weights).sum(), [heads]) for out in (ours, plain))
    assert torch.equal(mine, theirs)
    padded = torch.randn(6, 3, 2, 8, generator=generator)
    assert torch.equal(rotate(padded, whole, interleaved=False), megatron_rotates(padded, whole))
    turned = rotate(heads[:, None].bfloat16(), angles)[:, 0]
    assert torch.equal(turned, megatron_rotates_packed(heads.bfloat16(), cu_seqlens, whole, cp_group=OneRank()))


@pytest.mark.parametrize(("packs", "n_variants"), [(True, 4), (False, 8)])
def test_rotation_is_compiled_a_few_times(monkeypatch: pytest.MonkeyPatch, packs: bool, n_variants: int) -> None:
    """Fails if dynamo's limit of variants is exceeded, so that a run goes on uncompiled, or a variant computes other
    numbers. Queries and keys, both passes, with and without gradients; without packs also batches of one sequence.
    """
    generator, graphs = torch.Generator().manual_seed(0), list[torch.fx.GraphModule]()
    backend: Any = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
    for name in ("_turned", "_turned_back"):
        plain = inspect.unwrap(getattr(fused, name))
        monkeypatch.setattr(fused, name, torch.compile(plain, dynamic=False, backend=backend))
    for grad, n, length in [(True, 3, 6), (False, 1, 4), (True, 1, 8), (False, 3, 2), (True, 5, 12), (True, 7, 8)]:
        lead = (n * length, 1) if packs else (length, n)
        qkv = torch.randn(*lead, 2, 4 * 8, generator=generator, requires_grad=grad)  # a key head has 2 query heads
        angles = torch.rand(lead[0], 1, 1, 4, generator=generator).repeat(1, 1, 1, 2)
        queries, keys, _ = qkv.split([16, 8, 8], dim=-1)
        for values in (queries.reshape(*lead, 4, 8), keys):
            ours, plain = rotate(values, angles), megatron_rotates(values, angles)
            assert torch.equal(ours, plain)
            if grad:
                of_attention = torch.randn(values.transpose(0, -2).shape, generator=generator).transpose(0, -2)
                mine, theirs = (torch.autograd.grad(out, values, of_attention) for out in (ours, plain))
                assert torch.equal(*mine, *theirs)
    assert len(graphs) == n_variants <= torch.compiler.config.recompile_limit


@pytest.mark.parametrize(
    ("norms", "adds_one", "n_rotated", "trains"),
    [(True, False, 8, True), (True, True, 4, False), (True, True, 8, True), (False, False, 8, True)],
)
def test_heads_are_split_normalized_and_rotated(
    monkeypatch: pytest.MonkeyPatch, norms: bool, adds_one: bool, n_rotated: int, trains: bool
) -> None:
    """Fails if the traced operation, or its derivative, is not that of the single ones, or if batches compile again."""
    torch._dynamo.reset()  # the variants of other cases
    generator, graphs = torch.Generator().manual_seed(0), list[torch.fx.GraphModule]()
    backend: Any = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
    for name in ("_split_heads", "_split_heads_back"):
        plain = inspect.unwrap(getattr(fused, name))
        monkeypatch.setattr(fused, name, torch.compile(plain, dynamic=False, fullgraph=True, backend=backend))
    weights = [torch.rand(8, generator=generator, requires_grad=trains) if norms else None for _ in range(2)]
    for lead in ((6, 1), (9, 1), (4, 3), (3, 7)):
        mixed = torch.randn(*lead, 2, 5 * 8, generator=generator, requires_grad=True)  # a key head has 3 query heads
        angles = torch.rand(lead[0], 1, 1, n_rotated // 2, generator=generator).repeat(1, 1, 1, 2)
        ours = fused.split_heads(mixed, angles, tuple(weights), n_queries=3, eps=1e-6, adds_one=adds_one)
        exact = [mixed.detach().double().requires_grad_()]
        exact += [weight.detach().double().requires_grad_() for weight in weights if weight is not None]
        queries, keys, values = exact[0].split([24, 8, 8], dim=-1)
        plain = [queries.reshape(*lead, 6, 8), keys, values]
        for i, weight in enumerate(exact[1:]):
            plain[i] = torch.nn.functional.rms_norm(plain[i], (8,), weight + adds_one, 1e-6)
        plain[:2] = [megatron_rotates(part, angles.double()) for part in plain[:2]]
        inputs = [mixed, *(weight for weight in weights if weight is not None and trains)]
        scales = [torch.randn(part.transpose(0, 2).shape, generator=generator).transpose(0, 2) for part in plain]
        grads = torch.autograd.grad(ours, inputs, scales)
        theirs = torch.autograd.grad(plain, exact[: len(inputs)], [scale.double() for scale in scales])
        for mine, other in zip((*ours, *grads), (*plain, *theirs), strict=True):
            assert torch.allclose(mine, other.float(), atol=1e-5)
    assert len(graphs) == 4  # both passes, with one sequence and with several


def test_grouped_product_is_that_of_each_expert() -> None:
    """Fails if a row meets another expert's weights, or an expert without tokens has no gradient, or another one's."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 16, generator=generator, requires_grad=True)
    weights = [torch.randn(24, 16, generator=generator, requires_grad=True) for _ in range(4)]
    counts = [3, 0, 5, 1]
    grouped = GroupedProduct.apply(rows, torch.tensor(counts).cumsum(0).to(torch.int32), *weights)
    each = torch.cat([part @ weight.T for part, weight in zip(rows.split(counts), weights, strict=True)])
    assert torch.allclose(grouped, each, atol=1e-5)
    scale = torch.randn(grouped.shape, generator=generator)
    ours, plain = (torch.autograd.grad((out * scale).sum(), [rows, *weights]) for out in (grouped, each))
    assert all(torch.allclose(mine, theirs, atol=1e-5) for mine, theirs in zip(ours, plain, strict=True))
    assert not ours[2].any() and ours[1].any()
    frozen = GroupedProduct.apply(rows, torch.tensor([9], dtype=torch.int32), weights[0].detach())
    assert torch.autograd.grad(frozen.sum(), [rows])[0].shape == rows.shape


def test_layers_are_compiled_on_cuda_only() -> None:
    """Fails if the CPU's numbers change with the compiler, or `torch` does not turn it off."""
    assert not is_fused("auto", CPU) and is_fused("auto", CUDA) and is_fused("te", CUDA) and not is_fused("torch", CUDA)


@pytest.mark.parametrize(
    ("nnodes", "device", "overlaps"), [(1, CUDA, False), (2, CUDA, True), (1, CPU, False), (2, CPU, False)]
)
def test_gradients_are_reduced_in_the_backward_pass_across_nodes(
    monkeypatch: pytest.MonkeyPatch, nnodes: int, device: torch.device, overlaps: bool
) -> None:
    """Fails if several nodes wait for their network after each backward pass, or one node pays for the overlap."""
    built: list[dict[str, Any]] = []
    monkeypatch.setattr(student, "MegatronStudent", lambda *args, **settings: built.append(settings))
    config = load_config(QUICKSTART, [f"trainer.nnodes={nnodes}"])
    layout = ParallelLayout(tp=1, pp=1, world_size=1, rank=0)
    build_student(config, layout, device, 10, 60.0, on_phase=lambda name: None)
    assert [settings["overlap_grad_reduce"] for settings in built] == [overlaps]


def test_tensor_parallel_ranks_have_one_hardware_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if collectives wait for products on CUDA, a user's value is lost, or compile=on has no effect."""
    split = load_config(QUICKSTART, ["actor.tp=2", "trainer.n_gpus_per_node=2"])
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert actor_env(split, False) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert actor_env(split, True) == actor_env(load_config(QUICKSTART), False) == {}
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert actor_env(split, False) == {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    compiled = load_config(QUICKSTART, ["actor.strategy=fsdp2", "actor.compile=on"])
    assert actor_env(compiled, True) == {"TORCHDYNAMO_DISABLE": "0"}


def test_transformer_engine_that_cannot_be_used() -> None:
    """Fails if a run starts with other layers than it was told to, or ends in an error without the key."""
    for device in (CPU, CUDA):  # it is not installed here
        with refuses("actor.layers", "te"):
            check_transformer_engine(device)

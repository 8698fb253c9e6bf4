"""Compare losses of the Megatron student with the fused LM head with dense losses of an HF model. float32.

`test_megatron_parity` trains on the top-k forward KL. This file tests a mixture of every kind of loss, and the
teacher's hidden states. Hidden states of the student that are split over the sequence: test_loss_curves.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gkd.config.loss_spec import LossSpec, LossTerm, teacher_signals
from gkd.types import MicroBatch
from teacher_server.wire.protocol import Signal
from tests.dist.dense_loss import dense_losses
from tests.dist.helpers import run_ranks
from tests.dist.megatron_reference import VOCAB, make_hf_folder, make_micro_batches, read_model
from tests.dist.student_cases import as_numpy, build_student, grads_of

pytestmark = pytest.mark.dist
KINDS = ("qwen3", "qwen2_tied")
SIGNALS: tuple[Signal, ...] = ("topk", "hidden")
LAYOUTS = {"tp2": (2, 2, 1), "pp2": (2, 1, 2), "tp2_pp2": (4, 2, 2)}  # name -> (world size, tp, pp)
SPEC = LossSpec(
    (LossTerm("jsd", 0.6, beta=0.3), LossTerm("reverse_kl", 0.4), LossTerm("k3", 0.5), LossTerm("sft", 0.3)),
    temperature=0.9,
)
TEACHER_WIDTH = 5


def _layouts_of(size: int) -> list[str]:
    return [name for name, layout in LAYOUTS.items() if layout[0] == size]


def _teacher_head() -> np.ndarray:
    """Return the teacher's LM head, [VOCAB, D] float32."""
    return np.random.default_rng(8).normal(size=(VOCAB, TEACHER_WIDTH)).astype(np.float32)


def _batches(signal: Signal) -> list[MicroBatch]:
    """Return micro-batches of uneven shapes; the rows of every third sequence are from the dataset."""
    batches = make_micro_batches(4)
    generator = torch.Generator().manual_seed(4)
    for batch in batches:
        targets = batch.targets
        n_rows = len(targets)
        targets.on_policy = (batch.loss_index // batch.tokens.shape[1] + n_rows) % 3 != 0
        targets.rollout_logprobs = targets.on_policy * (torch.rand(n_rows, generator=generator) - 7.0)
        if signal == "hidden":
            targets.topk_ids = targets.topk_logprobs = targets.tail_mass = None
            targets.hidden = torch.randn((n_rows, TEACHER_WIDTH), generator=generator)
        else:
            targets.sampled_logprobs = torch.rand(n_rows, generator=generator) - 7.0
    return batches


def _reference(folder: Path, signal: Signal) -> tuple[float, dict[str, Tensor]]:
    """Return the token mean and its gradients by HF name."""
    model = read_model(folder, dtype=torch.float32, attn_implementation="eager")
    total, n_tokens = torch.zeros(()), 0
    for batch in _batches(signal):
        targets = batch.targets
        logits = model(batch.tokens).logits.flatten(0, 1)[batch.loss_index]
        log_p = None
        if targets.hidden is not None:
            log_p = (targets.hidden @ torch.from_numpy(_teacher_head()).T / SPEC.temperature).log_softmax(dim=-1)
        total = total + dense_losses(SPEC, targets, logits, log_p).sum()
        n_tokens += len(targets)
    loss = total / n_tokens
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _measure(rank: int, world_size: int, root: Path) -> dict[tuple[str, str, str], Any]:
    """Return, in a rank, (loss, gradients) by (layout, kind, signal), of the layouts of this size."""
    from megatron.core import parallel_state

    measured: dict[tuple[str, str, str], Any] = {}
    for name in _layouts_of(world_size):
        _, tp, pp = LAYOUTS[name]
        for kind in KINDS:
            for signal in SIGNALS:
                settings = {"loss": SPEC, "signals": teacher_signals(SPEC, signal)}
                student = build_student("megatron", root / kind, rank, world_size, tp=tp, pp=pp, **settings)
                # The smallest setting covers the whole batch here; a few rows per chunk give several chunks.
                student.loss.chunk_bytes = 5 * VOCAB * 4
                if signal == "hidden":
                    student.set_teacher_head(_teacher_head())
                grads = as_numpy(grads_of(student, _batches(signal)))
                measured[name, kind, signal] = student.evaluate(_batches(signal)).loss, grads
        parallel_state.destroy_model_parallel()
    return measured


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[[int], list[Any]]]:
    """Return a folder with one HF model per kind, and a function that measures a world of a given size."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("losses")
    for kind in KINDS:
        make_hf_folder(root / kind, kind)
    return root, functools.cache(lambda size: run_ranks(_measure, size, root, timeout_s=150.0))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_plain_training(worlds: Any, kind: str, signal: Signal, size: int) -> None:
    """Fails if the fused LM head drops or doubles a gradient under TP, PP, tied embeddings, or hidden states."""
    root, ranks_of = worlds
    loss, expected = _reference(root / kind, signal)
    assert max(float(grad.abs().max()) for grad in expected.values()) > 0.01  # otherwise 1e-5 is not a test
    for name in _layouts_of(size):
        results = [measured[name, kind, signal] for measured in ranks_of(size)]
        assert [result[0] for result in results] == pytest.approx([loss] * size, abs=1e-5)
        assert {key for _, grads in results for key in grads} == set(expected)
        for _, grads in results:
            for key, grad in grads.items():
                off = np.abs(grad - expected[key].numpy()).max()
                assert off <= 1e-5, (name, key, off)

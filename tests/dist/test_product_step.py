"""Compare one optimizer step from rollouts and teacher scores with plain Hugging Face + AdamW.

The reference has no micro-batches: it runs one unpadded sequence at a time. So this also covers what
`test_megatron_parity` presupposes: the shift, the mask, the padding, and the distribution over ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.types import Rollout, TeacherScores, TeacherTopK, VersionSpan
from tests.device import rank_device
from tests.dist.helpers import Measured, run_ranks
from tests.dist.megatron_reference import BETAS, EPS, LR, TOP_K, VOCAB, make_hf_folder
from tests.dist.student_cases import as_numpy, weights

pytestmark = pytest.mark.dist
# (world size, tp, pp, micro_batch_size, max_tokens_per_micro_batch)
LAYOUTS = {
    "tp1": (1, 1, 1, 3, 0),
    "tp2-token-budget": (2, 2, 1, 1, 40),
    "pp2": (2, 1, 2, 2, 0),
    "dp2": (2, 1, 1, 2, 0),
}


def _scored_batch() -> tuple[list[Rollout], list[TeacherScores]]:
    """Return seven sequences of different lengths, one with a single response token; top-k mass 0.3 to 0.9.

    Two are trajectories: the student read some tokens of their responses, which carry no loss.
    """
    masks = {3: [1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1], 5: [0, 1, 1, 0, 0, 0, 1]}
    rng = np.random.default_rng(5)
    rollouts, scores = [], []
    for i, (n_prompt, n_response) in enumerate([(3, 5), (1, 9), (6, 1), (2, 12), (4, 4), (5, 7), (2, 2)]):
        own = np.array(masks[i], bool) if i in masks else None
        n_rows = n_response if own is None else int(own.sum())
        rollouts.append(
            Rollout(
                prompt_id=i,
                sample_index=i,
                prompt_ids=rng.integers(0, VOCAB, n_prompt).astype(np.int32),
                response_ids=rng.integers(0, VOCAB, n_response).astype(np.int32),
                rollout_logprobs=np.zeros(n_rows, np.float32),
                version_spans=(VersionSpan(0, n_response, 0),),
                finish_reason="stop",
                own=own,
            )
        )
        ids = np.stack([rng.permutation(VOCAB)[:TOP_K] for _ in range(n_rows)]).astype(np.int32)
        weights = rng.random((n_rows, TOP_K)) + 0.05
        probs = rng.uniform(0.3, 0.9, (n_rows, 1)) * weights / weights.sum(1, keepdims=True)
        tail = (1 - probs.sum(1)).astype(np.float32)
        scores.append(TeacherScores(TeacherTopK(ids, np.log(probs).astype(np.float32), tail)))
    return rollouts, scores


def _reference(folder: Path) -> dict[str, Any]:
    """Return loss, gradients and the weights after one AdamW step, computed one unpadded sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    total, n_tokens = torch.zeros(()), 0
    for rollout, scores in zip(*_scored_batch(), strict=True):
        score = scores.topk
        assert score is not None
        tokens = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids])).long()[None]
        logits = model(tokens).logits[0]
        own = range(len(rollout.response_ids)) if rollout.own is None else rollout.own.nonzero()[0].tolist()
        for row, j in enumerate(own):
            q = logits[len(rollout.prompt_ids) + j - 1].softmax(-1)  # the row that predicts response token j
            q = q[torch.from_numpy(score.topk_ids[row]).long()]
            p = torch.from_numpy(score.topk_logprobs[row]).exp()
            total = total + (p * (p / q).log()).sum() + (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log()
            n_tokens += 1
    loss = total / n_tokens
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"loss": float(loss.detach()), "n_tokens": n_tokens, "grads": grads, "weights": weights}


def _product(rank: int, world_size: int, root: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Runs in a rank: return the same results of the product, by layout."""
    from megatron.core import parallel_state

    measured = {}
    for name in names:
        measured[name] = _one_layout(rank, world_size, root, name)
        parallel_state.destroy_model_parallel()
    return measured


def _one_layout(rank: int, world_size: int, root: Path, name: str) -> dict[str, Any]:
    from gkd.actor.common.optim_spec import OptimSpec
    from gkd.actor.megatron.layout import ParallelLayout
    from gkd.actor.megatron.student import MegatronStudent
    from gkd.config.loss_spec import LossSpec
    from gkd.data.batching import make_micro_batches

    _, tp, pp, micro_batch_size, max_tokens = LAYOUTS[name]
    layout = ParallelLayout(tp=tp, pp=pp, world_size=world_size, rank=rank)
    optim = OptimSpec(lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, clip_grad=0.0)

    def build(folder: Path) -> MegatronStudent:
        return MegatronStudent(
            folder,
            layout,
            optim=optim,
            loss=LossSpec(),
            dtype=torch.float32,
            device=rank_device(),
            seed=1,
        )

    rollouts, scores = _scored_batch()
    own = [i for i in range(len(rollouts)) if i % layout.dp == layout.dp_rank]
    batches = make_micro_batches(
        [rollouts[i] for i in own],
        [scores[i] for i in own] if layout.is_last_stage else None,
        micro_batch_size=micro_batch_size,
        max_tokens=max_tokens,
    )
    student = build(root / "hf")
    grads = student.grads_by_hf_name(batches)
    stats = student.train_step(batches)
    trained = weights(student)
    out = root / f"out_{name}"
    student.save_hf(out, root / "hf")
    torch.distributed.barrier()  # rank 0 writes; the others read
    reloaded = weights(build(out))
    return {"stats": stats, "grads": as_numpy(grads), "weights": as_numpy(trained), "reloaded": as_numpy(reloaded)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Measured]:
    root = tmp_path_factory.mktemp("product")
    torch.set_num_threads(1)
    make_hf_folder(root / "hf", "qwen3")
    names = {size: [name for name, layout in LAYOUTS.items() if layout[0] == size] for size in (1, 2)}
    worlds = Measured(lambda size: run_ranks(_product, size, root, names[size], timeout_s=200.0))
    return _reference(root / "hf"), Measured(lambda name: [rank[name] for rank in worlds[LAYOUTS[name][0]]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_equals_plain_training(results: Any, layout: str) -> None:
    """Fails if the shift, the mask, the token mean, the distribution over ranks or the optimizer is wrong."""
    reference, measured = results
    stages = measured[layout]
    assert (
        max(float(grad.abs().max()) for grad in reference["grads"].values()) > 0.01
    )  # else the tolerance of 1e-5 is meaningless
    for rank in stages:
        assert rank["stats"].loss == pytest.approx(reference["loss"], abs=1e-5)
        assert rank["stats"].n_loss_tokens == reference["n_tokens"] == 33
        for kind in ("grads", "weights"):
            for name, tensor in rank[kind].items():
                assert np.abs(tensor - reference[kind][name].numpy()).max() <= 1e-5, (kind, name)
    assert {name for rank in stages for name in rank["grads"]} == set(reference["grads"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_export_after_training_is_bit_exact(results: Any, layout: str) -> None:
    """Fails if the exported folder is not the trained student."""
    _, measured = results
    for rank in measured[layout]:
        assert rank["weights"].keys() == rank["reloaded"].keys()
        assert all(np.array_equal(array, rank["reloaded"][name]) for name, array in rank["weights"].items())

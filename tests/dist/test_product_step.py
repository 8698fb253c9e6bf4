"""Compare one optimizer step from rollouts and teacher scores with plain Hugging Face + AdamW.

The reference has no micro-batches: it runs one unpadded sequence at a time. So this also covers what
`test_megatron_parity` presupposes: the shift, the masks, padding, packing, and the distribution over ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from gkd.scoring.teacher.http_forms import Asked, scores_of
from gkd.types import Rollout, TeacherScores, VersionSpan
from tests.dist.helpers import destroy_groups, run_ranks
from tests.dist.megatron_reference import BETAS, EPS, LR, TOP_K, VOCAB, make_hf_folder
from tests.dist.student_cases import as_numpy, build_student, grads_of, weights

pytestmark = pytest.mark.dist
N_RANKS = 2


class Layout(NamedTuple):
    """Hold how a batch is distributed. Micro-batches have `size` sequences, or at most `max_tokens` tokens."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    size: int = 3
    max_tokens: int = 0
    packed: bool = False
    backend: str = "megatron"

    @property
    def dp(self) -> int:
        return N_RANKS // (self.tp * self.cp * self.pp)


PACKS = {"max_tokens": 45, "packed": True}  # of the three trajectories in a row, and of the others
LAYOUTS = {
    "tp2-token-budget": Layout(tp=2, max_tokens=40),
    "tp2-packed": Layout(tp=2, **PACKS),
    "pp2": Layout(pp=2, size=2),
    "pp2-packed": Layout(pp=2, **PACKS),
    "dp2": Layout(size=2),
    "dp2-packed": Layout(**PACKS),
    "fsdp2": Layout(backend="fsdp2", size=2),
    "fsdp2-packed": Layout(backend="fsdp2", **PACKS),
    "cp2": Layout(cp=2, size=2),
    "cp2-packed": Layout(cp=2, **PACKS),
    "fsdp2-cp2": Layout(backend="fsdp2", cp=2, size=2),
    "fsdp2-cp2-packed": Layout(backend="fsdp2", cp=2, **PACKS),
}
LENGTHS = [(3, 5), (1, 9), (6, 1), (2, 12), (4, 4), (5, 7), (2, 2)]  # of prompt and response
# Tokens of a response that are the student's own. Trajectories begin and end with either kind.
MASKS = {1: [1, 1, 0, 0, 0, 1, 1, 1, 0], 3: [1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1], 5: [0, 1, 1, 0, 0, 0, 1]}
# The limit of the relative error of loss and whole gradient, and of each element of gradients and weights. What is left
# is rounding: the reference computes in float64, both backends in float32, and their gradients differ by up to 7e-7.
CLOSE = 1e-6


def scored_batch(noise: int = 0) -> tuple[list[Rollout], list[TeacherScores]]:
    """Return seven sequences of different lengths, one with a single response token; top-k mass 0.3 to 0.9.

    A teacher replies with rows for all tokens of the responses, also for those that the student read.

    Args:
        noise: another number changes what nothing may depend on: the teacher's rows of tokens that the student read,
            and such a token that no own one follows.
    """
    rng, other = np.random.default_rng(5), np.random.default_rng([6, noise])
    rollouts, scores = [], []
    for i, (n_prompt, n_response) in enumerate(LENGTHS):
        own = np.array(MASKS[i], bool) if i in MASKS else None
        is_own = np.ones(n_response, bool) if own is None else own
        tokens = rng.integers(0, VOCAB, n_prompt + n_response).astype(np.int32)
        if not is_own[-1]:
            tokens[-1] = other.integers(0, VOCAB)
        rollouts.append(
            Rollout(
                prompt_id=i,
                sample_index=i,
                prompt_ids=tokens[:n_prompt],
                response_ids=tokens[n_prompt:],
                rollout_logprobs=np.zeros(int(is_own.sum()), np.float32),
                version_spans=(VersionSpan(0, n_response, 0),),
                finish_reason="stop",
                own=own,
            )
        )
        rows: list[dict[str, Any] | None] = [None]
        rows += [_row(other, token) for token in tokens[1:n_prompt]]
        rows += [_row(rng if mine else other, token) for mine, token in zip(is_own, tokens[n_prompt:], strict=True)]
        asked = Asked(f"sequence {i}", tokens.tolist(), n_prompt, TOP_K, with_sampled=False, own=own)
        body = json.dumps({"choices": [{"prompt_logprobs": rows}]}, separators=(",", ":")).encode()
        scores.append(scores_of("vllm", body, asked, VOCAB))
    return rollouts, scores


def _row(rng: np.random.Generator, token: int) -> dict[str, Any]:
    """Return a row of a vLLM server: the entries of the ranks 1 to K, and the token itself."""
    ids, parts = rng.permutation(VOCAB)[:TOP_K], np.sort(rng.random(TOP_K) + 0.05)[::-1]
    logprobs = np.log(rng.uniform(0.3, 0.9) * parts / parts.sum())
    entries = zip(ids.tolist(), logprobs.tolist(), strict=True)
    listed = {str(i): {"logprob": value, "rank": rank} for rank, (i, value) in enumerate(entries, 1)}
    return {str(token): {"logprob": float(logprobs[-1]) - 1.0, "rank": TOP_K + 1}} | listed


def _reference(folder: Path) -> dict[str, Any]:
    """Return loss, gradients and the weights after one AdamW step in float64, one unpadded sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    total, n_tokens = torch.zeros((), dtype=torch.float64), 0
    for rollout, scores in zip(*scored_batch(), strict=True):
        score = scores.topk
        tokens = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids])).long()[None]
        logits = model(tokens).logits[0]
        own = range(len(rollout.response_ids)) if rollout.own is None else rollout.own.nonzero()[0].tolist()
        for row, j in enumerate(own):
            q = logits[len(rollout.prompt_ids) + j - 1].softmax(-1)  # the row that predicts response token j
            q = q[torch.from_numpy(score.ids[row]).long()]
            p = torch.from_numpy(score.logprobs[row]).double().exp()
            total = total + (p * (p / q).log()).sum() + (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log()
            n_tokens += 1
    loss = total / n_tokens
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"loss": float(loss.detach()), "n_tokens": n_tokens, "grads": grads, "weights": weights}


def _product(rank: int, world_size: int, root: Path) -> dict[str, dict[str, Any]]:
    """Runs in a rank: return the same results of the product, by layout."""
    measured = {}
    for name in LAYOUTS:
        measured[name] = _one_layout(rank, root, name)
        if LAYOUTS[name].backend == "megatron":
            destroy_groups()
    return measured


def _one_layout(rank: int, root: Path, name: str) -> dict[str, Any]:
    from gkd.actor.common.optim_spec import OptimSpec
    from gkd.data.batching import MicroBatches, make_micro_batches

    layout = LAYOUTS[name]
    optim = OptimSpec(lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, clip_grad=0.0)
    ranks = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp}

    student = build_student(layout.backend, root / "hf", rank, N_RANKS, optim=optim, **ranks)
    place = getattr(student, "layout", None)
    dp_rank, is_last = (rank // layout.cp, True) if place is None else (place.dp_rank, place.is_last_stage)

    def batches(noise: int = 0) -> MicroBatches:
        rollouts, scores = scored_batch(noise)
        own = [i for i in range(len(rollouts)) if i % layout.dp == dp_rank]
        return make_micro_batches(
            [rollouts[i] for i in own],
            [scores[i] for i in own] if is_last else None,
            micro_batch_size=layout.size,
            max_tokens=layout.max_tokens,
            packed=layout.packed,
        )

    grads = grads_of(student, batches())
    others = as_numpy(grads_of(student, batches(noise=1)))
    stats = student.train_step(batches())
    trained = weights(student)
    return {
        "stats": stats,
        "grads": as_numpy(grads),
        "other_grads": others,
        "weights": as_numpy(trained),
        "packs": [len(batch.samples) for batch in batches() if batch.cu_seqlens is not None],
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    root = tmp_path_factory.mktemp("product")
    torch.set_num_threads(1)
    make_hf_folder(root / "hf", "qwen3")
    ranks = run_ranks(_product, N_RANKS, root, timeout_s=200.0)
    return _reference(root / "hf"), {name: [rank[name] for rank in ranks] for name in LAYOUTS}


def _error(found: dict[str, np.ndarray], expected: dict[str, torch.Tensor]) -> float:
    """Return the length of the difference of all tensors together, relative to that of the expected ones."""
    pairs = [(tensor.astype(np.float64), expected[name].numpy()) for name, tensor in found.items()]
    square = sum(((one - other) ** 2).sum() for one, other in pairs)
    return float(np.sqrt(square / sum((other**2).sum() for _, other in pairs)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_equals_plain_training(results: Any, layout: str) -> None:
    """Fails if the shift, a mask, a pack, the token mean, the distribution over ranks or the optimizer is wrong."""
    reference, measured = results
    stages = measured[layout]
    lengths = [sum(MASKS[i]) if i in MASKS else n for i, (_, n) in enumerate(LENGTHS)]
    for rank in stages:
        assert rank["stats"].loss == pytest.approx(reference["loss"], rel=CLOSE)
        assert rank["stats"].n_loss_tokens == reference["n_tokens"] == sum(lengths)
        assert _error(rank["grads"], reference["grads"]) <= CLOSE
        for kind in ("grads", "weights"):
            for name, tensor in rank[kind].items():
                assert np.abs(tensor - reference[kind][name].numpy()).max() <= CLOSE, (kind, name)
    assert {name for rank in stages for name in rank["grads"]} == set(reference["grads"])
    assert not LAYOUTS[layout].packed or max(stages[0]["packs"]) >= 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_depends_on_the_teacher_at_tokens_that_the_student_read(results: Any, layout: str) -> None:
    """Fails if a row of an observation reaches the loss: its teacher's scores, or a token that no own one follows."""
    clean, noisy = scored_batch(), scored_batch(noise=1)
    assert clean[0][1].response_ids[-1] != noisy[0][1].response_ids[-1]  # the noise is there
    for rank in results[1][layout]:
        assert rank["grads"].keys() == rank["other_grads"].keys()
        assert all(np.array_equal(array, rank["other_grads"][name]) for name, array in rank["grads"].items())

"""Functions that run in the ranks of `test_fsdp_student`: logprobs of a reference and of a student without adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gkd.config.load import load_config
from gkd.config.loss_spec import LossSpec, LossTerm
from gkd.config.schema import Config
from gkd.config.schema_actor import LoraConfig
from gkd.data.batching import make_micro_batches
from gkd.types import Rollout, TeacherScores
from tests.device import host, kind, rank_device
from tests.dist.frozen_cases import sequences
from tests.dist.helpers import caught
from tests.dist.megatron_reference import VOCAB, logprob_rows, response_logprobs
from tests.dist.peft_reference import LORA

TEMPERATURE = 0.8
N_STEPS = 3
# Two sequences a micro-batch, so that the ranks have different numbers of them.
SETTINGS = (f"teacher.temperature={TEMPERATURE}", "distill.reference_kl_weight=1", "actor.micro_batch_size=2")
SETTINGS = (*SETTINGS, "model.dtype=float32", "data.max_prompt_length=40", "data.max_response_length=24")


def rollouts() -> list[Rollout]:
    """Return on-policy sequences, unsorted."""
    return [
        replace(r, sample_index=9 - i, on_policy=True, rollout_logprobs=np.full(len(r.response_ids), -7, np.float32))
        for i, r in enumerate(sequences())
    ]


def indices_of(rank: int) -> list[int]:
    """Return the indices of a rank's sequences."""
    indices = list(range(len(sequences())))
    return indices[:-1] if rank == 0 else indices[-1:]


def measure_reference(rank: int, root: Path, build: Callable[..., Any]) -> dict[str, Any]:
    """Runs in a rank of two: return all results of the tests."""
    from gkd.actor.frozen.rank_models import FrozenModels

    config = load_config(None, [*SETTINGS, f"model.path={root / 'qwen3'}", f"trainer.device={kind()}"])
    share = [rollouts()[i] for i in indices_of(rank)]

    def models(config: Config, student: Any) -> FrozenModels:
        return FrozenModels(config, student, rank_device(), f"actor rank {rank}")

    reference = models(config, SimpleNamespace(n_vocab=VOCAB))
    reference.init_reference()
    frozen = reference.reference_logprobs
    spec = LossSpec((LossTerm("k1"),), temperature=TEMPERATURE, reference_weight=1.0)
    out: dict[str, Any] = {"frozen": frozen(share), "no share": len(frozen(share if rank else []))}
    out["curve"] = _curve(build("qwen3", loss=spec, signals=("sampled",)), share, out["frozen"])
    out["stayed"] = _equal(frozen(share), out["frozen"])  # after steps of a student in the same process

    def base(student: Any, work: list[Rollout], packing: bool = True) -> list[np.ndarray]:
        settings = replace(config, actor=replace(config.actor, packing=packing, lora=LORA))
        return models(settings, student).student_logprobs(work, disable_adapter=True)

    lora = {"lora": LORA, "loss": spec, "signals": ("sampled",)}
    untouched, student = build("qwen3", **lora), build("qwen3", **lora)
    plain = _steps(untouched, share, out["frozen"], lambda: None)
    looks: list[Any] = []
    out["same losses"] = plain == _steps(student, share, out["frozen"], lambda: looks.append(base(student, share)))
    out["base"] = looks[-1]
    out |= _switched(student, share, lambda: base(student, share))
    batches = make_micro_batches(share, None, micro_batch_size=2, packed=True)
    tables = (
        build("qwen3", loss=spec).compute_logprobs(batches),
        student.compute_logprobs(batches, disable_adapter=True),
    )
    out["from base"] = max(float((a - b).abs().max()) for a, b in zip(*tables, strict=True))
    out["bad"] = caught(lambda: base(student, [replace(r, response_ids=r.response_ids[:0]) for r in share[:rank]]))
    capped = LoraConfig(rank=2, targets=["q_proj"])  # its logits are soft-capped after the LM head
    gemma2 = build("gemma2", packing=False, lora=capped, loss=LossSpec(temperature=TEMPERATURE))
    out["gemma2"] = base(gemma2, share, packing=False)
    return out


def _batches(share: list[Rollout], logprobs: list[np.ndarray], seed: int) -> Any:
    """Return micro-batches with random teacher scores and these reference logprobs."""
    rng = np.random.default_rng(seed)
    scores = [
        TeacherScores(sampled_logprobs=-rng.uniform(1, 9, len(r.response_ids)).astype(np.float32), reference_logprobs=p)
        for r, p in zip(share, logprobs, strict=True)
    ]
    return make_micro_batches(share, scores, micro_batch_size=2, packed=True)


def _steps(student: Any, share: list[Rollout], logprobs: list[np.ndarray], between: Callable[[], Any]) -> list[float]:
    losses = []
    for step in range(N_STEPS):
        losses.append(student.train_step(_batches(share, logprobs, step)).loss)
        between()
    return losses


def _curve(student: Any, share: list[Rollout], logprobs: list[np.ndarray]) -> list[float]:
    """Return the reference term before each step; at the first, all importance weights are 1."""
    numbered = [replace(rollout, rollout_logprobs=p) for rollout, p in zip(share, logprobs, strict=True)]
    batches = [_batches(numbered, logprobs, step) for step in range(N_STEPS)]
    return [student.train_step(batch).extra["loss/reference_kl"] for batch in batches]


class _Broken:
    def statistics(self, *args: Any) -> Any:
        raise RuntimeError("enough")


def _switched(student: Any, share: list[Rollout], base: Callable[[], Any]) -> dict[str, Any]:
    """Check that the adapters are enabled again, after a call and after one that failed."""
    batches = make_micro_batches(share, None, micro_batch_size=2, packed=True)

    def whole() -> list[np.ndarray]:
        return [host(table) for table in student.compute_logprobs(batches)]

    before, without = whole(), base()
    out: dict[str, Any] = {"again": _equal(whole(), before)}
    kernels, student.loss.kernels = student.loss.kernels, _Broken()
    with pytest.raises(RuntimeError, match="enough"):
        base()
    student.loss.kernels = kernels
    out["again after an error"] = _equal(whole(), before) and _equal(base(), without)
    out["learned"] = float(np.abs(np.concatenate(before)).sum() - np.abs(np.concatenate(without)).sum())
    return out


def _equal(one: list[np.ndarray], two: list[np.ndarray]) -> bool:
    return len(one) == len(two) and all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def plain_logprobs(folder: Path) -> list[np.ndarray]:
    """Return the logprobs of all sequences by plain transformers in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    return [response_logprobs(logprob_rows(model, rollout, TEMPERATURE), rollout) for rollout in rollouts()]

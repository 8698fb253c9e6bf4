"""Measure one case of `bench_footprint`: the memory of a student's ranks in training, and the prediction.

The ranks are separate processes, as in training. Each reports the growth of its memory since its imports and since it
joined torch.distributed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.data.batching import make_micro_batches
from gkd.memory.footprint import RankFootprint, footprint
from gkd.types import Rollout, TeacherScores, TeacherTopK, VersionSpan
from tests.bench.footprint_memory import ENVIRONMENT, Meter
from tests.device import VARIABLE, environment
from tests.dist.helpers import run_ranks

# 113 million parameters.
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 14,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    overrides: tuple[str, ...] = ()
    tied: bool = True
    n_steps: int = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """Growth of one rank in bytes, and the prediction for its type of rank."""

    rank: int
    state: int  # after the last step, everything momentary gone
    peak: int  # over the training steps
    predicted: RankFootprint
    keeps_gradients: bool
    losses: list[float] = field(default_factory=list)

    @property
    def predicted_state(self) -> int:
        """fsdp2 gives its gradients back between steps; Megatron's have a buffer."""
        return self.predicted.state_bytes - (0 if self.keeps_gradients else self.predicted.parts["gradients"])

    @property
    def state_ratio(self) -> float:
        return self.predicted_state / self.state

    @property
    def peak_ratio(self) -> float:
        return self.predicted.total_bytes / self.peak


def measure(case: Case, folder: Path, *, device: str = "cpu", timeout_s: float = 600.0) -> list[Measured]:
    """Runs the case; one result for each rank. `folder` keeps the model's files; one that is there is taken."""
    config = case_config(case, folder, device)
    model = Path(config.model.path)
    if not model.exists():
        save_model(model, tied=case.tied)
    world_size = config.trainer.n_gpus_per_node
    with environment(ENVIRONMENT | {VARIABLE: device}):
        found = run_ranks(_train, world_size, config, case.n_steps, device, timeout_s=timeout_s, start="spawn")
    shape = json.loads((model / "config.json").read_text())
    actors = [as_metered(part) for part in footprint(config, shape) if part.role == "actor"]
    keeps = config.actor.strategy == "megatron"
    per_stage = world_size // config.actor.pp if keeps else world_size
    return [
        Measured(rank, state, peak, actors[rank // per_stage], keeps, losses)
        for rank, (state, peak, losses) in enumerate(found)
    ]


def as_metered(part: RankFootprint) -> RankFootprint:
    """Remove the weight sync, which does not run here, and the CUDA context, which torch's allocator does not count."""
    return replace(part, parts={k: size for k, size in part.parts.items() if k not in ("weight_sync", "context")})


def case_config(case: Case, folder: Path, device: str) -> Config:
    """Write a config with two micro-batches of 2 sequences of 256 tokens per step, except for the case's settings."""
    path = folder / "config.yaml"
    path.write_text(
        json.dumps(
            {
                "data": {"train_files": ["none"], "max_prompt_length": 64, "max_response_length": 192},
                "model": {"path": str(folder / ("tied" if case.tied else "untied")), "dtype": "float32"},
                "trainer": {"device": device, "global_batch_size": 4, "run_dir": str(folder / "run")},
                "actor": {"micro_batch_size": 2},
            }
        )
    )
    return load_config(path, list(case.overrides))


def save_model(folder: Path, *, tied: bool, sizes: Mapping[str, int] = SIZES) -> None:
    """A random Qwen2."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=tied)).save_pretrained(folder)


def full_sequences(
    n: int, n_prompt: int, n_response: int, *, vocab: int, topk: int
) -> tuple[list[Rollout], list[TeacherScores]]:
    """Random tokens, all sequences as long as they may be, and a teacher whose top-k holds 0.8 of the mass."""
    rng = np.random.default_rng(3)
    rollouts, scores = [], []
    for i in range(n):
        rollouts.append(
            Rollout(
                prompt_id=i,
                sample_index=i,
                prompt_ids=rng.integers(0, vocab, n_prompt, dtype=np.int32),
                response_ids=rng.integers(0, vocab, n_response, dtype=np.int32),
                rollout_logprobs=np.zeros(n_response, np.float32),
                version_spans=(VersionSpan(0, n_response, 0),),
                finish_reason="stop",
            )
        )
        ids = ((rng.integers(0, vocab, (n_response, 1)) + np.arange(topk) * (vocab // topk)) % vocab).astype(np.int32)
        logprobs = np.full((n_response, topk), np.log(0.8 / topk), np.float32)
        scores.append(TeacherScores(TeacherTopK(ids, logprobs, np.full(n_response, 0.2, np.float32))))
    return rollouts, scores


def _train(rank: int, world_size: int, config: Config, n_steps: int, device: str) -> tuple[int, int, list[float]]:
    """Runs in a rank: (state, peak, losses), see `Measured`."""
    student, meter = _build(rank, world_size, config, device)
    data, dp_size = config.data, config.derived.dp_size
    rollouts, scores = full_sequences(
        config.trainer.global_batch_size * config.rollout.n // dp_size,
        data.max_prompt_length,
        data.max_response_length,
        vocab=student.n_vocab,
        topk=config.teacher.topk,
    )
    batches = make_micro_batches(
        rollouts,
        scores,
        micro_batch_size=config.actor.micro_batch_size,
        max_tokens=config.actor.max_tokens_per_micro_batch,
        packed=config.actor.packing,
    )
    meter.forget_peak()
    losses = [float(student.train_step(batches).loss) for _ in range(n_steps)]
    return meter.now(), meter.peak(), losses


def _build(rank: int, world_size: int, config: Config, device: str) -> tuple[Any, Meter]:
    """The student of `gkd.actor.worker`, and a meter that began before it, after its imports."""
    from gkd.actor.common.optim_spec import OptimSpec

    actor, where = config.actor, torch.device(device)
    common: dict[str, Any] = {
        "optim": OptimSpec(lr=1e-5),
        "loss": config.derived.loss,
        "dtype": getattr(torch, config.model.dtype),
        "device": where,
        "seed": 1,
        "fused_lm_head": actor.fused_lm_head,
        "recompute": actor.recompute,
    }
    if actor.strategy == "fsdp2":
        from gkd.actor.fsdp.student import FsdpStudent

        meter = Meter(where)
        settings = {
            "packing": actor.packing,
            "cp": actor.cp,
            "cpu_offload": actor.fsdp_cpu_offload,
            "lora": actor.lora,
        }
        return FsdpStudent(config.model.path, **settings, **common), meter
    from gkd.actor.megatron.layout import layouts_of
    from gkd.actor.megatron.student import MegatronStudent

    layout = layouts_of(actor, world_size)[rank]
    meter = Meter(where)
    student = MegatronStudent(config.model.path, layout, sequence_parallel=actor.sequence_parallel, **common)
    return student, meter

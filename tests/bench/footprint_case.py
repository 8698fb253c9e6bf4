"""Measure one case of `bench_footprint`: the memory of a student's ranks in training, and the prediction.

The ranks are separate processes, as in training. Each reports the growth of its memory since its imports and since it
joined torch.distributed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.data.batching import make_micro_batches
from gkd.memory.footprint import RankFootprint, footprint
from gkd.types import MicroBatch, Rollout, TeacherScores, TeacherTopK, VersionSpan
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
    sizes: Mapping[str, int] = field(default_factory=lambda: SIZES)  # of the model
    alone: str = ""  # name of the case that computes the same on one rank


@dataclass(frozen=True, slots=True)
class Measured:
    """Growth of one rank in bytes, and the prediction for its type of rank."""

    rank: int
    state: int  # after the last step, everything momentary gone
    peak: int  # over the training steps
    predicted: RankFootprint
    keeps_gradients: bool
    losses: list[float] = field(default_factory=list)
    saved: int = 0  # bytes of what the forward pass of the first micro-batch saves
    cpu_s: float = 0.0  # of the last step
    wall_s: float = 0.0

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


def measure(case: Case, folder: Path, *, device: str = "cpu", timeout_s: float = 1800.0) -> list[Measured]:
    """Runs the case; one result for each rank. `folder` keeps the model's files; one that is there is taken."""
    config = case_config(case, folder, device)
    model = Path(config.model.path)
    if not model.exists():
        save_model(model, tied=case.tied, sizes=case.sizes)
    world_size = config.trainer.n_gpus_per_node
    with environment(ENVIRONMENT | {VARIABLE: device}):
        found = run_ranks(_train, world_size, config, case.n_steps, device, timeout_s=timeout_s, start="spawn")
    shape = json.loads((model / "config.json").read_text())
    actors = [as_metered(part) for part in footprint(config, shape) if part.role == "actor"]
    keeps = config.actor.strategy == "megatron"
    per_stage = world_size // config.actor.pp if keeps else world_size
    return [
        Measured(rank, state, peak, actors[rank // per_stage], keeps, *others)
        for rank, (state, peak, *others) in enumerate(found)
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


def _train(
    rank: int, world_size: int, config: Config, n_steps: int, device: str
) -> tuple[int, int, list[float], int, float, float]:
    """Runs in a rank: (state, peak, losses, saved, cpu_s, wall_s), see `Measured`."""
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
    losses = []
    for _ in range(n_steps):
        began = time.process_time(), time.perf_counter()
        losses.append(float(student.train_step(batches).loss))
    spent = time.process_time() - began[0], time.perf_counter() - began[1]
    held = meter.now(), meter.peak()
    return *held, losses, saved_bytes(student, batches[0]) if config.actor.pp == 1 else 0, *spent


def saved_bytes(student: Any, whole: MicroBatch) -> int:
    """Bytes of the storages that a forward pass of one stage saves, parameters left out. Collective.

    Those that fully_shard gathers around a layer are freed when it is over, so bytes are counted at the end.
    """
    saved: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    batch = student.columns.part_of(whole)
    if hasattr(student, "layout"):
        (module,) = student.model.chunks
        tensors = batch.tokens, batch.position_ids, batch.loss_index
        forward = partial(module, *tensors, cu_seqlens=batch.cu_seqlens, with_logits=False)
    else:
        from gkd.actor.fsdp import passes

        module = student.model
        options = {"targets": batch.targets, "loss": student.loss, "fused": True}
        forward = partial(passes.forward, module, batch, student.device, **options)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    own = {p.untyped_storage().data_ptr() for p in module.parameters() if type(p) is torch.nn.Parameter}
    n_bytes = sum(storage.nbytes() for key, storage in saved.items() if key not in own)
    del result  # it kept the graph, and with it the tensors, alive
    return n_bytes


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

"""Measure one case of `bench_footprint`: the memory of a student's ranks in training, and the prediction. Linux only.

The ranks are separate processes, as in training. Each reports the growth of its memory since its imports. Allocations
of 64 KiB and more are mapped one by one (`ENVIRONMENT`) and go back to the kernel when they are freed, so resident
memory is live memory. On CUDA, torch's allocator is read instead.
"""

from __future__ import annotations

import gc
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
from gkd.hf.model_dims import read_dims
from gkd.hf.model_folder import ModelFolder
from gkd.memory.footprint.estimate import STATES, RankFootprint, RunModels, footprint
from tests.bench.student_case import random_sequences
from tests.device import VARIABLE, environment
from tests.dist.helpers import run_ranks
from tests.dry_card.without_values import train_without_values

# To be in the environment of a process when it starts: glibc reads it once.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_MMAP_MAX_": str(1 << 20), "MALLOC_ARENA_MAX": "1"}
# 113 million parameters.
SIZES: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 14,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    overrides: tuple[str, ...] = ()
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)  # config.json of the model


@dataclass(frozen=True, slots=True)
class Measured:
    """Growth of one rank in bytes, and the prediction for its kind of rank."""

    rank: int
    state: int  # after the last step
    peak: int  # over two training steps
    saved: int  # by the first forward pass, on CUDA
    predicted: RankFootprint
    keeps_gradients: bool  # between two steps

    @property
    def state_ratio(self) -> float:
        kept = STATES if self.keeps_gradients else ("weights", "optimizer")
        return self.predicted.sum_of(kept) / self.state

    @property
    def peak_ratio(self) -> float:
        return self.predicted.total_bytes / self.peak


def predict(case: Case, folder: Path, device: str = "cpu") -> list[RankFootprint]:
    """Return the prediction for each pipeline stage, without what a meter does not see."""
    model = ModelFolder(case.sizes, read_dims(case.sizes), None)
    return [as_metered(part) for part in footprint(case_config(case, folder, device), RunModels(model))[:-1]]


def as_metered(part: RankFootprint) -> RankFootprint:
    """Remove the weight sync, which does not run here, and the CUDA context, which torch's allocator does not count."""
    return replace(part, parts={k: size for k, size in part.parts.items() if k not in ("weight_sync", "context")})


def measure(case: Case, folder: Path, *, device: str = "cpu", timeout_s: float = 1800.0) -> list[Measured]:
    """Run the case; return one result for each rank. `folder` keeps the model's files; one that is there is taken."""
    config = case_config(case, folder, device)
    if not Path(config.model.path).exists():
        save_model(Path(config.model.path), case.sizes)
    world_size = config.trainer.n_gpus_per_node
    variables = ENVIRONMENT | {VARIABLE: device}
    if "actor.compile=on" in case.overrides:  # stand-in cards disable it
        variables |= {"TORCHDYNAMO_DISABLE": "0"}
    with environment(variables):
        found = run_ranks(_train, world_size, config, device, timeout_s=timeout_s, start="spawn")
    actors = predict(case, folder, device)
    keeps = config.actor.backend_name == "megatron"
    per_stage = world_size // len(actors)
    return [
        Measured(rank, state, peak, saved, actors[rank // per_stage], keeps)
        for rank, (state, peak, saved) in enumerate(found)
    ]


def case_config(case: Case, folder: Path, device: str) -> Config:
    """Write a config with two micro-batches of 2 sequences of 256 tokens per step, except for the case's settings."""
    path = folder / "config.yaml"
    tied = "tied" if case.sizes["tie_word_embeddings"] else "untied"
    path.write_text(
        json.dumps(
            {
                "data": {"train_files": ["none"], "max_prompt_length": 64, "max_response_length": 192},
                "model": {"path": str(folder / tied), "dtype": "float32"},
                "trainer": {"device": device, "global_batch_size": 4, "run_dir": str(folder / "run")},
                "actor": {"micro_batch_size": 2},
            }
        )
    )
    return load_config(path, list(case.overrides))


def save_model(folder: Path, sizes: Mapping[str, Any]) -> None:
    """Save a random model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)).save_pretrained(folder)


def _train(rank: int, world_size: int, config: Config, device: str) -> tuple[int, int, int]:
    """Runs in a rank: (bytes after two steps, their peak, bytes saved by the first forward pass on CUDA)."""
    train_without_values()
    student, meter = _build(rank, world_size, config, device)
    data, dp_size = config.data, config.derived.dp_size
    lengths = [(data.max_prompt_length, data.max_response_length)]
    lengths *= config.trainer.global_batch_size * config.rollout.n // dp_size
    rollouts, scores = random_sequences(lengths, np.random.default_rng(3), student.n_vocab, config.teacher.topk)
    batches = make_micro_batches(
        rollouts,
        scores,
        micro_batch_size=config.actor.micro_batch_size,
        max_tokens=config.actor.max_tokens_per_micro_batch,
        packed=config.actor.packs,
    )
    saved = []
    backward = torch.autograd.backward
    before = meter.now()

    def noted(*args: Any, **settings: Any) -> None:
        saved.append(meter.now() - before if device == "cuda" else 0)
        backward(*args, **settings)

    torch.autograd.backward = noted
    meter.forget_peak()
    for _ in range(2):
        student.train_step(batches)
    return meter.now(), meter.peak(), saved[0]


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
        "fused_lm_head": actor.fuses,
        "recompute": actor.recompute,
    }
    if actor.strategy == "fsdp2":
        from gkd.actor.fsdp.student import FsdpStudent

        meter = Meter(where)
        settings = {
            "packing": actor.packs,
            "cp": actor.cp,
            "cpu_offload": actor.fsdp_cpu_offload,
            "lora": actor.lora,
            "compiles": actor.compile,
        }
        return FsdpStudent(config.model.path, **settings, **common), meter
    from gkd.actor.megatron.layout import layouts_of
    from gkd.actor.megatron.student import MegatronStudent

    layout = layouts_of(actor, world_size)[rank]
    meter = Meter(where)
    student = MegatronStudent(config.model.path, layout, sequence_parallel=actor.sequence_parallel, **common)
    return student, meter


class Meter:
    """Bytes beyond those that were there when it was made, after imports and before any model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            self._base = torch.cuda.memory_allocated(device)
        else:
            self._base, self._base_anonymous = _status("VmRSS"), _status("RssAnon", "RssShmem")

    def now(self) -> int:
        """Mapped files left out: weights are read through them."""
        gc.collect()
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device)) - self._base
        return _status("RssAnon", "RssShmem") - self._base_anonymous

    def forget_peak(self) -> None:
        """Peaks count from here on."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device)) - self._base
        return _status("VmHWM") - self._base


def _status(*names: str) -> int:
    """Return the bytes of these lines of /proc/self/status together."""
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(value.split()[0]) << 10 for key, _, value in lines if key in names)

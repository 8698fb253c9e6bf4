"""Whole runs on images, with real engine, teacher server and student; plain transformers computes each batch again.

LLaVA runs in any environment. The others need torchvision. On a CPU `PYTHONPATH=tests/torchvision_ops:FOLDER` gives it
to all processes, with the build of PyPI in FOLDER (pip install --no-deps --target FOLDER torchvision).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from gkd.run.rollout_file import read_sequences
from gkd.types import Rollout, TeacherScores
from tests.e2e.conftest import ALONE
from tests.service.harness import ServerProcess
from tests.vision_models import picture, save_vision_model
from tests.vision_reference import logits_of, train

ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-4}
TRAINED = "model.freeze_vision=false"
# Model type, options of the teacher, of the run.
CI = [("llava", "hf", (TRAINED, "trainer.n_gpus_per_node=2"))]
SLOW = [
    ("llava", "vllm", ("actor.packing=false",)),
    ("llava", "hf", (TRAINED, "trainer.scheduler=one_step_off", "actor.recompute=full")),
    ("llava", "", ("teacher.backend=local", "trainer.colocate=true")),
    ("qwen3_vl", "hf", ("actor.packing=false",)),
    ("qwen3_vl", "hf", (TRAINED, "rollout.n_gpus_per_node=2", "rollout.tp=2")),
    ("qwen2_5_vl", "vllm", (TRAINED, "trainer.n_gpus_per_node=2", "trainer.scheduler=one_step_off")),
    ("internvl", "vllm", (TRAINED,)),
    ("internvl", "hf", ("trainer.n_gpus_per_node=2",)),
]
CASES = [*CI, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@dataclass(frozen=True)
class Folder:
    """Models and rows of a run."""

    root: Path
    kind: str

    @property
    def student(self) -> Path:
        return self.root / "student"

    @property
    def teacher(self) -> Path:
        return self.root / "teacher"

    def run(self, port: int, *options: str) -> Path:
        """Run the trainer to its end, and return the run folder."""
        run_dir = self.root / "run"
        settings = [
            *(f"data.train_files=[{self.root}/train.jsonl]", f"data.val_files=[{self.root}/train.jsonl]"),
            *("data.images_key=images", "data.truncation=drop", "data.max_prompt_length=128"),
            *("data.max_response_length=10", f"model.path={self.student}", "model.dtype=float32"),
            *("trainer.device=cpu", "trainer.total_steps=3", "trainer.global_batch_size=6", "trainer.total_epochs=9"),
            *(f"trainer.run_dir={run_dir}", "trainer.record_batches=true", "actor.strategy=fsdp2"),
            *("actor.micro_batch_size=4", "actor.optim.lr=0.003", "actor.optim.eps=1e-4", "rollout.n=2"),
            *("rollout.max_num_seqs=16", "rollout.kv_cache_mib=32", "teacher.topk=64", "trainer.cpu_cores=1"),
            *("weight_sync.bucket_mib=1", "weight_sync.verify=always"),
            *((f"teacher.server_port={port}", "teacher.wire=fp32") if port else (f"teacher.path={self.teacher}",)),
        ]
        config = self.root / "base.yaml"
        config.write_text("{}\n")
        command = [sys.executable, "-m", "gkd.main_gkd", "--config", str(config), *settings, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return run_dir


def make_folder(root: Path, kind: str) -> Folder:
    """Save student, teacher and rows of four forms, one of them without images."""
    made = Folder(root, kind)
    for seed, folder in ((1, made.student), (5, made.teacher)):
        folder.mkdir()
        save_vision_model(folder, kind, seed=seed)
    rows: list[dict[str, Any]] = []
    for i in range(12):
        (root / f"{i}.png").write_bytes(picture(56 + 8 * (i % 5), 60 + 6 * (i % 7), i))
        parts = [{"type": "image"}, {"type": "text", "text": "Say it."}]
        rows += [
            {"prompt": "<image>What is x?", "images": [f"{i}.png"]},
            {"prompt": [{"role": "user", "content": parts}], "images": [f"{i}.png"]},
            {"prompt": "How are you?"},
            {"prompt": "First <image> then <image>?", "images": [f"{i}.png", f"{i // 2}.png"]},
        ]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def recompute(
    folder: Folder, run_dir: Path, frozen: bool, stale: bool
) -> tuple[list[float], dict[str, Tensor], float, float]:
    """Return the loss of each step, the weights after all, and the largest error of engine and teacher.

    Args:
        stale: the engine's weights are those of the step only in the first one.
    """
    student, teacher = (AutoModelForImageTextToText.from_pretrained(each) for each in (folder.student, folder.teacher))
    processor = AutoImageProcessor.from_pretrained(folder.student)
    steps = []
    errors = [0.0, 0.0]
    for step in range(1, 4):
        read = [read_sequences(file) for file in sorted((run_dir / "batches").glob(f"step_*{step}/*.npz"))]
        steps.append([pair for rollouts, scores in read for pair in zip(rollouts, scores or (), strict=True)])

    def see(step: int, rollout: Rollout, scores: TeacherScores, logits: Tensor) -> None:
        if scores.topk is not None and (step == 1 or not stale):
            errors[0] = max(errors[0], _engine_error(logits, rollout, student.config))
            with torch.no_grad():
                own = logits_of(teacher, processor, rollout).log_softmax(-1)
            listed = own.gather(1, torch.from_numpy(scores.topk.topk_ids.astype(np.int64)))
            errors[1] = max(errors[1], float((listed - torch.from_numpy(scores.topk.topk_logprobs)).abs().max()))

    losses, _ = train(student, processor, steps, frozen=frozen, weight_decay=0.01, clip=1.0, see=see, **ADAMW)
    student.save_pretrained(folder.root / "recomputed")
    return losses, load_file(folder.root / "recomputed/model.safetensors"), *errors


def _engine_error(logits: Tensor, rollout: Rollout, config: Any) -> float:
    for name in ("image_token_id", "video_token_id"):  # the engine never samples them
        if getattr(config, name, None) is not None:
            logits[:, getattr(config, name)] = -torch.inf
    own = logits.log_softmax(-1).gather(1, torch.from_numpy(rollout.response_ids.astype(np.int64))[:, None])[:, 0]
    return float(np.abs(own.numpy() - rollout.rollout_logprobs).max())


def compare(root: Path, kind: str, engine: str, options: tuple[str, ...]) -> dict[str, float]:
    """Run, and return the largest errors: of the loss relative, of logprobs in nats, of exported weights.

    Exports must be whole, and their tower other than the source's if it is trained.
    """
    folder = make_folder(root, kind)
    if engine:
        flags = "--images", "--engine", engine, "--dtype", "float32"
        with ServerProcess(folder.teacher, root, options=flags) as server:
            run_dir = folder.run(server.port, *options)
    else:
        run_dir = folder.run(0, *options)
    frozen = TRAINED not in options
    stale = "trainer.scheduler=one_step_off" in options
    losses, weights, engine_error, teacher_error = recompute(folder, run_dir, frozen, stale)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    own = np.array([row["loss/total"] for row in steps if row["step"]])
    source, exported = load_file(folder.student / "model.safetensors"), load_file(run_dir / "export/model.safetensors")
    assert exported.keys() == source.keys()
    moved = {name for name in source if not torch.equal(source[name], exported[name])}
    assert any(name.startswith(("vision_tower", "visual", "model.visual")) for name in moved) is not frozen
    # transformers 5 saves LLaVA's tower under other names than the hub has.
    named = {name.replace("vision_tower.vision_model.", "vision_tower."): tensor for name, tensor in exported.items()}
    weights = {name.replace("vision_tower.vision_model.", "vision_tower."): each for name, each in weights.items()}
    assert weights.keys() <= named.keys()
    export_error = max(float((named[name] - weight).abs().max()) for name, weight in weights.items())
    loss_error = float(np.abs(own / np.array(losses) - 1).max())
    return {"loss": loss_error, "engine": engine_error, "teacher": teacher_error, "export": export_error}


@pytest.mark.parametrize(("kind", "engine", "options"), CASES)
def test_a_run_equals_plain_transformers(tmp_path: Path, kind: str, engine: str, options: tuple[str, ...]) -> None:
    """Fails if engine, teacher or student reads other pixels or positions, or the export lacks what was trained."""
    if kind != "llava" and find_spec("torchvision") is None:
        pytest.skip("needs torchvision")
    errors = compare(tmp_path, kind, engine, options)
    assert errors["loss"] < 2e-6
    assert max(errors["engine"], errors["teacher"]) < 2e-5
    assert errors["export"] < 1e-4


@pytest.mark.slow
def test_a_resumed_run_is_bit_equal(tmp_path: Path) -> None:
    """Fails if a checkpoint lacks a part of the trained tower, or the images of a batch that was in flight."""
    folder = make_folder(tmp_path, "llava")
    options = TRAINED, "trainer.scheduler=one_step_off", "trainer.save_every=1", "trainer.keep_last=9"
    with ServerProcess(folder.teacher, tmp_path, options=("--images", "--engine", "hf", *ALONE)) as server:
        run_dir = folder.run(server.port, *options)
        expected = (run_dir / "export/model.safetensors").read_bytes()
        shutil.rmtree(run_dir / "export")
        folder.run(server.port, *options, f"trainer.resume={run_dir}/checkpoints/step_00000001")
    assert (run_dir / "export/model.safetensors").read_bytes() == expected

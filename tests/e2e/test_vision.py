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
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from gkd.types import Rollout, TeacherScores
from tests import device
from tests.e2e.conftest import ALONE
from tests.e2e.exactness import check_export, recorded
from tests.service.harness import ServerProcess
from tests.vision_models import missing, picture, save_vision_model
from tests.vision_reference import add_adapters, logits_of, train

ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-4}
TRAINED = "model.freeze_vision=false"
LORA = "actor.lora.rank=4"
REFERENCE = "distill.reference_kl_weight=0.5"
SCORED = "distill.on_policy_share=0"  # with the scores of `gkd score`, and without the teacher
STREAM = "trainer.scheduler=stream", "rollout.max_num_seqs=4"  # weights change in the middle of responses
# Model type, options of the teacher, of the run.
CI = [
    ("llava", "hf", (TRAINED, "trainer.n_gpus_per_node=2")),
    ("llava", "hf", (*STREAM, LORA, "weight_sync.lora=adapters", REFERENCE)),
]
SLOW = [
    ("llava", "hf", (*STREAM, TRAINED, REFERENCE, "trainer.n_gpus_per_node=2")),
    ("llava", "hf", (TRAINED, SCORED, "data.val_files=[]")),
    ("llava", "vllm", ("actor.packing=false",)),
    ("llava", "hf", (TRAINED, "trainer.scheduler=one_step_off", "actor.recompute=full")),
    ("llava", "", ("teacher.backend=local", "trainer.colocate=true", LORA)),
    ("qwen3_vl", "hf", ("actor.packing=false",)),
    ("qwen3_vl", "hf", (TRAINED, "rollout.n_gpus_per_node=2", "rollout.tp=2")),
    ("qwen2_5_vl", "vllm", (TRAINED, "trainer.n_gpus_per_node=2", "trainer.scheduler=one_step_off")),
    ("internvl", "vllm", (TRAINED,)),
    ("internvl", "hf", ("trainer.n_gpus_per_node=2",)),
    ("gemma3", "vllm", (TRAINED,)),  # on cards alone
]
CASES = [*CI, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@dataclass(frozen=True)
class Folder:
    """Models and rows of a run."""

    root: Path

    @property
    def student(self) -> Path:
        return self.root / "student"

    @property
    def teacher(self) -> Path:
        return self.root / "teacher"

    def run(self, port: int, *options: str, name: str = "run", program: str = "gkd.main_gkd") -> Path:
        """Run the trainer, or another program, to its end, and return the run folder."""
        run_dir = self.root / name
        settings = [
            *(f"data.train_files=[{self.root}/train.jsonl]", f"data.val_files=[{self.root}/train.jsonl]"),
            *("data.images_key=images", "data.truncation=drop", "data.max_prompt_length=128"),
            *("data.max_response_length=10", f"model.path={self.student}", "model.dtype=float32"),
            *(f"trainer.device={device.kind()}", "trainer.total_steps=3", "trainer.global_batch_size=6"),
            *("trainer.total_epochs=9", f"trainer.run_dir={run_dir}", "trainer.record_batches=true"),
            *("actor.strategy=fsdp2", "actor.micro_batch_size=4", "actor.optim.lr=0.003"),
            *("actor.optim.eps=1e-4", "rollout.n=2"),
            *("rollout.max_num_seqs=16", "rollout.kv_cache_mib=32", "teacher.topk=64", "trainer.cpu_cores=1"),
            *("weight_sync.bucket_mib=1", "weight_sync.verify=always"),
            *(("rollout.enforce_eager=true",) if device.on_cuda() else ()),
            *((f"teacher.store={self.root}/store",) if SCORED in options else ()),
            *((f"teacher.server_port={port}", "teacher.wire=fp32") if port else (f"teacher.path={self.teacher}",)),
        ]
        config = self.root / "base.yaml"
        config.write_text("{}\n")
        command = [sys.executable, "-m", *program.split(), "--config", str(config), *settings, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return run_dir


def make_folder(root: Path, kind: str) -> Folder:
    """Save student, teacher and rows of four forms, one of them without images."""
    made = Folder(root)
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
    answered = ({**row, "response": f"It is {i % 7}."} for i, row in enumerate(rows))
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answered))
    return made


def recompute(folder: Folder, run_dir: Path, options: tuple[str, ...]) -> tuple[list[float], Any, float, float]:
    """Return the loss of each step, the model after all, and the largest error of engine and teacher."""
    student, teacher, reference = (
        AutoModelForImageTextToText.from_pretrained(each) for each in (folder.student, folder.teacher, folder.student)
    )
    processor = AutoImageProcessor.from_pretrained(folder.student)
    student = add_adapters(student, rank=4, alpha=16.0, seed=1) if LORA in options else student
    steps = [recorded(run_dir, step) for step in range(1, 4)]
    errors = [0.0, 0.0]

    def see(step: int, rollout: Rollout, scores: TeacherScores) -> None:
        if rollout is steps[step - 1][0][0]:  # later steps have tokens of these weights, too
            with torch.no_grad():
                for other, _ in chain(*steps):
                    if any(span.policy_version == step - 1 for span in other.version_spans):
                        own = logits_of(student, processor, other)
                        errors[0] = max(errors[0], _engine_error(own, other, student.config, step - 1))
        if scores.topk is not None:
            with torch.no_grad():
                own = logits_of(teacher, processor, rollout).log_softmax(-1)
            listed = own.gather(1, torch.from_numpy(scores.topk.ids.astype(np.int64)))
            errors[1] = max(errors[1], float((listed - torch.from_numpy(scores.topk.logprobs)).abs().max()))

    settings: dict[str, Any] = {"frozen": TRAINED not in options, "weight_decay": 0.01, "clip": 1.0, "see": see}
    if REFERENCE in options:
        settings |= {"reference": reference, "reference_weight": 0.5}
    losses, _ = train(student, processor, steps, **settings, **ADAMW)
    return losses, student.merge_and_unload() if LORA in options else student, *errors


def _engine_error(logits: Tensor, rollout: Rollout, config: Any, version: int) -> float:
    """Return the largest error of the tokens that the engine sampled with this version of the weights."""
    for name in ("image_token_id", "video_token_id"):  # the engine never samples them
        if getattr(config, name, None) is not None:
            logits[:, getattr(config, name)] = -torch.inf
    own = logits.log_softmax(-1).gather(1, torch.from_numpy(rollout.response_ids.astype(np.int64))[:, None])[:, 0]
    errors = np.abs(own.numpy() - rollout.rollout_logprobs)
    return float(max(errors[s.start : s.stop].max() for s in rollout.version_spans if s.policy_version == version))


def compare(root: Path, kind: str, engine: str, options: tuple[str, ...]) -> dict[str, float]:
    """Run, and return the largest errors: of the loss relative, of logprobs in nats, of exported weights.

    Exports must be whole, and their tower other than the source's if it is trained.
    """
    folder = make_folder(root, kind)
    if engine:
        flags = ["--images", "--engine", engine, "--dtype", "float32", "--device", device.kind()]
        flags += ["--kv-cache-mib", "32"] if engine == "vllm" else []
        program = "gkd.cli score" if SCORED in options else "gkd.main_gkd"
        with ServerProcess(folder.teacher, root, options=tuple(flags)) as server:
            run_dir = folder.run(server.port, *options, program=program)
    if SCORED in options or not engine:
        run_dir = folder.run(server.port if engine else 0, *options)
    check_export(run_dir, root / "exported")
    losses, model, engine_error, teacher_error = recompute(folder, run_dir, options)
    model.save_pretrained(root / "recomputed")
    weights = load_file(root / "recomputed/model.safetensors")
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    own = np.array([row["loss/total"] for row in steps if row["step"]])
    source, exported = load_file(folder.student / "model.safetensors"), load_file(run_dir / "export/model.safetensors")
    assert exported.keys() == source.keys()
    moved = {name for name in source if not torch.equal(source[name], exported[name])}
    assert any(name.startswith(("vision_tower", "visual", "model.visual")) for name in moved) == (TRAINED in options)
    # transformers 5 saves LLaVA's tower under other names than the hub has.
    named = {name.replace("vision_tower.vision_model.", "vision_tower."): tensor for name, tensor in exported.items()}
    weights = {name.replace("vision_tower.vision_model.", "vision_tower."): each for name, each in weights.items()}
    assert weights.keys() <= named.keys()
    export_error = max(float((named[name] - weight).abs().max()) for name, weight in weights.items())
    if LORA in options:
        base = AutoModelForImageTextToText.from_pretrained(folder.student)
        adapted = PeftModel.from_pretrained(base, str(run_dir / "export/adapter"))
        assert not any(isinstance(layer, LoraLayer) for layer in adapted.base_model.model.model.vision_tower.modules())
        assert any(isinstance(layer, LoraLayer) for layer in adapted.modules())
    loss_error = float(np.abs(own / np.array(losses) - 1).max())
    return {"loss": loss_error, "engine": engine_error, "teacher": teacher_error, "export": export_error}


@pytest.mark.parametrize(("kind", "engine", "options"), CASES)
def test_a_run_equals_plain_transformers(tmp_path: Path, kind: str, engine: str, options: tuple[str, ...]) -> None:
    """Fails if engine, teacher or student reads other pixels or positions, or the export lacks what was trained."""
    if why := missing(kind):
        pytest.skip(why)
    errors = compare(tmp_path, kind, engine, options)
    assert errors["loss"] < 2e-6
    assert max(errors["engine"], errors["teacher"]) < 2e-5
    assert errors["export"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [("trainer.scheduler=one_step_off", TRAINED), (*STREAM, LORA, REFERENCE)])
def test_a_run_is_made_again_bit_by_bit(tmp_path: Path, scheduler: tuple[str, ...]) -> None:
    """Fails if a checkpoint lacks a part of what is trained, or the images of a batch in flight; or a recorded batch,
    or a part of it, lacks its images, or has other ones.
    """
    folder = make_folder(tmp_path, "llava")
    options = *scheduler, "trainer.save_every=1", "trainer.keep_last=9"
    with ServerProcess(folder.teacher, tmp_path, options=("--images", "--engine", "hf", *ALONE)) as server:
        run_dir = folder.run(server.port, *options)
        expected = (run_dir / "export/model.safetensors").read_bytes()
        again = folder.run(server.port, *options, f"trainer.replay={run_dir}/batches", name="again")
        assert (again / "export/model.safetensors").read_bytes() == expected
        assert expected != (folder.student / "model.safetensors").read_bytes()
        if "trainer.scheduler=stream" not in options:  # its batches depend on timing
            shutil.rmtree(run_dir / "export")
            folder.run(server.port, *options, f"trainer.resume={run_dir}/checkpoints/step_00000001")
            assert (run_dir / "export/model.safetensors").read_bytes() == expected
    one_step = [sys.executable, "-m", "gkd.tools.replay", str(run_dir), "--step", "3"]  # without the teacher
    assert b"bit by bit" in subprocess.run(one_step, stdout=subprocess.PIPE, timeout=800, check=True).stdout

"""The runs of bench_health: healthy quickstarts as a user would start them, and quickstarts with a seeded fault.

Faults are in changed model folders, in settings, or in `tests.bench.health_fault`; the product has no switch for them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EOS, PAD = 1, 0  # ids of the quickstart's tokenizer


@dataclass(frozen=True, slots=True)
class Case:
    """One run.

    Args:
        settings: overrides of configs/quickstart_cpu.yaml.
        fault: of `tests.bench.health_fault`.
        teacher, student: make another model from the quickstart's folder.
        teacher_folder: the quickstart's model that teaches.
        seeded: whether an alarm is expected.
        named: what `gkd where` or a check may call the fault; empty: it is not a case of `gkd where`.
    """

    name: str
    settings: tuple[str, ...] = ()
    fault: str = "none"
    teacher: Callable[[dict[str, torch.Tensor]], None] | None = None
    student: Callable[[dict[str, torch.Tensor]], None] | None = None
    seeded: bool = False
    teacher_folder: str = "teacher"
    named: tuple[str, ...] = ()


def swap_end_token(weights: dict[str, torch.Tensor]) -> None:
    """Let the model end its responses with the padding token."""
    embedding = weights["model.embed_tokens.weight"]
    embedding[[EOS, PAD]] = embedding[[PAD, EOS]]


def permute_vocabulary(weights: dict[str, torch.Tensor]) -> None:
    """Give every token the row of another one, as with a teacher of another tokenizer that passes the checks."""
    embedding = weights["model.embed_tokens.weight"]
    order = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(0))
    weights["model.embed_tokens.weight"] = embedding[order].clone()


def shift_vocabulary(weights: dict[str, torch.Tensor]) -> None:
    """Give every token the row of the one before it, as with a tokenizer that has one token more at the beginning."""
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].roll(1, dims=0).clone()


def repeat_last_token(weights: dict[str, torch.Tensor]) -> None:
    """Let the model repeat the last token: no layer changes the hidden state, and the logits are sharp."""
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    weights["model.norm.weight"] *= 4.0


HEALTHY = tuple(
    Case(f"healthy {i}: {' '.join(settings) or 'defaults'}", (*settings, f"data.seed={i}"))
    for i, settings in enumerate(
        (
            (),
            ("distill.loss=reverse_kl",),
            ("distill.loss=jsd", "trainer.scheduler=one_step_off"),
            ("distill.loss=k1",),
            ("trainer.scheduler=stream",),
            ("distill.loss=skew_kl", "trainer.scheduler=two_step_off"),
            ("teacher.signal=hidden",),
            ("distill.loss=k3",),
            ("distill.loss=jsd", "trainer.scheduler=stream", "trainer.max_staleness=2"),
            ("distill.loss=reverse_kl", "rollout.n=4", "trainer.global_batch_size=32"),
        ),
        start=1,
    )
)
FAULTS = (
    Case("EOS mismatch", teacher=swap_end_token, seeded=True, named=("end token", "ends_disagree", "end_of_sequence")),
    Case("lr x30", ("actor.optim.lr=0.06",), seeded=True, named=("sure_and_wrong", "kl_rises")),
    Case("repetition loop", student=repeat_last_token, seeded=True),
    Case("weight sync frozen", fault="frozen", seeded=True),
    Case("permuted teacher vocabulary", teacher=permute_vocabulary, seeded=True),
    Case("stale rollouts", fault="stale", seeded=True),
)
OTHER_TEACHER = ("sure of another", "teacher_mismatch")
# Faults that `gkd where` or a check has to name, with EOS mismatch and lr x30 above.
WHERE_FAULTS = (
    Case("wrong teacher template", ("teacher.prompt_template='User: {prompt}'",), seeded=True, named=OTHER_TEACHER),
    Case("shifted teacher ids", teacher=shift_vocabulary, seeded=True, named=OTHER_TEACHER),
    Case("teacher is the student", teacher_folder="student", seeded=True, named=("no gap", "no_gap")),
)
# Meant as a healthy run, it collapsed: accuracy 0.13 -> 0 in 60 steps. The learning rate is too high for stale samples.
COLLAPSED = Case(
    "k3 with one_step_off, collapses",
    ("distill.loss=k3", "trainer.scheduler=one_step_off", "data.seed=8"),
    seeded=True,
)
CASES = {case.name: case for case in (*FAULTS, *WHERE_FAULTS, COLLAPSED, *HEALTHY)}


def changed_model(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Copy a model folder with changed weights, and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    weights = {name: tensor.clone() for name, tensor in load_file(source / "model.safetensors").items()}
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]  # one table for both ends
    return folder

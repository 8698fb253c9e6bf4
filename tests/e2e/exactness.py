"""What two runs must have in common to be the same run, to the bit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from gkd.metrics import read_metrics

# All that training computes; the rest of a line is times and what was verified.
KEYS = (
    *("loss/total", "loss/tokens", "optim/grad_norm", "optim/lr"),
    *("rollout/response_tokens", "eval/kl", "eval/accuracy"),
)


def differences(one: Path, other: Path, *, export: bool = True) -> list[str]:
    """What differs between two run folders: steps, numbers of a step, or weights of the export."""
    lines = [{int(line["step"]): line for line in read_metrics(run / "metrics.jsonl")} for run in (one, other)]
    steps = [[line["step"] for line in read_metrics(run / "metrics.jsonl")] for run in (one, other)]
    found = [f"steps {steps[1]}, expected {steps[0]}"] if steps[0] != steps[1] else []
    for step in sorted(lines[0].keys() & lines[1].keys()):
        for key in KEYS:
            wanted, got = (run[step].get(key) for run in lines)
            if wanted != got:
                found.append(f"step {step}: {key} {got!r}, expected {wanted!r}")
    return found + (_different_weights(one, other) if export else [])


def _different_weights(one: Path, other: Path) -> list[str]:
    wanted, got = (load_file(run / "export" / "model.safetensors") for run in (one, other))
    if wanted.keys() != got.keys():
        return ["the exports have different tensors"]
    return [f"weights of {name}" for name in wanted if not torch.equal(_bits(wanted[name]), _bits(got[name]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)

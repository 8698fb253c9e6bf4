"""What two runs must have in common to be the same run, to the bit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from gkd.metrics import read_metrics

# Times, what was verified, and a mean over chunks in the order in which they came.
_OTHERWISE = ("time/", "perf/", "weight_sync/verified_tensors", "teacher/topk_mass")


def differences(one: Path, other: Path, *, export: bool = True, through: int | None = None) -> list[str]:
    """What differs between two run folders: steps, numbers of a step, or weights of the export.

    Args:
        through: the last step that is compared; None: all. What comes after the newest checkpoint is made again.
    """
    lines = [
        [line for line in read_metrics(run / "metrics.jsonl") if through is None or line["step"] <= through]
        for run in (one, other)
    ]
    steps = [[int(line["step"]) for line in run] for run in lines]
    found = [f"steps {steps[1]}, expected {steps[0]}"] if steps[0] != steps[1] else []
    wanted_lines, got_lines = ({int(line["step"]): line for line in run} for run in lines)
    for step in sorted(wanted_lines.keys() & got_lines.keys()):
        wanted, got = wanted_lines[step], got_lines[step]
        for key in sorted(wanted.keys() | got.keys()):
            if not key.startswith(_OTHERWISE) and wanted.get(key) != got.get(key):
                found.append(f"step {step}: {key} {got.get(key)!r}, expected {wanted.get(key)!r}")
    return found + (_different_weights(one, other) if export else [])


def _different_weights(one: Path, other: Path) -> list[str]:
    wanted, got = (load_file(run / "export" / "model.safetensors") for run in (one, other))
    if wanted.keys() != got.keys():
        return ["the exports have different tensors"]
    return [f"weights of {name}" for name in wanted if not torch.equal(_bits(wanted[name]), _bits(got[name]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)

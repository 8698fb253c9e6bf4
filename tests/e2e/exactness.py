"""Compare two runs bit-exactly, and check which sequences a run was trained on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from gkd.config.load import load_config
from gkd.data.sampler import PromptSampler
from gkd.metrics.writer import read_metrics
from gkd.run.manifest import digest_file
from gkd.run.rollout_file import read_sequences
from gkd.tools import export
from gkd.types import Prompt, Rollout, TeacherScores

# Times, memory, the number of verified tensors, a mean over chunks in their order of arrival, and what `base_run` alone
# measures.
_NOT_COMPARED = (
    "time/",
    "perf/",
    "memory/",
    "weight_sync/verified_tensors",
    "teacher/topk_mass",
)


def steps_of(run_dir: Path, file: str = "metrics.jsonl") -> dict[int, dict[str, Any]]:
    """Return the lines of a run's metrics by step."""
    return {int(line["step"]): line for line in read_metrics(run_dir / file)}


def last_step(run_dir: Path) -> int:
    """Return the last step in a run's metrics; -1: there is none yet."""
    metrics = run_dir / "metrics.jsonl"
    return max((int(line["step"]) for line in read_metrics(metrics)), default=-1) if metrics.exists() else -1


def differences(
    one: Path, other: Path, *, export: bool = True, through: int | None = None, but: tuple[str, ...] = ()
) -> list[str]:
    """Return the differences between two run folders: steps, metrics of a step, or exported weights.

    Args:
        but: beginnings of keys that are not compared.
        through: the last step to compare; None: all. Steps after the newest checkpoint are repeated by a resume.
    """
    lines = [
        [line for line in read_metrics(run / "metrics.jsonl") if through is None or line["step"] <= through]
        for run in (one, other)
    ]
    steps = [[int(line["step"]) for line in run] for run in lines]
    found = [f"steps {steps[1]}, expected {steps[0]}"] if steps[0] != steps[1] else []
    expected_lines, got_lines = ({int(line["step"]): line for line in run} for run in lines)
    for step in sorted(expected_lines.keys() & got_lines.keys()):
        expected, got = expected_lines[step], got_lines[step]
        for key in sorted(expected.keys() | got.keys()):
            if not key.startswith((*_NOT_COMPARED, *but)) and expected.get(key) != got.get(key):
                found.append(f"step {step}: {key} {got.get(key)!r}, expected {expected.get(key)!r}")
    return found + (_different_weights(one, other) if export else [])


def check_export(run_dir: Path, out: Path) -> None:
    """Assert that `gkd export` of the newest checkpoint writes every byte of the run's own export."""
    assert export.main([str(run_dir), "--out", str(out)]) == 0
    own, made = (
        {file.relative_to(root).as_posix(): digest_file(file) for file in root.rglob("*") if file.is_file()}
        for root in (run_dir / "export", out)
    )
    assert own == made and {"README.md", "config.json", "model.safetensors"} <= own.keys()


def check_taken(run_dir: Path, *, n_steps: int, n_prompts: int, whole: bool = True) -> list[list[Rollout]]:
    """Return the sequences of each step, read from the recorded batches.

    Assert that the prompts are in the sampler's order and that each sequence was trained on exactly once.

    Args:
        n_prompts: rows of the training file.
        whole: False: prompts may be missing, because an interrupted stream starts prompts that no step takes.
    """
    config = load_config(run_dir / "config.yaml")
    n, size = config.rollout.n, config.trainer.global_batch_size
    rows = [Prompt(i, np.zeros(1, np.int32)) for i in range(n_prompts)]
    order = PromptSampler(rows, shuffle=config.data.shuffle, seed=config.data.seed)
    taken = [[rollout for rollout, _ in recorded(run_dir, step)] for step in range(1, n_steps + 1)]
    seen: Counter[int] = Counter()
    for step, batch in enumerate(taken):
        assert len(batch) == size * n
        for rollout in batch:
            # A stream counts the positions of the whole run, other schedulers those of the batch.
            first = 0 if config.trainer.scheduler == "stream" else step * size
            (prompt,) = order.take(first + rollout.sample_index // n, 1)
            assert rollout.prompt_id == prompt.prompt_id
            seen[first * n + rollout.sample_index] += 1
    expected = range(n_steps * size * n)
    assert set(seen.values()) == {1} and (not whole or seen.keys() == set(expected)), f"lost or repeated: {seen}"
    return taken


def check_stream(run_dir: Path, *, n_steps: int, n_prompts: int, max_staleness: int) -> None:
    """Assert that a stream trained on each sequence once and never exceeded the staleness bound."""
    for step, batch in enumerate(check_taken(run_dir, n_steps=n_steps, n_prompts=n_prompts)):
        for rollout in batch:
            spans = rollout.version_spans
            assert step - max_staleness <= rollout.policy_version and max(s.policy_version for s in spans) <= step
            assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])]
            assert spans[-1].stop == len(rollout.response_ids)
    lines = [line for line in read_metrics(run_dir / "metrics.jsonl") if "loss/total" in line]
    assert [line["step"] for line in lines] == list(range(1, n_steps + 1))
    assert max(line["staleness/max"] for line in lines) <= max_staleness


def recorded(run_dir: Path, step: int) -> list[tuple[Rollout, TeacherScores]]:
    """Return the sequences of a step and their scores, read from the recorded batches."""
    pairs: list[tuple[Rollout, TeacherScores]] = []
    for file in sorted((run_dir / "batches" / f"step_{step:08d}").glob("*.npz")):
        rollouts, scores = read_sequences(file)
        assert scores is not None
        pairs += zip(rollouts, scores, strict=True)
    return pairs


def _different_weights(one: Path, other: Path) -> list[str]:
    expected, got = (load_file(run / "export" / "model.safetensors") for run in (one, other))
    if expected.keys() != got.keys():
        return ["the exports have different tensors"]
    return [f"weights of {name}" for name in expected if not torch.equal(_bits(expected[name]), _bits(got[name]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)

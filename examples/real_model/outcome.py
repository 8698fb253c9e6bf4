"""Compare the responses and the numbers of a run's first and last evaluation."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

from gkd.errors import CheckpointError
from gkd.metrics.writer import read_metrics
from gkd.scoring.reward.groups import Group

SHOWN = 4  # held-out prompts whose responses are printed


def one_sentence(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 for one line that ends with the end of a sentence and has no other such end: eval.metric of the runs."""
    del prompt, row
    return float(re.fullmatch(r"(?:[^.!?\n]|[.!?](?=\S))*[.!?]+[\"')]*", response.strip()) is not None)


def feedback(group: Group) -> list[str | list[dict[str, Any]] | None]:
    """Return the prompt that asks for one sentence, for each response that is not one: teacher.prompt_function."""
    corrected = group.asking(f"{group.question} Answer in one short sentence.")
    return [None if reward else corrected for reward in group.rewards]


def read(run_dir: Path, heldout: Path, wall_s: float, peak_gib: float) -> dict[str, Any]:
    """Return the figures and responses of the first and the last evaluation of a run.

    Args:
        heldout: file with the held-out prompts.
        wall_s: seconds that the example took.
        peak_gib: largest memory of all its processes.

    Raises:
        CheckpointError: the run has fewer than two evaluations.
    """
    files = sorted((run_dir / "samples").glob("*.jsonl"))
    evaluated = [line for line in read_metrics(run_dir / "metrics.jsonl") if "eval/kl" in line]
    if len(files) < 2 or len(evaluated) < 2:
        raise CheckpointError(f"{run_dir} lacks the evaluations before and after training")
    prompts = [json.loads(line)["prompt"] for line in heldout.read_text().splitlines()]
    samples = [[json.loads(line) for line in file.read_text().splitlines()] for file in (files[0], files[-1])]
    return {
        "steps": evaluated[-1]["step"],
        "wall_s": wall_s,
        "peak_gib": peak_gib,
        "kl": [line["eval/kl"] for line in (evaluated[0], evaluated[-1])],
        "mean_tokens": [_mean(len(one["response_ids"]) for one in each) for each in samples],
        "one_sentence": [line["eval/accuracy"] for line in (evaluated[0], evaluated[-1])],
        "responses": [
            {"prompt": next(p for p in prompts if p in one["prompt"]), "before": one["text"], "after": other["text"]}
            for one, other in zip(*samples, strict=True)
        ],
    }


def as_text(found: dict[str, Any]) -> str:
    """Format the outcome for the terminal."""
    blocks = []
    for each in found["responses"][:SHOWN]:
        blocks.append(each["prompt"])
        for name in ("before", "after"):
            filled = textwrap.wrap(" ".join(each[name].split()), 100)
            blocks += [f"  {name if i == 0 else '':<8}{line}" for i, line in enumerate(filled or [""])]
        blocks.append("")
    rows = [
        ("held-out prompts", "before", "after"),
        ("KL(teacher || student), nats a token", *(f"{value:.3f}" for value in found["kl"])),
        ("mean length of a response, tokens", *(f"{value:.1f}" for value in found["mean_tokens"])),
        ("responses of one sentence", *(f"{value:.0%}" for value in found["one_sentence"])),
    ]
    table = [f"{name:<40}{before:>10}{after:>10}" for name, before, after in rows]
    totals = f"{found['steps']} steps, {found['wall_s'] / 60:.1f} minutes in total"
    return "\n".join([*blocks, *table, "", f"{totals}, at most {found['peak_gib']:.1f} GiB of memory"])


def _mean(values: Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed)

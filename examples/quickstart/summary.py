"""Summarize a quickstart run from the files that the run wrote."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gkd.errors import CheckpointError
from gkd.metrics.writer import read_metrics

STAGES = ("data", "rollout", "teacher", "train", "weight_sync", "eval", "checkpoint")


def summarize(run_dir: Path, teacher_accuracy: float, export_match: str, wall_s: float) -> dict[str, Any]:
    """Return the content of summary.json.

    Args:
        run_dir: a finished run with evaluations before the first and after the last step.
        teacher_accuracy: measured on the same held-out prompts.
        export_match: e.g. "50/50": greedy responses of the export that equal those of the engine.
        wall_s: seconds since the quickstart was started, installation included.

    Raises:
        CheckpointError: the run's metrics lack an evaluation.
    """
    lines = read_metrics(run_dir / "metrics.jsonl")
    steps = [line for line in lines if "time/step_s" in line and line["step"] > 0]
    # Without a teacher distribution (only k1-k3, for example) there is an estimate of the reverse KL instead.
    key = "eval/kl" if any("eval/kl" in line for line in lines) else "eval/reverse_kl"
    evaluated = [line for line in lines if key in line]
    if len(evaluated) < 2 or not steps:
        raise CheckpointError(f"{run_dir}/metrics.jsonl lacks the evaluations before and after training")
    before, after = evaluated[0], evaluated[-1]
    step_s = sum(line["time/step_s"] for line in steps)
    shares = {stage: sum(line.get(f"time/{stage}_s", 0.0) for line in steps) / step_s for stage in STAGES}
    return {
        "teacher_accuracy": teacher_accuracy,
        "student_accuracy_before": before["eval/accuracy"],
        "student_accuracy_after": after["eval/accuracy"],
        "kl": "teacher || student" if key == "eval/kl" else "student || teacher",
        "kl_before": before[key],
        "kl_after": after[key],
        "kl_drop": 1.0 - after[key] / before[key] if before[key] and after[key] is not None else math.nan,
        "export_equals_engine": export_match,
        "steps": steps[-1]["step"],
        "training_s": step_s,
        "wall_s": wall_s,
        "stage_time_share": shares,
        "stage_time_accounted": sum(shares.values()),
    }


def as_table(summary: dict[str, Any]) -> str:
    """Format the summary for the terminal."""
    s = summary
    accuracies = [s["student_accuracy_before"], s["student_accuracy_after"], s["teacher_accuracy"]]
    rows = [
        ("", "before", "after", "teacher"),
        ("held-out greedy accuracy", *(f"{share:.1%}" for share in accuracies)),
        (f"KL({s['kl']}), nats", f"{s['kl_before']:.4f}", f"{s['kl_after']:.4f}", "-"),
    ]
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in s["stage_time_share"].items() if share >= 0.005)
    return "\n".join(
        [
            *(f"{name:<30}{a:>10}{b:>10}{c:>10}" for name, a, b, c in rows),
            "",
            f"{s['steps']} steps in {s['training_s']:.0f} s ({shares}; {s['stage_time_accounted']:.1%} accounted for)",
            f"identical responses of export and engine: {s['export_equals_engine']}; {s['wall_s']:.0f} s in total",
        ]
    )

"""Declare the settings of the health checks."""

from __future__ import annotations

from dataclasses import dataclass

from gkd.config.declare import key

# Names of the checks; `gkd.health.checks` has their thresholds and reasons.
HEALTH_CHECKS = (
    *("truncated", "repetition", "end_of_sequence", "teacher_mismatch", "overlap_falls", "entropy_collapse"),
    *("importance_clipped", "gradient_spikes", "no_gap", "kl_rises", "accuracy_falls", "worse_than_start"),
    *("engine_logprobs", "stale_rollouts"),
)


@dataclass
class HealthConfig:
    on_alarm: str = key(
        "warn",
        "What a new alarm of a health check does. warn: one log line. pause: save the step, then wait until "
        "run_dir/continue exists. stop: save the step, then end with an error. See docs/health.md.",
        choices=("warn", "pause", "stop"),
        resume=True,
    )
    checks_off: list[str] = key(
        [], "Checks to leave out.", limits=f"of {', '.join(HEALTH_CHECKS)}, each once", resume=True
    )
    limits: dict[str, float] = key(
        {}, "Other limits of some checks, e.g. {truncated: 0.9}. See docs/health.md.", limits="numbers > 0", resume=True
    )

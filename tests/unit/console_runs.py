"""Make the state of a run, and a clock, for tests of the terminal."""

from __future__ import annotations

from gkd.console.state import RunState


class Clock:
    """Seconds that pass only by `now_s += ...`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def line(**changes: float | None) -> dict[str, float]:
    """Return the numbers of a step; `loss__total=1` changes "loss/total", None removes it."""
    m: dict[str, float] = {
        "loss/total": 0.1478,
        "loss/token_kl": 0.1395,
        "loss/tokens": 3500.0,
        "optim/grad_norm": 0.56,
        "optim/lr": 2e-3,
        "rollout/response_tokens": 3500.0,
        "rollout/prompt_tokens": 700.0,
        "perf/response_tokens_per_s": 3700.0,
        "perf/waited_rollout_share": 0.54,
        "perf/bound_by_rollout": 1.0,
        "perf/bound_by_actor": 0.0,
        "staleness/mean": 0.5,
        "staleness/max": 1.0,
        "time/step_s": 0.93,
        "time/rollout_s": 0.5,
        "time/train_s": 0.3,
    }
    for name, value in changes.items():
        key = name.replace("__", "/", 1)
        if value is None:
            del m[key]
        else:
            m[key] = value
    if any(key.startswith("eval/") for key in m):
        m.setdefault("time/eval_s", 0.0)
    return m


def run(total_steps: int = 120, *, clock: Clock | None = None) -> RunState:
    """Return the state of a run without a step."""
    return RunState(total_steps, clock or Clock())

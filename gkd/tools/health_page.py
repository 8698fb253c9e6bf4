"""`python -m gkd.tools.health_page`: write docs/health.md from the table of `gkd/health/checks.py`."""

from __future__ import annotations

from pathlib import Path

from gkd.health.checks import CHECKS
from gkd.health.monitor import CLEAR_AFTER

_HEAD = f"""# Health checks

After each step the trainer judges from `metrics.jsonl` whether the run is healthy. `python -m gkd.tools.health_page`
writes this page from `gkd/health/checks.py`.

- An alarm is one log line with evidence, likely cause and the key to change, when it starts. Another line follows when
  it clears: after {CLEAR_AFTER} verdicts without a finding in a row, or with the next good evaluation.
- `metrics.jsonl` and the trackers have `health/<check>` in each line: 1 while the alarm lasts, else 0. A check without
  its numbers (no evaluation, no distribution of the teacher, too few steps) has no key.
- A resumed run rebuilds the state of all checks from `metrics.jsonl`. Alarms that still last are logged once, and are
  not new.
- `health.checks_off: [no_gap]` leaves checks out; `health.limits: {{truncated: 0.9}}` changes thresholds.
- `engine_logprobs` and `stale_rollouts` are off if `rollout.temperature` differs from `teacher.temperature`, or with
  `rollout.top_p`, `top_k` or `min_p`: the engine's logprobs then belong to another distribution. With
  `trainer.replay` they are off, too: the rollouts are those of another run.

`health.on_alarm` selects what a new alarm does, after the line of its step is written:

- `warn`: the log line, nothing else.
- `pause`: saves the step as a checkpoint, with the rollouts in flight. Then the loop waits until the run folder has a
  file named continue (`touch RUN/continue`), and deletes it. A log line follows after 1, 2, 4, ... minutes, later each
  hour. Ctrl-C ends the run; `trainer.resume=auto` continues from the paused step.
- `stop`: saves the step in the same way, then ends with the error `HealthAlarm`, exit code 1, without an export.
  `trainer.resume=auto` continues, also past this alarm. A resumed run may change the keys that
  [configuration.md](configuration.md) marks; for another learning rate start a new run.

The thresholds are meant for language models, not for the quickstart alone, and loose: an alarm is meant to be worth a
look. What the reasons tell of large models and of bfloat16 was not measured with this code; adapt `health.limits`.
[results.md](results.md#health-checks) has the figures of healthy runs and of seeded faults.

| check | alarm | why this threshold | likely cause | what to change |
|---|---|---|---|---|
"""


def health_page() -> str:
    """Return the page as Markdown."""
    rows = (
        (f"`{c.name}`", c.alarm.format(limit=f"**{c.limit:g}**"), c.reason, f"{c.cause}.", f"{c.change}.")
        for c in CHECKS
    )
    sentences = ([cell[:1].upper() + cell[1:] for cell in row] for row in rows)
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in sentences)


if __name__ == "__main__":
    Path("docs/health.md").write_text(health_page())

"""`python -m gkd.tools.metrics_page`: write docs/metrics.md from the rows of `gkd/metrics/catalog*.py`."""

from __future__ import annotations

from pathlib import Path

from gkd.metrics.catalog import DOTTED, FUNCTION, NAME, NUMBER, PLACEHOLDERS, Row
from gkd.metrics.catalog_learning import LEARNING
from gkd.metrics.catalog_system import SYSTEM

SECTIONS = LEARNING | SYSTEM
ROWS = [row for rows in SECTIONS.values() for row in rows]
_HEAD = """# Metrics

All keys of `metrics.jsonl` in the run folder: one JSON object per line, with `step` and the keys below.
`python -m gkd.tools.metrics_page` writes this page from `gkd/metrics/catalog*.py`; tests compare the rows with the keys
of real runs.

Column *in* names the lines that have the key: every step, or a condition. A line before the first step has the
evaluation of step 0, and what loading and moving states took. A number that is not finite is `null`. The log has memory
and times of the last save and the export, which follow the last line.

Read first: `health/<check>` (is there an alarm?), `eval/kl` (does the student learn?), `rollout/truncated_share` and
`teacher/topk_mass` (is the signal complete?), `perf/response_tokens_per_s` and `perf/bound_by_<pool>` (is it fast?),
`memory/<phase>/peak_gib` (does it fit?).

| placeholder | values |
|---|---|
"""
_COLUMNS = "| key | unit | in | meaning | healthy | problem and what to do |\n|---|---|---|---|---|---|"
_TAIL = """
## Renamed

`rollout/cut_share` is `rollout/truncated_share`, `time/<call>/meeting` is `time/<call>/barrier_wait_s`,
`memory/setting_the_teacher's_LM_head/...` is `memory/teacher_head/...`, and in `tuner.jsonl` `perf/answer_s` is
`perf/generate_s` and `perf/response_length_q100` is `perf/response_length_max`. The sums of the split tuner moved from
`metrics.jsonl` to `tuner.jsonl`, see [GPU split](split.md); the tuner still reads runs of older versions, with their
names.
"""


def metrics_page() -> str:
    """Return the page as Markdown, one table per section."""
    placeholders = "\n".join(f"| `<{name}>` | {_values(name)} |" for name in PLACEHOLDERS)
    tables = [f"\n## {heading}\n\n{_COLUMNS}\n" + "\n".join(map(_line, rows)) for heading, rows in SECTIONS.items()]
    return _HEAD + placeholders + "\n" + "\n".join(tables) + "\n" + _TAIL


def _values(name: str) -> str:
    values = PLACEHOLDERS[name]
    if values == NAME:
        return "a name in `teacher.routes`"
    if values == FUNCTION:
        return "a function of `reward.functions`, without its module"
    if values == NUMBER:
        return "a number"
    return ", ".join(
        "`package.module.function` for a function of your own" if value == DOTTED else f"`{value}`" for value in values
    )


def _line(row: Row) -> str:
    cells = (f"`{row.key}`", row.unit, row.when, row.meaning, row.healthy, row.problem)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


if __name__ == "__main__":
    Path("docs/metrics.md").write_text(metrics_page())

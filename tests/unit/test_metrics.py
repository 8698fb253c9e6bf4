"""Test metrics.jsonl."""

from __future__ import annotations

import json
import math
import re
import resource
from pathlib import Path

import pytest

from gkd.errors import CheckpointError
from gkd.metrics.catalog import FUNCTION, KEY, NAME, NUMBER, PLACEHOLDERS, ROWS
from gkd.metrics.writer import MetricsWriter, read_metrics
from tests.pages import tables, with_tables
from tests.structure import ROOT


def test_non_finite_numbers_are_written_as_null(tmp_path: Path) -> None:
    """If it fails, one NaN makes metrics.jsonl unreadable."""
    file = tmp_path / "m" / "metrics.jsonl"
    writer = MetricsWriter(file, keep_through=-1)
    writer.write(1, {"loss/total": math.nan, "optim/lr": 0.5})
    writer.close()
    again = MetricsWriter(file, keep_through=1)
    again.write(2, {"loss/total": math.inf})
    again.close()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]
    assert lines == [{"step": 1, "loss/total": None, "optim/lr": 0.5}, {"step": 2, "loss/total": None}]
    assert read_metrics(file) == lines


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    """If it fails, steps after the checkpoint occur twice in the file, or a truncated last line makes it unreadable."""
    file = tmp_path / "metrics.jsonl"
    for keep, steps in ((-1, (0, 1, 2, 3)), (2, (3, 4))):
        writer = MetricsWriter(file, keep_through=keep)
        for step in steps:
            writer.write(step, {"loss/total": float(keep)})
        writer.close()
        with file.open("a") as broken:
            broken.write('{"step": 9, "lo')
    assert [(m["step"], m["loss/total"]) for m in read_metrics(file)] == [(0, -1), (1, -1), (2, -1), (3, 2), (4, 2)]


@pytest.mark.parametrize("line", ['{"step": 2, "lo', "\0\0\0", "[]", '{"step": "2"}'])
def test_a_corrupted_line_is_named(tmp_path: Path, line: str) -> None:
    """If it fails, a resume raises a JSON error, or silently drops a corrupted line."""
    file = tmp_path / "metrics.jsonl"
    text = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
    file.write_text(text)
    with pytest.raises(CheckpointError, match=f"{file}: line 2 "):
        MetricsWriter(file, keep_through=3)
    assert file.read_text() == text
    MetricsWriter(file, keep_through=-1).close()
    assert file.read_text() == "", "a run from step 0 truncates the file"


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """If it fails, a full disk raises an OSError, or closing the file hides the first error."""
    file = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(file, keep_through=-1)
    writer.write(1, {"loss/total": 1.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(CheckpointError):
            writer.write(2, {"loss/total": 2.0})
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(file.read_bytes().split(b"\n")[-1]) == 10, "a resume removes the truncated line"
    assert read_metrics(file) == [{"step": 1, "loss/total": 1.0}]
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError):
        MetricsWriter(tmp_path / "folder", keep_through=0)


def test_lines_and_the_truncated_file_are_flushed(tmp_path: Path, flushed: list[tuple[Path, int]]) -> None:
    """If it fails, a power loss removes lines of a committed checkpoint, or restores discarded lines."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')
    writer = MetricsWriter(file, keep_through=1)
    assert [name for name, _ in flushed] == [tmp_path / ".tmp_metrics.jsonl", tmp_path]
    writer.write(2, {"loss/total": 1.0})
    writer.sync()
    assert flushed[2:] == [(file, file.stat().st_size)]


def test_the_page_of_metrics_is_current() -> None:
    """Fails if docs/metrics.md is out of date, a row cannot be read, or a key has two rows or a wrong placeholder."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == with_tables(page, tables()["metrics.md"]), "run python -m tests.pages"
    assert len(ROWS) == len(re.findall(r"^\| `[^`<]*/", page, re.MULTILINE))
    assert (ROOT / "gkd" / "metrics" / "metrics.md").readlink() == Path("../../docs/metrics.md")
    assert {name for row in ROWS for name in re.findall(r"<(\w+)>", row.key)} == PLACEHOLDERS.keys()
    examples = [re.sub(r"<(\w+)>", lambda found: _example(found[1]), row.key) for row in ROWS]
    assert all(sum(row.matches(key) for row in ROWS) == 1 for key in examples)
    assert not any(row.matches("time/nonsense_s") or row.matches("memory/nonsense/peak_gib") for row in ROWS)


def _example(placeholder: str) -> str:
    values = PLACEHOLDERS[placeholder]
    return "3" if values in (NUMBER, NAME, FUNCTION, KEY) else values[-1]

"""Test where the KL of a run is: on records with known sums, and on files that are missing or damaged."""

from __future__ import annotations

import copy
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gkd.metrics.token_groups import OTHER, SAME, SURE_OF_OTHER, evaluation_numbers, is_sure_and_wrong, student_choice
from gkd.tools.report.groups import evaluations, rows, sentence
from gkd.tools.report.page import page
from gkd.tools.report.read import read_runs
from gkd.tools.where import main
from gkd.types import TokenRecord
from tests.report_run import make_run, make_tokenizer

AGREE, DIFFER, SURE = [[5, 0.8, 0.6], [2, 0.1, 0.3]], [[5, 0.6, 0.2], [2, 0.3, 0.7]], [[5, 0.9, 0.02], [2, 0.05, 0.95]]
# Ten tokens of one response: words, digits, two of an environment, space, end. The KL of its own tokens adds up to 8.
RECORD: dict[str, Any] = {
    "prompt_id": 1,
    "sample_index": 0,
    "prompt_ids": [2],
    "response_ids": [2, 2, 5, 5, 6, 6, 2, 9, 6, 1],
    "values": {
        "token_kl": [1.0, 0.0, 0.5, 0.5, 0.0, 1.0, 1.0, 4.0],
        "ended": [0.0] * 7 + [1.0],
        "student_entropy": [0.5] * 8,
    },
    "choices": [AGREE, AGREE, DIFFER, DIFFER, AGREE, DIFFER, AGREE, SURE],
    "observed": [4, 5],
}


def write(root: Path, step: int, *records: dict[str, Any]) -> Path:
    file = root / "token_losses" / f"step_{step:08d}.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run without an export, whose model.path has the tokenizer, and whose last evaluation is RECORD."""
    make_tokenizer(tmp_path / "model")
    root = make_run(tmp_path / "run", f"model.path={tmp_path / 'model'}", steps=4)
    shutil.rmtree(root / "export")
    write(root, 0, {**RECORD, "values": {**RECORD["values"], "token_kl": [0.25] * 8}})
    write(root, 4, RECORD)
    return root


def test_shares_are_those_of_the_records(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a token is counted in another group, an observation has KL, or the change is not since the first."""
    assert main([str(run)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == (
        "step 4: end token: 50% of the KL on 10% of the tokens; compare the end tokens of both. "
        "step 0: no group stands out. KL(teacher || student): 0.2500 at step 0, 1.0000 at step 4 nats a token; 8 tokens"
    )
    cells = {line[11:26].strip(): line[26:].split() for line in out[2:]}
    assert cells["end token"] == ["50.0%", "10.0%", "+37.5%", "'<eos>'"]
    assert cells["words"][:3] == ["12.5%", "30.0%", "-25.0%"]
    assert cells["digits"][:3] == ["12.5%", "20.0%", "-12.5%"]
    assert cells["punctuation"][:3] == cells["space"][:3] == ["12.5%", "10.0%", "+0.0%"]
    assert cells["observation"] == ["-", "20.0%", "-"]
    assert cells["tenth 1"][:2] == ["12.5%", "12.5%"] and cells["tenth 10"][:2] == ["50.0%", "12.5%"]
    assert "tenth 5" not in cells, "it has observations alone"
    assert cells["same choice"][:2] == ["25.0%", "50.0%"] and cells["other choice"][:2] == ["25.0%", "37.5%"]
    assert cells["sure of another"][:2] == ["50.0%", "12.5%"]


def test_the_report_shows_the_same_table(run: Path) -> None:
    """Fails if page and command differ, or the page leaves the table out."""
    (read,) = read_runs([run])
    found = evaluations(read)
    section = page([read]).partition('<section id="where">')[2].partition("</section>")[0]
    assert "end token: 50% of the KL" in section
    assert section.count("<tr>") == len(rows([found])) and "+37.5%" in section


@pytest.mark.parametrize(
    ("choices", "entropy", "expected", "is_wrong"),
    [
        (AGREE, 0.5, SAME, False),
        (DIFFER, 0.5, OTHER, False),
        (SURE, 0.2, SURE_OF_OTHER, True),
        ([[5, 0.8, 0.02], [2, 0.15, 0.95]], 0.2, SURE_OF_OTHER, False),  # the teacher gives it more than 0.1
        ([[5, 0.8, 0.02], [2, 0.15, 0.01]], 0.1, SURE_OF_OTHER, True),  # one token outside the list has the rest
        ([[5, 0.8, 0.02], [2, 0.15, 0.01]], 3.0, OTHER, False),  # many tokens outside the list
        ([[5, 0.4, 0.02], [2, 0.35, 0.01]], 0.1, SURE_OF_OTHER, False),  # the rest may have 0.25 of the teacher
    ],
)
def test_agreement(choices: list[list[float]], entropy: float, expected: str, is_wrong: bool) -> None:
    """Fails if a student that is unsure counts as sure, or one that is sure outside the list as unsure."""
    assert student_choice(choices, entropy)[0] == expected
    assert is_sure_and_wrong(choices, entropy) == is_wrong


def test_numbers_of_an_evaluation() -> None:
    """Fails if the metrics of the checks are not those of the table, or an infinite KL makes them NaN."""
    names = ("prompt_id", "sample_index", "prompt_ids", "response_ids", "values", "choices", "observed")
    record = TokenRecord(**copy.deepcopy({name: RECORD[name] for name in names}))
    assert evaluation_numbers([record]) == {"eval/end_kl_share": 0.5, "eval/sure_and_wrong_share": 1 / 8}
    record.values["token_kl"][0] = math.inf
    assert evaluation_numbers([record]) == {"eval/end_kl_share": 4 / 7, "eval/sure_and_wrong_share": 1 / 7}
    record.values["paired"] = [1.0, 0.0, *[1.0] * 6]
    assert evaluation_numbers([record]) == {"eval/end_kl_share": 4 / 7, "eval/sure_and_wrong_share": 1 / 6}, "token 1"
    record.choices[2] = []  # a teacher with another tokenizer has not chosen a token there, but there is a KL
    assert evaluation_numbers([record]) == {"eval/end_kl_share": 4 / 7, "eval/sure_and_wrong_share": 1 / 6}
    assert evaluation_numbers([TokenRecord(1, 0, [2], [5], {"sampled_reverse_kl": [0.1]})]) == {}
    assert evaluation_numbers([]) == {}


def test_what_is_missing_is_told(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a run without a distribution, end marks or a tokenizer ends in an error, or looks complete."""
    plain = {key: RECORD[key] for key in ("prompt_id", "sample_index", "prompt_ids", "response_ids", "observed")}
    write(run, 4, {**plain, "choices": [], "values": {"sampled_reverse_kl": [0.5, None, *[0.5] * 6]}})
    shutil.rmtree(tmp_path / "model")
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    for part in ("no distribution", "no choices", "no `ended`", "no tokenizer", "1 tokens with an infinite one"):
        assert part in out, part
    assert "log q - log p of the token: 0.2500 at step 0, 0.5000 at step 4 nats" in out


def test_tokens_without_a_pair_do_not_lower_the_kl(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the mean KL of a teacher with another tokenizer is not that of eval/kl, over tokens with a pair."""
    values = {**RECORD["values"], "paired": [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]}
    write(run, 4, {**RECORD, "values": values})
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    assert f"{8 / 6:.4f} at step 4 nats a token; 6 tokens" in out
    assert "teacher.tokenizer" in out


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no complete line"),
        ('{"prompt_id": 1', "no complete line"),
        ("nonsense\n", "line 1"),
        (json.dumps({**RECORD, "response_ids": [1]}) + "\n", "line 1"),
        (json.dumps({**RECORD, "values": {}}) + "\n", "no number of the loss"),
        (json.dumps({**RECORD, "choices": [[]]}) + "\n", "line 1"),
    ],
)
def test_a_damaged_file_is_named(run: Path, text: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if an empty, half-written or damaged file is a traceback, or file and fix are not named."""
    file = run / "token_losses" / "step_00000004.jsonl"
    file.write_text(text)
    assert main([str(run)]) == 1
    error = capsys.readouterr().err
    assert str(file) in error and named in error and "delete" in error


def test_two_runs_are_side_by_side(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the columns of two runs are mixed up, or three runs or a run without tokens are not refused."""
    other = Path(shutil.copytree(run, tmp_path / "other"))
    write(other, 4, {**RECORD, "values": {**RECORD["values"], "token_kl": [1.0] * 8}})
    assert main([str(run), str(other)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("1, run: step 4") and out[1].startswith("2, other: step 4")
    (line,) = [line for line in out if "end token  " in line]
    assert line.split()[3:] == ["50.0%", "10.0%", "+37.5%", "12.5%", "10.0%", "+0.0%"]
    third = Path(shutil.copytree(run, tmp_path / "third"))
    assert main([str(run), str(other), str(third)]) == 2
    shutil.rmtree(third / "token_losses")
    assert main([str(third)]) == 2
    assert "eval.every" in capsys.readouterr().err


def test_an_equal_pair_has_no_gap(run: Path) -> None:
    """Fails if rounding noise of two equal models counts as a finding."""
    write(run, 4, {**RECORD, "values": {**RECORD["values"], "token_kl": [0.001] * 8}})
    assert "no gap" in sentence(evaluations(read_runs([run])[0]))


def test_a_student_that_is_sure_of_other_tokens_before_training_is_named(run: Path) -> None:
    """Fails if the sign of a wrong template or of other ids is not named, or a later evaluation is blamed for it."""
    wrong = {**RECORD, "choices": [SURE] * 8, "values": {**RECORD["values"], "token_kl": [1.0] * 8}}
    for step in (0, 4):
        write(run, step, wrong)
    text = sentence(evaluations(read_runs([run])[0]))
    assert text.startswith("step 4: no group stands out. step 0: sure of another: 100% of the KL on 100% of the tokens")


def test_the_first_evaluation_of_a_branch_is_not_before_training(run: Path) -> None:
    """Fails if a trained student that is sure of other tokens is blamed for its template or its ids."""
    (run / "token_losses" / "step_00000000.jsonl").unlink()
    assert not evaluations(read_runs([run])[0])[0].is_first


def test_the_tool_needs_no_torch(run: Path) -> None:
    """Fails if the tool takes the seconds that importing torch or transformers takes."""
    code = "import sys; from gkd.tools.where import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "end token" in done.stdout and not {"torch", "transformers", "ray"} & set(done.stderr.split())

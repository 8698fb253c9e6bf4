"""How the migration tool reads files of other systems: shell scripts, YAML with base files, and their dialects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gkd.config.dialects.table import dialects
from gkd.config.load import yaml_values
from gkd.errors import ConfigError
from gkd.tools.migrate.__main__ import main
from gkd.tools.migrate.read import find_dialect, read_file, settings_of
from tests.refusals import refuses
from tests.unit.migrate_examples import EXAMPLES, FLAGS

TRAIN = "python3 -m verl.trainer.main_ppo "


def settings(folder: Path, script: str) -> dict[str, Any]:
    """Return the settings of a script."""
    file = folder / "run.sh"
    file.write_text(script)
    return read_file(file, {}).settings


OPEN = {"a.b": "$N", "a.c": "$M"}  # what only some runs of a script set


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("N=3\n" + TRAIN + "a.b=$((N * (2 + 4) / 2 - 1)) a.c=$(( $N%2 ))", {"a.b": 8, "a.c": 1}),
        (TRAIN + "a.b=$((UNKNOWN * 2))", {"a.b": "$[UNKNOWN*2]"}),
        ("N=3\nR=${R:-$((N + 1))}\n" + TRAIN + "a.b=$R a.c=$((R * 2))", {"a.b": 4, "a.c": 8}),
        (TRAIN + "a.b=$(nproc)", {"a.b": "$"}),
        (TRAIN + "data.train_files=$HOME/data/x.parquet", {"data.train_files": os.path.expanduser("~/data/x.parquet")}),
        (TRAIN + "a.b=${A:-${B:-x}/y} a.c=${A:-$B/x}", {"a.b": "x/y", "a.c": "${A:-$B/x}"}),
        ("uv run --frozen --extra fsdp python3 -m verl.trainer.main_ppo a.b=1", {"a.b": 1}),
        ("ROOT=${ROOT:-/data}\nFILE=$ROOT/a\n" + TRAIN + "a.b=${FILE}.jsonl", {"a.b": "/data/a.jsonl"}),
        ("USED=(\n a.b=1 # one\n 'a.c=[1,2]'\n)\nUNUSED=(a.b=2)\n" + TRAIN + '"${USED[@]}"', {"a.b": 1, "a.c": [1, 2]}),
        ("A=(a.b=1)\nB=(${A[@]} a.c=2)\nB+=(a.d=3)\n" + TRAIN + "${B[@]} $@", {"a.b": 1, "a.c": 2, "a.d": 3}),
        ('ARGS="--lr 1e-6 --tp 2"\nARGS+=" --pp 3"\npython train.py $ARGS', {"--lr": 1e-6, "--tp": 2, "--pp": 3}),
        ("python -m sglang.launch_server --tp 4 &\n" + TRAIN + "a.b=1", {"a.b": 1}),
        ("swift deploy --model t &\nNPROC_PER_NODE=2 swift rlhf --rlhf_type gkd", {"--rlhf_type": "gkd"}),
        ("python prepare.py --local_dir x\n" + TRAIN + "a.b=1 a.c=2 a.d=3", {"a.b": 1, "a.c": 2, "a.d": 3}),
        ("--lr 1e-6\n--tp 2\n", {"--lr": 1e-6, "--tp": 2}),
        (
            "N=1\nif [ $X = 2 ]; then\n N=2\nelse\n M=3\nfi\nK=4\n" + TRAIN + "a.b=$N a.c=$M a.d=$K",
            {"a.b": "$N", "a.c": 3, "a.d": 4},
        ),
        (
            "if a; then N=1; else N=2; fi\ncase $X in\n a) M=1 ;;\n b) M=2 ;;\nesac\n" + TRAIN + "a.b=$N a.c=$M",
            {"a.b": "$N", "a.c": "$M"},
        ),
        ("if a; then\n N=1\nfi\nN=3\nM=x\nif b; then M=x; fi\n" + TRAIN + "a.b=$N a.c=$M", {"a.b": 3, "a.c": "x"}),
        (
            "A=(a.b=1)\nB=(b.b=1)\nif a; then\n A=(a.b=2)\n B+=(b.c=2)\nfi\n" + TRAIN + '"${A[@]}" "${B[@]}"',
            {"--A[@]": True, "b.b": 1, "b.c": 2},
        ),
        (
            'N=1\n[ -n "$A" ] && N=2\n[ b ] && M=1 || M=2\ncd /x && K=4\n' + TRAIN + "a.b=$N a.c=$M a.d=$K",
            OPEN | {"a.d": 4},
        ),
        ("N=1\nM=1\nf() {\n N=2\n}\nfunction g { M=2; }\nK=4\n" + TRAIN + "a.b=$N a.c=$M a.d=$K", OPEN | {"a.d": 4}),
        ("A=(--lr 1)\na && A=(--lr 2)\npython train.py ${A[@]} --tp 2", {"--A[@]": True, "--tp": 2}),
        ("A='--lr 1'\nif a; then\n A='--lr 2'\nfi\npython train.py $A --tp 2", {"--A[@]": True, "--tp": 2}),
        ("source common.sh\n" + TRAIN + '"${COMMON[@]}" a.b=1 "$@"', {"--COMMON[@]": True, "a.b": 1}),
    ],
)
def test_a_shell_script_is_read_as_a_shell_reads_it(script: str, expected: dict[str, Any], tmp_path: Path) -> None:
    """Fails if a value of a script is not what its command gets, or a setting of another command is taken."""
    assert settings(tmp_path, script) == expected


def test_a_script_with_two_training_commands_is_refused(tmp_path: Path) -> None:
    """Fails if the settings of two runs are mixed."""
    run = TRAIN + "a.b=1 a.c=2 a.d=3 a.e=4\n"
    with refuses("FILE", str(tmp_path / "run.sh")):
        settings(tmp_path, run + run.replace("=1", "=2"))


def test_a_variable_before_the_command_is_a_setting_where_a_dialect_has_it(tmp_path: Path) -> None:
    """Fails if the number of processes, which ms-swift reads from the environment, is lost."""
    file = tmp_path / "run.sh"
    file.write_text("NPROC_PER_NODE=4 swift rlhf --rlhf_type gkd --lmbda 0.5")
    old = read_file(file, {})
    assert old.of(find_dialect("", old))["NPROC_PER_NODE"] == 4


def test_base_files_are_read_before_the_file(tmp_path: Path) -> None:
    """Fails if `defaults` of a NeMo-RL file are ignored, or win over the file."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "a.yaml").write_text("policy: {lr: 1, size: 4, half: '${div:${policy.size},2}'}\n")
    (tmp_path / "b.yaml").write_text("defaults: base/a.yaml\npolicy: {lr: 2}\n")
    (tmp_path / "c.yaml").write_text("defaults: [b.yaml]\npolicy: {size: '${mul:3,4}'}\n")
    assert read_file(tmp_path / "c.yaml", {}).settings == {"policy.lr": 2, "policy.size": 12, "policy.half": 6}
    (tmp_path / "base" / "a.yaml").unlink()
    for base, missing in ((None, "base/a.yaml"), ("defaults: c.yaml\n", "c.yaml")):
        if base:
            (tmp_path / "b.yaml").write_text(base)
        with pytest.raises(ConfigError) as caught:
            read_file(tmp_path / "c.yaml", {})
        assert str(tmp_path / missing) in caught.value.problem


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_dialect_is_found(name: str, tmp_path: Path) -> None:
    """Fails if a file of a system is read as another one's, or cannot be told apart from it."""
    file = tmp_path / EXAMPLES[name][0]
    file.write_text(EXAMPLES[name][1])
    old = read_file(file, settings_of(FLAGS.get(name, [])).settings)
    for asked in ("", dialects()[name].system):
        assert find_dialect(asked, old).title == dialects()[name].title


@pytest.mark.parametrize(
    ("asked", "words", "named"),
    [
        ("", "--learning_rate 1e-6", "none of"),
        ("verl", "data.train_batch_size=8", "verl_gkd, verl_main"),
        ("trl", "--beta 0.5 --learning_rate 1e-6", "trl_gkd"),
        ("nowhere", "--beta 0.5", "not a known system"),
    ],
)
def test_a_dialect_is_never_guessed(asked: str, words: str, named: str) -> None:
    """Fails if settings that several dialects have, or none, are read as one of them, with its defaults."""
    with pytest.raises(ConfigError) as caught:
        find_dialect(asked, settings_of(words.split()))
    assert caught.value.key == "SYSTEM" and named in caught.value.problem


def test_a_named_dialect_is_taken(tmp_path: Path) -> None:
    """Fails if a dialect that the user names is not the one whose defaults are written."""
    out = tmp_path / "out.yaml"
    assert main(["trl_gkd", "--output", str(out), "--", "--beta", "0.5", "--num_processes", "1"]) == 0
    assert "read as TRL gkd" in out.read_text().splitlines()[0]


def test_files_are_utf_8_whatever_the_locale_is(tmp_path: Path) -> None:
    """Fails if a text of a file becomes other letters, or the tool a traceback, in a locale that is not UTF-8."""
    flags = "--use-opd --hf-checkpoint /models/Übung --rollout-batch-size 16 --n-samples-per-prompt 4"
    (tmp_path / "run.sh").write_text(f"python3 train.py {flags}\n", encoding="utf-8")
    command = [sys.executable, "-m", "gkd.tools.migrate", "slime", "run.sh", "--output", "mine.yaml"]
    locale = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | locale, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert yaml_values(tmp_path / "mine.yaml")["model.path"] == "/models/Übung"

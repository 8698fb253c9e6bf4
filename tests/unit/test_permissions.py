"""Paths that the user of a command may not read or write, as in a container that does not run as root."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gkd.config.schema_sections import DataConfig
from gkd.errors import ConfigError
from gkd.main_gkd import main
from gkd.preflight.teacher import template_warning
from gkd.run.open import check_run_folder
from gkd.scoring.teacher.info import TeacherInfo
from teacher_server.__main__ import main as teacher_server
from tests.container import without_rights
from tests.e2e.conftest import save_model
from tests.unit.chat_templates import tokenizer
from tests.unit.test_run_folder import config as run_config


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Make a model and a file of prompts in a folder that every user may read; pytest's folders are of one user."""
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        save_model(made / "model", seed=0, layers=1, n_vocab=64)
        (made / "data").mkdir()
        (made / "data" / "prompts.jsonl").write_text('{"prompt": "w2 w3"}\n')
        lines = (f"model: {{path: {made}/model}}", f"data: {{train_files: [{made}/data/prompts.jsonl]}}")
        (made / "x.yaml").write_text("\n".join(lines))
        for path in (made, *made.rglob("*")):
            path.chmod(0o755)
        yield made


def show_prompts(folder: Path) -> int:
    return main(["--config", str(folder / "x.yaml"), "--show-prompts", "1"])


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Take all permissions of a path from this process."""
    path.chmod(0)
    with without_rights():
        yield
    path.chmod(0o755)


@pytest.mark.parametrize("name", ["x.yaml", "data/prompts.jsonl", "model"])
def test_a_path_without_permission_is_named(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Fails if a file of another user ends a start with a traceback, or is called damaged or missing."""
    assert show_prompts(folder) == 0
    with locked(folder / name):
        assert show_prompts(folder) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("config error: ") and str(folder / name) in line and "permission" in line.lower()


@pytest.mark.parametrize("name", ["model/config.json", "model/model.safetensors"])
def test_a_teacher_of_another_user_is_named(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Fails if the teacher server calls an intact model damaged, because its user may not read it."""
    options = ("--device", "cpu", "--port", "0", "--model")
    assert teacher_server([*options, str(folder / "data")]) == 2  # imports what the next call needs
    with locked(folder / name):
        assert teacher_server([*options, str(folder / "model")]) == 2
    other, line = capsys.readouterr().err.splitlines()
    assert str(folder / name) in line and "permission" in line.lower() and "permission" not in other.lower()


def test_a_run_folder_that_cannot_be_written_is_refused_first(folder: Path) -> None:
    """Fails if a run folder below a folder of another user is a traceback, or is refused after the prompts are read."""
    for run_dir in (folder / "data" / "run", folder / "data"):
        with locked(folder / "data"), pytest.raises(ConfigError) as caught:
            check_run_folder(run_config(run_dir))
        assert caught.value.key == "trainer.run_dir" and str(folder / "data") in caught.value.problem
    assert check_run_folder(run_config(folder / "data" / "run")) is None


def test_a_teacher_on_another_host_may_have_a_path_that_is_closed_here(folder: Path) -> None:
    """Fails if a run needs permissions for a path of the teacher's host."""
    info = TeacherInfo(
        "", "t", str(folder / "data" / "t"), "", 1, 1, "", 1, 1, 1, "hf", "cpu", "float32", True, "f", "Q"
    )
    with locked(folder / "data"):
        assert repr("Q") in template_warning(DataConfig(), tokenizer(None), info, trust_remote_code=False)

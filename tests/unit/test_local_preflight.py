"""Checks of a local teacher's folder before the start."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gkd.config.load import load_config
from gkd.preflight.meta_models import local_teacher
from gkd.scoring.teacher.info import TeacherInfo
from teacher_server.wire.fingerprint import tokenizer_fingerprint
from tests.dist.hf_models import make_model_folder
from tests.dist.megatron_reference import VOCAB, make_hf_folder
from tests.random_models import word_tokenizer
from tests.refusals import refuses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_hf_folder(tmp_path_factory.mktemp("teacher") / "qwen3", "qwen3")
    word_tokenizer(VOCAB).save_pretrained(folder)
    return folder


def look(path: Path | str, *overrides: str) -> TeacherInfo:
    settings = ["teacher.backend=local", f"teacher.path={path}", "trainer.n_gpus_per_node=2", *overrides]
    return local_teacher(load_config(None, settings), "cpu")


def test_the_description_is_that_of_a_server(folder: Path) -> None:
    """Fails if the checks of teacher and student use other sizes than those of the folder."""
    info = look(folder)
    assert (info.vocab_size, info.hidden_size, info.max_tokens, info.n_workers) == (VOCAB, 32, 64, 2)
    assert (info.model_name, info.model_path) == ("qwen3", str(folder.resolve()))
    assert info.tokenizer_fingerprint == tokenizer_fingerprint({f"w{i}": i for i in range(VOCAB)})


def test_another_model_has_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    """Fails if a run could be resumed with another teacher's weights under the old name."""
    other = make_hf_folder(tmp_path / "qwen3", "qwen3", n_layers=1)
    shutil.copy(folder / "tokenizer.json", other)
    shutil.copy(folder / "tokenizer_config.json", other)
    assert look(other).fingerprint != look(folder).fingerprint == look(folder).fingerprint


def test_what_cannot_be_packed_or_is_not_there(folder: Path, tmp_path: Path) -> None:
    """Fails if a teacher that does not support packed sequences is refused only on the ranks."""
    folder = shutil.copytree(folder, tmp_path / "without_tokenizer")
    with refuses("actor.packing"):
        look(make_model_folder(tmp_path / "falcon", "falcon"))
    with refuses("teacher.path"):
        look(make_model_folder(tmp_path / "opt", "opt"))
    (folder / "tokenizer.json").unlink()
    with refuses("teacher.path", str(folder)) as caught:
        look(folder)
    assert "tokenizer" in caught.value.problem
    with refuses("teacher.path", str(tmp_path / "nothing")):
        look(tmp_path / "nothing")

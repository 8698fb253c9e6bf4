"""Compare the tokens of a student with those of a teacher whose folder is, or is not, on this host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gkd.config.load import load_config
from gkd.config.routes import Route
from gkd.errors import ConfigError
from gkd.preflight.same_tokens import token_difference
from gkd.preflight.teacher import check_teacher
from gkd.teacher.info import TeacherInfo
from teacher_server.wire.fingerprint import tokenizer_fingerprint

OWN = {f"w{i}": i for i in range(10)}
N_ROWS = 12  # of the student: two padding rows


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (OWN, ()),
        (OWN | {"think": 12, "call": 13}, ()),
        (OWN | {"think": 11}, ("only the other model has 'think' (11)",)),
        ({token: i for token, i in OWN.items() if i < 9}, ("only the student has 'w9' (9)",)),
        (OWN | {"w1": 2, "w2": 1}, ("other ids for 'w1' (1 and 2), 'w2' (2 and 1)",)),
        ({f"x{i}": i for i in range(10)}, ("only the student has 'w0' (0)", "and 6 more", "'x3' (3)")),
        (OWN | {"w9": 12}, ("only the student has 'w9' (9)",)),
    ],
)
def test_the_tokens_that_differ_are_named(other: dict[str, int], words: tuple[str, ...]) -> None:
    """Fails if a teacher scores other tokens than the student generated, or a mask makes a difference."""
    text = token_difference(OWN, other, N_ROWS)
    assert bool(text) == bool(words) and all(word in text for word in words), text


def _tokenizer(vocab: dict[str, int]) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="w0")))


@pytest.mark.parametrize(
    ("extra", "is_here", "words"),
    [
        ({"think": 12}, True, ""),
        ({"think": 12}, False, "not on this host"),
        ({"think": 11}, True, r"'think' \(11\).*ids from 12 on"),
    ],
)
def test_a_teacher_with_more_tokens(tmp_path: Path, extra: dict[str, int], is_here: bool, words: str) -> None:
    """Fails if a teacher whose additional tokens the student never sees is refused, or one is accepted unseen."""
    theirs = _tokenizer(OWN | extra)
    if is_here:
        theirs.save_pretrained(tmp_path)
    fingerprint = tokenizer_fingerprint(theirs.get_vocab())
    info = TeacherInfo("t", "m", str(tmp_path), "f", 16, 4, fingerprint, 9999, 1, 1, "hf", "cpu", "float32", 3)
    config = load_config(None, ["data.train_files=[x]", "model.path=m", "trainer.run_dir=r", "teacher.topk=2"])
    route = Route("", config.teacher)
    if not words:
        assert check_teacher(config, route, info, _tokenizer(OWN), N_ROWS) == N_ROWS
        words = "not on this host"  # a folder whose tokenizer has been replaced
        info = replace(info, tokenizer_fingerprint="0" * 32)
    with pytest.raises(ConfigError, match=words) as caught:
        check_teacher(config, route, info, _tokenizer(OWN), N_ROWS)
    assert caught.value.key == "model.path"


def test_a_student_with_more_rows_learns_how_to_cut_them() -> None:
    """Fails if the fix does not say which program removes the padding rows."""
    fingerprint = tokenizer_fingerprint(OWN)
    info = TeacherInfo("t", "m", "p", "f", 11, 4, fingerprint, 9999, 1, 1, "hf", "cpu", "float32", 3)
    config = load_config(None, ["data.train_files=[x]", "model.path=m", "trainer.run_dir=r", "teacher.topk=2"])
    with pytest.raises(ConfigError, match=r"12 token ids.*only 11.*resize_token_embeddings\(11\)"):
        check_teacher(config, Route("", config.teacher), info, _tokenizer(OWN), N_ROWS)

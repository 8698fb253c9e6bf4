"""Compare the tokens of a student with those of a teacher whose folder is, or is not, on this host."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gkd.config.load import load_config
from gkd.config.schema import Route
from gkd.config.schema_rollout import MOST_MASKED
from gkd.errors import ConfigError
from gkd.preflight.teacher import check_masked, check_teacher, shared_ids
from gkd.scoring.teacher.info import TeacherInfo
from gkd.types import Prompt
from teacher_server.wire.fingerprint import tokenizer_fingerprint

OWN = {f"w{i}": i for i in range(10)}
N_ROWS = 12  # of the student: two padding rows


@pytest.mark.parametrize(
    ("other", "n_ids", "words"),
    [
        (OWN, 12, ()),
        (OWN | {"think": 12, "call": 13}, 12, ()),
        (OWN | {"think": 11}, 11, ()),
        ({token: i for token, i in OWN.items() if i < 9}, 9, ()),
        ({token: i for token, i in OWN.items() if i != 4}, 4, ("only the student has 'w4' (4)",)),
        ({token: i for token, i in OWN.items() if i < 9} | {"x": 9}, 9, ("has 'w9' (9)", "other model has 'x' (9)")),
        (OWN | {"w1": 2, "w2": 1}, 12, ("other ids for 'w1' (1 and 2), 'w2' (2 and 1)",)),
        ({f"x{i}": i for i in range(10)}, 0, ("only the student has 'w0' (0)", "and 6 more", "'x3' (3)")),
        (OWN | {"w9": 12}, 12, ("other ids for 'w9' (9 and 12)",)),
    ],
)
def test_the_tokens_that_differ_are_named(other: dict[str, int], n_ids: int, words: tuple[str, ...]) -> None:
    """Fails if a teacher scores other tokens than the student generated, or more ids are masked than must be."""
    found, text = shared_ids(OWN, other, N_ROWS, 14)
    assert bool(text) == bool(words) and all(word in text for word in words), text
    assert words or found == n_ids


@pytest.mark.parametrize(
    ("eos_ids", "prompt", "words"),
    [
        ([1], Prompt(0, np.array([1, 8])), ""),
        ([1, 9], Prompt(0, np.array([1])), "token 9"),
        ([1], Prompt(3, np.array([1, 9])), "row 3 has the token id 9"),
        ([1], Prompt(4, np.array([1]), response_ids=np.array([2, 9])), "row 4"),
    ],
)
def test_masked_tokens_are_refused_in_the_data(eos_ids: list[int], prompt: Prompt, words: str) -> None:
    """Fails if a run asks for a token that it never generates, or that the teacher cannot read."""
    config = load_config(None, ["model.path=m"])
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_masked(config, 9, eos_ids, [prompt], n_masked=MOST_MASKED)
    with pytest.raises(ConfigError, match="2049 rows"):
        check_masked(config, 9, eos_ids, [prompt], n_masked=MOST_MASKED + 1)


def _tokenizer(vocab: dict[str, int]) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="w0")))


@pytest.mark.parametrize(
    ("theirs", "n_rows", "is_here", "n_ids", "words"),
    [
        (OWN | {"think": 12}, 16, True, 12, ""),
        (OWN | {"think": 12}, 16, False, 0, "not on this host"),
        (OWN | {"w1": 2, "w2": 1}, 16, True, 0, r"'w1' \(1 and 2\).*highest ids"),
        (OWN, 11, False, 11, ""),  # it is padded to fewer rows than the student
    ],
)
def test_a_teacher_with_other_tokens(
    tmp_path: Path, theirs: dict[str, int], n_rows: int, is_here: bool, n_ids: int, words: str
) -> None:
    """Fails if one with the same tokens and more is refused, or one is accepted whose tokens have not been compared; or
    if a student that is padded to more rows than the teacher is refused, or its rows count.
    """
    tokenizer = _tokenizer(theirs)
    if is_here:
        tokenizer.save_pretrained(tmp_path)
    fingerprint = tokenizer_fingerprint(tokenizer.get_vocab())
    info = TeacherInfo("t", "m", str(tmp_path), "f", n_rows, 4, fingerprint, 9999, 1, 1, "hf", "cpu", "float32", True)
    config = load_config(None, ["data.train_files=[x]", "model.path=m", "trainer.run_dir=r", "teacher.topk=2"])
    route = Route("", config.teacher)
    if not words:
        assert check_teacher(config, route, info, _tokenizer(OWN), N_ROWS) == n_ids
        words = "not on this host"  # a folder whose tokenizer has been replaced
        info = replace(info, tokenizer_fingerprint="0" * 32)
    with pytest.raises(ConfigError, match=words) as caught:
        check_teacher(config, route, info, _tokenizer(OWN), N_ROWS)
    assert caught.value.key == "model.path"

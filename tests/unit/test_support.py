"""Settings of distill.support, checks before the start, and the rollout's own ids on their way to the teacher."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from examples.quickstart.addition import build_tokenizer
from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.data.batching import trained_on
from gkd.preflight.teacher import check_teacher
from gkd.rollout.vllm.sampling import read_logprobs
from gkd.scoring.teacher.info import TeacherInfo
from teacher_server.wire.fingerprint import tokenizer_fingerprint
from teacher_server.wire.protocol import MAX_ENTRIES
from tests.refusals import refuses
from tests.unit.test_rollout_file import rollout

BASE = ["data.train_files=[x]", "model.path=m", "trainer.run_dir=r", "eval.metric=none", "teacher.topk=2"]


def test_a_reply_that_is_too_large_is_refused_before_the_start() -> None:
    """Fails if a run ends at its first long response, because no request may ask for that many entries."""
    tokenizer = build_tokenizer()
    own = tokenizer_fingerprint(tokenizer.get_vocab())
    info = TeacherInfo("t", "m", "p", "f", 10, 4, own, 9999, 1, 1, "hf", "cpu", "float32", True)
    for length, fits in ((MAX_ENTRIES // 4, True), (MAX_ENTRIES // 4 + 1, False)):
        config = load_config(None, [*BASE, "teacher.topk=4", f"data.max_response_length={length}"])
        (route,), long = config.derived.routes, replace(info, max_tokens=2 * MAX_ENTRIES)
        with nullcontext() if fits else refuses("teacher.topk"):
            check_teacher(config, route, long, tokenizer, 9)


@pytest.mark.parametrize(("support", "n"), [("teacher", 0), ("student", 7), ("union", 3)])
def test_the_student_names_all_or_half_of_the_ids(support: str, n: int) -> None:
    """Fails if the engines return more ids than the list has room for, or none."""
    assert check_config(load_config(None, [*BASE, "teacher.topk=7", f"distill.support={support}"])).n_student_ids == n


def test_skipped_tokens_take_their_ids_along() -> None:
    """Fails if the ids of a response are those of other tokens after the first ones are skipped."""
    one = rollout(1)
    ids = np.arange(3 * len(one.response_ids), dtype=np.int32).reshape(-1, 3)
    (cut,), _ = trained_on([replace(one, top_ids=ids)], None, 1)
    np.testing.assert_array_equal(cut.top_ids, ids[1:])


def test_logprobs_of_an_engine_are_split_into_sampled_and_top() -> None:
    """Fails if a position with more or fewer entries shifts those of the next one."""
    values = [-0.5, -0.1, -0.2, -0.3, -0.3, -0.9, -2.0, -1.5, -1.0, -1.2]
    flat = FlatLogprobs([0, 3, 7], values, [9, 1, 2, 4, 4, 5, 6, 7, 8, 3])
    logprobs, ids = read_logprobs(flat, 2)
    np.testing.assert_array_equal(logprobs, np.array([-0.5, -0.3, -1.5], np.float32))
    assert ids.tolist() == [[1, 2], [4, 5], [8, 3]]
    assert read_logprobs(flat, 0)[1] is None


class FlatLogprobs(NamedTuple):
    """The part of vLLM's class that is read."""

    start_indices: list[int]
    logprobs: list[float]
    token_ids: list[int]

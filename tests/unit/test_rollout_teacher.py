"""Settings of teacher.backend: rollout, the engines' student as the teacher: what is refused, and what follows."""

from __future__ import annotations

import numpy as np

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.rollout.vllm.self_scoring import _teacher_scores

MINIMAL = ["data.train_files=[a.jsonl]", "model.path=m", "trainer.run_dir=r", "teacher.backend=rollout"]
OWN_PROMPT = ["teacher.prompt_template=Be brief. {prompt}"]


def test_engines_have_room_for_the_teachers_prompt() -> None:
    """Fails if a sequence that the settings allow is longer than the engine, which generates one token after it."""
    lengths = ["data.max_prompt_length=10", "data.max_response_length=5", "data.max_teacher_prompt_length=20"]
    derived = check_config(load_config(None, [*MINIMAL, *OWN_PROMPT, *lengths]))
    assert (derived.max_engine_length, derived.teacher_pool) == (26, "rollout")
    assert check_config(load_config(None, [*MINIMAL[:-1], *OWN_PROMPT, *lengths])).max_engine_length == 15


def test_scores_of_the_sampled_token_and_of_the_list_are_separate() -> None:
    """Fails if the sampled token, which the engine returns first, is taken for an entry of the list."""
    ids, probs = np.array([[7, 1, 2], [3, 3, 9]], np.int32), np.array([[0.1, 0.5, 0.25], [0.5, 0.5, 0.5]])
    scores = _teacher_scores(ids, np.log(probs).astype(np.float32), with_sampled=True)
    assert scores.topk.ids.tolist() == [[1, 2], [3, 9]]
    np.testing.assert_allclose(scores.topk.tail, [0.25, 0.0], atol=1e-6)
    np.testing.assert_allclose(np.exp(scores.sampled_logprobs), [0.1, 0.5], rtol=1e-6)
    alone = _teacher_scores(ids[:, :1], np.log(probs[:, :1]).astype(np.float32), with_sampled=True)
    assert alone.topk is None and alone.sampled_logprobs is not None
    assert _teacher_scores(ids, np.log(probs).astype(np.float32), with_sampled=False).sampled_logprobs is None

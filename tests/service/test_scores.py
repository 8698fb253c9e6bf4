"""The description of a real server, a wide vocabulary, and calls that are abandoned.

Scores of every signal: test_endpoint_signals.py, and test_engine_contract.py, which has the limits of a model, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gkd.types import Rollout
from teacher_server.engines.base import ScoreParams
from teacher_server.wire.table import TopKTable
from tests.device import rank_device
from tests.service.conftest import TINY_VOCAB, WIDE_VOCAB
from tests.service.engine_host import plain_logits, plain_logprobs, sequences_of
from tests.service.harness import ServerProcess, connect, random_rollouts, score

pytestmark = pytest.mark.service


def max_error(
    model: Path,
    rollouts: Sequence[Rollout],
    scores: dict[int, TopKTable],
    *,
    relative: bool = False,
) -> float:
    """Return the largest difference to the reference at the ids of the reply, and to the reference's own top k.

    In nats, or with `relative` as a fraction of max(1, |logprob|), because float16 has 11 significant bits.
    """
    worst = 0.0
    plain = plain_logits(model, sequences_of(rollouts))
    for index, got in scores.items():
        expected = plain_logprobs(plain[index], ScoreParams("topk"))
        at_ids = np.take_along_axis(expected, got.ids.astype(np.int64), axis=1)
        largest = -np.sort(-expected, axis=1)[:, : got.ids.shape[1]]
        scale = np.maximum(1.0, np.abs(largest)) if relative else 1.0
        for reference in (at_ids, largest):
            worst = max(worst, float((np.abs(reference - got.logprobs) / scale).max()))
    return worst


@pytest.mark.parametrize("wire,bound", [("fp32", 1e-4), ("fp16", 1e-3)])
def test_wide_vocabulary(wide_server: ServerProcess, wide_model: Path, wire: str, bound: float) -> None:
    """Fails if the planes change ids above 255 or 32767, or chunks of rows are misplaced."""
    rollouts = random_rollouts(4, WIDE_VOCAB, seed=2)
    with connect(wide_server.port, wire=wire, k=64) as teacher:
        scores = dict(score(teacher, rollouts))
    assert max_error(wide_model, rollouts, scores, relative=wire == "fp16") <= bound
    assert max(int(table.ids.max()) for table in scores.values()) > 32767 - 1000


def test_info_describes_the_model(tiny_server: ServerProcess, tiny_model: Path) -> None:
    """Fails if the description lacks what a trainer checks before the first batch: vocabulary, limits, weights."""
    with connect(tiny_server.port) as teacher:
        info = teacher.info()
    assert (info.model_name, info.vocab_size, info.max_tokens) == ("tiny", TINY_VOCAB, 1024)
    assert (info.n_workers, info.engine, info.device) == (1, "hf", str(rank_device()))
    assert info.is_server
    assert len(info.fingerprint) == 32 and info.tokenizer_fingerprint == ""


def test_closing_a_score_early_does_not_affect_other_calls(tiny_server: ServerProcess, tiny_model: Path) -> None:
    """Fails if late replies of an abandoned call are used for the next call, or for a concurrent one."""
    with connect(tiny_server.port, n_vocab=TINY_VOCAB) as teacher:
        abandoned = score(teacher, random_rollouts(16, TINY_VOCAB, seed=5))
        next(abandoned)
        concurrent = random_rollouts(1, TINY_VOCAB, seed=7)
        assert max_error(tiny_model, concurrent, dict(score(teacher, concurrent))) <= 1e-4
        abandoned.close()  # type: ignore[attr-defined]
        rollouts = random_rollouts(6, TINY_VOCAB, seed=6)
        scores = dict(score(teacher, rollouts))
    assert max_error(tiny_model, rollouts, scores) <= 1e-4

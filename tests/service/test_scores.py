"""The description of a real server, and a wide vocabulary.

Scores of every signal: test_endpoint_signals.py, and test_engine_contract.py, which has the limits of a model, too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from teacher_server.engines.base import ScoreParams
from tests.device import rank_device
from tests.service.conftest import TINY_VOCAB, WIDE_VOCAB
from tests.service.engine_host import plain_logits, plain_logprobs, sequences_of
from tests.service.harness import ServerProcess, connect, random_rollouts, score

pytestmark = pytest.mark.service


# float16 has 11 significant bits.
@pytest.mark.parametrize(("wire", "rtol", "atol"), [("fp32", 0.0, 1e-4), ("fp16", 5e-4, 5e-4)])
def test_wide_vocabulary(wide_server: ServerProcess, wide_model: Path, wire: str, rtol: float, atol: float) -> None:
    """Fails if the planes change ids above 255 or 32767, or chunks of rows are misplaced."""
    rollouts = random_rollouts(4, WIDE_VOCAB, seed=2)
    with connect(wide_server.port, wire=wire, k=64) as teacher:
        scores = dict(score(teacher, rollouts))
    for index, logits in enumerate(plain_logits(wide_model, sequences_of(rollouts))):
        expected = plain_logprobs(logits, ScoreParams("topk"))
        found = scores[index]
        at_ids = np.take_along_axis(expected, found.ids.astype(np.int64), axis=1)
        for reference in (at_ids, -np.sort(-expected, axis=1)[:, :64]):
            np.testing.assert_allclose(found.logprobs, reference, rtol=rtol, atol=atol)
    assert max(int(table.ids.max()) for table in scores.values()) > 32767 - 1000


def test_info_describes_the_model(tiny_server: ServerProcess, tiny_model: Path) -> None:
    """Fails if the description lacks what a trainer checks before the first batch: vocabulary, limits, weights."""
    with connect(tiny_server.port) as teacher:
        info = teacher.info()
    assert (info.model_name, info.vocab_size, info.max_tokens) == ("tiny", TINY_VOCAB, 1024)
    assert (info.n_workers, info.engine, info.device) == (1, "hf", str(rank_device()))
    assert info.is_server
    assert len(info.fingerprint) == 32 and info.tokenizer_fingerprint == ""

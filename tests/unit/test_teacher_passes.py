"""Grouping of a batch into forward passes of the Transformers engine on CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from teacher_server.engines.base import ScoreParams, TokenSequence
from teacher_server.engines.hf import HfEngine, _passes
from teacher_server.engines.load import EngineSettings
from tests.dist.megatron_reference import make_hf_folder


@pytest.mark.parametrize("limit", [1, 64, 512, 100_000])
def test_passes_are_within_the_limit_and_lose_nothing(limit: int) -> None:
    """Fails if a sequence is computed twice or never, or short sequences are padded to long ones beyond the limit."""
    lengths = np.random.default_rng(0).geometric(1 / 40, 300).tolist()
    passes = list(_passes(dict(enumerate(lengths)), lambda longest: limit // longest))
    assert sorted(i for group in passes for i in group) == list(range(300))
    assert all(len(group) == 1 or len(group) * max(lengths[i] for i in group) <= limit for group in passes)
    padded = sum(len(group) * max(lengths[i] for i in group) for group in passes)
    assert limit > 512 or padded <= 1.25 * sum(lengths)


def test_a_batch_returns_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a teacher on a CPU keeps the freed activations of each batch: 0.2 GiB in the example."""
    trims: list[int] = []
    library = SimpleNamespace(CDLL=lambda name: SimpleNamespace(malloc_trim=trims.append))
    monkeypatch.setattr("teacher_server.engines.hf.ctypes", library)
    make_hf_folder(tmp_path, "qwen3")
    engine = HfEngine(EngineSettings(model=str(tmp_path), max_tokens=16), dtype="float32", device="cpu")
    for n_batches in (1, 2):
        assert len(engine.score([TokenSequence(np.arange(6, dtype=np.int32), 2)], ScoreParams("topk", k=2))) == 1
        assert len(trims) == n_batches

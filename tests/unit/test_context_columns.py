"""Columns of context-parallel ranks, their loss rows and targets; the heads that ranks share; even groups; norms."""

from __future__ import annotations

from dataclasses import asdict
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.actor.common.step import total_norm
from gkd.data.batching import make_micro_batches
from gkd.data.collate import parts_of
from gkd.data.columns import Columns
from gkd.data.scatter import decode_indices, scatter_to_groups, work
from gkd.hf.model_dims import attention_length, check_context_split
from gkd.types import MicroBatch, ScoredChunk
from tests.refusals import refuses
from tests.rollout_chunks import chunk_of
from tests.unit.test_batching import make_rollout, make_scores
from tests.unit.test_gpu_examples import MODELS


def of_rank(rank: int, cp: int, multiple: int = 1) -> Columns:
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: cp)  # whose collectives are not used
    return Columns(group, multiple)


# (prompt tokens, response tokens, bits of the mask of own tokens) of each sequence
SEQUENCES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(0, 4095)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(1, 5), st.integers(1, 3), st.booleans(), st.booleans())
def test_the_ranks_of_a_group_have_each_column_row_and_target_once(
    lengths: list[tuple[int, int, int]], cp: int, multiple: int, packed: bool, lazy: bool
) -> None:
    """Fails if a token is computed twice or never, or a loss row gets another token, position or teacher's row."""
    rollouts = [make_rollout(i, n, r, sample=i, own=own & (1 << r) - 1) for i, (n, r, own) in enumerate(lengths)]
    made = make_micro_batches(rollouts, [make_scores(r) for r in rollouts], micro_batch_size=3, packed=packed)
    parts = [parts_of(made if lazy else list(made), of_rank(rank, cp, multiple)) for rank in range(cp)]
    for number, whole in enumerate(made):
        own: list[MicroBatch] = [batches[number] for batches in parts]
        length = whole.tokens.shape[1]
        tokens = torch.cat([part.tokens for part in own], dim=1)
        assert torch.equal(tokens[:, :length], whole.tokens) and tokens.shape[1] % (cp * multiple) == 0
        assert len({part.tokens.shape for part in own}) == 1, "an exchange between ranks has parts of one size"
        seen: list[torch.Tensor] = []
        for rank, part in enumerate(own):
            rows = of_rank(rank, cp, multiple).rows(whole)
            seen.append(rows)
            at = whole.loss_index[rows]
            assert torch.equal(part.tokens.flatten()[part.loss_index], whole.tokens.flatten()[at])
            assert torch.equal(part.position_ids.flatten()[part.loss_index], whole.position_ids.flatten()[at])
            for name, wanted in asdict(whole.targets.rows(rows)).items():
                found = getattr(part.targets, name)
                assert found is wanted is None or torch.equal(found, wanted), name
            assert part.cu_seqlens is None or part.cu_seqlens[-1] == tokens.shape[1]
        assert sorted(torch.cat(seen).tolist()) == list(range(whole.n_loss_tokens))


@pytest.mark.parametrize(("cp", "heads", "kv_heads"), [(3, 8, 4), (8, 28, 4), (6, 12, 4), (4, 2, 2)])
def test_heads_that_cannot_be_shared_are_refused(cp: int, heads: int, kv_heads: int) -> None:
    """Fails if a rank gets a part of a head, or two ranks share a key head that their query heads do not have."""
    with refuses("actor.cp"):
        check_context_split(cp, [heads], [kv_heads])
    check_context_split(2, [heads], [kv_heads])


QWEN3_8B = MODELS["Qwen3-8B"]
QWEN3_30B_A3B = MODELS["Qwen3-30B-A3B-Instruct-2507"]


def test_the_length_at_which_attention_equals_the_linear_layers() -> None:
    """Fails if the sizes of a model give another balance of its groups; the numbers are those of its matrices."""
    matrices = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288
    assert attention_length(QWEN3_8B) == pytest.approx(matrices / 4096, rel=1e-3)
    active = 2048 * 128 * (2 * 32 + 2 * 4) + 2048 * 128 + 8 * 3 * 2048 * 768  # the router chooses 8 experts
    assert attention_length(QWEN3_30B_A3B) == pytest.approx(active / 4096, rel=1e-3)
    windows = ["sliding_attention", "sliding_attention", "full_attention"] * 12
    assert attention_length(QWEN3_8B | {"layer_types": windows}) == pytest.approx(3 * attention_length(QWEN3_8B))
    assert attention_length(QWEN3_8B | {"layer_types": ["linear_attention"] * 36}) == np.inf


@pytest.mark.parametrize(("model", "uneven"), [(QWEN3_8B, 1.05), (QWEN3_30B_A3B, 1.1)])
def test_groups_of_long_tailed_lengths_have_the_same_work(model: dict[str, Any], uneven: float) -> None:
    """Fails if the group with the longest responses still delays each step of a run with long contexts."""
    rng, length = np.random.default_rng(0), attention_length(model)
    heaviest: dict[float, list[float]] = {np.inf: [], length: []}
    for _ in range(10):
        n = (rng.lognormal(np.log(4000), 1.2, 512).clip(max=65536) + 500).astype(int)
        chunk = ScoredChunk(chunk_of(range(512), n, n_prompt=0), None, None, 0)
        for by, found in heaviest.items():
            chosen = [decode_indices(part.sequence_indices, 512) for (part,) in scatter_to_groups([chunk], 8, by)]
            totals = [int(work(n[at], length).sum()) for at in chosen]
            found.append(max(totals) / np.mean(totals))
    by_tokens, by_work = (float(np.mean(found)) for found in heaviest.values())
    assert by_tokens > uneven and by_work < 1.015


def time_of_a_step(n: np.ndarray, length: float, **way: Any) -> float:
    """Return the work of a step of 4 groups that wait for each other in each micro-batch, relative to an even split."""
    each = [ScoredChunk(chunk_of(range(i, len(n), 4), n[i::4], n_prompt=0, dp_rank=i), None, None, 0) for i in range(4)]
    groups = []
    for parts in scatter_to_groups(each, 4, **way):
        at = [(part.chunk.rollouts.dp_rank, decode_indices(part.sequence_indices, len(n) // 4)) for part in parts]
        own = [4 * j + i for i, positions in at for j in positions]
        rollouts = [make_rollout(0, 1, n[i] - 1, sample=i) for i in own]
        made = make_micro_batches(rollouts, None, micro_batch_size=1, max_tokens=66_048, packed=True)
        groups.append([int(work(batch.cu_seqlens.diff().numpy(), length).sum()) for batch in made])
    return sum(max(works) for works in zip_longest(*groups, fillvalue=0)) / (sum(map(sum, groups)) / 4)


@pytest.mark.parametrize(("model", "best"), [(QWEN3_8B, 1.07), (QWEN3_30B_A3B, 1.08)])
def test_ranks_in_step_have_micro_batches_of_the_same_work(model: dict[str, Any], best: float) -> None:
    """Fails if long responses of one group delay the micro-batches of all ranks although they could be spread."""
    rng, length = np.random.default_rng(0), attention_length(model)
    by_tokens, by_work, dealt = {}, {"attention_length": length}, {"attention_length": length, "in_step": True}
    times = []
    for _ in range(4):
        n = (rng.lognormal(np.log(4000), 1.2, 256).clip(max=65536) + 500).astype(int)
        times.append([time_of_a_step(n, length, **way) for way in (by_tokens, by_work, dealt)])
    tokens, worked, found = np.mean(times, axis=0)
    print(f"time of a step: by tokens {tokens:.3f}, by work {worked:.3f}, long ones dealt {found:.3f}")
    assert found < best < min(tokens, worked)


def test_the_norm_of_millions_of_numbers_is_exact() -> None:
    """Fails if the gradient of a large table is clipped by a norm with the rounding of a long float32 sum."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((2_000_003,), (30, 70), (0,), ())]
    exact = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    assert float(total_norm(tensors)) == pytest.approx(float(exact), rel=1e-8)

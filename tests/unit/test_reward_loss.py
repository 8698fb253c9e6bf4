"""Test the loss of rewards: values and gradients in float64, advantages, and the way of each to its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.loss_spec import LossSpec, LossTerm
from gkd.config.schema import Route
from gkd.config.schema_teacher import NORMALIZATIONS, RESPONSE_WEIGHTS, DistillConfig, TeacherConfig
from gkd.data.batching import make_micro_batches, trained_on
from gkd.data.chunks import chunk_sizes
from gkd.data.collate import route_counts, sequence_weights
from gkd.data.scatter import ChunkInputs, scatter_to_groups, select, with_numbers
from gkd.errors import DataError
from gkd.metrics.step import reward_numbers
from gkd.scoring.judged import advantages_of, response_factors
from gkd.scoring.judged import with_numbers as of_batch
from gkd.types import Rollout, ScoredChunk, TeacherScores
from teacher_server.wire.protocol import Signal
from tests.unit.loss_cases import Batch, train, written_out

ROUTE = Route("", TeacherConfig())
TERMS = (LossTerm("reverse_kl"), LossTerm("k2", 0.5), LossTerm("sft", 0.25))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("signal", ["topk", "logits", "hidden", "sampled"])
def test_the_loss_of_rewards_is_ppos(signal: Signal, fused: bool) -> None:
    """Fails if ratio, clip or sign are wrong, a path loses the term, or dataset tokens are trained on a reward."""
    batch = Batch()
    terms = TERMS[1:] if signal == "sampled" else TERMS
    spec = LossSpec(terms, reward_weight=0.7, reward_clip=(0.2, 0.3), temperature=0.8)
    logits = (batch.hidden @ batch.head.T).requires_grad_()
    values, scalar = written_out(spec, batch, signal, logits)
    (slopes,) = torch.autograd.grad(scalar, logits)
    targets = dataclasses.replace(batch.targets(signal, 0.8), advantages=batch.advantages)
    loss = batch.loss(spec, signal, 3)
    total, sums, *grads = train(loss, batch, targets, fused=fused)
    torch.testing.assert_close(total, values["total"].sum())
    torch.testing.assert_close(grads, [slopes @ batch.head, slopes.T @ batch.hidden])
    found = dict(zip(loss.report_names, sums.tolist(), strict=True))
    for name in ("reward", "reward_ratio", "reward_clipped"):
        assert found[name] == pytest.approx(float(values[name].sum())), name
    assert 0 < found["reward_clipped"] < int(batch.on_policy.sum()), "the case has both kinds"
    with pytest.raises(DataError):
        loss.check(batch.targets(signal, 0.8))
    with loss.evaluating(None):
        assert "reward" not in loss.report_names
        loss.check(batch.targets(signal, 0.8))


def test_a_run_with_weight_0_trains_as_one_without_rewards() -> None:
    """Fails if rewards that are only reported reach the training step."""
    base = ["data.train_files=[x]", "model.path=m", "trainer.run_dir=r", "rollout.n=2"]
    plain = check_config(load_config(None, base))
    reported = check_config(load_config(None, [*base, "reward.functions=[{path: length}]"]))
    trained = check_config(load_config(None, [*base, "reward.functions=[{path: length}]", "distill.reward_weight=1"]))
    assert plain.loss == reported.loss != trained.loss
    batch = [chunk([0, 1], [3.0, 4.0])]
    (parts,) = scatter_to_groups(batch, 1)
    assert not ChunkInputs.of_parts(parts, is_last_stage=True).numbers
    with_them = of_batch(batch, DistillConfig(advantage="none"), [1.0], 2)
    (parts,) = scatter_to_groups(with_them, 1)
    (found,) = ChunkInputs.of_args(*ChunkInputs.of_parts(parts, is_last_stage=True).to_args()).numbers
    assert np.frombuffer(found, "<f4").tolist() == [3.0, 1.0, 4.0, 1.0]


def rollout(index: int, n_tokens: int) -> Rollout:
    ids = np.arange(1, n_tokens + 1, dtype=np.int32)
    return Rollout(index // 3, index, ids[:1], ids, np.zeros(n_tokens, np.float32), (), "stop")


def chunk(indices: Sequence[int], rewards: Sequence[float] | None, group: int = 0) -> ScoredChunk:
    """Return a chunk whose handle is its rollouts; sequence i has i + 2 response tokens."""
    rollouts = [rollout(i, i + 2) for i in indices]
    sizes = dataclasses.replace(chunk_sizes(group, rollouts, 0), ref=rollouts, on_policy=rewards is not None)
    values = None if rewards is None else np.array(rewards)[:, None]
    return ScoredChunk(sizes, None, None, 0, rewards=values)


REWARDS = np.array([0.0, 1.0, 1.0, 5.0, 5.0, 5.0, -1.0, 0.25, 3.0])  # three responses to each of three prompts


@pytest.mark.parametrize("kind", ["group", "batch", "none"])
def test_advantages(kind: str) -> None:
    """Fails if an advantage differs from its formula in float64, for prompts in any order."""
    order = np.random.default_rng(0).permutation(9)
    found = advantages_of(REWARDS[order], order // 3, kind)
    expected = np.empty(9)
    for group in [range(0, 3), range(3, 6), range(6, 9)] if kind == "group" else [range(9)]:
        own = REWARDS[list(group)]
        expected[list(group)] = own if kind == "none" else (own - np.mean(own)) / (np.std(own) + 1e-6)
    np.testing.assert_allclose(found, expected[order], rtol=1e-12, atol=1e-12)
    assert kind != "group" or (found[order // 3 == 1] == 0).all(), "equal rewards have no advantage"


@pytest.mark.parametrize("kind", ["group", "batch", "none"])
def test_an_undecided_response_is_no_part_of_its_group(kind: str) -> None:
    """Fails if an unknown reward counts as 0, which is the best of a group whose rewards are costs, or moves the
    advantages of the others.
    """
    costs = np.array([-1.0, -3.0, np.nan, -2.0, np.nan, np.nan, -4.0, -4.0, -1.0])
    values = np.stack([costs, np.full(9, 7.0)], axis=1)
    parts = [[0, 2, 5], [1, 3, 4, 6, 7, 8]]
    batch = [dataclasses.replace(chunk(part, [0.0] * len(part)), rewards=values[part]) for part in parts]
    found = np.empty(9, np.float32)
    for part, each in zip(parts, of_batch(batch, DistillConfig(advantage=kind), [2.0, 1.0], 3), strict=True):
        found[part] = each.numbers[:, 0]
    decided = ~np.isnan(costs)
    expected = advantages_of(2 * costs[decided] + 7, (np.arange(9) // 3)[decided], kind)
    np.testing.assert_allclose(found[decided], expected, rtol=1e-6)
    assert (found[~decided] == 0).all()


@pytest.mark.parametrize("kind", ["group", "batch"])
def test_each_row_gets_the_advantage_of_its_sequence(kind: str) -> None:
    """Fails if means are those of a chunk or a data-parallel group, balancing mixes up sequences, or a sequence whose
    first tokens are skipped gets another one's advantage.
    """
    split = [[0, 4, 8], [1, 2], [3, 5, 6, 7]]
    batch = [chunk(split[0], REWARDS[split[0]], 0), chunk([27, 30], None, 1), chunk(split[1], REWARDS[split[1]], 1)]
    batch.append(chunk(split[2], REWARDS[split[2]], 0))
    expected = advantages_of(REWARDS, np.arange(9) // 3, kind).astype(np.float32)
    with_them = of_batch(batch, DistillConfig(advantage=kind), [1.0], 3)
    seen = []
    for parts in scatter_to_groups(with_them, 2):
        own, _ = select([part.sequence_indices for part in parts], [part.chunk.rollouts.ref for part in parts], None)
        rollouts = with_numbers(own, [part.numbers or b"" for part in parts])
        scores = [TeacherScores(sampled_logprobs=np.zeros(len(r.response_ids), np.float32)) for r in rollouts]
        rollouts, kept = trained_on(rollouts, scores, 2)
        for micro_batch in make_micro_batches(rollouts, kept, micro_batch_size=2):
            rows = iter(micro_batch.targets.advantages.tolist())
            for index, n_rows in micro_batch.samples:
                assert n_rows == index, "without the two first tokens"
                assert {next(rows) for _ in range(n_rows)} == {float(expected[index]) if index < 9 else 0.0}
                seen.append(index)
    assert sorted(seen) == [1, 2, 3, 4, 5, 6, 7, 8, 27, 30]
    with pytest.raises(DataError):
        with_numbers([rollout(0, 2)], [b""])


def test_response_factors() -> None:
    """Fails if a pass rate counts undecided responses or those of another prompt, or correct and wrong are mixed up."""
    rewards = np.array([2.0, 0.0, 1.0, np.nan, 2.0, 2.0, 0.5, 0.0])
    groups = np.array([4, 4, 4, 4, 1, 1, 7, 7])
    factors = {kind: response_factors(rewards, groups, kind, 2.0).tolist() for kind in RESPONSE_WEIGHTS}
    assert factors["none"] == [1] * 8
    assert factors["correct"] == [1, 0, 1, 0, 1, 1, 0, 0], "a reward of half the largest is correct"
    assert factors["wrong"] == [0, 1, 0, 0, 0, 0, 1, 1]
    assert factors["pass_rate"] == pytest.approx([2 / 9] * 4 + [0] * 4)


@pytest.mark.parametrize("normalize", NORMALIZATIONS[:2])
@pytest.mark.parametrize("kind", ["correct", "pass_rate"])
def test_factors_weigh_the_responses_of_a_batch(kind: str, normalize: str) -> None:
    """Fails if a response of factor 0 is trained on, the mean of the others' factors is not 1, dataset responses lose
    theirs, or factors replace those of distill.normalize.
    """
    rewards = np.array([1, 1, 0, 1, 0, 0, 0, 0, 0.0])  # pass rates 2/3, 1/3, 0
    batch = [chunk(range(0, 4), rewards[:4], 0), chunk([27, 30], None, 1), chunk(range(4, 9), rewards[4:], 1)]
    with_them = of_batch(batch, DistillConfig(response_weight=kind), [1.0], 3)
    rollouts: list[Rollout] = []
    for parts in scatter_to_groups(with_them, 2):
        own, _ = select([part.sequence_indices for part in parts], [part.chunk.rollouts.ref for part in parts], None)
        rollouts += trained_on(with_numbers(own, [part.numbers or b"" for part in parts]), None, 0)[0]
    kept = [0, 1, 3] if kind == "correct" else [0, 1, 2, 3, 4, 5]
    assert sorted(r.sample_index for r in rollouts) == [*kept, 27, 30]
    factors = {r.sample_index: r.factor for r in rollouts}
    assert [factors[i] for i in kept] == pytest.approx([1] * len(kept)), "p (1 - p) is 2/9 for both prompts"
    weights = sequence_weights(rollouts, route_counts(rollouts, 1), [ROUTE], normalize)
    plain = [dataclasses.replace(r, factor=1.0) for r in rollouts]
    np.testing.assert_allclose(weights, sequence_weights(plain, route_counts(plain, 1), [ROUTE], normalize))
    halved = [dataclasses.replace(r, factor=0.5) for r in rollouts]
    np.testing.assert_allclose(2 * sequence_weights(halved, route_counts(halved, 1), [ROUTE], normalize), weights)


def test_unequal_pass_rates_have_a_mean_of_1() -> None:
    """Fails if factors are normalized over a prompt or a chunk, or by responses that are not trained on."""
    rewards = np.array([1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1.0])  # of 4 responses each: 1/4, 1/2, 1
    batch = [chunk(range(0, 6), rewards[:6], 0), chunk(range(6, 12), rewards[6:], 1)]
    with_them = of_batch(batch, DistillConfig(response_weight="pass_rate"), [1.0], 4)
    found = np.concatenate([scored.numbers[:, 1] for scored in with_them])
    np.testing.assert_allclose(found, [6 / 7] * 4 + [8 / 7] * 4 + [0] * 4, rtol=1e-6)


def test_reward_numbers() -> None:
    """Fails if the metrics of rewards count dataset responses, mix up functions, or miss prompts without a signal; if a
    time-out raises or lowers the reward, or hides that a prompt has no gradient.
    """
    config = load_config(
        None, ["reward.functions=[{path: length}, {path: 'my.module:unit', weight: 2.0}]", "rollout.n=3"]
    )
    values = np.array([[-1, -5], [-1, -5], [np.nan, -5], [-4, np.nan], [-3, -5], [-2, -5], *[[np.nan, -5]] * 3])
    batch = [
        dataclasses.replace(chunk(part, [0.0] * len(part)), rewards=values[part])
        for part in ([0, 3, 8], [1, 2, 4, 5, 6, 7])
    ]
    total = np.array([-11, -11, -13, -12])
    expected = {
        "reward/mean": total.mean(),
        "reward/std": total.std(),
        "reward/flat_groups": 2 / 3,
        "reward/undecided": 5,
        "reward/length/mean": -11 / 5,
        "reward/unit/mean": -5,
    }
    assert reward_numbers([*batch, chunk([27], None)], config) == pytest.approx(expected)
    assert reward_numbers([chunk([27], None)], config) == {}
    nothing = reward_numbers([dataclasses.replace(chunk([6, 7], [0.0] * 2), rewards=values[6:8])], config)
    assert np.isnan([nothing["reward/mean"], nothing["reward/std"], nothing["reward/length/mean"]]).all()

"""Test which rollouts are judged, which values belong to which sequence, and the numbers of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.quickstart.addition import build_tokenizer
from gkd.config.load import load_config
from gkd.console.state import RunState
from gkd.data.chunks import part_of
from gkd.metrics.writer import read_metrics
from gkd.pipeline.evaluate import judged, pass_at_k, pass_at_numbers
from gkd.scoring.judged import JudgedScoring, init_judging, with_judges, workers_per_endpoint
from gkd.scoring.reward.judging import TRAINING, VALIDATION
from gkd.scoring.reward.worker import CUT, FAILED, UNKNOWN
from gkd.types import GreedyReport, PendingScores, Prompt, RolloutChunk, Sample, ScoredChunk, TrainStats
from tests.metric_keys import unlisted_keys
from tests.rollout_chunks import chunk_of
from tests.unit.local_ray import LocalRay, Method
from tests.unit.world import PROMPTS, World, make


def chunk(samples: Sequence[int], group: int = 0, *, on_policy: bool = True) -> RolloutChunk:
    return chunk_of(samples, 2, dp_rank=group, ref=list(samples), on_policy=on_policy)


class Endpoint:
    """Judges a sample index as its value and a tenth of it, undecided from 8 on. Its handles are the bytes."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls
        self.judge = Method(self._judge)

    def _judge(self, rollouts: Sequence[Any], prompts: str) -> bytes:
        self._calls.append((list(rollouts), prompts))
        if prompts == VALIDATION:
            return np.array([float(rollout.prompt_id) for rollout in rollouts]).tobytes()
        return np.array([[i, i / 10 if i < 8 else np.nan] for i in rollouts], np.float64).tobytes()


@pytest.fixture
def calls(local_ray: LocalRay) -> list[Any]:
    return []


def test_each_sequence_gets_its_own_values(calls: list[Any]) -> None:
    """Fails if a part of a chunk, as a stream takes them, gets the values of other sequences, a comparison that took
    too long counts as 0, a dataset response is judged, or judging starts only when the batch is collected.
    """
    scoring = JudgedScoring(World(), [Endpoint(calls), Endpoint(calls)], 9.0, TRAINING, 2)
    whole = scoring.submit(chunk([4, 5, 6, 8], group=1))
    other = scoring.submit(chunk([0, 1]))
    dataset = scoring.submit(chunk([9], on_policy=False))
    assert calls == [([4, 5, 6, 8], TRAINING), ([0, 1], TRAINING)]
    parts = [replace(whole, rollouts=part_of(whole.rollouts, at)) for at in ([1, 3], [0, 2])]
    batch = scoring.collect([parts[0], dataset, other, parts[1]])
    assert batch.pop(1).rewards is None
    expected = [[5, 0.5], [8, np.nan], [0, 0], [1, 0.1], [4, 0.4], [6, 0.6]]
    np.testing.assert_array_equal(np.concatenate([each.rewards for each in batch]), expected)


def test_restored_rollouts_are_judged_again(calls: list[Any], tmp_path: Path) -> None:
    """Fails if a resumed or replayed run trains without the rewards of its recorded rollouts."""
    scoring = JudgedScoring(World(), [Endpoint(calls)], 9.0, TRAINING, 2)
    scoring.record([scoring.submit(chunk([2, 3]))], tmp_path, "batch", scored=False)
    calls.clear()
    (restored,) = scoring.restore(tmp_path, "batch")
    assert calls == [([2, 3], TRAINING)]
    (scored,) = scoring.collect([restored])
    assert scored.rewards.tolist() == [[2, 0.2], [3, 0.3]]


@pytest.mark.parametrize(
    ("workers", "groups", "each"), [(1, 1, 1), (1, 4, 1), (4, 4, 1), (5, 4, 2), (6, 2, 3), (7, 2, 4)]
)
def test_each_group_gets_its_part_of_the_workers(
    calls: list[Any], tmp_path: Path, workers: int, groups: int, each: int
) -> None:
    """Fails if a run has fewer workers than `reward.workers`, or each group has all of them, or a group has none; or if
    an endpoint has to load the tokenizer, which imports torch.
    """
    build_tokenizer().save_pretrained(tmp_path)
    layout = (f"trainer.n_gpus_per_node={groups}", f"reward.workers={workers}", "reward.functions=[{path: length}]")
    config = load_config(None, [*layout, f"model.path={tmp_path}"])
    derived = config.derived
    assert derived.dp_size == groups and workers_per_endpoint(config, groups) == each
    started = Method(lambda *args: calls.append((args[0], args[1], args[-2])))
    init_judging(config, derived, [], [], [SimpleNamespace(init_judging=started)] * groups, 9.0)
    assert [(own[TRAINING], n) for own, n, _ in calls] == [(("length",), each)] * groups
    assert all(tokenizer.get_vocab() == build_tokenizer().get_vocab() for _, _, tokenizer in calls)


def sample(prompt_id: int) -> Sample:
    return Sample(prompt_id, [1], [2], "t", "a", False, "p")


def test_greedy_responses_are_judged_in_their_order(calls: list[Any]) -> None:
    """Fails if several groups' endpoints mix up the responses, or a route gets the accuracy of another one."""
    scoring = JudgedScoring(World(), [Endpoint(calls), Endpoint(calls)], 9.0, VALIDATION, 1)
    samples = [sample(i) for i in (0, 1, 1, 0, 1)]
    samples[1] = replace(samples[1], truncated=True)
    values = scoring.judge(samples)
    assert values == [0, 1, 1, 0, 1]
    assert [[r.finish_reason for r in rollouts] for rollouts, _ in calls] == [["stop"] * 3, ["length", "stop"]]
    report = judged(samples, values, {0: 1, 1: 0})
    assert (report.accuracy, report.by_route) == (0.6, {0: 1.0, 1: 0.0})
    assert [each.correct for each in report.samples] == [False, True, True, False, True]


def test_the_reasons_of_unknown_values_are_said_once(calls: list[Any], gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if the log names a reason that did not apply, or repeats one; or an accuracy is shown if none is known."""
    values = [UNKNOWN[CUT], UNKNOWN[FAILED], UNKNOWN[CUT]]
    endpoint = SimpleNamespace(judge=Method(lambda rollouts, _: np.array(values[: len(rollouts)]).tobytes()))
    scoring = JudgedScoring(World(), [endpoint], 9.0, VALIDATION, 1)
    samples = [sample(0)] * 3
    report = judged(samples, scoring.judge(samples), {0: 0})
    assert [message.partition(" (")[0] for message in gkd_log.messages] == [
        f"2 of 3 validation values are unknown: {CUT}",
        f"1 of 3 validation values are unknown: {FAILED}",
    ]
    scoring.judge(samples)
    assert len(gkd_log.messages) == 2
    state = RunState(1)
    state.add(0, {"eval/kl": 0.5, "eval/accuracy": report.accuracy})
    assert list(state.scores()) == ["eval/kl"]


def test_a_greedy_trajectory_is_judged_as_one(calls: list[Any]) -> None:
    """Fails if eval.metric reads what the environment wrote as the student's text, or an error as a missing reward."""
    scoring = JudgedScoring(World(), [Endpoint(calls)], 9.0, VALIDATION, 1)
    messages = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    acted = replace(sample(0), response_ids=[5, 6, 7, 8], observed=[1, 2], messages=messages, reward=0.5)
    scoring.judge([acted, replace(acted, failed=True, reward=None)])
    (((one, failed), _),) = calls
    assert (one.last_turn.tolist(), one.n_own, one.reward) == ([8], 2, 0.5) and json.loads(one.messages) == messages
    assert (one.finish_reason, failed.finish_reason) == ("stop", "environment_error")


def test_pass_at_k_is_unbiased() -> None:
    """Fails if the estimate differs from the mean over all choices of k of the n responses."""
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                chosen = list(combinations([i < c for i in range(n)], k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)


def scored(samples: Sequence[int], values: Sequence[float]) -> ScoredChunk:
    return ScoredChunk(chunk(samples), None, None, 0, rewards=np.array(values)[:, None])


def test_pass_at_k_counts_the_responses_of_each_prompt() -> None:
    """Fails if responses of a prompt that came in several chunks are counted as several prompts."""
    batch = [scored([0, 3, 4], [1, 0, 1]), scored([5, 1, 2], [0.4, 0, 0])]  # prompt 0: 1 of 3; prompt 1: 1 of 3
    assert pass_at_numbers(batch, 3) == pytest.approx(
        {"eval/pass_at_1": 1 / 3, "eval/pass_at_2": 2 / 3, "eval/pass_at_3": 1.0}
    )


class Judged(World):
    """A world whose evaluations are judged: even samples are correct."""

    def greedy(self, prompts: Sequence[Prompt], *, n_samples: int) -> GreedyReport:
        self.events.append(f"greedy {n_samples}")
        return GreedyReport(0.0, [sample(prompt.prompt_id) for prompt in prompts])


class Judge(World):
    """The scoring of held-out prompts."""

    def judge(self, samples: Sequence[Sample]) -> list[float]:
        return [each.prompt_id % 4 / 2 for each in samples]

    def collect(self, pending: Sequence[PendingScores]) -> list[ScoredChunk]:
        even = [1.0 - p.rollouts.sample_index[:, None] % 2 for p in pending]
        return [replace(c, rewards=values) for c, values in zip(super().collect(pending), even, strict=True)]


def test_evaluations_use_the_metric(tmp_path: Path) -> None:
    """Fails if eval.metric or eval.n has no effect, or an evaluation writes a number without a row in the catalog."""
    world = Judged()
    trainer = make(tmp_path, world, "trainer.total_steps=1", "eval.metric=math_verify", "eval.n=2", val=PROMPTS[:4])
    roles = replace(trainer.roles, judge=Judge())
    trainer = type(trainer)(trainer.config, roles, PROMPTS, PROMPTS[:4], trainer.folder, 1)
    trainer.fit()
    _, line = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (line["eval/accuracy"], line["eval/pass_at_1"], line["eval/pass_at_2"]) == (0.75, 0.5, 1.0)
    assert "greedy 4" in world.events, "all responses are judged"
    assert len([event for event in world.events if event.startswith("generate n=2 seed=2147483648")]) == 2
    assert not unlisted_keys(tmp_path / "run")


def test_an_undecided_greedy_response_is_not_the_best(local_ray: LocalRay) -> None:
    """Fails if a failed environment, whose reward is unknown, counts as 0 where all rewards are costs: the evaluation
    with most failures would be the best.
    """

    class Costs:
        def __init__(self) -> None:
            self.judge = Method(lambda rollouts, _: np.array([[-3.0, np.nan, 0.5][r.prompt_id] for r in rollouts]))

    def values(prompt_ids: Sequence[int]) -> Sequence[float]:
        samples = [Sample(i, [1], [2], "t", "a", correct=None, prompt="p") for i in prompt_ids]
        return JudgedScoring(World(), [Costs(), Costs()], 9.0, VALIDATION, 1).judge(samples)

    assert values([1, 0, 1]) == [-3.0, -3.0, -3.0]
    assert values([1, 2]) == [0.0, 0.5], "as a wrong answer"
    assert np.isnan(values([1, 1])).all(), "none is known"


class Advantages(World):
    """A world that keeps advantages and factors of the chunks that the actor gets."""

    def __init__(self) -> None:
        super().__init__()
        self.of_training: list[Any] = []
        self.of_evaluation: list[Any] = []

    def train_step(self, batch: Sequence[ScoredChunk], meta: Any = None) -> TrainStats:
        self.of_training += [chunk.numbers for chunk in batch]
        return super().train_step(batch)

    def evaluate(self, batch: Sequence[ScoredChunk], **settings: Any) -> TrainStats:
        self.of_evaluation += [chunk.numbers for chunk in batch]
        return super().evaluate(batch, **settings)


def test_held_out_responses_get_no_reward_of_training(calls: list[Any], tmp_path: Path) -> None:
    """Fails if evaluations of a run that trains on rewards are judged by rows of training, or get advantages."""
    world = Advantages()
    settings = ("trainer.total_steps=1", "eval.every=1", "eval.metric=none", "rollout.n=2", "distill.reward_weight=1")
    settings += ("distill.advantage=none",)
    functions = "reward.functions=[{path: length}, {path: exact_match}]"
    trainer = make(tmp_path, world, *settings, functions, val=PROMPTS[:2])

    def judge(rollouts: Any, prompts: str) -> bytes:
        calls.append(prompts)
        return np.array([[len(calls), 0.0], [0.0, 0.0]]).tobytes()

    roles = with_judges(trainer.roles, trainer.config, trainer.config.derived, [SimpleNamespace(judge=Method(judge))])
    trainer = type(trainer)(trainer.config, roles, PROMPTS, PROMPTS[:2], trainer.folder, 1)
    trainer.fit()
    assert len(world.of_evaluation) == 4 and all(each is None for each in world.of_evaluation)
    assert len(calls) == len(world.of_training) and set(calls) == {TRAINING}
    assert [numbers.tolist() for numbers in world.of_training] == [[[1.0, 1.0], [0.0, 1.0]], [[2.0, 1.0], [0.0, 1.0]]]

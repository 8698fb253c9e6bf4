"""The loop's own logic, against fakes that only record: order of the stages, commit and resume, evaluation, refusal.

The fake actor's files are real ones, and what becomes of them is the real store's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gkd.data.mixing import on_policy_indices
from gkd.data.sampler import PromptSampler
from gkd.errors import CheckpointError, ClusterError, NumericsError, TeacherUnavailable
from gkd.handles import RolloutChunk, RolloutUsage
from gkd.metrics.pools import SINCE_START, WITH_EVALUATION
from gkd.metrics.writer import read_metrics
from gkd.types import Prompt
from tests.unit.world import PROMPTS, World, answers, checkpoints, make


def test_the_road_of_one_batch(tmp_path: Path) -> None:
    """If it fails, stages run in another order: training on unscored rollouts, or rolling out with old weights."""
    world = World()
    make(tmp_path, world, "trainer.total_steps=2", "rollout.n=3").fit()
    road = ["chunk", "submit", "chunk", "submit", "collect", "train"]
    assert world.events == [
        "push 0",
        *["generate n=3 seed=10 v=0", *road, "push 1"],
        *["generate n=3 seed=11 v=1", *road, "push 2"],
        "save",
        "saved 2",
        "export",
    ]
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


class SharedGpus(World):
    """Actor and engines on the same GPUs: notes who leaves and who comes."""

    def offload_states(self, include: Sequence[str] | None = None, level: int | None = None) -> None:
        self.events.append("actor away" if level is None else f"engines away {level}")

    def reload_states(self, include: Sequence[str] | None = None, *, blocking: bool = True) -> SharedGpus:
        self.events.append("engines back" if blocking else "actor back")
        return self

    def wait(self) -> None:
        """Reloaded already."""


def test_a_teacher_on_the_actor_s_gpus_scores_in_the_actor_s_turn(tmp_path: Path) -> None:
    """Fails if a local teacher scores beside engines that have the GPUs, or engines are put away once more for it:
    their weights would be copied to the host although new ones are about to come."""
    world = SharedGpus()
    make(tmp_path, world, "trainer.colocate=true", "trainer.total_steps=1", val=PROMPTS[:1]).fit()
    turn: str | None = None
    turns: list[tuple[str | None, str]] = []
    for event in world.events:
        if event.startswith(("engines", "actor away")):
            turn = event
        elif event in ("collect", "train", "evaluate", "greedy", "chunk"):
            turns.append((turn, event))
    answered = [("engines back", "chunk"), ("engines back", "greedy")]
    held_out = [*answered, ("engines away 1", "collect"), ("engines away 1", "evaluate")]
    step = [("engines back", "chunk")] * 2 + [("engines away 2", "collect"), ("engines away 2", "train")]
    assert turns == [*held_out, *step, *held_out]


def test_without_overlap_the_teacher_is_asked_after_the_rollout(tmp_path: Path) -> None:
    """If it fails, teacher.overlap_rollout=false does nothing."""
    world = World()
    make(tmp_path, world, "trainer.total_steps=1", "teacher.overlap_rollout=false").fit()
    assert world.events[2:7] == ["chunk", "chunk", "submit", "submit", "collect"]


def test_evaluations_and_checkpoints_come_when_they_are_due(tmp_path: Path) -> None:
    """If it fails, eval.every, save_every or keep_last does nothing, or the last evaluation is made twice."""
    world = World()
    settings = ("trainer.total_steps=4", "eval.every=2", "trainer.save_every=1", "trainer.keep_last=2")
    make(tmp_path, world, *settings, val=PROMPTS[:1]).fit()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval/kl" in line] == [0, 2, 4]
    assert world.events.count("greedy") == 3
    assert world.events.count("save") == 4, "the last step is saved once"
    assert checkpoints(tmp_path) == ["latest", "step_00000003", "step_00000004"]
    assert len({event for event in world.events if event.startswith("generate n=1 seed=2147483648")}) == 3
    assert all((line["eval/accuracy"], line["eval/kl"]) == (0.5, 0.3) for line in lines if "eval/kl" in line)


def test_eval_metric_none_does_not_decode(tmp_path: Path) -> None:
    """If it fails, a run without reference answers spends time on judging nothing."""
    world = World()
    make(tmp_path, world, "trainer.total_steps=1", "eval.metric=none", val=PROMPTS[:1]).fit()
    assert "greedy" not in world.events
    assert world.events.count("evaluate") == 2


def test_the_memory_of_every_line_is_in_it(tmp_path: Path) -> None:
    """Fails if a step's memory is in another step's line, an evaluation's is missing, or it is asked for when off."""
    world = World()
    settings = ("trainer.total_steps=2", "eval.every=1")
    make(tmp_path / "on", world, *settings, val=PROMPTS[:1]).fit()
    lines = read_metrics(tmp_path / "on" / "run" / "metrics.jsonl")
    assert [line["memory/training_step/peak_gib"] for line in lines] == [1.5] * 3
    assert world.memory_asked == 4, "also after the last line"
    world = World()
    make(tmp_path / "off", world, *settings, "memory.timeline=false", val=PROMPTS[:1]).fit()
    lines = read_metrics(tmp_path / "off" / "run" / "metrics.jsonl")
    assert world.memory_asked == 0 and not [name for line in lines for name in line if name.startswith("memory/")]
    world = World()
    make(tmp_path / "moves", world, *settings, "memory.timeline=false", "actor.offload_train=true").fit()
    lines = read_metrics(tmp_path / "moves" / "run" / "metrics.jsonl")
    assert world.memory_asked == 4 and all("memory/training_step/peak_gib" in line for line in lines)


class Streams(World):
    """Its stream has every prompt answered at once."""

    def __init__(self) -> None:
        super().__init__()
        self._answered: list[RolloutChunk] = []

    def open_stream(self, *, n: int, temperature: float, seed: int) -> Streams:
        return self

    def admit(self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int]) -> None:
        for prompt, place in zip(prompts, prompt_indices, strict=True):
            self._answered.append(
                replace(answers(prompt, 1, 2, 0, self.engine_version), sample_index=np.array([place]))
            )

    def finished(self, timeout_s: float) -> list[RolloutChunk]:
        time.sleep(0 if self._answered else 0.01)
        taken, self._answered = self._answered, []
        return taken

    def close(self) -> None:
        """Nothing is under way."""

    def usage(self) -> RolloutUsage:
        self.events.append("usage")
        return super().usage()


@pytest.mark.parametrize(("scheduler", "n_more"), [("sync", 3), ("stream", 1)])
def test_a_stream_s_own_work_beside_an_evaluation_is_not_thrown_away(
    tmp_path: Path, scheduler: str, n_more: int
) -> None:
    """Fails if the engines' numbers lose what a stream did, or an evaluation's passes look like a step's."""
    world = Streams()
    settings = ("trainer.total_steps=4", "eval.every=2", "eval.metric=none", f"trainer.scheduler={scheduler}")
    make(tmp_path, world, *settings, val=PROMPTS[:1]).fit()
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss/total" in line]
    assert world.events.count("usage") == 4 + n_more, "an evaluation before the first step has the engines alone"
    tuner = read_metrics(tmp_path / "run" / "tuner.jsonl")
    marked = [line["step"] for line in tuner if WITH_EVALUATION in line]
    assert marked == ([3] if scheduler == "stream" else [])
    assert [line["step"] for line in lines if "perf/rollout_busy_share" not in line] == marked


def test_a_stale_rollout_is_never_trained_on(tmp_path: Path) -> None:
    """If it fails, the sync scheduler trains off-policy without saying so."""
    world = World()
    world.lag = 1
    with pytest.raises(NumericsError, match="staleness"):
        make(tmp_path, world, "trainer.total_steps=1").fit()
    assert "train" not in world.events


def test_a_teacher_lost_in_an_evaluation_costs_no_line(tmp_path: Path) -> None:
    """If it fails, the step before the evaluation is missing from metrics.jsonl, or its evaluation is never made."""
    world = World()
    world.teacher_dies_at = 2  # step 2 is rolled out by version 1, so what dies is the evaluation after it
    with pytest.raises(TeacherUnavailable):
        make(tmp_path, world, "trainer.total_steps=2", val=PROMPTS[:1]).fit()
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
    again = World()
    make(tmp_path, again, "trainer.total_steps=2", "trainer.resume=auto", val=PROMPTS[:1]).fit()
    assert "train" not in again.events
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(line["step"], "eval/kl" in line) for line in lines] == [(0, True), (1, False), (2, False), (2, True)]


def test_a_teacher_lost_before_the_first_step_is_the_error_that_is_raised(tmp_path: Path) -> None:
    """If it fails, an optimizer without state is saved, and that failure hides that the teacher is gone."""
    for name, val in (("in_evaluation", PROMPTS[:1]), ("in_step", [])):
        world = World()
        world.teacher_dies_at = 0
        with pytest.raises(TeacherUnavailable):
            make(tmp_path / name, world, "trainer.total_steps=2", val=val).fit()
        assert "save" not in world.events


def test_a_lost_teacher_costs_no_prompt(tmp_path: Path) -> None:
    """If it fails, the batch that could not be scored is skipped, or trained twice, after the resume."""
    whole = World()
    make(tmp_path / "whole", whole, "trainer.total_steps=4").fit()
    world = World()
    world.teacher_dies_at = 2
    with pytest.raises(TeacherUnavailable):
        make(tmp_path, world, "trainer.total_steps=4").fit()
    assert world.events[-2:] == ["save", "saved 2"]
    again = World()
    make(tmp_path, again, "trainer.total_steps=4", "trainer.resume=auto").fit()
    assert again.events[:2] == ["load", "push 2"]
    assert world.trained + again.trained == whole.trained
    lines = read_metrics(tmp_path / "run" / "tuner.jsonl")
    assert [(line["step"], line[SINCE_START]) for line in lines] == [(1, 1), (2, 2), (3, 1), (4, 2)]


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_a_mixed_batch_has_both_kinds_of_answers(tmp_path: Path, overlap: str) -> None:
    """If it fails, prompts are lost or answered twice, or the split is another than distill.on_policy_share's."""
    world = World()
    settings = ("trainer.global_batch_size=4", "rollout.n=3", f"teacher.overlap_rollout={overlap}")
    make(tmp_path, world, "trainer.total_steps=2", "distill.on_policy_share=0.5", *settings).fit()
    sampler = PromptSampler(PROMPTS, shuffle=True, seed=10)
    for step, batch in enumerate(world.trained):
        ids = [prompt.prompt_id for prompt in sampler.take(4 * step, 4)]
        student = on_policy_indices(step, 4, 0.5, 10)
        dataset = [place for place in range(4) if place not in student]
        assert world.places[2 * step : 2 * step + 2] == [dataset, student], "what is there already goes first"
        assert batch == [*((ids[place], False) for place in dataset), *((ids[place], True) for place in student)]
    assert [e for e in world.events if e.startswith(("dataset", "generate"))] == [
        *["dataset v=0", "generate n=3 seed=10 v=0"],
        *["dataset v=1", "generate n=3 seed=11 v=1"],
    ]
    (line, _) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert line["rollout/sequences"] == 8 and line["rollout/dataset_response_tokens"] == 2 * 3
    assert line["rollout/on_policy_sequences"] == 0.75 * line["rollout/sequences"]
    assert line["rollout/response_length_mean"] == (2 * 3 + 6 * 2) / 8
    assert line["rollout/truncated_share"] == 0.25
    assert line["staleness/max"] == 0
    assert line["teacher/topk_mass"] == pytest.approx(0.9)


def test_without_on_policy_prompts_only_evaluations_sample(tmp_path: Path) -> None:
    """If it fails, a run on dataset responses alone pays for rollouts, divides by zero, or loses its evaluations."""
    world = World()
    make(tmp_path, world, "trainer.total_steps=2", "distill.on_policy_share=0", val=PROMPTS[:1]).fit()
    assert [event for event in world.events if event.startswith(("generate", "push"))] == [
        *["push 0", "generate n=1 seed=2147483648 v=0", "push 1", "push 2", "generate n=1 seed=2147483648 v=2"]
    ]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["rollout/on_policy_sequences"] for line in lines[1:]] == [0.0, 0.0]
    assert [line["rollout/sequences"] for line in lines[1:]] == [2.0, 2.0]


def test_a_fully_on_policy_run_never_asks_for_the_dataset(tmp_path: Path) -> None:
    """If it fails, the default needs responses that its prompts were loaded without."""
    world = World()
    make(tmp_path, world, "trainer.total_steps=2").fit()
    assert not [event for event in world.events if event.startswith("dataset")]
    assert all(on_policy for batch in world.trained for _, on_policy in batch)


def test_a_resumed_run_splits_its_batches_the_same_way(tmp_path: Path) -> None:
    """If it fails, what a run with a mixture learns from depends on whether it was interrupted."""
    settings = ("trainer.total_steps=6", "trainer.global_batch_size=3", "distill.on_policy_share=0.5")
    whole = World()
    make(tmp_path / "whole", whole, *settings).fit()
    first, again = World(), World()
    first.teacher_dies_at = 3
    with pytest.raises(TeacherUnavailable):
        make(tmp_path, first, *settings).fit()
    make(tmp_path, again, *settings, "trainer.resume=auto").fit()
    assert first.trained + again.trained == whole.trained
    assert sum(on_policy for batch in whole.trained for _, on_policy in batch) == 9


def test_a_teacher_without_distribution_still_gives_an_evaluation(tmp_path: Path) -> None:
    """If it fails, a loss on sampled tokens alone has no held-out number, or the first evaluation is made twice."""
    world, again = World(), World()
    world.has_distribution = again.has_distribution = False
    make(tmp_path, world, "trainer.total_steps=1", val=PROMPTS[:1]).fit()
    make(tmp_path, again, "trainer.total_steps=1", "trainer.resume=auto", val=PROMPTS[:1]).fit()
    assert "evaluate" not in again.events
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line.get("eval/reverse_kl") for line in lines] == [0.2, 0.2]
    assert not any("eval/kl" in line or "teacher/topk_mass" in line for line in lines)


def of_saves(world: World) -> list[str]:
    """Saves and steps, in order."""
    return [event for event in world.events if event.startswith(("save", "train", "export"))]


@pytest.mark.parametrize(
    ("async_save", "polls", "wanted"),
    [
        (True, 0, ["train", "save", "train", "saved 1", "save", "train", "saved 2", "save", "saved 3", "export"]),
        (True, 9, ["train", "save", "train", "saved 1", "save", "train", "saved 2", "save", "saved 3", "export"]),
        (False, 9, ["train", "save", "saved 1", "train", "save", "saved 2", "train", "save", "saved 3", "export"]),
    ],
)
def test_saves_go_on_beside_the_steps(tmp_path: Path, async_save: bool, polls: int, wanted: list[str]) -> None:
    """Fails if trainer.async_save does nothing, two saves overlap, or the run ends before its last one is written."""
    world = World()
    world.polls_per_save = polls
    make(tmp_path, world, "trainer.total_steps=3", "trainer.save_every=1", f"trainer.async_save={async_save}").fit()
    assert of_saves(world) == wanted
    assert checkpoints(tmp_path) == ["latest", "step_00000002", "step_00000003"]


def test_a_save_is_committed_at_the_first_step_that_finds_it_written(tmp_path: Path) -> None:
    """Fails if a save is only committed when the next one is due, or its numbers stand in another step's line."""
    world = World()
    world.polls_per_save = 1
    make(tmp_path, world, "trainer.total_steps=6", "trainer.save_every=3").fit()
    # Begun after step 3; step 4's line is of the step in which it was begun; found written one boundary later.
    assert of_saves(world)[2:8] == ["train", "save", "train", "train", "saved 3", "train"]
    lines = {line["step"]: line for line in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    assert [step for step, line in lines.items() if "perf/checkpoint_bytes" in line] == [6]
    kept = tmp_path / "run" / "checkpoints" / "step_00000003"
    n_bytes = sum(p.stat().st_size for p in kept.rglob("*") if p.is_file() and p.name != "manifest.json")
    assert lines[6]["perf/checkpoint_bytes"] == n_bytes
    assert lines[6]["perf/checkpoint_write_s"] > 0
    assert all(line["time/checkpoint_s"] >= 0 for line in lines.values())


@pytest.mark.parametrize("async_save", [True, False])
def test_a_save_that_fails_stops_the_run(tmp_path: Path, async_save: bool) -> None:
    """Fails if a run goes on for days without a checkpoint because nobody looked whether its saves were written."""
    world = World()
    world.save_fails_at = 2
    with pytest.raises(CheckpointError, match="No space left"):
        make(tmp_path, world, "trainer.total_steps=9", "trainer.save_every=1", f"trainer.async_save={async_save}").fit()
    assert len(world.trained) == (3 if async_save else 2)
    assert checkpoints(tmp_path) == ["latest", "step_00000001"], "no partial files"
    again = World()
    make(tmp_path, again, "trainer.total_steps=3", "trainer.resume=auto").fit()
    assert again.events[:2] == ["load", "push 1"]


def test_a_save_under_way_outlives_the_error_that_ends_the_run(tmp_path: Path) -> None:
    """Fails if a finished copy of the student is thrown away because a rank died while it was being written."""
    world = World()
    world.polls_per_save, world.rank_dies_at = 9, 2
    with pytest.raises(ClusterError, match="rank 1"):
        make(tmp_path, world, "trainer.total_steps=9", "trainer.save_every=2").fit()
    assert of_saves(world) == ["train", "train", "save", "saved 2"]
    assert checkpoints(tmp_path) == ["latest", "step_00000002"]


@pytest.mark.parametrize("error", [ClusterError, TeacherUnavailable])
def test_a_save_that_fails_on_the_way_out_hides_nothing(tmp_path: Path, error: type[Exception]) -> None:
    """Fails if the user reads of a full disk and not of what ended the run."""
    world = World()
    world.polls_per_save = 9
    world.save_fails_at = 2
    if error is ClusterError:
        world.rank_dies_at = 2
    else:
        world.teacher_dies_at = 2
    with pytest.raises(error):
        make(tmp_path, world, "trainer.total_steps=9", "trainer.save_every=2").fit()
    assert checkpoints(tmp_path) == []


def test_a_run_goes_back_to_the_checkpoint_that_is_named(tmp_path: Path) -> None:
    """Fails if trainer.resume=PATH goes on from another step, or steps that were given up stay in the metrics."""
    settings = ("trainer.total_steps=5", "trainer.save_every=1", "trainer.keep_last=9")
    whole = World()
    make(tmp_path, whole, *settings).fit()
    two = tmp_path / "run" / "checkpoints" / "step_00000002"
    again, branch = World(), World()
    make(tmp_path / "branch", branch, *settings, f"trainer.resume={two}").fit()
    make(tmp_path, again, *settings, f"trainer.resume={two}").fit()
    for world in (again, branch):
        assert world.events[:2] == ["load", "push 2"]
        assert whole.trained[2:] == world.trained
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in read_metrics(tmp_path / "branch" / "run" / "metrics.jsonl")] == [3, 4, 5]
    assert checkpoints(tmp_path)[1:] == [f"step_0000000{i}" for i in (1, 2, 3, 4, 5)]
    assert checkpoints(tmp_path / "branch")[1:] == [f"step_0000000{i}" for i in (2, 3, 4, 5)]

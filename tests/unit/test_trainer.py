"""Test the training loop with fake roles that record their calls: stage order, checkpoints, resume, evaluation, errors.

The fake actor writes real files, and the real checkpoint store commits them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gkd.data.sampler import PromptSampler, on_policy_indices
from gkd.errors import CheckpointError, ClusterError, NumericsError, TeacherUnavailable
from gkd.metrics.writer import read_metrics
from gkd.pipeline.batches import generate_and_score
from gkd.spans import described, driver
from gkd.types import RolloutChunk
from tests.metric_keys import unlisted_keys
from tests.unit.world import PROMPTS, StreamWorld, World, checkpoints, make


def test_stages_of_one_step_run_in_order(tmp_path: Path) -> None:
    """If it fails, the loop trains on unscored rollouts or generates with old weights."""
    world = World()
    make(tmp_path, world, "trainer.total_steps=2", "rollout.n=3").fit()
    stages = ["chunk", "submit", "chunk", "submit", "collect", "train"]
    assert world.events == [
        "push 0",
        *["generate n=3 seed=10 v=0", *stages, "push 1"],
        *["generate n=3 seed=11 v=1", *stages, "push 2"],
        "texts n=3",
        "save",
        "saved 2",
        "export",
    ]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(line["step"], "time/switch_s" in line) for line in lines] == [(1, False), (2, False)]


class SharedGpus(World):
    """Roles on shared GPUs that record each offload and reload."""

    def offload_states(self, include: Sequence[str] | None = None, level: int | None = None) -> None:
        self.events.append("actor offloaded" if level is None else f"engines offloaded {level}")

    def reload_states(self, include: Sequence[str] | None = None, *, blocking: bool = True) -> SharedGpus:
        self.events.append("engines reloaded" if blocking else "actor reloaded")
        return self

    def wait(self) -> None:
        self.events.append("actor waited for")


def test_pools_on_shared_gpus_take_turns(tmp_path: Path) -> None:
    """Fails if both models are on a GPU that holds one, a training step waits for a reload that could have overlapped
    with the teacher's work, the reload's error is lost, weights are copied although new ones follow, or the duration of
    switches is not reported.
    """
    world = SharedGpus()
    make(tmp_path, world, "trainer.colocate=true", "trainer.total_steps=1", val=PROMPTS[:1]).fit()
    calls = ("engines", "actor", "collect", "train", "evaluate", "greedy", "chunk", "save", "export")
    to_engines = ["actor offloaded", "engines reloaded"]
    validation = [*to_engines, "chunk", "greedy", "engines offloaded 1", "collect", "evaluate"]
    step = ["chunk", "chunk", "engines offloaded 2", "actor reloaded", "collect", "train", "actor waited for"]
    found = [event for event in world.events if event.startswith(calls)]
    end = ["engines offloaded 1", "save", "saved 1", "engines offloaded 1", "export"]
    assert found == [*validation, *to_engines, *step, *validation, *end]
    assert "time/switch_s" in read_metrics(tmp_path / "run" / "metrics.jsonl")[1]


def test_evaluations_and_checkpoints_follow_their_intervals(tmp_path: Path) -> None:
    """If it fails, eval.every, save_every or keep_last has no effect, the last evaluation runs twice, or a line has no
    time stamp.
    """
    world, began = World(), time.time()
    settings = ("trainer.total_steps=4", "eval.every=2", "trainer.save_every=1", "trainer.keep_last=2")
    make(tmp_path, world, *settings, val=PROMPTS[:1]).fit()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert not unlisted_keys(tmp_path / "run"), "the loop writes a number that docs/metrics.md does not have"
    assert [line["step"] for line in lines if "eval/kl" in line] == [0, 2, 4]
    assert world.events.count("greedy") == 3
    assert world.events.count("save") == 4, "the last step is saved once"
    assert checkpoints(tmp_path) == ["latest", "step_00000003", "step_00000004"]
    assert len({event for event in world.events if event.startswith("generate n=1 seed=2147483648")}) == 3
    assert all((line["eval/accuracy"], line["eval/kl"]) == (0.5, 0.3) for line in lines if "eval/kl" in line)
    stamps = [line["time/unix_s"] for line in lines]
    assert len(stamps) == 5 and began <= stamps[0] and stamps == sorted(stamps) and stamps[-1] <= time.time()


def written_texts(tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    files = sorted((tmp_path / "run" / "samples").glob("*"))
    return {file.stem.lstrip("step_0") or "0": list(map(json.loads, file.read_text().splitlines())) for file in files}


def test_each_evaluation_leaves_text_without_a_metric(tmp_path: Path) -> None:
    """Fails if a run without a metric leaves no text of its responses, or one has another prompt's answer."""
    settings = ("trainer.total_steps=2", "eval.every=1", "eval.metric=none", "rollout.n=3")
    val = [msgspec.structs.replace(PROMPTS[0], answer="7"), msgspec.structs.replace(PROMPTS[1], answer=None)]
    make(tmp_path, World(), *settings, val=val).fit()
    found = written_texts(tmp_path)
    assert {step: [(s["text"], s["answer"], s["correct"]) for s in rows] for step, rows in found.items()} == {
        str(step): [(f"v{step}", "7", None), (f"v{step}", "", None)] for step in range(3)
    }


@pytest.mark.parametrize("metric", ["none", "exact_match"])
def test_a_run_without_validation_prompts_leaves_text_of_its_training(tmp_path: Path, metric: str) -> None:
    """Fails if a run ends without a text that a person can read, or a dataset's response is shown as the student's."""
    settings = ("trainer.total_steps=3", "eval.every=2", f"eval.metric={metric}", "rollout.n=3")
    make(tmp_path, World(), *settings).fit()
    assert {step: len(rows) for step, rows in written_texts(tmp_path).items()} == {"2": 2, "3": 2}
    make(tmp_path / "dataset", World(), *settings, "distill.on_policy_share=0").fit()
    assert written_texts(tmp_path / "dataset") == {}


def test_every_line_has_its_memory_numbers(tmp_path: Path) -> None:
    """Fails if memory numbers are in the wrong line, or missing for an evaluation."""
    world = World()
    make(tmp_path, world, "trainer.total_steps=2", "eval.every=1", val=PROMPTS[:1]).fit()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["memory/training_step/peak_gib"] for line in lines] == [1.5] * 3
    assert world.n_memory_calls == 4, "also after the last line"


@pytest.mark.parametrize(("scheduler", "n_more"), [("sync", 3), ("stream", 1)])
def test_an_evaluation_keeps_the_engine_counters_of_a_stream(tmp_path: Path, scheduler: str, n_more: int) -> None:
    """Fails if an evaluation resets a stream's engine counters, or its forward passes are counted for a step."""
    world = StreamWorld()
    settings = ("trainer.total_steps=4", "eval.every=2", "eval.metric=none", f"trainer.scheduler={scheduler}")
    make(tmp_path, world, *settings, val=PROMPTS[:1]).fit()
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss/total" in line]
    assert world.events.count("usage") == 4 + n_more, "the evaluation before the first step runs without a stream"
    without = [line["step"] for line in lines if "perf/rollout_busy_share" not in line]
    assert without == ([3] if scheduler == "stream" else [])


def test_a_rollout_above_the_staleness_bound_is_rejected(tmp_path: Path) -> None:
    """If it fails, the sync scheduler silently trains off-policy."""
    world = World(lag=1)
    with pytest.raises(NumericsError):
        make(tmp_path, world, "trainer.total_steps=1").fit()
    assert "train" not in world.events


def test_a_teacher_failure_in_an_evaluation_keeps_the_metrics_of_the_step(tmp_path: Path) -> None:
    """If it fails, the step before the evaluation is missing from metrics.jsonl, or a resume skips the evaluation."""
    world = World(teacher_dies_at=2)  # version 1 rolls step 2 out, so the teacher fails in the evaluation after it
    with pytest.raises(TeacherUnavailable):
        make(tmp_path, world, "trainer.total_steps=2", val=PROMPTS[:1]).fit()
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
    again = World()
    make(tmp_path, again, "trainer.total_steps=2", "trainer.resume=auto", val=PROMPTS[:1]).fit()
    assert "train" not in again.events
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(line["step"], "eval/kl" in line) for line in lines] == [(0, True), (1, False), (2, False), (2, True)]


def test_a_teacher_failure_before_the_first_step_is_raised_without_a_save(tmp_path: Path) -> None:
    """If it fails, saving an optimizer without state raises an error that hides TeacherUnavailable."""
    for name, val in (("in_evaluation", PROMPTS[:1]), ("in_step", [])):
        world = World(teacher_dies_at=0)
        with pytest.raises(TeacherUnavailable):
            make(tmp_path / name, world, "trainer.total_steps=2", val=val).fit()
        assert "save" not in world.events


@pytest.mark.parametrize("settings", [(), ("trainer.global_batch_size=3", "distill.on_policy_share=0.5")])
def test_a_resume_after_a_teacher_failure_trains_every_prompt_once(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Fails if a resume skips the unscored batch, trains on it twice, or selects other prompts to be answered."""
    whole = World()
    make(tmp_path / "whole", whole, "trainer.total_steps=4", *settings).fit()
    world = World(teacher_dies_at=2)
    with pytest.raises(TeacherUnavailable):
        make(tmp_path, world, "trainer.total_steps=4", *settings).fit()
    assert world.events[-2:] == ["save", "saved 2"]
    again = World()
    make(tmp_path, again, "trainer.total_steps=4", *settings, "trainer.resume=auto").fit()
    assert again.events[:2] == ["load", "push 2"]
    assert world.trained + again.trained == whole.trained


def test_a_mixed_batch_has_dataset_and_on_policy_responses(tmp_path: Path) -> None:
    """If it fails, prompts are lost or duplicated, or the batch does not follow distill.on_policy_share."""
    world = World()
    settings = ("trainer.global_batch_size=4", "rollout.n=3")
    make(tmp_path, world, "trainer.total_steps=2", "distill.on_policy_share=0.5", *settings).fit()
    sampler = PromptSampler(PROMPTS, shuffle=True, seed=10)
    for step, batch in enumerate(world.trained):
        ids = [prompt.prompt_id for prompt in sampler.take(4 * step, 4)]
        student = on_policy_indices(step, 4, 0.5, 10)
        dataset = [index for index in range(4) if index not in student]
        assert world.prompt_indices[2 * step : 2 * step + 2] == [dataset, student], "dataset responses come first"
        assert batch == [*((ids[i], False) for i in dataset), *((ids[i], True) for i in student)]
    assert [e for e in world.events if e.startswith(("dataset", "generate"))] == [
        *["dataset v=0", "generate n=3 seed=10 v=0"],
        *["dataset v=1", "generate n=3 seed=11 v=1"],
    ]
    (line, _) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert line["rollout/sequences"] == 8 and line["rollout/dataset_response_tokens"] == 2 * 13
    assert line["rollout/on_policy_sequences"] == 0.75 * line["rollout/sequences"]
    assert line["rollout/response_length_mean"] == (2 * 13 + 6 * 8) / 8
    assert line["rollout/truncated_share"] == 0.25 and line["rollout/repeated_4gram_share"] == 0.2
    assert line["staleness/max"] == 0
    assert line["teacher/topk_mass"] == pytest.approx(0.9)


def test_without_on_policy_prompts_only_evaluations_generate(tmp_path: Path) -> None:
    """If it fails, a run on dataset responses alone generates rollouts, divides by zero, or skips its evaluations."""
    world = World()
    make(tmp_path, world, "trainer.total_steps=2", "distill.on_policy_share=0", val=PROMPTS[:1]).fit()
    assert [event for event in world.events if event.startswith(("generate", "push"))] == [
        *["push 0", "generate n=1 seed=2147483648 v=0", "push 1", "push 2", "generate n=1 seed=2147483648 v=2"]
    ]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["rollout/on_policy_sequences"] for line in lines[1:]] == [0.0, 0.0]
    assert [line["rollout/sequences"] for line in lines[1:]] == [2.0, 2.0]


def test_an_evaluation_without_teacher_distribution_reports_reverse_kl(tmp_path: Path) -> None:
    """If it fails, a loss on sampled tokens has no validation metric, or the first evaluation runs twice."""
    world, again = World(has_distribution=False), World(has_distribution=False)
    make(tmp_path, world, "trainer.total_steps=1", val=PROMPTS[:1]).fit()
    make(tmp_path, again, "trainer.total_steps=1", "trainer.resume=auto", val=PROMPTS[:1]).fit()
    assert "evaluate" not in again.events
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line.get("eval/reverse_kl") for line in lines] == [0.2, 0.2]
    assert not any("eval/kl" in line or "teacher/topk_mass" in line for line in lines)


def save_events(world: World) -> list[str]:
    """Return the saves, steps and exports, in order."""
    return [event for event in world.events if event.startswith(("save", "train", "export"))]


@pytest.mark.parametrize("polls", [0, 9])
def test_saves_overlap_with_steps(tmp_path: Path, polls: int) -> None:
    """Fails if a step waits for a save, two saves overlap, or the run ends before its last save is written."""
    world = World(polls_per_save=polls)
    make(tmp_path, world, "trainer.total_steps=3", "trainer.save_every=1").fit()
    expected = ["train", "save", "train", "saved 1", "save", "train", "saved 2", "save", "saved 3", "export"]
    assert save_events(world) == expected
    assert world.saves_blocking == [False, False, True], "nothing trains during the last save, so it needs no copy"
    assert checkpoints(tmp_path) == ["latest", "step_00000002", "step_00000003"]


def test_a_save_is_committed_at_the_first_poll_after_it_is_written(tmp_path: Path) -> None:
    """Fails if a save is committed only when the next one is due, or its metrics are in the wrong line."""
    world = World(polls_per_save=1)
    make(tmp_path, world, "trainer.total_steps=6", "trainer.save_every=3").fit()
    # The save starts after step 3. The poll after step 4 finds it unfinished, the poll after step 5 commits it.
    assert save_events(world)[2:8] == ["train", "save", "train", "train", "saved 3", "train"]
    lines = {line["step"]: line for line in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    assert [step for step, line in lines.items() if "perf/checkpoint_bytes" in line] == [6]
    kept = tmp_path / "run" / "checkpoints" / "step_00000003"
    n_bytes = sum(p.stat().st_size for p in kept.rglob("*") if p.is_file() and p.name != "manifest.json")
    assert lines[6]["perf/checkpoint_bytes"] == n_bytes
    assert lines[6]["perf/checkpoint_write_s"] > 0
    assert all(line["time/checkpoint_s"] >= 0 for line in lines.values())


def test_a_failed_save_stops_the_run(tmp_path: Path) -> None:
    """Fails if a failed background save goes unnoticed and the run continues without checkpoints."""
    world = World(save_fails_at=2)
    with pytest.raises(CheckpointError):
        make(tmp_path, world, "trainer.total_steps=9", "trainer.save_every=1").fit()
    assert len(world.trained) == 3
    assert checkpoints(tmp_path) == ["latest", "step_00000001"], "no partial files"
    again = World()
    make(tmp_path, again, "trainer.total_steps=3", "trainer.resume=auto").fit()
    assert again.events[:2] == ["load", "push 1"]


@pytest.mark.parametrize(("error", "at"), [(ClusterError, "rank_dies_at"), (TeacherUnavailable, "teacher_dies_at")])
def test_a_failed_pending_save_does_not_hide_the_error_of_the_run(
    tmp_path: Path, error: type[Exception], at: str
) -> None:
    """Fails if the error of a failed save replaces the error that ended the run."""
    world = World(polls_per_save=9, save_fails_at=2, **{at: 2})
    with pytest.raises(error):
        make(tmp_path, world, "trainer.total_steps=9", "trainer.save_every=2").fit()
    assert checkpoints(tmp_path) == []


def test_resuming_from_a_named_checkpoint_rewinds_or_branches(tmp_path: Path) -> None:
    """Fails if trainer.resume=PATH resumes from another step, or discarded steps stay in metrics.jsonl."""
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


def test_generating_is_counted_by_responses() -> None:
    """Fails if a long first evaluation shows no count, so that it looks as if it hangs."""
    seen = []

    class Counting(World):
        def generate(self, *args: Any, **kwargs: Any) -> Iterator[RolloutChunk]:
            for chunk in super().generate(*args, **kwargs):
                seen.append(described(driver.now))
                yield chunk

    world = Counting()
    generate_and_score(world, world, PROMPTS[:3], range(3), n=2, temperature=1.0, seed=0, policy_version=0)
    assert seen == ["generating 0/6", "generating 2/6", "generating 4/6"]

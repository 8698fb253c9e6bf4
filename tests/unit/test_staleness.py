"""Test the stream scheduler: staleness bound, no lost or repeated prompt, no deadlock."""

from __future__ import annotations

import sys
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.config.load import load_config
from gkd.pipeline.staleness import StreamScheduler


def test_staleness_bound_of_each_scheduler() -> None:
    """Fails if the loop checks another bound than the documented one."""
    for name, bound in {"sync": 0, "one_step_off": 1, "two_step_off": 2, "stream": 3}.items():
        config = load_config(
            None, [f"trainer.scheduler={name}", f"trainer.max_staleness={bound if name == 'stream' else 1}"]
        )
        assert config.trainer.staleness_bound == bound


def scheduler_of(
    sizes: list[int], bound: int, n_steps: int, next_batch: int = 0, *, early_parts: bool = False
) -> StreamScheduler:
    """Return a scheduler whose batch b has sizes[b % len(sizes)] positions: 10 b, 10 b + 1, ..."""
    return StreamScheduler(
        lambda batch: [10 * batch + i for i in range(sizes[batch % len(sizes)])],
        bound,
        n_steps,
        next_batch,
        early_parts=early_parts,
    )


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(1, 8),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_every_prompt_is_trained_once_within_the_bound(
    sizes: list[int], bound: int, n_steps: int, early_parts: bool, rng: Random
) -> None:
    """Fails if a prompt exceeds the staleness bound, is repeated or lost, or a step waits forever.

    This holds for any order and time in which the prompts finish, any version that starts them, any batch sizes, with
    and without early parts.
    """
    scheduler = scheduler_of(sizes, bound, n_steps, early_parts=early_parts)
    of_step = [sizes[step % len(sizes)] for step in range(n_steps)]
    admitted: list[int] = []
    begun: dict[int, int] = {}  # position -> version that started it
    policy_version: dict[int, int] = {}
    trained: list[int] = []
    for step in range(n_steps):
        # Before it admits more, the loop learns that some prompts have not been started.
        scheduler.not_started([p for p in admitted if p not in begun and rng.random() < 0.5], step)
        admitted += scheduler.admit_new(step)
        assert len(admitted) == sum(of_step[: step + bound + 1]), (
            "exactly as many prompts in flight as the bound allows"
        )
        for position in admitted:  # an engine may start some prompts now and others with a later version
            if position not in begun and rng.random() < 0.5:
                begun[position] = step

        def finish_one(step: int = step) -> None:
            position = rng.choice(scheduler.unfinished)
            policy_version[position] = begun.setdefault(position, step)
            scheduler.finish(position, policy_version[position])

        while (choice := scheduler.choose(step)) is None:
            assert scheduler.unfinished, "the step waits although no prompt is pending"
            finish_one()
        finished, due = choice
        assert 2 * len(finished) >= of_step[step] * (1 if early_parts else 2)
        assert scheduler.split(finished) == (finished, []) and set(due) <= set(scheduler.unfinished)
        left = due
        while left:
            while (parts := scheduler.split(left)) is None:
                finish_one()
            assert sorted(parts[0] + parts[1]) == sorted(left) and len(parts[0]) >= len(parts[1])
            left = parts[1]
        batch = [*finished, *due]
        assert len(batch) == len(set(batch)) == of_step[step]
        assert all(step - policy_version[position] <= bound for position in batch)
        scheduler.remove(batch)
        trained += batch
    assert sorted(trained) == admitted and len(admitted) == sum(of_step)
    assert scheduler.unfinished == [] and not scheduler.admit_new(n_steps)


class PlainScheduler:
    """Choose as `StreamScheduler` does, by going over all prompts in flight each time."""

    def __init__(self, sizes: list[int], bound: int, early_parts: bool) -> None:
        self.sizes, self.bound, self.early_parts = sizes, bound, early_parts
        self.version: dict[int, int] = {}
        self.finished: list[int] = []

    def choose(self, step: int) -> tuple[list[int], list[int]] | None:
        size = self.sizes[step % len(self.sizes)]
        now = {position for position, version in self.version.items() if version + self.bound <= step}
        late = sorted(now - set(self.finished))
        chosen: list[int] = list(late)
        room = 0
        for last in range(step, step + self.bound + 1):
            room += self.sizes[last % len(self.sizes)] if last > step else 0
            due = {position for position, version in self.version.items() if version + self.bound <= last}
            must_take = len(due) - room - len(due & set(chosen))
            finished = [position for position in self.finished if position in due and position not in chosen]
            if len(finished) < must_take:
                return None
            chosen += finished[: max(must_take, 0)]
        chosen = [*chosen, *(position for position in self.finished if position not in chosen)][:size]
        if len(chosen) < size or size - len(late) < ((size + 1) // 2 if self.early_parts else size):
            return None
        return chosen[len(late) :], late


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.integers(0, 4),
    st.integers(1, 8),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_choice_is_that_of_the_plain_definition(
    sizes: list[int], bound: int, n_steps: int, early_parts: bool, rng: Random
) -> None:
    """Fails if the counts that the scheduler keeps differ from those of the prompts in flight at any moment."""
    scheduler = scheduler_of(sizes, bound, n_steps, early_parts=early_parts)
    plain = PlainScheduler(sizes, bound, early_parts)
    for step in range(n_steps):
        waiting = [position for position in plain.version if rng.random() < 0.3]
        scheduler.not_started(waiting, step)
        plain.version |= dict.fromkeys(set(waiting) - set(plain.finished), step)
        plain.version |= dict.fromkeys(scheduler.admit_new(step), step)
        begun: tuple[list[int], list[int]] | None = None  # the choice when it was made
        while begun is None or set(begun[1]) & set(scheduler.unfinished):
            if begun is None and (begun := scheduler.choose(step)) is not None:
                assert begun == plain.choose(step) == scheduler.choose(step)
                continue
            assert begun is not None or plain.choose(step) is None
            assert scheduler.unfinished == sorted(plain.version.keys() - set(plain.finished))
            assert scheduler.finished == plain.finished
            position = rng.choice(scheduler.unfinished)
            version = rng.randint(0, step)  # also older than the one it was admitted with
            scheduler.finish(position, version)
            plain.version[position] = max(plain.version[position], version)
            plain.finished.append(position)
        batch = [*begun[0], *begun[1]]
        scheduler.remove(batch)
        for position in batch:
            del plain.version[position]
            plain.finished.remove(position)


def test_waiting_for_a_batch_does_not_go_over_its_prompts() -> None:
    """Fails if a finished prompt costs time in proportion to those in flight: a step of 65,536 would take hours."""
    size = 4096
    scheduler = StreamScheduler(lambda batch: range(batch * size, (batch + 1) * size), 2, 10)
    positions = scheduler.admit_new(0)
    n_lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal n_lines
        n_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        for position in positions[: size - 1]:
            scheduler.finish(position, 0)
            assert scheduler.choose(0) is None
    finally:
        sys.settrace(before)
    assert n_lines < 60 * size


def test_a_prompt_that_finishes_twice_or_was_never_admitted_is_an_error() -> None:
    """Fails if a duplicate response replaces another prompt in a batch."""
    scheduler = scheduler_of([2], 0, 100)
    scheduler.admit_new(0)
    scheduler.finish(0, 0)
    for position in (0, 7):
        with pytest.raises(KeyError):
            scheduler.finish(position, 0)
    for position in (0, 1):
        with pytest.raises(KeyError):
            scheduler.admit([position], 0)
    with pytest.raises(KeyError):
        scheduler.remove([1])


def test_a_resumed_scheduler_continues_at_its_position() -> None:
    """Fails if trained positions are admitted again, or positions before the end of the run are not admitted."""
    scheduler = scheduler_of([2], 1, 5, next_batch=3)
    scheduler.admit([11], 2)  # unfinished at the checkpoint
    assert scheduler.admit_new(2) == [30, 31] and scheduler.admit_new(2) == []
    assert scheduler.admit_new(3) == [40, 41] and scheduler.admit_new(4) == [] and scheduler.next_batch == 5

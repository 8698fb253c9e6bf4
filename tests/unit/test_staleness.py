"""What a stream may admit and which prompts a step takes: nothing too old, nothing twice, nothing lost, no deadlock."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.config.load import load_config
from gkd.config.schedulers import staleness_bound
from gkd.pipeline.staleness import StreamScheduler


def test_each_scheduler_promises_a_bound() -> None:
    """Fails if the loop checks another bound than the one that is documented."""
    bounds = {"sync": 0, "one_step_off": 1, "two_step_off": 2, "stream": 3}
    for name, bound in bounds.items():
        config = load_config(
            None, [f"trainer.scheduler={name}", f"trainer.max_staleness={bound if name == 'stream' else 1}"]
        )
        assert staleness_bound(config.trainer) == bound


def scheduler_of(sizes: list[int], bound: int, n_steps: int, next_batch: int = 0) -> StreamScheduler:
    """Batch b has the positions 10 b, 10 b + 1, ...; as many as sizes, over and over, say."""
    return StreamScheduler(
        lambda batch: [10 * batch + i for i in range(sizes[batch % len(sizes)])], bound, n_steps, next_batch
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_every_prompt_is_trained_on_once_and_in_time(sizes: list[int], bound: int, n_steps: int, rng: Random) -> None:
    """Fails if a step trains on a prompt that is too old, twice on one, on none, or waits for ever: whatever the order
    and the moment in which the prompts finish, whichever version really began them, and however many each step takes.
    """
    scheduler = scheduler_of(sizes, bound, n_steps)
    of_step = [sizes[step % len(sizes)] for step in range(n_steps)]
    admitted: list[int] = []
    begun: dict[int, int] = {}  # position -> version that really began it
    written_by: dict[int, int] = {}
    trained: list[int] = []
    for step in range(n_steps):
        admitted += scheduler.admit_new(step)
        assert len(admitted) == sum(of_step[: step + bound + 1]), "as much in flight as the bound allows, and no more"
        for position in admitted:  # an engine may begin some of what it has now, and the rest under a later version
            if position not in begun and rng.random() < 0.5:
                begun[position] = step
        while (batch := scheduler.choose(step)) is None:
            assert scheduler.unfinished, "it waits, and nothing is left to wait for"
            position = rng.choice(scheduler.unfinished)
            written_by[position] = begun.setdefault(position, step)
            scheduler.finish(position, written_by[position])
        assert len(batch) == len(set(batch)) == of_step[step]
        assert all(step - written_by[position] <= bound for position in batch)
        scheduler.remove(batch)
        trained += batch
    assert sorted(trained) == admitted and len(admitted) == sum(of_step)
    assert scheduler.unfinished == [] and not scheduler.admit_new(n_steps)


def test_what_finishes_first_is_taken_first_unless_something_is_due() -> None:
    """Fails if short answers wait for long ones without need, or an old one is left to grow too old."""
    scheduler = scheduler_of([2], 1, 100)
    assert scheduler.admit_new(0) == [0, 1, 10, 11]
    for position in (11, 1):
        assert scheduler.choose(0) is None
        scheduler.finish(position, 0)
    assert scheduler.choose(0) == [11, 1]
    scheduler.remove([11, 1])
    assert scheduler.admit_new(1) == [20, 21]
    for position in (20, 21):
        scheduler.finish(position, 1)
    assert scheduler.choose(1) is None, "0 and 10 were begun by version 0, and may not wait for step 2"
    scheduler.finish(10, 0)
    assert scheduler.choose(1) is None
    scheduler.finish(0, 1)  # an engine had it in its queue until version 1 came: it may wait
    assert scheduler.choose(1) == [10, 20]
    assert scheduler.unfinished == []


def test_a_prompt_that_finishes_twice_or_was_never_admitted_is_an_error() -> None:
    """Fails if a doubled answer takes another prompt's place in a batch."""
    scheduler = scheduler_of([2], 0, 100)
    scheduler.admit_new(0)
    scheduler.finish(0, 0)
    for position in (0, 7):
        with pytest.raises(KeyError):
            scheduler.finish(position, 0)


def test_a_resumed_scheduler_goes_on_where_it_was() -> None:
    """Fails if positions that were trained on are begun again, or those before the end of the run are not."""
    scheduler = scheduler_of([2], 1, 5, next_batch=3)
    scheduler.admit([11], 2)  # one that was unfinished
    assert scheduler.admit_new(2) == [30, 31] and scheduler.admit_new(2) == []
    assert scheduler.admit_new(3) == [40, 41] and scheduler.admit_new(4) == [] and scheduler.next_batch == 5

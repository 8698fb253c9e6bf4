"""What a stream may admit and which prompts a step takes: nothing too old, nothing twice, nothing lost, no deadlock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.config_load import load_config
from gkd.schedule import StreamLedger, staleness_bound


def test_each_scheduler_promises_a_bound() -> None:
    """Fails if the loop checks another bound than the one that is documented."""
    bounds = {"sync": 0, "one_step_off": 1, "two_step_off": 2, "stream": 3}
    for name, bound in bounds.items():
        config = load_config(None, [f"trainer.scheduler={name}", "trainer.max_staleness=3"])
        assert staleness_bound(config.trainer) == bound


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 8), st.randoms(use_true_random=False))
def test_every_prompt_is_trained_on_once_and_in_time(size: int, bound: int, n_steps: int, rng: object) -> None:
    """Fails if a step trains on a prompt that is too old, twice on one, on none, or waits for ever: whatever the order
    and the moment in which the prompts finish, and whichever version really began them.
    """
    ledger = StreamLedger(size, bound, n_steps * size)
    begun: dict[int, int] = {}  # position -> version that really began it
    written_by: dict[int, int] = {}
    trained: list[int] = []
    for step in range(n_steps):
        room = ledger.room(step)
        assert len(begun) + len(room) <= (step + bound + 1) * size, "no more in flight than the bound allows"
        ledger.admit(room, step)
        # An engine may begin some of what it has now, and the rest under a later version.
        waiting = [p for p in range(ledger.position) if p not in begun]
        for position in waiting:
            if rng.random() < 0.5:  # type: ignore[attr-defined]
                begun[position] = step
        while (batch := ledger.choose(step)) is None:
            candidates = ledger.unfinished
            assert candidates, "it waits, and nothing is left to wait for"
            position = rng.choice(candidates)  # type: ignore[attr-defined]
            written_by[position] = begun.setdefault(position, step)
            ledger.finish(position, written_by[position])
        assert len(batch) == len(set(batch)) == size
        assert all(step - written_by[position] <= bound for position in batch)
        ledger.trained(batch)
        trained += batch
    assert sorted(trained) == list(range(n_steps * size))
    assert ledger.unfinished == [] and not ledger.room(n_steps)


def test_what_finishes_first_is_taken_first_unless_something_is_due() -> None:
    """Fails if short answers wait for long ones without need, or an old one is left to grow too old."""
    ledger = StreamLedger(2, 1, 100)
    ledger.admit(ledger.room(0), 0)  # 0 to 3
    for position in (3, 1):
        assert ledger.choose(0) is None
        ledger.finish(position, 0)
    assert ledger.choose(0) == [3, 1]
    ledger.trained([3, 1])
    ledger.admit(ledger.room(1), 1)  # 4 and 5
    for position in (4, 5):
        ledger.finish(position, 1)
    assert ledger.choose(1) is None, "0 and 2 were begun by version 0, and may not wait for step 2"
    ledger.finish(2, 0)
    assert ledger.choose(1) is None
    ledger.finish(0, 1)  # an engine had it in its queue until version 1 came: it may wait
    assert ledger.choose(1) == [2, 4]
    assert ledger.unfinished == []


def test_a_prompt_that_finishes_twice_or_was_never_admitted_is_an_error() -> None:
    """Fails if a doubled answer takes another prompt's place in a batch."""
    ledger = StreamLedger(2, 0, 100)
    ledger.admit(ledger.room(0), 0)
    ledger.finish(0, 0)
    for position in (0, 7):
        with pytest.raises(KeyError):
            ledger.finish(position, 0)


def test_a_resumed_ledger_goes_on_where_it_was() -> None:
    """Fails if positions that were trained on are admitted again, or those before the end of the run are not."""
    ledger = StreamLedger(2, 1, 9, position=7)
    assert list(ledger.room(2)) == [7]
    ledger.admit([5], 2)  # one that was unfinished
    assert list(ledger.room(3)) == [7, 8] and ledger.position == 7

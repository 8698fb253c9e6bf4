"""A second of what `python -m tests.fuzz` does for minutes."""

from __future__ import annotations

from tests.fuzz.__main__ import run_mutations
from tests.fuzz.targets import check, corpus, join, split


def test_the_corpus_is_valid() -> None:
    """Would break if the fuzzer started from messages that are refused at the door: it would test nothing behind it."""
    for message in corpus():
        assert split(join(message)) == message
        assert check(message), message[0]


def test_random_damage_is_refused_or_harmless() -> None:
    """Would break if some damaged message raised anything but ProtocolError, or took memory for good."""
    result = run_mutations(40_000, seed=7)
    assert 0 < result["n_valid"] < result["n"], "both outcomes must occur, or nothing was tested"
    assert result["growth_mib"] < 32

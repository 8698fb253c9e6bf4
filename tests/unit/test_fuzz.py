"""A short run of `python -m tests.fuzz`."""

from __future__ import annotations

from tests.fuzz.__main__ import run_mutations
from tests.fuzz.targets import check, corpus, join, split


def test_the_corpus_is_valid() -> None:
    """Fails if the fuzzer starts from messages that are refused, so that it only tests the first check."""
    for message in corpus():
        assert split(join(message)) == message
        assert check(message), message[0]


def test_random_damage_is_refused_or_valid() -> None:
    """Fails if a damaged message raises another exception than ProtocolError, or leaks memory."""
    result = run_mutations(40_000, seed=7)
    assert 0 < result["n_valid"] < result["n"], "both outcomes must occur, or nothing was tested"
    assert result["growth_mib"] < 32

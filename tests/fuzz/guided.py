"""Process of the coverage-guided fuzzer: `python -m tests.fuzz.guided CORPUS_FOLDER [libFuzzer options]`."""

from __future__ import annotations

import random
import sys

import atheris

with atheris.instrument_imports(include=["teacher_server"]):  # what is imported before has no coverage points
    from tests.fuzz.mutate import mutate
    from tests.fuzz.targets import check, corpus, join, split

_CORPUS = corpus()


def one_input(data: bytes) -> None:
    """Check one input. Its last byte selects whether the checksums of the frames are corrected."""
    check(split(data), correct_checksums=not data or bool(data[-1] & 3))


def mutator(data: bytes, max_size: int, seed: int) -> bytes:
    """Apply libFuzzer's byte mutations or `mutate`, which changes frames and msgpack numbers, half of the time each."""
    message = split(data)
    if seed % 2 or not message:
        return atheris.Mutate(data, max_size)
    return join(mutate(message, _CORPUS, random.Random(seed)))[:max_size]


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input, custom_mutator=mutator)
    atheris.Fuzz()

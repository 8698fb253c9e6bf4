"""The coverage-guided fuzzer's process: `python -m tests.fuzz.guided CORPUS_FOLDER [libFuzzer options]`."""

from __future__ import annotations

import random
import sys

import atheris

with atheris.instrument_imports(include=["teacher_server"]):
    pass

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import check, corpus, join, split

_CORPUS = corpus()


def one_input(data: bytes) -> None:
    """The last byte says whether the checksums of the frames are made right."""
    check(split(data), honest_checksums=not data or bool(data[-1] & 3))


def mutator(data: bytes, max_size: int, seed: int) -> bytes:
    """libFuzzer's own mutations know bytes; ours know frames and msgpack's numbers. Half of each."""
    message = split(data)
    if seed % 2 or not message:
        return atheris.Mutate(data, max_size)
    return join(mutate(message, _CORPUS, random.Random(seed)))[:max_size]


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input, custom_mutator=mutator)
    atheris.Fuzz()

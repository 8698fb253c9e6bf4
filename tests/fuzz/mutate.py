"""Damage valid messages at random: bits, bytes, lengths, frames, numbers inside the header."""

from __future__ import annotations

import random

from tests.fuzz.targets import Message

# Boundary values of integers, floats and lengths, encoded by msgpack.
_BORDERS = """
    00 7f ff e0 cc80 ccff cd0100 cdffff ce00010000 ceffffffff cf0000000100000000 cfffffffffffffffff d080
    d38000000000000000 cb7ff8000000000000 cb7ff0000000000000 cbfff0000000000000 cb8000000000000000 ca7fc00000
    c0 c2 c3 90 80 a0 c400 dc0000 dd00000000 dbffffffff
"""
_NUMBERS = [bytes.fromhex(text) for text in _BORDERS.split()]


def mutate(message: Message, others: list[Message], rng: random.Random) -> Message:
    """Return a copy with one to four random changes."""
    message = list(message)
    for _ in range(rng.randrange(1, 5)):
        part = rng.randrange(len(message)) if message else 0
        if not message:
            return message
        raw = bytearray(message[part])
        kind = rng.randrange(10)
        if kind <= 2 and raw:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        elif kind == 3 and raw:
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        elif kind == 4 and raw:
            at = rng.randrange(len(raw))
            number = rng.choice(_NUMBERS)
            raw[at : at + rng.choice((1, len(number), 9))] = number
        elif kind == 5:
            at = rng.randrange(len(raw) + 1)
            raw[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 6 and raw:
            at = rng.randrange(len(raw))
            del raw[at : at + rng.randrange(1, 9)]
        elif kind == 7:
            other = rng.choice(rng.choice(others))
            at = rng.randrange(len(raw) + 1)
            raw = raw[:at] + other[rng.randrange(len(other) + 1) :]
        elif kind == 8:
            message.insert(rng.randrange(len(message) + 1), bytes(raw))
            continue
        else:
            other_part = rng.randrange(len(message))
            message[part], message[other_part] = message[other_part], message[part]
            if rng.randrange(2) and len(message) > 1:
                del message[part]
            continue
        message[part] = bytes(raw)
    return message

"""Faults of a reply of an HTTP teacher, in the forms of vLLM and SGLang."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from tests.service.http_servers import N_VOCAB

K = 8

# Faults of a reply: each changes the JSON at a random place of the response and returns None, or returns other bytes.
Fault = Callable[[Any, random.Random], bytes | None]


def _row(reply: Any, rng: random.Random) -> Any:
    """Return the listed row of one of the last two tokens, which belong to the response in every test."""
    if "choices" in reply:
        return reply["choices"][0]["prompt_logprobs"][-rng.randint(1, 2)]
    return reply["meta_info"]["input_top_logprobs"][-rng.randint(1, 2)]


def _entry(reply: Any, rng: random.Random, value: Any) -> None:
    """Replace the logprob of a listed entry."""
    row = _row(reply, rng)
    if isinstance(row, dict):
        row[rng.choice(list(row))]["logprob"] = value
    else:
        rng.choice(row)[0] = value


def _id(reply: Any, rng: random.Random, value: Any) -> None:
    row = _row(reply, rng)
    if isinstance(row, dict):
        row[value] = row.pop(rng.choice(list(row)))
    else:
        rng.choice(row)[1] = value


def _lists(reply: Any) -> list[list[Any]]:
    """Return the lists with one item per token."""
    if "choices" in reply:
        return [reply["choices"][0]["prompt_logprobs"]]
    return [reply["meta_info"]["input_token_logprobs"], reply["meta_info"]["input_top_logprobs"]]


def _drop_row(reply: Any, rng: random.Random) -> None:
    rows = rng.choice(_lists(reply))
    del rows[rng.randrange(len(rows))]


def _repeat_row(reply: Any, rng: random.Random) -> None:
    rows = rng.choice(_lists(reply))
    rows.insert(rng.randrange(len(rows)), copy.deepcopy(rows[-1]))


def _null_row(reply: Any, rng: random.Random) -> None:
    rows = rng.choice(_lists(reply))
    rows[-rng.randint(1, 2)] = None


def _shift_rows(reply: Any, rng: random.Random) -> None:
    rows = _lists(reply)[-1]
    rows[1:] = [*rows[2:], rows[1]]


def _more(reply: Any, rng: random.Random) -> None:
    """Add the next entry, as a server does that counts another K."""
    row = _row(reply, rng)
    if isinstance(row, dict):
        free = next(i for i in range(N_VOCAB) if str(i) not in row)
        row[str(free)] = {"logprob": -30.0, "rank": K + 1}
    else:
        row.append([-30.0, next(i for i in range(N_VOCAB) if i not in {i for _, i, _ in row}), None])


def _fewer(reply: Any, rng: random.Random) -> None:
    row = _row(reply, rng)
    if isinstance(row, dict):
        del row[next(i for i, entry in row.items() if entry["rank"] == rng.randint(1, K) or entry["rank"] == K)]
    else:
        del row[rng.randrange(len(row))]


def _repeat_id(reply: Any, rng: random.Random) -> bytes | None:
    row = _row(reply, rng)
    if isinstance(row, dict):
        some, other = rng.sample(list(row), 2)
        row["again"] = row.pop(some)
        return json.dumps(reply).replace('"again"', f'"{other}"').encode()
    some, other = rng.sample(row, 2)
    some[1] = other[1]
    return None


def _swap(reply: Any, rng: random.Random) -> None:
    """Exchange the logprobs of the most probable and the last entry of a row."""
    row = _row(reply, rng)
    if isinstance(row, dict):
        by_rank = {entry["rank"]: entry for entry in row.values()}
        by_rank[1]["logprob"], by_rank[K]["logprob"] = by_rank[K]["logprob"], by_rank[1]["logprob"]
    else:
        row[0][0], row[-1][0] = row[-1][0], row[0][0]


def _heavy(reply: Any, rng: random.Random) -> None:
    row = _row(reply, rng)
    for entry in row.values() if isinstance(row, dict) else row:
        if isinstance(entry, dict):
            entry["logprob"] = -0.1
        else:
            entry[0] = -0.1


def _rank(reply: Any, rng: random.Random) -> None:
    """Damage a rank, or in SGLang's form a token at its place."""
    row = _row(reply, rng)
    if isinstance(row, dict):
        rng.choice([e for e in row.values() if e["rank"] <= K])["rank"] = rng.choice([0, -1, None, "1", 1.5, 10**20])
    else:
        own = rng.choice(reply["meta_info"]["input_token_logprobs"])
        own[1] = rng.choice([None, str(own[1]), own[1] + 1, -1, 1.5, 10**30])


def _other_form(reply: Any, rng: random.Random) -> bytes:
    items = [[], {}, None, 7, "x", [reply], {"choices": []}, {"choices": [reply, reply]}, {"meta_info": {}}]
    items += [{"error": {"message": "x"}}, {"choices": [{"prompt_logprobs": None}]}, {"choices": [{"text": "x"}]}]
    return json.dumps(rng.choice(items)).encode()


def _cut(reply: Any, rng: random.Random) -> bytes:
    whole = json.dumps(reply).encode()
    return whole[: rng.randrange(len(whole) - 1)]


def _garbage(reply: Any, rng: random.Random) -> bytes:
    return rng.choice([b"", b"<html>busy</html>", rng.randbytes(200), b"[" * 5000, b"\xff\xfe{}", b"NaN"])


FAULTS: dict[str, Fault] = {
    "NaN": lambda reply, rng: _entry(reply, rng, float("nan")),
    "infinite": lambda reply, rng: _entry(reply, rng, rng.choice([float("inf"), -float("inf")])),
    "no number": lambda reply, rng: _entry(reply, rng, rng.choice([None, "-1.5", True, [], {}])),
    "above 0": lambda reply, rng: _entry(reply, rng, rng.choice([0.5, 3.0, 1e30])),
    "id as text": lambda reply, rng: _id(reply, rng, rng.choice(["token_id:5", "w5", "", "5.0", "1e3"])),
    "id out of range": lambda reply, rng: _id(reply, rng, rng.choice([N_VOCAB, -1, 10**6, 2**31, 2**63])),
    "row missing": _drop_row,
    "row repeated": _repeat_row,
    "row null": _null_row,
    "rows shifted": _shift_rows,
    "K + 1 entries": _more,
    "K - 1 entries": _fewer,
    "id repeated": _repeat_id,
    "order": _swap,
    "mass": _heavy,
    "rank or token": _rank,
    "another form": _other_form,
    "cut": _cut,
    "garbage": _garbage,
}

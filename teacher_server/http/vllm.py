"""vLLM's `/v1/completions` and `/inference/v1/generate` with prompt logprobs (TRL's VLLMClient, prime-rl).

    prompt_logprobs  a list per prompt: null, then {"id": {"logprob", "rank", "decoded_token"}, ...} for each token

The token itself comes first, then the others by rank. Outside of the K most probable it has rank K + 1 (2 if K = 0), so
that clients that sort by rank and cut to K do not count it. The logits are divided by the temperature; vLLM ignores it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from teacher_server.http.question import (
    HOLE,
    Dialect,
    Question,
    Refusal,
    TokenId,
    Wanted,
    check_generation,
    fill,
    rows_json,
    sequences_of,
)
from teacher_server.wire.table import TopKTable

_ERRORS = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 503: "ServiceUnavailableError"}


class _Entry(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: None = None


class _Refused(msgspec.Struct):
    """Refuse other tokens than the prompt's, images, and what is generated."""

    n: int | None = None
    stream: bool | None = None
    echo: bool | None = None
    logprobs: object = None
    logprob_token_ids: object = None
    prompt_logprob_token_ids: object = None
    truncate_prompt_tokens: object = None
    prompt_embeds: object = None
    features: object = None
    content_parts: object = None


class _Sampling(_Refused):
    max_tokens: int | None = None
    temperature: float | None = None  # 0 and null: 1
    prompt_logprobs: int | None = None  # K


class _Completions(_Sampling, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    model: str | None = None


class _Generate(msgspec.Struct):
    token_ids: list[TokenId]
    sampling_params: _Sampling
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    features: object = None
    content_parts: object = None


def _read_completions(body: bytes) -> Question:
    asked = msgspec.json.decode(body, type=_Completions)
    wanted = [_wanted(ids, asked) for ids in sequences_of("prompt", asked.prompt)]

    def write(scores: Sequence[TopKTable], name: str) -> Iterator[bytes]:
        n_tokens = sum(len(sequence.ids) for sequence in wanted)
        choice = {"text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None, "prompt_logprobs": HOLE}
        shell = {
            "id": f"cmpl-{time.time_ns():x}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model or name,
            "choices": [{"index": index, **choice} for index in range(len(scores))],
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens, "completion_tokens": 0},
        }
        return fill(shell, [rows_json(_rows(*pair)) for pair in zip(wanted, scores, strict=True)])

    return Question(asked.model or "", wanted, write)


def _read_generate(body: bytes) -> Question:
    asked = msgspec.json.decode(body, type=_Generate)
    for name in ("stream", "features", "content_parts"):
        setattr(asked.sampling_params, name, getattr(asked, name))
    (wanted,) = (_wanted(ids, asked.sampling_params) for ids in sequences_of("token_ids", [asked.token_ids]))

    def write(scores: Sequence[TopKTable], _: str) -> Iterator[bytes]:
        choice = {"index": 0, "token_ids": [], "logprobs": None, "finish_reason": "length"}
        request_id = asked.request_id or f"{time.time_ns():x}"
        shell = {"request_id": request_id, "choices": [choice], "prompt_logprobs": HOLE}
        return fill(shell, [rows_json(_rows(wanted, scores[0]))])

    return Question(asked.model or "", [wanted], write)


def _wanted(ids: np.ndarray, asked: _Sampling) -> Wanted:
    refused = {name: getattr(asked, name) for name in _Refused.__struct_fields__}
    check_generation("max_tokens", asked.max_tokens, refused)
    if asked.prompt_logprobs is None:
        raise Refusal(400, "prompt_logprobs is missing: this server returns nothing else. Fix: prompt_logprobs = K.")
    return Wanted("prompt_logprobs", ids, 1, asked.prompt_logprobs, asked.temperature or 1.0)


def _rows(wanted: Wanted, scores: TopKTable) -> Iterator[dict[int, _Entry]]:
    """Yield id -> entry of each row, the token itself first."""
    assert scores.sampled is not None  # every request asks for it
    sampled = zip(wanted.ids[wanted.start :].tolist(), scores.sampled.tolist(), strict=True)
    ranks = range(1, wanted.depth + 1)
    for (token, logprob), ids, logprobs in zip(sampled, scores.ids, scores.logprobs, strict=True):
        # A key keeps its first place when it is assigned again: the token's entry gets its rank, if it has one.
        row = {token: _Entry(logprob, wanted.depth + 1)}
        row.update(zip(ids.tolist(), map(_Entry, logprobs.tolist(), ranks), strict=True))
        yield row if wanted.k else {token: row[token]}


def error(status: int, text: str) -> Mapping[str, object]:
    """Return vLLM's JSON of an error."""
    kind = _ERRORS.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": text, "type": kind, "param": None, "code": status}}


COMPLETIONS = Dialect(_read_completions, error)
GENERATE = Dialect(_read_generate, error)

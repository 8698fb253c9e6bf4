"""SGLang's `/generate` with input logprobs (slime): entries are [logprob, id, null], from `logprob_start_len` on.

    input_token_logprobs  [null, id, null] of the token at the start, then one entry per token
    input_top_logprobs    null, then a list of the K most probable per token, for `top_logprobs_num` = K > 0

SGLang's input logprobs are those at temperature 1, whatever the request's temperature is; so are these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec

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


class _Refused(msgspec.Struct):
    """Refuse what is generated, other models, and images."""

    stream: bool | None = None
    token_ids_logprob: object = None
    lora_path: object = None
    image_data: object = None
    video_data: object = None
    audio_data: object = None
    input_embeds: object = None


class _Sampling(msgspec.Struct):
    max_new_tokens: int | None = None
    n: int | None = None


class _Generate(_Refused):
    input_ids: list[TokenId | list[TokenId]] | None = None
    text: str | list[str] = ""
    model: str | None = None
    sampling_params: _Sampling = msgspec.field(default_factory=_Sampling)
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0


def _read(body: bytes) -> Question:
    asked = msgspec.json.decode(body, type=_Generate)
    sequences = sequences_of("input_ids", asked.text if asked.input_ids is None else asked.input_ids)
    refused = {"n": asked.sampling_params.n, **{name: getattr(asked, name) for name in _Refused.__struct_fields__}}
    check_generation("max_new_tokens", asked.sampling_params.max_new_tokens, refused)
    if not asked.return_logprob:
        raise Refusal(400, "return_logprob = false: this server returns nothing else. Fix: return_logprob = true.")
    start = asked.logprob_start_len
    last = min(map(len, sequences)) - 2
    if not 0 <= start <= last:
        raise Refusal(400, f"logprob_start_len = {start} with {last + 2} tokens: no row is left. Fix: 0 to {last}.")
    wanted = [Wanted("top_logprobs_num", ids, start + 1, asked.top_logprobs_num) for ids in sequences]

    def write(scores: Sequence[TopKTable], _: str) -> Iterator[bytes]:
        tables = [_tables(sequence, table) for sequence, table in zip(wanted, scores, strict=True)]
        shells = []
        for sequence, columns in zip(wanted, tables, strict=True):
            meta: dict[str, object] = {"id": "", "finish_reason": {"type": "length", "length": 0}}
            meta |= {"prompt_tokens": len(sequence.ids), "completion_tokens": 0, "cached_tokens": 0}
            meta |= {"output_token_logprobs": [], **dict.fromkeys(columns, HOLE)}
            shells.append({"text": "", "output_ids": [], "meta_info": meta})
        is_one = asked.input_ids is not None and isinstance(asked.input_ids[0], int)
        return fill(shells[0] if is_one else shells, [part for columns in tables for part in columns.values()])

    return Question(asked.model or "", wanted, write)


def _tables(wanted: Wanted, scores: TopKTable) -> dict[str, Iterable[bytes]]:
    """Return name -> JSON of the lists of one sequence."""
    assert scores.sampled is not None  # every request asks for it
    before, *ids = wanted.ids[wanted.start - 1 :].tolist()
    none = itertools.repeat(None)
    sampled: Iterable[object] = zip(scores.sampled.tolist(), ids, none, strict=False)
    tables: dict[str, Iterable[bytes]] = {"input_token_logprobs": rows_json(sampled, first=(None, before, None))}
    if wanted.k:
        rows = zip(scores.logprobs, scores.ids, strict=True)
        tables["input_top_logprobs"] = rows_json([*zip(p.tolist(), i.tolist(), none, strict=False)] for p, i in rows)
    return tables


GENERATE = Dialect(_read, lambda _, text: {"error": {"message": text}})

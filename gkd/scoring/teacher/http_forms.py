"""Requests and replies of HTTP teachers: one sequence or answer as JSON, in the dialects of vLLM and SGLang.

A reply must list each token of its sequence at its position, and K entries for each response token. Everything else is
refused, so that no row is trained on at a wrong place. These servers send rows of all response tokens; those of own
tokens are kept. docs/http_teacher.md has the requests.

Letters: P prompt tokens, R response tokens, M of them are the student's own, K entries, G given ids.
"""

from __future__ import annotations

import base64
import io
import math
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from gkd.errors import TeacherError
from gkd.types import TeacherScores
from teacher_server.client.generate import AnswerSettings
from teacher_server.wire.answers import check_end
from teacher_server.wire.protocol import MAX_ID, ProtocolError
from teacher_server.wire.table import Rows, TopKTable, check_logprobs, check_topk

_FLOOR = -9999.0  # vLLM writes it for minus infinity and NaN, which JSON does not have
_Ids = list[Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]]
_SAME = 1e-3  # nats between the two places at which SGLang lists the logprob of one token


class Asked(NamedTuple):
    """Hold what a request asks about one sequence."""

    name: str  # names the sequence in errors
    tokens: list[int]  # P + R
    n_prompt: int  # P
    k: int  # entries of each row; 0: no list
    with_sampled: bool
    given: np.ndarray | None = None  # [M, G] ids that each row must list
    own: np.ndarray | None = None  # [R] bool, the tokens whose rows are kept; None means all

    @property
    def rows(self) -> np.ndarray:
        """Return [M] int64, the positions in the response of the rows that are kept."""
        return np.arange(len(self.tokens) - self.n_prompt) if self.own is None else np.flatnonzero(self.own)

    @property
    def given_everywhere(self) -> np.ndarray:
        """Return [R, G] ids: the request lists some for each response token, also for those whose rows are dropped."""
        assert self.given is not None
        if self.own is None:
            return self.given
        return self.given[np.maximum(np.cumsum(self.own) - 1, 0)]


class _Entry(msgspec.Struct):
    logprob: float
    rank: int


_VllmRows = list[dict[int, _Entry] | None]  # one for each token; the first is None
_Listed = tuple[float, int, Any]  # logprob, id, text


class _Choice(msgspec.Struct):
    prompt_logprobs: _VllmRows


class _Completion(msgspec.Struct):
    choices: tuple[_Choice]


class _Generated(msgspec.Struct):
    prompt_token_id_logprobs: str  # base64 of a .npy file, [R, G] float32
    prompt_logprobs: _VllmRows | None = None


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]]  # one for each token from the last one of the prompt on
    input_top_logprobs: list[list[_Listed] | None] | None = None


class _SGLangReply(msgspec.Struct):
    meta_info: _Meta


class _Written(msgspec.Struct):
    token_ids: _Ids


class _VllmAnswer(msgspec.Struct):
    choices: tuple[_Written]


class _SGLangAnswer(msgspec.Struct):
    output_ids: _Ids


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None  # an adapter names the model that it belongs to


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: list[int]


def request_of(dialect: str, model: str, asked: Asked) -> tuple[str, bytes]:
    """Return the path and the body of the request for the scores of a sequence."""
    body: dict[str, Any]
    if dialect == "sglang":
        body = {
            "input_ids": asked.tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": asked.n_prompt - 1,
            "top_logprobs_num": asked.k,
        }
        return "/generate", msgspec.json.encode(body)
    params: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0}
    if asked.given is None:
        body = {"model": model, "prompt": asked.tokens, "prompt_logprobs": asked.k, **params}
        return "/v1/completions", msgspec.json.encode(body)
    params |= {"prompt_logprob_token_ids": asked.given_everywhere.tolist(), "prompt_logprob_start": asked.n_prompt - 1}
    if (n_listed := _n_listed(asked)) is not None:
        params["prompt_logprobs"] = n_listed
    body = {"model": model, "token_ids": asked.tokens, "sampling_params": params}
    return "/inference/v1/generate", msgspec.json.encode(body)


def scores_of(dialect: str, body: bytes, asked: Asked, n_vocab: int) -> TeacherScores:
    """Return the scores in a reply.

    Raises:
        TeacherError: naming the sequence: the reply is not in the dialect's form, a row or a token is missing or at
            another place, or the numbers fail `check_topk` or `check_logprobs`.
    """
    try:
        ids, *tables = _tables(dialect, body, asked, n_vocab)
        logprobs, sampled = (np.where(values <= _FLOOR, np.float32(-np.inf), values) for values in tables)
        table = TopKTable.without_tail(ids, logprobs) if asked.k else None
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise TeacherError(f"{asked.name}: the reply is not in the form of {dialect}: {error}") from error
    rows = Rows((asked.name,), (len(asked.rows),), (asked.own,))
    if table is not None:
        check_topk(table, n_vocab, rows)
    if asked.with_sampled:
        check_logprobs(rows, sampled)
    return TeacherScores(table, sampled if asked.with_sampled else None)


def answer_request(dialect: str, model: str, ids: list[int], seed: int, how: AnswerSettings) -> tuple[str, bytes]:
    """Return the path and the body of the request for an answer; servers have defaults for what it does not say."""
    params: dict[str, Any] = {"temperature": how.temperature, "top_p": how.top_p, "top_k": -1, "min_p": 0.0}
    params |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    params["stop_token_ids"] = list(how.stop_ids)
    if dialect == "sglang":  # its ignore_eos would ignore the stop ids, too; some versions take seeds of 31 bits
        params |= {"max_new_tokens": how.max_tokens, "sampling_seed": seed % (1 << 31), "no_stop_trim": True}
        return "/generate", msgspec.json.encode({"input_ids": ids, "sampling_params": params})
    params |= {"max_tokens": how.max_tokens, "seed": seed, "ignore_eos": True, "return_token_ids": True}
    return "/v1/completions", msgspec.json.encode({"model": model, "prompt": ids, **params})


def answer_of(dialect: str, body: bytes, how: AnswerSettings) -> np.ndarray:
    """Return the ids of the answer in a reply, [R] int32. Raises ValueError: it lacks them or is another one."""
    if dialect == "sglang":
        ids = msgspec.json.decode(body, type=_SGLangAnswer).output_ids
    else:
        ids = msgspec.json.decode(body, type=_VllmAnswer).choices[0].token_ids
    answer = np.array(ids, np.int32)
    try:
        check_end(answer, how.max_tokens, how.stop_ids)
    except ProtocolError as error:
        fix = f"if the teacher ends answers with {ids[-1:]}, add it to rollout.stop_token_ids"
        raise ValueError(f"{error}. Fix: {fix}") from error
    if max(ids) >= how.n_vocab:
        problem = f"the teacher wrote the id {max(ids)}, and the student has {how.n_vocab}"
        raise ValueError(f"{problem}. Fix: use gkd teacher --engine vllm, which masks the others")
    return answer


def model_of(body: bytes, name: str) -> tuple[str, int | None]:
    """Return id and context length of the model `name`, or of the only one, in a reply of /v1/models.

    Raises:
        ValueError: the server has no model of this name, or has several and no name was given; the text lists the ids.
    """
    models = msgspec.json.decode(body, type=_Models).data
    matches = [model for model in models if (model.id == name if name else model.parent is None)]
    if len(matches) != 1:
        raise ValueError(f"its models are {', '.join(model.id for model in models[:8]) or 'none'}")
    return matches[0].id, matches[0].max_model_len


def tokens_of(body: bytes) -> list[int]:
    """Return the ids in a reply of /tokenize. Raises msgspec.DecodeError."""
    return msgspec.json.decode(body, type=_Tokens).tokens


def _n_listed(asked: Asked) -> int | None:
    """Return the entries to request besides given ids; None: no rows. Up to G of the K entries may be given ids."""
    assert asked.given is not None
    if asked.given.shape[1] < asked.k:
        return asked.k
    return 0 if asked.with_sampled else None


def _tables(dialect: str, body: bytes, asked: Asked, n_vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids [M, K] int32, logprobs [M, K] float32, and the own tokens' [M] float32. Raises ValueError."""
    if dialect == "sglang":
        return _sglang_tables(msgspec.json.decode(body, type=_SGLangReply).meta_info, asked, n_vocab)
    if asked.given is None:
        rows = msgspec.json.decode(body, type=_Completion).choices[0].prompt_logprobs
        _check_distinct(body, rows)
        return _vllm_tables(rows, asked, asked.k)
    reply = msgspec.json.decode(body, type=_Generated)
    logprobs = _array(reply.prompt_token_id_logprobs, asked.given_everywhere.shape)[asked.rows]
    n_listed = _n_listed(asked)
    if n_listed is None:
        return _merged(asked.given, logprobs, *_arrays([], 0), asked.k)
    if reply.prompt_logprobs is None:
        raise ValueError("prompt_logprobs are missing")
    _check_distinct(body, reply.prompt_logprobs)
    return _merged(asked.given, logprobs, *_vllm_tables(reply.prompt_logprobs, asked, n_listed), asked.k)


def _check_distinct(body: bytes, rows: _VllmRows) -> None:
    """Raise ValueError if a row names an id twice: the decoder keeps the last of equal names of a JSON object."""
    n_entries = sum(len(row) for row in rows if row)
    if body.count(b'"rank":') != n_entries:
        raise ValueError(f"{n_entries} distinct entries, and another number of ranks")


def _vllm_tables(rows: _VllmRows, asked: Asked, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tables of K entries: by rank, and the token itself at its place or in addition."""
    tokens = asked.tokens
    listed = []
    kept = set((asked.n_prompt + asked.rows).tolist())
    if len(rows) != len(tokens) or rows[0] is not None:
        raise ValueError(f"{len(rows)} rows of {len(tokens)} tokens, the first of which has none")
    for position in range(1, len(tokens)):
        row = rows[position]
        token = tokens[position]
        sampled = None if row is None else row.get(token)
        if row is None or sampled is None:
            raise ValueError(f"position {position} does not list its token {token}")
        if position not in kept:
            continue
        top = {entry.rank: (entry.logprob, i) for i, entry in row.items() if 1 <= entry.rank <= k}
        if len(top) != k or len(row) != k + (sampled.rank > k):
            problem = f"position {position} has {len(row)} entries"
            raise ValueError(f"{problem}, expected the ranks 1 to {k} once, and its token")
        listed.append(((sampled.logprob, token), [top[rank] for rank in range(1, k + 1)]))
    return _arrays(listed, k)


def _sglang_tables(meta: _Meta, asked: Asked, n_vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sampled = meta.input_token_logprobs
    top = meta.input_top_logprobs or []
    listed = []
    expected = asked.tokens[asked.n_prompt - 1 :]
    # SGLang writes 0 in place of the last id of its vocabulary: it takes ids from there on for ids of images.
    written = [0 if token == n_vocab - 1 else token for token in expected]
    if [token for _, token, _ in sampled] not in (expected, written):
        raise ValueError(f"{len(sampled)} tokens, which are not the {len(expected)} from the end of the prompt on")
    if asked.k and len(top) != len(expected):
        raise ValueError(f"{len(top)} lists for {len(expected)} tokens")
    for row in (1 + asked.rows).tolist():
        logprob = sampled[row][0]
        token = expected[row]
        entries = top[row] or [] if asked.k else []
        if logprob is None or len(entries) != asked.k:
            raise ValueError(f"response position {row - 1}: logprob {logprob}, {len(entries)} of {asked.k} entries")
        at = {i: listed_at for listed_at, i, _ in entries}
        if entries and not -_SAME <= at.get(token, entries[-1][0]) - logprob <= (_SAME if token in at else math.inf):
            problem = f"token {token} has logprob {logprob:.6g}, which its list contradicts"
            raise ValueError(f"response position {row - 1}: {problem}")
        listed.append(((logprob, token), [(listed_at, i) for listed_at, i, _ in entries]))
    return _arrays(listed, asked.k)


def _arrays(
    listed: list[tuple[tuple[float, int], list[tuple[float, int]]]], k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids, logprobs and the tokens' own logprobs of rows of (logprob, id) pairs."""
    ids = np.array([[i for _, i in top] for _, top in listed], np.int32).reshape(len(listed), k)
    logprobs = np.array([[value for value, _ in top] for _, top in listed], np.float32).reshape(len(listed), k)
    return ids, logprobs, np.array([sampled for (sampled, _), _ in listed], np.float32)


def _array(text: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a float32 matrix of this shape from base64 of a .npy file. Raises ValueError."""
    file = io.BytesIO(base64.b64decode(text, validate=True))
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("another version of the .npy format")
    header_shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
    data = file.read()
    if (header_shape, by_column, dtype) != (shape, False, np.dtype("<f4")) or len(data) != 4 * shape[0] * shape[1]:
        raise ValueError(f"logprobs of the given ids are {dtype} {header_shape}, expected float32 {shape}")
    return np.frombuffer(data, "<f4").reshape(shape)


def _merged(
    given: np.ndarray, given_logprobs: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, sampled: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return K entries per row, descending: the given ids, and the most probable others."""
    if n_others := k - given.shape[1]:
        is_given = (ids[:, :, None] == given[:, None, :]).any(axis=2)
        top_others = np.argsort(is_given, axis=1, kind="stable")[:, :n_others]
        given = np.hstack([given, np.take_along_axis(ids, top_others, axis=1)])
        given_logprobs = np.hstack([given_logprobs, np.take_along_axis(logprobs, top_others, axis=1)])
    order = np.argsort(-given_logprobs, axis=1, kind="stable")
    return np.take_along_axis(given, order, axis=1), np.take_along_axis(given_logprobs, order, axis=1), sampled

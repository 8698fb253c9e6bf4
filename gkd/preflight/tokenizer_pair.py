"""Check a teacher with another tokenizer: what both vocabularies have in common on the texts of the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from gkd.config.schema import Config, Route
from gkd.config.schema_teacher import BY_UNITS, NONE
from gkd.data.prompts import load_tokenizer
from gkd.errors import ConfigError, DataError, TeacherRefusal
from gkd.hf.model_folder import eos_token_ids
from gkd.log import get_logger
from gkd.preflight.teacher import as_rollout
from gkd.scoring.teacher.info import TeacherInfo
from gkd.scoring.teacher.teacher import open_teacher
from gkd.text.byte_vocab import END, MARK, ByteVocab, token_bytes
from gkd.text.pair import TokenizerPair
from gkd.types import Prompt, TeacherScores
from teacher_server.wire.fingerprint import tokenizer_fingerprint
from teacher_server.wire.table import TopKTable

log = get_logger("preflight")

LEAST_COMMON = 0.8  # share of the student's token boundaries, below which distill.units=nodes is refused
LEAST_PAIRED = 0.5  # share of the student's tokens, below which the tokenizer is refused
_N_TEXTS = 64
_TEXT_TOKENS = 512
SAFE_SHARE = 0.95  # the one of gkd.loss.text_units, which imports torch
_ANSWER = "\ue000answer\ue001"  # characters for private use, which no template changes


def teacher_tokenizer(config: Config) -> Any:
    """Return the tokenizer of teacher.tokenizer, or None if it is empty, or no teacher scores. Raises ConfigError."""
    path = config.teacher.tokenizer
    if not path or config.teacher.backend == NONE:
        return None
    return load_tokenizer(path, "teacher.tokenizer", trust_remote_code=config.model.trust_remote_code)


def tokenizer_pair(
    config: Config, student: Any, teacher: Any, info: TeacherInfo, n_student: int, eos_ids: Sequence[int]
) -> TokenizerPair:
    """Return the tokenizers of a run.

    Args:
        student, teacher: Hugging Face's tokenizers.
        n_student: token ids of the student.
        eos_ids: the student's, which end a response.

    Raises:
        ConfigError: the folder has another tokenizer than the teacher; the bytes of a vocabulary are not known; an
            entry of teacher.special_tokens is not a special token, or has a pair that another one has.
    """
    path = config.teacher.tokenizer
    if info.tokenizer_fingerprint and info.tokenizer_fingerprint != tokenizer_fingerprint(teacher.get_vocab()):
        problem = f"its tokens are not those of the teacher's folder {info.model_path}."
        raise config.error("teacher.tokenizer", problem, "name the folder of the teacher, or a copy of it.")
    vocabs = []
    for key, value, tokenizer, n in (
        ("model.path", config.model.path, student, n_student),
        ("teacher.tokenizer", path, teacher, info.vocab_size),
    ):
        try:
            tokens = token_bytes(tokenizer)
        except DataError as error:
            problem = f"the bytes of its tokens are not known: {error}."
            raise ConfigError(
                key, value, problem, "use byte-level BPE, or SentencePiece with byte fallback."
            ) from error
        n = n or len(tokens)  # an HTTP teacher does not tell the rows of its LM head
        vocabs.append(tokens[:n] + [None] * (n - len(tokens)))
    ends = eos_token_ids(path, teacher)
    end = _turn_end(teacher, config.data.chat_template != "never")
    if end is None:
        end = ends[0] if teacher.eos_token_id is None else teacher.eos_token_id
    for name in config.teacher.special_tokens:
        if _special(student, name, name) in eos_ids:
            problem = "ends a response of the student; ends are paired without it."
            raise ConfigError(f"teacher.special_tokens.{name}", name, problem, "remove the entry.")
    marks = [(list(eos_ids), sorted({*ends, end}), END)]
    taken = {*ends, end}
    for i, (name, other) in enumerate(config.teacher.special_tokens.items(), 1):
        token = _special(teacher, other, name)
        if token in taken:  # each token of the teacher has one mark
            problem = "ends the teacher's responses, or is the pair of another token."
            fix = "name another token, or remove the entry."
            raise ConfigError(f"teacher.special_tokens.{name}", other, problem, fix)
        taken.add(token)
        marks.append(([_special(student, name, name)], [token], MARK + bytes([i])))
    for *sides, mark in marks:
        for vocab, ids in zip(vocabs, sides, strict=True):
            for token in ids:
                if token < len(vocab):
                    vocab[token] = mark
    ours, theirs = (tokenizer.backend_tokenizer.to_str() for tokenizer in (student, teacher))
    return TokenizerPair(
        vocabs[0],
        vocabs[1],
        ours,
        theirs,
        end,
        info.max_tokens,
        by_units=config.teacher.signal == BY_UNITS,
        with_nodes=config.distill.units == "nodes",
        unpaired=_no_rows(config, info),
    )


def _no_rows(config: Config, info: TeacherInfo) -> TeacherScores:
    """Return the tables of a response that has no token of the teacher."""
    if config.teacher.signal == "hidden":
        return TeacherScores(hidden=np.zeros((0, info.hidden_size), np.float32))
    none = np.zeros((0, config.teacher.topk), np.float32)
    ids = np.zeros((0, config.teacher.topk), np.int32)
    counts = ids[:, 0] if config.teacher.mass > 0 else None
    return TeacherScores(TopKTable(ids, none, none[:, 0], counts), none[:, 0])


def _special(tokenizer: Any, name: str, key: str) -> int:
    added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    if name not in added:
        problem = f"is not a special token; there are {', '.join(map(repr, list(added)[:8]))}."
        raise ConfigError(f"teacher.special_tokens.{key}", name, problem, "name one of them.")
    return added[name]


def _turn_end(tokenizer: Any, is_applied: bool) -> int | None:
    """Return the special token that the chat template writes behind an answer; None without a template or a token."""
    if not is_applied or not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template is a program and may raise any error; the prompts' own rendering reports it
        return None
    behind = text.partition(_ANSWER)[2]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    return next((i for i in ids if i in special), None)


def check_pair(config: Config, route: Route, pair: TokenizerPair, prompts: Sequence[Prompt]) -> None:
    """Log what the two tokenizers have in common on texts of the run: dataset responses, else prompts.

    Raises:
        ConfigError: too little of it, so that nodes would compare hardly any token, or no text has a pair.
        TeacherError: the teacher cannot score the texts.
    """
    texts = [_text(pair, prompt)[:_TEXT_TOKENS] for prompt in prompts[:_N_TEXTS]]
    teacher_texts = [pair.teacher_ids(text) for text in texts]
    alignments = [pair.align(text, other) for text, other in zip(texts, teacher_texts, strict=True)]
    n_begins = sum(int((aligned.depth == 0).sum()) for aligned in alignments)
    n_tokens = sum(map(len, texts))
    if n_begins < LEAST_PAIRED * n_tokens or not n_begins:
        problem = f"only {n_begins} of {n_tokens} tokens of the run's texts have the same bytes in its tokens."
        raise config.error("teacher.tokenizer", problem, "use a tokenizer that does not change texts.")
    common = sum(int(aligned.is_common.sum()) for aligned in alignments) / n_begins
    shares = ""
    if not config.derived.teacher_pool:
        safe, mass = _of_teacher(route, pair, teacher_texts)
        shares = (
            f"{safe:.1%} of the teacher's boundaries are safe; {mass:.1%} of its probability is on common strings; "
        )
        if pair.by_units and len(longest := max(teacher_texts, key=len)) > 1:
            _check_units(config, route, pair, longest)
    canonical = np.concatenate([pair.canonical(text) for text in texts]).mean()
    log.info(
        "the teacher's tokens are not the student's. On %d texts of this run: %.1f%% of the student's tokens have the "
        "same bytes in the teacher's; %.1f%% of these begin where a token of the teacher does; %s%d nodes; %.1f%% of "
        "the student's tokens are canonical",
        *(len(texts), 100 * n_begins / n_tokens, 100 * common, shares, pair.nodes.n, 100 * canonical),
    )
    if common < LEAST_COMMON and config.distill.units == "nodes":
        problem = (
            f"only {100 * common:.0f}% of the student's tokens begin where a token of the teacher does, and nodes need "
            f"{100 * LEAST_COMMON:.0f}%."
        )
        raise config.error("distill.units", problem, "set distill.units=text.")


def _check_units(config: Config, route: Route, pair: TokenizerPair, text: np.ndarray) -> None:
    """Raise ConfigError if the teacher refuses to list units, as an engine of one's own does."""
    settings = route.teacher
    teacher = open_teacher(settings, k=settings.topk, n_vocab=pair.n_listed, n_in_flight=1, units=pair.unit_of_token)
    try:
        with closing(teacher):
            teacher.submit([as_rollout(text[: pair.max_tokens])], config.derived.signals).result()
    except TeacherRefusal as error:
        raise config.error("teacher.signal", f"{error}.", "use topk.") from error


def _text(pair: TokenizerPair, prompt: Prompt) -> np.ndarray:
    """Return the response of a prompt, or the longest part of the prompt without special tokens."""
    if prompt.response_ids is not None:
        return prompt.response_ids
    special = [(pair.student[token] or MARK).startswith(MARK) for token in prompt.token_ids.tolist()]
    runs = np.split(prompt.token_ids, np.flatnonzero(np.diff(special)) + 1)
    plain = [part for part in runs if not (pair.student[int(part[0])] or MARK).startswith(MARK)]
    return max(plain, key=len, default=prompt.token_ids[:0])


def _of_teacher(route: Route, pair: TokenizerPair, texts: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the share of the teacher's boundaries that are safe, and of its probability on strings that both have.

    Both are computed from its most probable tokens.
    """
    vocab = ByteVocab(pair.teacher)
    nodes = pair.nodes
    is_whole = nodes.lengths[nodes.teacher] == vocab.lengths
    settings = route.teacher
    n = len(pair.teacher)
    n_safe = list[bool]()
    masses = list[np.ndarray]()
    with closing(open_teacher(settings, k=min(settings.topk, n), n_vocab=n, n_in_flight=8)) as teacher:
        asked = [as_rollout(text[: pair.max_tokens], i) for i, text in enumerate(texts) if len(text) > 1]
        futures = [teacher.submit([sequence], ["topk"]) for sequence in asked]
        for sequence, future in zip(asked, futures, strict=True):
            table = future.result()[0].topk
            assert table is not None  # requested
            p = np.exp(table.logprobs, dtype=np.float64)
            masses.append((p * is_whole[table.ids]).sum(axis=1))
            for token, ids, row in zip(sequence.response_ids.tolist(), table.ids.tolist(), p, strict=True):
                string = pair.teacher[token] or MARK
                alike = [
                    nodes.teacher[i] == nodes.teacher[token] and (pair.teacher[i] or b"").startswith(string)
                    for i in ids
                ]
                p_token = row[ids.index(token)] if token in ids else 0.0
                n_safe.append(bool(p_token >= SAFE_SHARE * row[alike].sum()))
    return float(np.mean(n_safe or [True])), float(np.concatenate(masses).mean()) if masses else 1.0

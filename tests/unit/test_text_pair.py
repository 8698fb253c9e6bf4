"""Check vocabularies as bytes, the strings that two of them share, and responses in the tokens of both."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gkd.config.load import load_config
from gkd.errors import ConfigError, DataError
from gkd.preflight.tokenizer_pair import tokenizer_pair
from gkd.scoring.teacher.info import TeacherInfo
from gkd.text.byte_vocab import END, MARK, NO_BYTE, REST, ByteVocab, Vocab, common_nodes, token_bytes
from gkd.text.pair import TokenizerPair
from tests.unit.text_cases import STUDENT, TEACHER, nodes_of

TEXTS = (
    "Two apples cost 3.50, and 12 cost 20.",
    "  naïve café — Ωμέγα, 今天天气很好 🙂👩‍🚀\n\n\tend ",
    "def f(x):\n    return x + 1  # 100\n",
    "▁ is a character, too, and so is <|end|>",
    "\n",
    " a",
)
CORPUS = [*TEXTS, "the cat and the hat cost the cat 10 and 20", "def g(y):\n    return y"] * 4


def byte_level(n: int, *, digits: bool = False) -> Any:
    """Return a byte-level BPE of at most `n` tokens; with `digits` each digit is a token of its own."""
    tokens = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokens.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n, special_tokens=["<|end|>", "<|call|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokens.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|end|>")


def sentence_pieces(n: int, *, prefix: bool) -> Any:
    """Return a BPE as SentencePiece has it, with a token for each byte; `prefix`: it begins a text with a space."""
    tokens = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokens.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+|▁"), "isolated")
    special = ["<unk>", "</s>", "[CALL]", *(f"<0x{byte:02X}>" for byte in range(256))]
    # The trainer's own choice between characters of equal frequency differs from process to process.
    counts = Counter("".join(CORPUS).replace(" ", "▁"))
    alphabet = sorted(counts, key=lambda character: (-counts[character], character))[:40]
    trainer = trainers.BpeTrainer(
        vocab_size=n, special_tokens=special, limit_alphabet=len(alphabet), initial_alphabet=alphabet
    )
    tokens.train_from_iterator(CORPUS, trainer)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokens.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    tokens.pre_tokenizer = None  # type: ignore[assignment]
    model = Tokenizer.from_str(_without_added_bytes(tokens.to_str()))
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", unk_token="<unk>")


def with_spaces(tokenizer: Any) -> Any:
    """Return a SentencePiece tokenizer that has two spaces as a user-defined symbol, as Gemma's has: an added token."""
    found = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = found["model"]["vocab"]
    vocab["▁▁"] = 1 + max(vocab.values())
    found["model"]["merges"].insert(0, ["▁", "▁"])
    model = Tokenizer.from_str(json.dumps(found))
    model.add_tokens([AddedToken("▁▁", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", unk_token="<unk>")


def _without_added_bytes(text: str) -> str:
    """Return a tokenizer.json in which the tokens of bytes are pieces of the model alone, as SentencePiece has them."""
    found = json.loads(text)
    found["added_tokens"] = [token for token in found["added_tokens"] if not token["content"].startswith("<0x")]
    return json.dumps(found)


TOKENIZERS = {
    "bytes": lambda: byte_level(420),
    "digits": lambda: byte_level(330, digits=True),
    "pieces": lambda: sentence_pieces(380, prefix=False),
    "prefix": lambda: sentence_pieces(360, prefix=True),
    "spaces": lambda: with_spaces(sentence_pieces(380, prefix=False)),
}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {name: make() for name, make in TOKENIZERS.items()}


def pair_of(student: Any, teacher: Any) -> TokenizerPair:
    vocabs = [[*token_bytes(each)] for each in (student, teacher)]
    for vocab, each in zip(vocabs, (student, teacher), strict=True):
        vocab[each.eos_token_id] = END
        call = each.convert_tokens_to_ids("[CALL]" if "[CALL]" in each.get_vocab() else "<|call|>")
        vocab[call] = MARK + b"\x01"
    jsons = [each.backend_tokenizer.to_str() for each in (student, teacher)]
    return TokenizerPair(vocabs[0], vocabs[1], jsons[0], jsons[1], teacher.eos_token_id, 999)


def _bytes(vocab: Vocab, ids: np.ndarray) -> bytes:
    return b"".join(vocab[token] or b"" for token in ids.tolist())


def _response(tokenizer: Any, text: str) -> np.ndarray:
    """Return the tokens with exactly these bytes, as a model would write them behind another text."""
    first = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"])[0]
    vocab, begin = token_bytes(tokenizer), "\x02" if first[0] == "▁" else ""
    # A special token's text is none of its tokens where a model writes it letter by letter.
    parts = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (begin + text).split("<|end|>")]
    letters = [tokenizer(letter, add_special_tokens=False)["input_ids"][-1] for letter in "<|end|>"]
    ids = [token for part in parts for token in [*letters, *part]][len(letters) :]
    while _bytes(vocab, np.array(ids)) != text.encode():
        ids = ids[1:]
        assert ids, f"the line break and {text!r} share a token"
    return np.array(ids, np.int32)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_the_tokens_of_a_text_are_the_text(name: str, tokenizers: dict[str, Any]) -> None:
    """If it fails, all sums over tokens that begin with a string are of other tokens.

    Fails if two spaces that are one token of SentencePiece count as the characters by which it writes them.
    """
    vocab = token_bytes(tokenizers[name])
    assert vocab[tokenizers[name].eos_token_id] is None
    for text in TEXTS:
        if "▁" not in text:  # SentencePiece takes it for a space
            ids = tokenizers[name](text, add_special_tokens=False)["input_ids"]
            assert _bytes(vocab, np.array(ids)) == b" " * (name == "prefix") + text.encode()


def test_a_vocabulary_of_words_is_refused() -> None:
    """If it fails, tokens without known bytes are compared."""
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    with pytest.raises(DataError):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=words))


def _random_vocab(rng: random.Random, n: int) -> list[bytes | None]:
    return [bytes(rng.choice(b"abc") for _ in range(rng.randint(1, 5))) if i % 7 else None for i in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_ranges_and_nodes_are_those_of_plain_loops(seed: int) -> None:
    """If it fails, a string has other tokens than those that begin with it, or two outcomes are taken for one."""
    rng = random.Random(seed)
    student, teacher = _random_vocab(rng, 40), _random_vocab(rng, 25)
    vocab = ByteVocab(student)
    starts, bounds = vocab.ranges
    for i, token in enumerate(student):
        for depth in range(1, len(token or b"") + 1):
            first, last = bounds[starts[i] + depth - 1]
            found = {int(each) for each in vocab.order[first:last]}
            assert found == {j for j, other in enumerate(student) if (other or b"").startswith(token[:depth])}
    nodes, expected = common_nodes(student, teacher), nodes_of(student, teacher)
    strings: dict[int, bytes] = {REST: b""}
    for side, vocabulary in ((nodes.student, student), (nodes.teacher, teacher)):
        for node, token in zip(side.tolist(), vocabulary, strict=True):
            assert strings.setdefault(node, expected[token or b""] if token else b"") == (
                expected[token] if token else b""
            )
    assert [len(strings[i]) for i in range(nodes.n)] == nodes.lengths.tolist()
    assert [strings[i][0] if strings[i] else NO_BYTE for i in range(nodes.n)] == nodes.first_byte.tolist()


@pytest.mark.parametrize("teacher", TOKENIZERS)
@pytest.mark.parametrize("student", TOKENIZERS)
def test_a_response_has_the_same_bytes_in_both(student: str, teacher: str, tokenizers: dict[str, Any]) -> None:
    """If it fails, teacher and student are compared on different texts."""
    pair, is_pieces = pair_of(tokenizers[student], tokenizers[teacher]), {"pieces", "prefix", "spaces"}
    for text in TEXTS:
        if "▁" in text and student in is_pieces:  # it cannot write this character
            continue
        ids = _response(tokenizers[student], text)
        others = pair.teacher_ids(np.append(ids, tokenizers[student].eos_token_id))
        if "▁" in text and teacher in is_pieces:
            assert len(others) == 0, "the teacher reads a space in place of the first character"
        elif "<|end|>" in text and teacher not in is_pieces:
            assert _bytes(pair.teacher, others) == text.partition("<|end|>")[0].encode(), "it reads its special token"
        else:
            assert _bytes(pair.teacher, others) == text.encode() + END
            assert others[-1] == tokenizers[teacher].eos_token_id
        assert pair.canonical(ids).all() or "<|end|>" in text


@pytest.mark.parametrize("pairs", ["'<|call|>': '</s>'", "'<|call|>': '[CALL]', '<|back|>': '[CALL]'"])
def test_a_token_of_the_teacher_is_the_pair_of_one(pairs: str, tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    """Fails if a special token takes the mark of an end or of another one, which then has no token of the teacher."""
    student, teacher = byte_level(420), tokenizers["pieces"]
    student.add_special_tokens({"extra_special_tokens": ["<|back|>"]})
    numbers = {"vocab_size": len(teacher), "hidden_size": 8, "max_tokens": 99, "n_workers": 1, "n_streams": 1}
    info = TeacherInfo(
        "t", "t", "t", "f", tokenizer_fingerprint="", engine="", device="", dtype="", **numbers, is_server=True
    )
    settings = [f"teacher.tokenizer={tmp_path}", f"teacher.special_tokens={{{pairs}}}"]
    with pytest.raises(ConfigError) as caught:
        tokenizer_pair(load_config(None, settings), student, teacher, info, len(student), [student.eos_token_id])
    assert caught.value.key.startswith("teacher.special_tokens.<|")
    whole = tokenizer_pair(
        load_config(None, [settings[0], "teacher.special_tokens={'<|call|>': '[CALL]'}"]),
        *(student, teacher, info, len(student), [student.eos_token_id]),
    )
    called = whole.teacher_ids(np.array([student.convert_tokens_to_ids("<|call|>"), student.eos_token_id]))
    assert called.tolist() == [teacher.convert_tokens_to_ids("[CALL]"), teacher.eos_token_id]


def test_the_pair_ends_where_a_text_has_no_meaning_for_the_teacher(tokenizers: dict[str, Any]) -> None:
    """If it fails, bytes that are not UTF-8 or a special token shift everything behind them."""
    student, teacher = tokenizers["bytes"], tokenizers["digits"]
    pair = pair_of(student, teacher)
    smile, call, end = _response(student, "🙂"), student.convert_tokens_to_ids("<|call|>"), student.eos_token_id
    word = _response(student, "cat")
    cut = pair.teacher_ids(np.concatenate([word, smile[:1]]))
    assert _bytes(pair.teacher, cut) == b"cat"
    called = pair.teacher_ids(np.array([*word, call, *word, end]))
    assert called.tolist().count(teacher.convert_tokens_to_ids("<|call|>")) == 1
    assert _bytes(pair.teacher, called) == b"cat" + MARK + b"\x01" + b"cat" + END
    alone = replace(pair, student=[None if i == call else token for i, token in enumerate(pair.student)])
    assert _bytes(pair.teacher, alone.teacher_ids(np.array([*word, call, *word, end]))) == b"cat"
    assert len(pair.teacher_ids(smile[1:])) == 0
    rows = replace(pair, teacher=pair.teacher[: teacher.convert_tokens_to_ids("at")])  # the last tokens have no row
    assert _bytes(pair.teacher, rows.teacher_ids(word)) == b"c" and len(pair.teacher_ids(word)) == 2
    raw = [student.convert_tokens_to_ids(character) for character in "cÿĀ"]  # the bytes of a mark
    assert _bytes(pair.teacher, pair.teacher_ids(np.array(raw))) == b"c"


def test_canonical_tokens_are_those_of_the_tokenizer(tokenizers: dict[str, Any]) -> None:
    """If it fails, a student that writes its teacher's tokens is not noticed."""
    pair = pair_of(tokenizers["bytes"], tokenizers["digits"])
    ids = _response(tokenizers["bytes"], "the cat cost 10")
    single = np.array([pair.student.index(bytes([byte])) for byte in b"the cat"])
    assert pair.canonical(ids).all()
    assert pair.canonical(np.append(ids, tokenizers["bytes"].eos_token_id)).all()
    assert not pair.canonical(single).any()
    mixed = np.concatenate([_response(tokenizers["bytes"], "the"), [pair.student.index(b" ")], single[4:]])
    assert pair.canonical(mixed).tolist() == [True, *[False] * (len(mixed) - 1)]


def test_positions_are_the_bytes_of_both() -> None:
    """If it fails, rows of different places in the text are compared."""
    pair = TokenizerPair(STUDENT, TEACHER, "", "", 0, 999)
    ours = np.array([STUDENT.index(token) for token in (b"ab", b"ca", b" ", b"\xff\x01", b"abc", END)])
    theirs = np.array([TEACHER.index(token) for token in (b"a", b"bca", b" ", b"\xff\x01", b"ab", b"c", END)])
    at = pair.align(ours, theirs)
    assert at.row.tolist() == [0, 0, 1, 1, 2, 3, 4, 4, 4, 5]
    assert at.depth.tolist() == [0, 1, 0, 1, 0, 0, 0, 1, 2, 0]
    assert at.teacher_row.tolist() == [0, 1, 1, 1, 2, 3, 4, 4, 5, 6]
    assert at.teacher_depth.tolist() == [0, 0, 1, 2, 0, 0, 0, 1, 0, 0]
    # "ab" of both begins at 6: the student's "abc" has the node "ab", so its second byte is compared there.
    assert at.cover.tolist() == [-1, -1, -1, -1, -1, -1, -1, 6, -1, -1]


def test_an_added_token_that_is_no_special_one_is_text() -> None:
    """If it fails, the markers of thoughts, which many tokenizers add as text, end the comparison."""
    tokenizer = byte_level(330)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    assert token_bytes(tokenizer)[tokenizer.convert_tokens_to_ids("<think>")] == b"<think>"

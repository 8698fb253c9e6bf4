"""Collect responses for the sample browser: their text, each token's KL, and the teacher's choices.

Of a run's evaluations at most 12 are shown: the first, the last, and evenly spaced ones between them. Of each one the
first 8 kept responses with their first 400 tokens, and 20 responses as text with their first
2,000 characters. With several runs each has its part of the evaluations, at least two.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from gkd.errors import CheckpointError
from gkd.hf.hub import cached_folder
from gkd.tools.report.read import Run, json_lines

T = TypeVar("T")
MAX_EVALUATIONS = 12
MAX_RESPONSES = 8
MAX_TOKENS = 400
MAX_TEXTS = 20
MAX_CHARACTERS = 2000
# Number of a token by which it is colored: the first one that a record has.
COLORS = {"token_kl": "KL(teacher || student)", "sampled_reverse_kl": "log q - log p of the token", "total": "loss"}


class TokenTexts:
    """Texts of token ids by the run's tokenizer: of the export, or of model.path. Without one, the ids.

    Raises:
        CheckpointError: tokenizer.json is damaged.
    """

    def __init__(self, run: Run) -> None:
        folders = [run.root / "export", Path(cached_folder(str(run.settings.get("model.path", "")) or "."))]
        self.file = next((f / "tokenizer.json" for f in folders if (f / "tokenizer.json").is_file()), None)
        self._tokenizer = None
        if self.file is not None:
            try:
                self._tokenizer = Tokenizer.from_file(str(self.file))
            except Exception as error:  # the library raises Exception itself
                raise CheckpointError(f"{self.file} is not a tokenizer ({error}); restore or delete it") from error

    def token(self, token_id: int) -> str:
        """Return the text of one token with its leading space; special tokens by their names."""
        if self._tokenizer is None:
            return f"[{token_id}]"
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return f"[{token_id}]"
        if piece.startswith("▁"):  # SentencePiece; decode drops the space at the beginning of a text
            return piece.replace("▁", " ")
        return self._tokenizer.decode([token_id], skip_special_tokens=False) or piece

    def text(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(f"[{i}]" for i in ids)
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def evenly(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the steps: first, last, and evenly spaced ones between them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def browser(run: Run, n_runs: int = 1) -> dict[str, Any]:
    """Return the data of one run's sample browser.

    Raises:
        CheckpointError: a file of token_losses/ or samples/, or the tokenizer, is damaged.
    """
    texts, most = TokenTexts(run), max(MAX_EVALUATIONS // n_runs, 2)
    kept, written = run.step_files("token_losses"), run.step_files("samples")
    used: set[int] = set()
    shown = {step: _texts(written[step], texts) for step in evenly(list(written), most)}
    responses = {step: _responses(kept[step], texts, used) for step in evenly(list(kept), most)}
    return {
        "steps": list(responses),
        "n_evaluations": len(kept),
        "responses": responses,
        "vocabulary": {token: texts.token(token) for token in sorted(used)},
        "has_tokenizer": texts.file is not None,
        "texts": shown,
        "n_texts": len(written),
        "changes": _changes(*(shown[step] for step in (min(shown), max(shown)))) if shown else [],
    }


def _responses(file: Path, texts: TokenTexts, used: set[int]) -> dict[str, dict[str, Any]]:
    """Return the responses of one evaluation by prompt and sample; adds the ids of their tokens to `used`."""
    found: dict[str, dict[str, Any]] = {}
    for record in _first(file, MAX_RESPONSES, ("prompt_id", "sample_index", "response_ids", "values")):
        ids, values, observed = record["response_ids"][:MAX_TOKENS], record["values"], set(record.get("observed", ()))
        own = [i for i in range(len(ids)) if i not in observed]  # the tables have a row for each of these
        rows = record.get("choices", ())[: len(own)]
        choices = _spread([[(token, round(p, 4), round(q, 4)) for token, p, q in row] for row in rows], own, ids)
        used.update(ids, (one[0] for row in choices for one in row or ()))
        color = next((name for name in COLORS if name in values), None)
        found[f"{record['prompt_id']}/{record['sample_index']}"] = {
            "prompt": _end(texts.text(record["prompt_ids"])) if "prompt_ids" in record else None,
            "ids": ids,
            "n_tokens": len(record["response_ids"]),
            "kind": COLORS[color] if color else "",
            "observed": sorted(observed & set(range(len(ids)))),
            "unpaired": [i for i, paired in zip(own, values.get("paired", ()), strict=False) if not paired],
            "color": _spread([_short(v) for v in values[color][: len(own)]], own, ids) if color else [None] * len(ids),
            "entropy": _spread([_short(value) for value in values.get("student_entropy", ())[: len(own)]], own, ids),
            "choices": choices,
        }
    return found


def _spread(rows: Sequence[T], own: Sequence[int], ids: Sequence[int]) -> list[T | None]:
    """Return the rows of own tokens at the places of their tokens; nothing without rows.

    Args:
        own: positions of the own tokens.
        ids: all tokens.
    """
    placed = dict(zip(own, rows, strict=False))
    return [placed.get(i) for i in range(len(ids))] if rows else []


def _texts(file: Path, texts: TokenTexts) -> list[dict[str, Any]]:
    return [
        {
            "id": sample["prompt_id"],
            "prompt": _end(sample.get("prompt") or texts.text(sample.get("prompt_ids", ()))),
            "text": sample["text"][:MAX_CHARACTERS],
            "answer": sample.get("answer", ""),
            "correct": sample.get("correct"),
        }
        for sample in _first(file, MAX_TEXTS, ("prompt_id", "text"))
    ]


def _changes(first: Sequence[dict[str, Any]], last: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the word diff of each prompt that two steps have: parts [kind, text], kind "", "del" or "ins"."""
    earlier = {sample["id"]: sample["text"] for sample in first}
    changed = [sample for sample in last if sample["text"] != earlier.get(sample["id"], sample["text"])]
    return [{**sample, "parts": _word_diff(earlier[sample["id"]], sample["text"])} for sample in changed]


def _word_diff(before: str, after: str) -> list[tuple[str, str]]:
    old, new = (re.findall(r"\s*\S+|\s+", text) for text in (before, after))
    parts: list[tuple[str, str]] = []
    for kind, i, j, k, n in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            parts.append(("", "".join(old[i:j])))
        else:
            parts += [each for each in (("del", "".join(old[i:j])), ("ins", "".join(new[k:n]))) if each[1]]
    return parts


def _first(file: Path, n: int, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the first lines of a file. Raises CheckpointError: one is damaged, or lacks a key."""
    lines = [line for line, _ in zip(json_lines(file), range(n), strict=False)]
    for number, line in enumerate(lines, start=1):
        if missing := [key for key in keys if key not in line]:
            raise CheckpointError(f"{file}: line {number} lacks {missing[0]!r}; delete the file, or restore it")
    return lines


def _end(text: str) -> str:
    """Return the end of a prompt, which has the question."""
    return text if len(text) <= MAX_CHARACTERS else f"... {text[-MAX_CHARACTERS:]}"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")

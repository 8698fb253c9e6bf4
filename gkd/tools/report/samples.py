"""Collect responses for the sample browser: their text, each token's KL, and the teacher's choices.

Of a run's evaluations at most 12 are shown: the first, the last, and evenly spaced ones between them. Of each one the
first 8 kept responses with their first 400 tokens, and 20 responses as text with their first
2,000 characters. With several runs each has its part of the evaluations, at least two.
"""

from __future__ import annotations

import base64
import difflib
import io
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from gkd.config.load import yaml_values
from gkd.errors import CheckpointError
from gkd.hf.hub import cached_folder
from gkd.metrics.writer import json_lines
from gkd.run.folder import IMAGES, SHOWN_RESPONSES
from gkd.tools.report.read import Run
from teacher_server.vision.images import decode

T = TypeVar("T")
MAX_EVALUATIONS = 12
MAX_RESPONSES = 8
MAX_TOKENS = 400
MAX_TEXTS = SHOWN_RESPONSES
MAX_CHARACTERS = 2000
MAX_IMAGES = 300  # limit over all runs
SIDE = 256  # pixels of an image
# A token is colored by the first of these numbers that its record has.
COLORS = {"token_kl": "KL(teacher || student)", "sampled_reverse_kl": "log q - log p of the token", "total": "loss"}


class TokenTexts:
    """Texts of token ids by the run's tokenizer: of the export, or of model.path. Without one, the ids.

    Raises:
        CheckpointError, ConfigError: tokenizer.json or config.json is damaged.
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
        config = (self.file or run.root).with_name("config.json")  # JSON is YAML
        values = yaml_values(config) if self.file and config.is_file() else {}
        self.image_token = values.get("image_token_id", values.get("image_token_index"))

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


class Thumbnails:
    """Small copies of the images of a run. `urls`: name of the file -> data URL."""

    def __init__(self, run: Run, most: int) -> None:
        self._folder = run.root / IMAGES
        self._most = most
        self.urls: dict[str, str] = {}

    def mark(self, names: Sequence[str | None], first: int, tokens: str) -> dict[str, Any]:
        """Return what stands for tokens of images: a text, and the names of thumbnails. A name is None: not kept."""
        numbers = ", ".join(str(first + i) for i in range(len(names)))
        text = "; ".join([f"image {numbers}{tokens}", *filter(None, map(self._problem, names))])
        return {"text": f"[{text}]", "images": [name for name in names if name in self.urls]}

    def _problem(self, name: str | None) -> str:
        """Make the thumbnail of an image, or return why there is none."""
        if name is None or (len(self.urls) >= self._most and name not in self.urls):
            return "not shown"
        try:
            self.urls[name] = _thumbnail(self._folder / Path(name).name)
        except (OSError, ValueError, ImportError) as error:  # a file that cannot be read or decoded; no Pillow
            return f"{IMAGES}/{name} cannot be shown: {getattr(error, 'strerror', None) or error}"
        return ""


@lru_cache(maxsize=1024)  # --watch makes the page again and again
def _thumbnail(file: Path) -> str:
    image = decode(file.read_bytes())
    webp = io.BytesIO()
    image.thumbnail((SIDE, SIDE))
    image.save(webp, "WEBP")
    return f"data:image/webp;base64,{base64.b64encode(webp.getvalue()).decode()}"


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
    texts = TokenTexts(run)
    most = max(MAX_EVALUATIONS // n_runs, 2)
    images = Thumbnails(run, MAX_IMAGES // n_runs)
    kept = run.step_files("token_losses")
    written = run.step_files("samples")
    used: set[int] = set()
    shown = {step: _texts(written[step], texts, images) for step in evenly(list(written), most)}
    responses = {step: _responses(kept[step], texts, images, used) for step in evenly(list(kept), most)}
    return {
        "steps": list(responses),
        "n_evaluations": len(kept),
        "responses": responses,
        "vocabulary": {token: texts.token(token) for token in sorted(used)},
        "has_tokenizer": texts.file is not None,
        "texts": shown,
        "n_texts": len(written),
        "images": images.urls,
        "changes": _changes(*(shown[step] for step in (min(shown), max(shown)))) if shown else [],
    }


def _responses(file: Path, texts: TokenTexts, images: Thumbnails, used: set[int]) -> dict[str, dict[str, Any]]:
    """Return the responses of one evaluation by prompt and sample; adds the ids of their tokens to `used`."""
    responses: dict[str, dict[str, Any]] = {}
    for record in _first(file, MAX_RESPONSES, ("prompt_id", "sample_index", "response_ids", "values")):
        ids = record["response_ids"][:MAX_TOKENS]
        values = record["values"]
        observed = set(record.get("observed", ()))
        own = [i for i in range(len(ids)) if i not in observed]  # the tables have a row for each of these
        rows = record.get("choices", ())[: len(own)]
        choices = _spread([[(token, round(p, 4), round(q, 4)) for token, p, q in row] for row in rows], own, ids)
        used.update(ids, (one[0] for row in choices for one in row or ()))
        color = next((name for name in COLORS if name in values), None)
        responses[f"{record['prompt_id']}/{record['sample_index']}"] = {
            "prompt": _prompt(record, texts, images) if "prompt_ids" in record else None,
            "ids": ids,
            "n_tokens": len(record["response_ids"]),
            "kind": COLORS[color] if color else "",
            "observed": sorted(observed & set(range(len(ids)))),
            "unpaired": [i for i, paired in zip(own, values.get("paired", ()), strict=False) if not paired],
            "color": _spread([_short(v) for v in values[color][: len(own)]], own, ids) if color else [None] * len(ids),
            "entropy": _spread([_short(value) for value in values.get("student_entropy", ())[: len(own)]], own, ids),
            "choices": choices,
        }
    return responses


def _spread(rows: Sequence[T], positions: Sequence[int], ids: Sequence[int]) -> list[T | None]:
    """Return the rows of own tokens at the places of their tokens; nothing without rows.

    Args:
        positions: positions of the own tokens.
        ids: all tokens.
    """
    placed = dict(zip(positions, rows, strict=False))
    return [placed.get(i) for i in range(len(ids))] if rows else []


def _texts(file: Path, texts: TokenTexts, images: Thumbnails) -> list[dict[str, Any]]:
    return [
        {
            "id": sample["prompt_id"],
            "prompt": _prompt(sample, texts, images),
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
    pieces: list[tuple[str, str]] = []
    for kind, i, j, k, n in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            pieces.append(("", "".join(old[i:j])))
        else:
            pieces += [piece for piece in (("del", "".join(old[i:j])), ("ins", "".join(new[k:n]))) if piece[1]]
    return pieces


def _first(file: Path, n: int, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the first lines of a file. Raises CheckpointError: one is damaged, or lacks a key."""
    lines = list(islice(json_lines(file), n))
    for number, line in lines:
        if missing := [key for key in keys if key not in line]:
            raise CheckpointError(f"{file}: line {number} lacks {missing[0]!r}; delete the file, or restore it")
    return [line for _, line in lines]


def _prompt(record: dict[str, Any], texts: TokenTexts, images: Thumbnails) -> str | list[Any]:
    """Return the text; with images texts and `Thumbnails.mark`. Images without a token between them have one size."""
    ids = record.get("prompt_ids", ())
    names = record.get("images", ())
    if not names:
        return _end(record.get("prompt") or texts.text(ids))
    runs = [(is_image, [*run]) for is_image, run in groupby(ids, lambda token: token == texts.image_token)]
    size = len(ids) if sum(i for i, _ in runs) == len(names) else max(ids.count(texts.image_token) // len(names), 1)
    pieces = list[Any]()
    at = 0
    for is_image, run in runs:
        n = is_image * max(len(run) // size, 1)
        pieces.append(images.mark(names[at : at + n], at + 1, f": {len(run)} tokens") if n else _end(texts.text(run)))
        at += n
    return [*pieces, images.mark(names[at:], at + 1, "")] if at < len(names) else pieces  # without a tokenizer


def _end(text: str) -> str:
    """Return the end of a prompt, which has the question."""
    return text if len(text) <= MAX_CHARACTERS else f"... {text[-MAX_CHARACTERS:]}"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")

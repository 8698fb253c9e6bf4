"""Find where the KL of a run is: its share by kind of token, by tenth of the response, and by agreement."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gkd.errors import CheckpointError, ConfigError
from gkd.metrics.token_groups import OTHER, SAME, SURE_OF_OTHER, student_choice
from gkd.metrics.writer import json_lines
from gkd.tools.report.read import Run
from gkd.tools.report.samples import COLORS, TokenTexts

KINDS = ("end token", "digits", "words", "punctuation", "space", "observation")
TENTHS = tuple(f"tenth {i}" for i in range(1, 11))
GROUPS = {"kind": KINDS, "position": TENTHS, "agreement": (SAME, OTHER, SURE_OF_OTHER)}
N_LARGEST = 3
# Limits of the first line: a smaller KL does not count as a gap; a group with more than this share of it is named.
NO_GAP = 0.005
END_SHARE = 0.3
SURE_SHARE = 0.3


@dataclass(slots=True)
class Group:
    """Tokens of one group: their KL and number, and the KL of each token id."""

    kl: float = 0.0
    n: int = 0
    by_token: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class Evaluation:
    """Groups of the kept responses of one evaluation.

    Attributes:
        is_first: before training nothing but template, ids or weights can make the student sure of other tokens.
        number: what stands for the KL, a value of `COLORS`.
        n_skipped: own tokens whose KL is infinite.
        missing: parts that the records do not allow, as sentences.
    """

    step: int
    texts: TokenTexts
    is_first: bool
    number: str = ""
    kl: float = 0.0
    n: int = 0
    n_observed: int = 0
    n_skipped: int = 0
    groups: dict[str, Group] = field(default_factory=lambda: {name: Group() for row in GROUPS.values() for name in row})
    missing: list[str] = field(default_factory=list)

    def shares(self, name: str) -> tuple[float, float]:
        """Return a group's share of the KL (0 if there is none), and of the tokens."""
        group = self.groups[name]
        n = self.n + (self.n_observed if name in KINDS else 0)
        return group.kl / self.kl if self.kl > 0 else 0.0, group.n / max(n, 1)

    def finding(self) -> str:
        """Return what stands out, in words; empty: nothing."""
        (ends, n_ends), (sure, n_sure) = self.shares("end token"), self.shares(SURE_OF_OTHER)
        if abs(self.kl) < NO_GAP * self.n:
            return "no gap: student and teacher agree"
        if ends > END_SHARE:
            return f"end token: {ends:.0%} of the KL on {n_ends:.0%} of the tokens; compare the end tokens of both"
        if self.is_first and sure > SURE_SHARE:
            return (
                f"{SURE_OF_OTHER}: {sure:.0%} of the KL on {n_sure:.0%} of the tokens; compare template and token ids"
            )
        return ""


def evaluations(run: Run) -> list[Evaluation]:
    """Return the first and the last evaluation that kept tokens; one, if they are the same.

    Raises:
        ConfigError: the run has none.
        CheckpointError: a file or the tokenizer is damaged.
    """
    kept = run.step_files("token_losses")
    if not kept:
        fix = "set data.val_files and eval.every, and let the run reach an evaluation."
        raise ConfigError("RUN", str(run.root), "it has no token_losses/step_N.jsonl.", fix)
    texts = TokenTexts(run)
    return [
        read_evaluation(step, kept[step], texts, is_first=step == 0) for step in dict.fromkeys((min(kept), max(kept)))
    ]


def read_evaluation(step: int, file: Path, texts: TokenTexts, *, is_first: bool) -> Evaluation:
    """Return the groups of one file of token_losses/. Raises CheckpointError: it is damaged or empty."""
    result = Evaluation(step, texts, is_first)
    kind_of = functools.cache(lambda token: kind(texts.token(token)))
    missing: dict[str, None] = {} if texts.file else {"no tokenizer at model.path: kinds are those of ids": None}
    records = list(json_lines(file))
    if not records:
        raise CheckpointError(f"{file}: no complete line; wait until the evaluation is written, or delete the file")
    for number, record in records:
        try:
            _add(result, record, kind_of, missing)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            problem = f"{file}: line {number} is not a record of tokens ({type(error).__name__}: {error})"
            raise CheckpointError(f"{problem}; delete the file, or restore it") from error
    result.missing = list(missing)
    return result


def _add(result: Evaluation, record: dict[str, Any], kind_of: Callable[[int], str], missing: dict[str, None]) -> None:
    ids = record["response_ids"]
    values = record["values"]
    choices = record.get("choices") or ()
    observed = set(record.get("observed") or ())
    positions = [i for i in range(len(ids)) if i not in observed]
    name = next(name for name in (*COLORS, None) if name is None or name in values)
    if name is None:
        raise ValueError("no number of the loss")
    result.number = COLORS[name]
    if name != "token_kl":
        missing[f"no distribution of the teacher: {COLORS[name]} instead of the KL, which may be negative"] = None
    if not choices:
        missing["no choices of the teacher: agreement is unknown"] = None
    if "ended" not in values:
        missing["no `ended` in the records: end tokens count by their text"] = None
    ends = values.get("ended") or [0.0] * len(positions)
    entropies = values.get("student_entropy") or [math.inf] * len(positions)
    paired = values.get("paired") or [1.0] * len(positions)
    if not all(paired):
        missing["tokens without a pair are left out (teacher.tokenizer)"] = None
    rows = zip(positions, values[name], ends, entropies, choices or [()] * len(positions), paired, strict=True)
    result.n_observed += len(observed)
    result.groups["observation"].n += len(observed)
    for i, kl, ended, entropy, listed, has_pair in rows:
        if not has_pair:
            continue
        if kl is None:
            result.n_skipped += 1
            continue
        result.kl += kl
        result.n += 1
        names = ["end token" if ended else kind_of(ids[i]), TENTHS[10 * i // len(ids)]]
        if listed:
            entropy = math.inf if entropy is None else entropy
            names.append(student_choice(listed, entropy)[0])
        for name in names:
            group = result.groups[name]
            group.kl += kl
            group.n += 1
            group.by_token[ids[i]] += kl


def kind(text: str) -> str:
    """Return the kind of a token that does not end a response."""
    if not text.strip():
        return "space"
    if re.fullmatch(r"\s*\d+\s*", text):
        return "digits"
    return "punctuation" if re.fullmatch(r"[\W_]+", text) else "words"


def rows(runs: Sequence[Sequence[Evaluation]]) -> list[list[str]]:
    """Return the table: a head, then a line for each group of the last evaluations; of one run with its largest tokens.

    Each run has the share of the KL, the share of the tokens, and the change of the first since the first evaluation.
    """
    single = len(runs) == 1
    head = ["", "group"]
    for number in range(1, len(runs) + 1):
        head += [name if single else f"{name} {number}" for name in ("KL", "tokens", "change")]
    table = [[*head, "largest"] if single else head]
    for what, names in GROUPS.items():
        for name in names:
            if not any(history[-1].groups[name].n or history[0].groups[name].n for history in runs):
                continue
            cells = [cell for history in runs for cell in _cells(history, name)]
            if single:
                last = runs[0][-1]
                largest = last.groups[name].by_token.most_common(N_LARGEST)
                cells.append(" ".join(repr(last.texts.token(token)) for token, kl in largest if kl > 0))
            table.append([what, name, *cells])
    return table


def _cells(history: Sequence[Evaluation], name: str) -> list[str]:
    share, tokens = history[-1].shares(name)
    change = f"{share - history[0].shares(name)[0]:+.1%}" if len(history) > 1 else "-"
    return ["-", f"{tokens:.1%}", "-"] if name == "observation" else [f"{share:.1%}", f"{tokens:.1%}", change]


def sentence(history: Sequence[Evaluation]) -> str:
    """Return the line above the table: what stands out in the last and in the first evaluation, and the mean KL.

    A student learns not to be sure of what its teacher denies, so a fault may stand out in the first one alone.
    """
    last = history[-1]
    means = ", ".join(f"{one.kl / max(one.n, 1):.4f} at step {one.step}" for one in history)
    findings = ". ".join(f"step {one.step}: {one.finding() or 'no group stands out'}" for one in reversed(history))
    skipped = f"; {last.n_skipped} tokens with an infinite one left out" if last.n_skipped else ""
    return f"{findings}. {last.number}: {means} nats a token; {last.n} tokens{skipped}"

"""Compare the token ids of two tokenizers, and name the tokens that differ."""

from __future__ import annotations

from collections.abc import Mapping

_SHOWN = 4  # tokens in one message


def token_difference(own: Mapping[str, int], other: Mapping[str, int], n_rows: int) -> str:
    """Return a clause about tokens that differ, "" if there are none.

    Tokens of the other model with ids from `n_rows` on do not count. The student has no logits for them, and theirs are
    dropped before the softmax, like those of padding rows.

    Args:
        own: token -> id of the student.
        other: token -> id of a teacher or reference.
        n_rows: of the student's embedding.
    """
    kept = {token: i for token, i in other.items() if i < n_rows}
    moved = {token: (i, kept[token]) for token, i in own.items() if token in kept and kept[token] != i}
    clauses = (
        ("other ids for", {token: f"{a} and {b}" for token, (a, b) in moved.items()}),
        ("only the student has", {token: i for token, i in own.items() if token not in kept}),
        ("only the other model has", {token: i for token, i in kept.items() if token not in own}),
    )
    return "; ".join(f"{what} {_shown(tokens)}" for what, tokens in clauses if tokens)


def _shown(tokens: Mapping[str, object]) -> str:
    first = [f"{token!r} ({i})" for token, i in list(tokens.items())[:_SHOWN]]
    return ", ".join(first) + (f" and {len(tokens) - _SHOWN} more" if len(tokens) > _SHOWN else "")

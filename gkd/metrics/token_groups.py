"""Group the tokens of an evaluation by whether student and teacher choose the same, from their five listed choices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gkd.types import TokenRecord

SURE = 0.9  # the student's probability of its token
DENIED = 0.1  # the teacher's of the same token
SURE_ENTROPY = 0.325  # nats of (0.9, 0.1): below it, one token has more than 0.9
SAME = "same choice"
OTHER = "other choice"
SURE_OF_OTHER = "sure of another"
Choice = Sequence[float]  # token id, probability of the teacher, of the student


def student_choice(choices: Sequence[Choice], entropy: float) -> tuple[str, float, float]:
    """Return how the student's first choice relates to the teacher's, then the student's and the teacher's probability.

    What the list leaves out counts as one token; the teacher gives it at most what its last choice has.

    Args:
        choices: the teacher's, descending; at least one.
        entropy: the student's, nats.
    """
    best = max(choices, key=lambda one: one[2])
    left = 1.0 - sum(one[2] for one in choices)
    if left > best[2]:
        p = max(min(choices[-1][1], 1.0 - sum(one[1] for one in choices)), 0.0)
        q = left if entropy < SURE_ENTROPY else min(left, SURE)  # many unlisted tokens do not make a sure choice
        return (SURE_OF_OTHER if q > SURE else OTHER), q, p
    if best[0] == choices[0][0]:
        return SAME, best[2], best[1]
    return (SURE_OF_OTHER if best[2] > SURE else OTHER), best[2], best[1]


def is_sure_and_wrong(choices: Sequence[Choice], entropy: float) -> bool:
    """Return whether the student is sure of a token that the teacher denies."""
    _, q, p = student_choice(choices, entropy)
    return q > SURE and p < DENIED


def evaluation_numbers(records: Sequence[TokenRecord]) -> dict[str, float]:
    """Return `eval/end_kl_share` and `eval/sure_and_wrong_share`; empty without a distribution of the teacher."""
    tokens = [
        (kl, ended, bool(choices) and is_sure_and_wrong(choices, entropy))
        for record in records
        if record.choices and {"token_kl", "ended"} <= record.values.keys()
        for kl, ended, choices, entropy, paired in zip(
            *(record.values[name] for name in ("token_kl", "ended")),
            record.choices,
            record.values["student_entropy"],
            record.values.get("paired") or [1.0] * len(record.choices),
            strict=True,
        )
        if paired and math.isfinite(kl)
    ]
    total = sum(kl for kl, *_ in tokens)
    if not total > 0:
        return {}
    return {
        "eval/end_kl_share": sum(kl for kl, ended, _ in tokens if ended) / total,
        "eval/sure_and_wrong_share": sum(wrong for *_, wrong in tokens) / len(tokens),
    }

"""How the loss compares student and teacher: token by token, or by the bytes of their texts.

    Comparison       both have the same tokens
    TokenizerPair    the teacher has another tokenizer        gkd.text.pair

`gkd.preflight.run.models_compared` chooses one. Scoring endpoints, the actor's ranks and a local teacher ask it.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gkd.types import Rollout, TeacherScores


class Comparison:
    """Compare by token; both models have ids below `n_vocab`, 0: all of the student's."""

    ids = "shared"  # what `n_vocab` counts

    def __init__(self, n_vocab: int = 0) -> None:
        self._n_vocab = n_vocab

    @property
    def n_vocab(self) -> int:
        """Return the number that the ids which the student's loss compares are below."""
        return self._n_vocab

    @property
    def n_listed(self) -> int:
        """Return the number that the ids in the teacher's lists are below."""
        return self._n_vocab

    @property
    def unit_of_token(self) -> np.ndarray | None:
        """Return [V'] int32, the unit of each of the teacher's tokens; None: its lists have tokens."""
        return None

    def for_teacher(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the sequences that the teacher scores, in its tokens. One with an empty response is not sent."""
        return [rollout.for_teacher() for rollout in rollouts]

    def completed(self, scores: Mapping[int, TeacherScores], texts: Sequence[Rollout]) -> dict[int, TeacherScores]:
        """Return what the teacher sent by position, and what stands for those of `for_teacher` that were not sent."""
        return dict(scores)

    def text_columns(self, rollouts: Sequence[Rollout], scores: Sequence[TeacherScores]) -> list[np.ndarray]:
        """Return the arrays of `TextTargets` for the sequences of a micro-batch; empty: tokens are compared."""
        return []


SAME_TOKENS = Comparison()  # of a student alone, or of one whose vocabulary the teacher has

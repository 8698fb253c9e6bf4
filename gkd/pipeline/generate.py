"""Prompts -> answers -> questions to the teacher: the same for a step of any scheduler and for an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gkd.config.schema import Config
from gkd.handles import PendingScores, RolloutChunk
from gkd.roles import RolloutRole, ScoringRole
from gkd.types import Prompt


class Generation:
    """The way from prompts to scores that are on their way."""

    def __init__(self, config: Config, rollout: RolloutRole, scoring: ScoringRole) -> None:
        self._config, self._rollout, self._scoring = config, rollout, scoring

    def submitted(
        self, prompts: Sequence[Prompt], on_policy: Sequence[int], *, n: int, seed: int, policy_version: int
    ) -> list[PendingScores]:
        """All answers to a batch, and the teacher asked about them; blocks until the last one is written.

        The teacher is asked about each as it is finished or, without teacher.overlap_rollout, when all are.

        Args:
            on_policy: places in `prompts` of those that the student answers, ascending.
            policy_version: of the weights that the engines have.
        """
        answers = self._answers(prompts, on_policy, n=n, seed=seed, policy_version=policy_version)
        if not self._config.teacher.overlap_rollout:
            answers = iter(list(answers))
        return [self._scoring.submit(chunk) for chunk in answers]

    def _answers(
        self, prompts: Sequence[Prompt], on_policy: Sequence[int], *, n: int, seed: int, policy_version: int
    ) -> Iterator[RolloutChunk]:
        """The dataset's, which are there already, then the student's as they finish."""
        from_dataset = sorted(set(range(len(prompts))) - set(on_policy))
        if from_dataset:
            asked = [prompts[i] for i in from_dataset]
            yield from self._rollout.dataset(asked, prompt_indices=from_dataset, policy_version=policy_version)
        if on_policy:
            asked = [prompts[i] for i in on_policy]
            temperature = self._config.rollout.temperature
            yield from self._rollout.generate(asked, prompt_indices=on_policy, n=n, temperature=temperature, seed=seed)

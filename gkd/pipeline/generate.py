"""Generate responses and submit them to the teacher: the same for a step of any scheduler and for an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gkd.config.schema import Config
from gkd.roles import RolloutRole, ScoringRole
from gkd.types import PendingScores, Prompt, RolloutChunk


class Generation:
    """Turns prompts into responses whose scores are pending."""

    def __init__(self, config: Config, rollout: RolloutRole, scoring: ScoringRole) -> None:
        self._config, self._rollout, self._scoring = config, rollout, scoring

    def generate_and_score(
        self, prompts: Sequence[Prompt], on_policy: Sequence[int], *, n: int, seed: int, policy_version: int
    ) -> list[PendingScores]:
        """Generate all responses of a batch and submit them to the teacher; blocks until the last one is generated.

        Each chunk is submitted as soon as it is finished.

        Args:
            on_policy: indices of the prompts that the student responds to, ascending. The others take the
                dataset's response.
            n: samples per on-policy prompt.
            policy_version: of the weights that the engines hold.
        """
        chunks = self._chunks(prompts, on_policy, n=n, seed=seed, policy_version=policy_version)
        return [self._scoring.submit(chunk) for chunk in chunks]

    def _chunks(
        self, prompts: Sequence[Prompt], on_policy: Sequence[int], *, n: int, seed: int, policy_version: int
    ) -> Iterator[RolloutChunk]:
        """Yield the dataset's responses, which exist already, then the student's as they finish."""
        from_dataset = sorted(set(range(len(prompts))) - set(on_policy))
        if from_dataset:
            chosen = [prompts[i] for i in from_dataset]
            yield from self._rollout.dataset(chosen, prompt_indices=from_dataset, policy_version=policy_version)
        if on_policy:
            chosen = [prompts[i] for i in on_policy]
            temperature = self._config.rollout.temperature
            yield from self._rollout.generate(chosen, prompt_indices=on_policy, n=n, temperature=temperature, seed=seed)

"""How sequences are sampled, and what the engine knows of one that is being written."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gkd.types import Prompt, VersionSpan


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one user of the engine samples. temperature 0 is greedy."""

    n: int
    temperature: float
    top_p: float
    max_tokens: int
    seed: int


@dataclass(slots=True)
class Request:
    """One sequence that is being written."""

    owner: Hashable
    prompt: Prompt
    index: int  # its sample_index
    engine_id: str  # vLLM's own name of it
    spans: list[VersionSpan] = field(default_factory=list)  # of the versions before the current one

    def written(self, stop: int, policy_version: int) -> None:
        """That version wrote what there is up to token `stop` and no span covers yet; nothing if there is no such."""
        start = self.spans[-1].stop if self.spans else 0
        if stop > start and self.spans and self.spans[-1].policy_version == policy_version:
            start = self.spans.pop().start
        if stop > start:
            self.spans.append(VersionSpan(start, stop, policy_version))


def vllm_params(sampling: Sampling, sample_index: int, eos_ids: Sequence[int]) -> Any:
    """vLLM's SamplingParams of one sequence.

    Its seed is its own, so what it says does not depend on which engine it runs on.

    Args:
        eos_ids: the response ends with, and includes, the first of these.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        seed=sequence_seed(sampling.seed, sample_index),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        stop_token_ids=list(eos_ids),
        ignore_eos=True,  # there is no tokenizer here that would know it; eos_ids decide
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sequence_seed(seed: int, sample_index: int) -> int:
    """In [0, 2^32)."""
    return int(np.random.SeedSequence([seed, sample_index]).generate_state(1, np.uint32)[0])

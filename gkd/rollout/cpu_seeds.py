"""Draw the random numbers of a sequence's next tokens together, on the CPU.

On the CPU vLLM samples a token from a number that it draws from the sequence's generator: for each token several
calls of torch, which take long with a small model. Here many numbers are drawn at once. They are the same, so that
sequences are the same, too.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

_N_AHEAD = 32
_MOST = 2**31  # vLLM's
_ahead: WeakKeyDictionary[Generator, list[int]] = WeakKeyDictionary()  # the last one is the next


def draw_seeds_ahead() -> None:
    """Make vLLM's sampler take its numbers from here; no-op on GPUs, where it needs none."""
    if current_platform.is_cpu():
        TopKTopPSampler.forward_cpu = _sample


def _sample(
    _: TopKTopPSampler, logits: Tensor, generators: dict[int, Generator], k: Tensor | None, p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the sampled tokens and the logprobs of the distribution that they are sampled from.

    Args:
        logits: [B, V], divided by the temperature.
        generators: by row.
    """
    logits = apply_top_k_top_p(logits, k, p).float()
    tokens: Tensor = torch.ops._C.fused_gumbel_argmax(logits, _seeds(len(logits), generators))
    return tokens, logits.log_softmax(dim=-1)


def _seeds(n_rows: int, generators: dict[int, Generator]) -> Tensor:
    seeds = torch.randint(0, _MOST, (n_rows,))
    numbers = []
    for generator in generators.values():
        ahead = _ahead.get(generator)
        if not ahead:
            drawn = torch.randint(0, _MOST, (_N_AHEAD,), generator=generator)
            ahead = _ahead[generator] = drawn.flip(0).tolist()
        numbers.append(ahead.pop())
    seeds[list(generators)] = torch.tensor(numbers, dtype=torch.long)
    return seeds

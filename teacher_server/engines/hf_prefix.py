"""Compute a prompt once for the sequences of a batch that have it, in the Transformers engine on a CPU.

The prompt's KV cache is repeated for the sequences of a pass, which then computes their responses only.

Letters: B sequences of a pass, P prompt tokens, R response tokens, S padded length, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from teacher_server.engines.base import TokenSequence

# Prompts of fewer tokens are computed with each sequence: two small passes cost more than they save. Measured on a CPU
# with 4 layers. On an H200 sharing was slower up to 2,048 tokens of prompt: the cache rules out the fast attention.
SHORTEST_PROMPT = 64
_PASS_TOKENS = 512  # padded response tokens of a pass, which also bounds the attention mask
_CACHE_TOKENS = 8192  # tokens in the KV cache of a pass: most of its memory


def sharing_problem(backbone: Any, config: Any, device: torch.device) -> str:
    """Return why this model's prompts cannot be shared; empty if they can. Runs two short passes."""
    rope = {str(getattr(module, "rope_type", "")) for module in backbone.modules()}
    if any("dynamic" in kind or "longrope" in kind for kind in rope):
        return "its rotary embedding depends on the length of the whole sequence"
    cache = DynamicCache(config=config)
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        kinds = sorted({type(layer).__name__ for layer in cache.layers} - {DynamicLayer.__name__})
        return f"its cache has layers of the kind {', '.join(kinds)}"
    tokens = torch.arange(1, 9, device=device)[None] % config.get_text_config().vocab_size  # [1, 8]
    with torch.inference_mode():
        whole = backbone(input_ids=tokens, use_cache=False).last_hidden_state[0]
        try:
            backbone(input_ids=tokens[:, :5], past_key_values=cache, use_cache=True)
            if cache.get_seq_length() != 5:
                return "it does not keep its state in the cache that it is given"
            parts = backbone(input_ids=tokens[:, 5:], past_key_values=cache, use_cache=True).last_hidden_state[0]
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            return f"it does not take a cache: {type(error).__name__}: {error}"
    tolerance = 1e-3 if whole.dtype == torch.float32 else 0.05
    if not torch.allclose(parts, whole[5:], rtol=tolerance, atol=tolerance * float(whole.abs().max())):
        return "with a cache it computes other hidden states"
    return ""


def groups_of(batch: Sequence[TokenSequence], block: int) -> tuple[list[list[int]], list[int]]:
    """Return the indices of sequences with a common prompt of more than `block` tokens, and those of all others."""
    by_prompt: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(batch):
        by_prompt.setdefault(sequence.token_ids[: sequence.prompt_length].tobytes(), []).append(index)
    groups = [g for g in by_prompt.values() if block and len(g) > 1 and batch[g[0]].prompt_length > block]
    grouped = {index for group in groups for index in group}
    return groups, [index for index in range(len(batch)) if index not in grouped]


def rows_of_group(backbone: Any, config: Any, batch: Sequence[TokenSequence], device: torch.device) -> list[Any]:
    """Return the [M, H] hidden states that predict the M response tokens with rows, of each sequence.

    Args:
        backbone: without the LM head.
        config: of the model, for its cache.
        batch: sequences with the same prompt.
    """
    n_prompt = batch[0].prompt_length
    cache = DynamicCache(config=config)
    prompt = torch.from_numpy(batch[0].token_ids[:n_prompt].astype(np.int64))[None].to(device)
    # The logits at position t predict token t + 1: the prompt's last row predicts the first token of every response.
    hidden = backbone(input_ids=prompt, past_key_values=cache, use_cache=True).last_hidden_state
    first = hidden[0, -1:].clone()  # [1, H]
    rows: list[Any] = [first] * len(batch)
    for group in _passes([sequence.n_response - 1 for sequence in batch], n_prompt):
        inputs = [batch[i].response[:-1] for i in group]
        tokens = np.zeros((len(group), max(map(len, inputs))), np.int64)  # [B, S]; the last token predicts none
        for row, ids in zip(tokens, inputs, strict=True):
            row[: len(ids)] = ids
        # The cache holds the prompt alone, once or for the pass before: its first entry becomes B entries.
        cache.batch_select_indices(torch.zeros(len(group), dtype=torch.int64, device=device))
        hidden = _hidden(backbone, cache, torch.from_numpy(tokens).to(device))
        cache.crop(-tokens.shape[1])
        for i, ids, states in zip(group, inputs, hidden, strict=True):
            every = torch.cat([first, states[: len(ids)]])  # [R, H]
            rows[i] = every if batch[i].own is None else every[torch.from_numpy(batch[i].rows).to(device)]
    return rows


def _hidden(backbone: Any, cache: DynamicCache, tokens: torch.Tensor) -> torch.Tensor:
    """Return [B, S, H]. A response that is longer than a pass is computed in several: its mask would be large."""
    step = max(1, _PASS_TOKENS // len(tokens))
    parts = [
        backbone(input_ids=part, past_key_values=cache, use_cache=True).last_hidden_state
        for part in tokens.split(step, dim=1)
    ]
    return torch.cat(parts, dim=1)


def _passes(lengths: Sequence[int], n_prompt: int) -> list[list[int]]:
    """Return the indices of each pass, from short to long; none for sequences without a token to compute."""
    passes: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not lengths[i]:
            continue
        most = min(_PASS_TOKENS // lengths[i], _CACHE_TOKENS // (n_prompt + lengths[i]))
        if not passes or len(passes[-1]) + 1 > most:
            passes.append([])
        passes[-1].append(i)
    return passes

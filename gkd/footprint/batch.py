"""How large a training step's micro-batches may become. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from gkd.config.derived import derive
from gkd.config.schema import Config


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The largest micro-batch of one data-parallel group, with sequences as long as they may be."""

    n_tokens: int  # padding included
    n_rows: int  # that carry loss
    n_sequences: int
    n_batches: int  # of one optimizer step
    packed: bool


def batch_shape(config: Config) -> BatchShape:
    """The worst case: where a token budget is set, all of its tokens may be answers' (prompts may be short)."""
    data, actor = config.data, config.actor
    derived = derive(config)
    longest = derived.max_sequence_length
    of_group = -(-config.trainer.global_batch_size // derived.dp_size) * config.rollout.n
    budget = actor.max_tokens_per_micro_batch
    if budget:
        n_tokens = min(max(budget, longest), of_group * longest)
        n_sequences = max(1, n_tokens // longest)
        n_rows = min(n_tokens, of_group * data.max_response_length)
    else:
        n_sequences = min(actor.micro_batch_size, of_group)
        n_tokens, n_rows = n_sequences * longest, n_sequences * data.max_response_length
    n_batches = -(-of_group * longest // n_tokens)
    return BatchShape(n_tokens, n_rows, n_sequences, n_batches, actor.packing)

"""Name prompts by a digest, and count the tokens that an engine computes for sequences that share a prompt.

Broker and workers count alike, so a worker's credit and the budget of its batches have one unit: computed tokens.

Letters: P prompt tokens, R response tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from teacher_server.wire.codec import Buffer, checksum
from teacher_server.wire.protocol import ScoreRequest

_TOKEN_BYTES = 4


class Prompt(NamedTuple):
    """The prompt of one sequence, as two numbers of 64 bits. Equal digests decide about speed only."""

    digest: int
    # Digest without the last token, if R = 1: greedy responses of a teacher grow by one token with each request, so
    # this is the prompt of the request before. Else the same as `digest`.
    parent: int


def prompts_of(request: ScoreRequest, tokens: Buffer) -> tuple[Prompt, ...]:
    """Return the prompt of each sequence of a request.

    Args:
        tokens: the request's token frame, 4 bytes a token, of `request.total_length` tokens.
    """
    view, prompts, at = memoryview(tokens).cast("B"), [], 0
    for n_prompt, n_total in request.sequences:
        ids = view[_TOKEN_BYTES * at : _TOKEN_BYTES * (at + n_prompt)]
        digest = checksum(ids)
        prompts.append(Prompt(digest, checksum(ids[:-_TOKEN_BYTES]) if n_total - n_prompt == 1 else digest))
        at += n_total
    return tuple(prompts)


def computed_tokens(n_prompt: int, n_total: int, block: int, *, known: bool) -> int:
    """Return the most tokens that an engine computes for a sequence of P = `n_prompt` and P + R = `n_total` tokens.

    Args:
        block: `Engine.prefix_block`; 0 for an engine that computes each sequence as a whole.
        known: whether the engine has computed this prompt in the same batch.
    """
    return n_total - n_prompt + block if known and n_prompt > block > 0 else n_total

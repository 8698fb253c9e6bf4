"""Compare the token ids of two tokenizers, and name the tokens that differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gkd.config.schema import Config
from gkd.errors import ConfigError
from gkd.types import Prompt

_SHOWN = 4  # tokens in one message


def shared_ids(own: Mapping[str, int], other: Mapping[str, int], n_rows: int, n_other_rows: int) -> tuple[int, str]:
    """Return how many ids, from 0 on, mean the same token in both models, and a clause on what prevents that.

    The clause is empty if one model has all tokens of the other with the same ids, and its additional tokens have the
    highest ids. These and padding rows are masked: they are not generated, and dropped before the softmax.

    Args:
        own: token -> id of the student.
        other: token -> id of a teacher or reference.
        n_rows: of the student's embedding.
        n_other_rows: of the other model's.
    """
    kept = {token: i for token, i in other.items() if i < n_rows}
    moved = {token: f"{i} and {other[token]}" for token, i in own.items() if other.get(token, i) != i}
    only_own = {token: i for token, i in own.items() if token not in other}
    only_other = {token: i for token, i in kept.items() if token not in own}
    n_ids = min([n_rows, n_other_rows, *only_own.values(), *only_other.values()])
    are_last = all(i < n_ids for token, i in own.items() if token in other)
    if not moved and are_last and not (only_own and only_other):
        return n_ids, ""
    clauses = (("other ids for", moved), ("only the student has", only_own), ("only the other model has", only_other))
    return n_ids, "; ".join(f"{what} {shown(tokens)}" for what, tokens in clauses if tokens)


def check_masked(
    config: Config, n_vocab: int, eos_ids: Sequence[int], prompts: Iterable[Prompt], *, is_shared: bool = True
) -> None:
    """Raise ConfigError if a response can only end with a masked token, or if a prompt or response has one.

    Args:
        is_shared: the teacher's prompts have the student's tokens.
    """
    fix = "use a teacher with the student's tokens, or remove them from the data and the chat template."
    key = "model.n_vocab" if config.model.n_vocab else "model.path"
    value = config.model.n_vocab or config.model.path
    if masked := [i for i in eos_ids if i >= n_vocab]:
        problem = f"responses end with token {masked[0]}, and the ids from {n_vocab} on are masked."
        raise ConfigError(key, value, problem, fix)
    for prompt in prompts:
        for ids in (prompt.token_ids, prompt.response_ids, prompt.teacher_ids if is_shared else None):
            if ids is not None and len(ids) and int(ids.max()) >= n_vocab:
                problem = f"row {prompt.prompt_id} has the token id {int(ids.max())}; ids from {n_vocab} on are masked."
                raise ConfigError(key, value, problem, fix)


def shown(tokens: Mapping[str, object]) -> str:
    """Return the first tokens with their ids."""
    first = [f"{token!r} ({i})" for token, i in list(tokens.items())[:_SHOWN]]
    return ", ".join(first) + (f" and {len(tokens) - _SHOWN} more" if len(tokens) > _SHOWN else "")

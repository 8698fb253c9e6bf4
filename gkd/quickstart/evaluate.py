"""Measure greedy accuracy on the addition task with plain Hugging Face decoding.

    python -m gkd.quickstart.evaluate MODEL_DIR --problems DIR/heldout.jsonl

It shares no code with the rollout engines, so it checks a trained model independently.

Shape letters: B prompts of a batch, P longest prompt of it, R response tokens decoded so far.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gkd.errors import ConfigError, DataError, GkdError, ModelError
from gkd.quickstart.addition import Problem, build_tokenizer, extract_answer, read_jsonl

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_RESPONSE_TOKENS = 40  # the longest correct response has 32 tokens, including end-of-sequence


@dataclass(frozen=True, slots=True)
class GreedyScore:
    """Shares of the problems, each in [0, 1]."""

    accuracy: float  # the response ends, is well-formed and has the correct answer
    well_formed: float  # the response ends and has an answer, correct or not


def greedy_accuracy(model: PreTrainedModel | str | Path, problems: Sequence[Problem], batch_size: int = 256) -> float:
    """Return the accuracy of `greedy_score`."""
    return greedy_score(model, problems, batch_size).accuracy


def greedy_score(
    model: PreTrainedModel | str | Path, problems: Sequence[Problem], batch_size: int = 256
) -> GreedyScore:
    """Decode every problem's response greedily and read off the answers.

    Args:
        model: a Hugging Face causal language model with the task's own tokenizer, or the folder of one with any
            tokenizer (it is then loaded from there).
        problems: to be solved.
        batch_size: prompts decoded together; the result does not depend on it.

    Raises: DataError if there are no problems; ConfigError on a batch size below 1; ModelError if the folder cannot
        be loaded.
    """
    if not problems:
        raise DataError("greedy_score: no problems given")
    if batch_size < 1:
        raise ConfigError("batch_size", batch_size, "a batch needs at least one prompt.", "set it to 1 or more.")
    tokenizer: PreTrainedTokenizerBase
    if isinstance(model, (str, Path)):
        model, tokenizer = _load(Path(model))
    else:
        tokenizer = build_tokenizer()
    answers: list[str | None] = []
    for start in range(0, len(problems), batch_size):
        prompt_ids = [tokenizer(problem.prompt)["input_ids"] for problem in problems[start : start + batch_size]]
        for ids in greedy_decode(model, prompt_ids, eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id):
            ended = ids[-1] == tokenizer.eos_token_id
            answers.append(extract_answer(str(tokenizer.decode(ids[:-1]))) if ended else None)
    right = sum(answer == problem.answer for answer, problem in zip(answers, problems, strict=True))
    return GreedyScore(right / len(problems), sum(answer is not None for answer in answers) / len(problems))


@torch.no_grad()
def greedy_decode(
    model: PreTrainedModel,
    prompt_ids: Sequence[list[int]],
    *,
    eos_id: int,
    pad_id: int,
    max_response_tokens: int = MAX_RESPONSE_TOKENS,
) -> list[list[int]]:
    """Decode one batch greedily, with a key/value cache.

    Prompts of different lengths are padded on the left, with the pads masked out of the attention and positions
    counted from the first real token. Leaves the model in the train/eval mode it was in.

    Returns: per prompt the response's token ids; they end with `eos_id` unless `max_response_tokens` came first.
    """
    longest = max(map(len, prompt_ids))
    inputs = torch.tensor([[pad_id] * (longest - len(ids)) + ids for ids in prompt_ids])  # [B, P]
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompt_ids])  # [B, P + R]
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)  # [B, P]

    was_training = model.training
    model.eval()
    ended = torch.zeros(len(prompt_ids), dtype=torch.bool)
    cache: Any = None
    written: list[torch.Tensor] = []
    while len(written) < max_response_tokens and not ended.all():
        output = model(
            input_ids=inputs, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        cache = output.past_key_values
        token = output.logits[:, -1].argmax(dim=-1)  # [B]
        written.append(token)
        ended |= token == eos_id
        # A row that has ended continues to decode with the others; tokens after its end are removed below.
        inputs = token[:, None]
        mask = torch.cat([mask, mask.new_ones(len(prompt_ids), 1)], dim=1)
        positions = positions[:, -1:] + 1
    model.train(was_training)

    rows = torch.stack(written, dim=1).tolist()  # [B, R]
    return [row[: row.index(eos_id) + 1] if eos_id in row else row for row in rows]


def _load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} is not a model folder that transformers can load: {error}") from error


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m gkd.quickstart.evaluate", description="Greedy accuracy of a model."
    )
    parser.add_argument("model", type=Path, help="Hugging Face model folder")
    parser.add_argument("--problems", type=Path, required=True, help="prompt file, e.g. heldout.jsonl")
    parser.add_argument("--batch-size", type=int, default=256, help="prompts decoded together")
    options = parser.parse_args(arguments)
    try:
        problems = read_jsonl(options.problems)
        score = greedy_score(options.model, problems, options.batch_size)
    except GkdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.model}: {score.accuracy:.1%} of {len(problems)} correct, {score.well_formed:.1%} well-formed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

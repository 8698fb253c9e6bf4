"""Check trained models with transformers' own generation, which shares no code with the rollout engines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from examples.quickstart.addition import Problem, build_tokenizer, extract_answer

MAX_RESPONSE_TOKENS = 40  # the longest correct response has 32, including end-of-sequence


def load(folder: Path, kind: Any = AutoModelForCausalLM) -> Any:
    """Return the model of a Hugging Face folder in float32."""
    return kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def greedy_score(model: Any, problems: Sequence[Problem]) -> tuple[float, float]:
    """Decode a response to each problem and return its `score`."""
    tokenizer = build_tokenizer()
    return score(greedy_decode(model, [tokenizer(problem.prompt)["input_ids"] for problem in problems]), problems)


def score(responses: Sequence[list[int]], problems: Sequence[Problem]) -> tuple[float, float]:
    """Return (accuracy, share of well-formed responses), each in [0, 1].

    A response is well-formed if it ends and has an answer, correct or not.
    """
    tokenizer = build_tokenizer()
    answers = [
        extract_answer(str(tokenizer.decode(ids[:-1]))) if ids[-1] == tokenizer.eos_token_id else None
        for ids in responses
    ]
    right = sum(answer == problem.answer for answer, problem in zip(answers, problems, strict=True))
    return right / len(problems), sum(answer is not None for answer in answers) / len(problems)


def greedy_decode(
    model: Any, prompt_ids: Sequence[list[int]], max_tokens: int = MAX_RESPONSE_TOKENS
) -> list[list[int]]:
    """Return the token ids of the greedy responses, of at most `max_tokens`, end-of-sequence included.

    Args:
        model: its generation config has the ids of end-of-sequence and padding.
        prompt_ids: token ids of a batch of prompts, of any lengths.
    """
    config, longest = model.generation_config, max(map(len, prompt_ids))
    tokens = torch.tensor([[config.pad_token_id] * (longest - len(ids)) + ids for ids in prompt_ids])  # [B, P]
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompt_ids])
    return greedy_rows(model, {"input_ids": tokens, "attention_mask": mask}, max_tokens)


@torch.no_grad()
def greedy_rows(model: Any, inputs: Mapping[str, torch.Tensor], max_tokens: int) -> list[list[int]]:
    """Do the same for a batch of prompts that is padded on the left already. Inputs are those of the model."""
    end = model.generation_config.eos_token_id
    output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    rows = output[:, inputs["input_ids"].shape[1] :].tolist()  # [B, R], padded after the end
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def count_equal(export: Path, samples: Path) -> tuple[int, int]:
    """Return (responses with the engine's tokens, all responses) of an exported student.

    Args:
        export: Hugging Face folder of the trained student.
        samples: `samples/step_N.jsonl` of the run: greedy responses of the engine after the last weight sync.
    """
    model = load(export)
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    equal = 0
    for line in lines:  # one at a time: in a batch, rounding depends on the other rows
        (response,) = greedy_decode(model, [line["prompt_ids"]], len(line["response_ids"]))
        equal += response == line["response_ids"]
    return equal, len(lines)

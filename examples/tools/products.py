"""The task of the example: products of three-digit numbers, which only the calculator can compute.

    user       417*823
    assistant  <tool_call>{"name": "calculate", "arguments": {"expression": "417*823"}}</tool_call>
    tool       343191
    assistant  The result is 343191

The models have 0.3M and 0.6M parameters: they can learn to copy digits into a call and out of its answer, not to
multiply. So a right answer shows that the student has called the tool, and has read what it wrote.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from examples.tools.calculator import Calculator, calculate
from gkd.data.chat_delta import ChatDelta
from gkd.environment.calls import ToolCall, parse_calls

LOWEST, HIGHEST = 320, 999  # factors of three digits and products of six, so that all trajectories have one length
MARKER = "The result is "
ENVIRONMENT = "examples.tools.calculator:Calculator"
_ROLES = [f"<|{name}|>" for name in ("pad", "end", "tools", "user", "assistant", "tool")]
_CALL_TAGS = ["<tool_call>", "</tool_call>"]  # text of the student, not special tokens
_TEMPLATE = """{%- if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


@dataclass(frozen=True, slots=True)
class Problem:
    """A product, `left * right`."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}*{self.right}"

    @property
    def answer(self) -> str:
        return str(self.left * self.right)

    @property
    def call(self) -> str:
        """Return the first turn."""
        call = {"name": "calculate", "arguments": {"expression": self.prompt}}
        return f"{_CALL_TAGS[0]}{json.dumps(call)}{_CALL_TAGS[1]}"

    def last_turn(self, answer: str) -> str:
        """Return the second turn, for what the tool has answered."""
        return f"{MARKER}{answer}"


def make_problems(seed: int, n_train: int, n_heldout: int) -> tuple[list[Problem], list[Problem]]:
    """Draw (train, held-out) problems, none of them twice; the held-out ones do not depend on `n_train`."""
    rng, drawn = random.Random(seed), dict[Problem, None]()
    while len(drawn) < n_heldout + n_train:
        drawn[Problem(rng.randint(LOWEST, HIGHEST), rng.randint(LOWEST, HIGHEST))] = None
    problems = list(drawn)
    return problems[n_heldout:], problems[:n_heldout]


def write_jsonl(problems: Sequence[Problem], path: Path) -> None:
    """Write a prompt file, as docs/data.md describes it. Prompts are messages, so that the chat template applies."""
    rows = [{"prompt": [{"role": "user", "content": each.prompt}], "answer": each.answer} for each in problems]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read_jsonl(path: Path) -> list[Problem]:
    """Read a file of `write_jsonl`."""
    prompts = [json.loads(line)["prompt"][0]["content"] for line in path.read_text().splitlines()]
    return [Problem(*map(int, prompt.split("*"))) for prompt in prompts]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on turns of the task, with one token for each digit, and give it a chat template."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    texts = [text for each in make_problems(0, 64, 0)[0] for text in (each.call, each.last_turn(each.answer))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=_ROLES, show_progress=False)
    tokenizer.train_from_iterator([text.replace(tag, "") for text in texts for tag in _CALL_TAGS], trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in _CALL_TAGS])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = _TEMPLATE
    return made


class Script:
    """Tokens of prompts and of complete trajectories, in the form that a run has them."""

    def __init__(self) -> None:
        self.tokenizer = build_tokenizer()
        self.end: int = self.tokenizer.eos_token_id
        tools = tuple(Calculator.tools)
        self._tools: list[Any] = list(tools)
        self.delta = ChatDelta(self.tokenizer, {}, [self.end], tools, setting=("rollout.environment", ENVIRONMENT))

    def prompt(self, problem: Problem) -> list[int]:
        messages = [{"role": "user", "content": problem.prompt}]
        text = self.tokenizer.apply_chat_template(
            messages, tools=self._tools, add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def turn(self, text: str) -> list[int]:
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end]

    def observation(self, text: str) -> list[int]:
        return list(map(int, self.delta.ids([{"role": "tool", "content": text}])))

    def trajectory(self, problem: Problem) -> list[tuple[list[int], bool]]:
        """Return the parts of the teacher's trajectory, each with whether it is the model's own."""
        return [
            (self.prompt(problem), False),
            (self.turn(problem.call), True),
            (self.observation(problem.answer), False),
            (self.turn(problem.last_turn(problem.answer)), True),
        ]


@torch.no_grad()
def solve(model: Any, problems: Sequence[Problem], tool: Callable[[str], str] = calculate) -> list[tuple[str, str]]:
    """Let a model answer greedily in two turns, with Transformers' own generation.

    Args:
        tool: computes an expression; another function shows whether the model reads its answer.

    Returns: (what the tool wrote, what the model answers) of each problem; empty texts where there is none.
    """
    script = Script()
    contexts = [script.prompt(problem) for problem in problems]
    turns = _generated(model, contexts, script)
    written, second = [], []
    for context, turn in zip(contexts, turns, strict=True):
        text = _result(script.delta.text(np.array(turn)), tool)
        written.append(text)
        second.append([*context, *turn, *script.observation(text)] if text and turn[-1] == script.end else context)
    answers = [script.delta.text(np.array(turn)) for turn in _generated(model, second, script)]
    return [
        (text, answer.removeprefix(MARKER) if text and answer.startswith(MARKER) else "")
        for text, answer in zip(written, answers, strict=True)
    ]


def accuracy(model: Any, problems: Sequence[Problem]) -> float:
    """Return the share of problems that a model solves with the calculator."""
    answers = [answer for _, answer in solve(model, problems)]
    return sum(answer == problem.answer for answer, problem in zip(answers, problems, strict=True)) / len(problems)


def _result(turn: str, tool: Callable[[str], str]) -> str:
    calls = parse_calls(turn)
    if len(calls) != 1 or not isinstance(calls[0], ToolCall):
        return ""
    try:
        return tool(str(calls[0].arguments["expression"]))
    except (KeyError, ValueError, SyntaxError, ArithmeticError):
        return ""


def _generated(model: Any, contexts: Sequence[list[int]], script: Script) -> list[list[int]]:
    """Return the greedy continuation of each context, with its end token if it has one."""
    longest, pad = max(map(len, contexts)), script.tokenizer.pad_token_id
    tokens = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in contexts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in contexts])
    output = model.generate(tokens, attention_mask=mask, max_new_tokens=40, do_sample=False)[:, longest:].tolist()
    return [row[: row.index(script.end) + 1] if script.end in row else row for row in output]

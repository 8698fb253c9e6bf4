"""The quickstart's task: three-digit addition, written column by column with carries.

A prompt and its worked response:

    358+467=    8+7=15,5+6+1=12,3+4+1=08;825

Units first; every column is `a+b(+1 if carried)=` and a two-digit sum whose first digit is the carry; after the
semicolon is the answer. Half a million parameters can learn it. A student that has only learned the format fails: one
wrong digit or carry makes the answer wrong.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LOWEST, HIGHEST = 100, 999  # three digits, so all prompts have the same length
EOS_TOKEN, PAD_TOKEN = "<eos>", "<pad>"


@dataclass(frozen=True, slots=True)
class Problem:
    """One addition, `left + right`."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    @property
    def response(self) -> str:
        """Return the worked solution, without the end-of-sequence token."""
        columns = []
        carry = 0
        for a, b in zip(reversed(str(self.left)), reversed(str(self.right)), strict=True):
            total = int(a) + int(b) + carry
            columns.append(f"{a}+{b}{'+1' if carry else ''}={total:02d}")
            carry = total // 10
        return ",".join(columns) + ";" + self.answer


def extract_answer(response: str) -> str | None:
    """Return what follows the only semicolon if it is three or four digits, else None: the response is malformed."""
    _, _, tail = response.partition(";")
    return tail if tail.isascii() and tail.isdigit() and len(tail) in (3, 4) else None


def make_problems(seed: int, n_train: int, n_heldout: int) -> tuple[list[Problem], list[Problem]]:
    """Draw (train, held-out) problems: the same ones for a seed, and no unordered pair of numbers twice.

    The held-out problems are drawn first, so they do not depend on `n_train`. If 358+467 is held out, neither 358+467
    nor 467+358 is in the train split.
    """
    rng = random.Random(seed)
    drawn: dict[tuple[int, int], Problem] = {}  # keyed by the unordered pair, in the order of the draw
    while len(drawn) < n_heldout + n_train:
        left, right = rng.randint(LOWEST, HIGHEST), rng.randint(LOWEST, HIGHEST)
        drawn.setdefault((min(left, right), max(left, right)), Problem(left, right))
    problems = list(drawn.values())
    return problems[n_heldout:], problems[:n_heldout]


def write_jsonl(problems: list[Problem], path: Path) -> None:
    """Write a prompt file, as docs/data.md describes it. The worked responses are left out: distillation needs none."""
    rows = [json.dumps({"prompt": problem.prompt, "answer": problem.answer}) for problem in problems]
    path.write_text("\n".join(rows) + "\n")


def read_jsonl(path: Path) -> list[Problem]:
    """Read a file of `write_jsonl`."""
    prompts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    return [Problem(*map(int, prompt.removesuffix("=").split("+"))) for prompt in prompts]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte, without a chat template: `<pad>` = 0, `<eos>` = 1, then 256 bytes."""
    symbols = [PAD_TOKEN, EOS_TOKEN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        padding_side="left",  # generation continues the last position, which must be a real token
        clean_up_tokenization_spaces=False,
    )


def worked(problems: Sequence[Problem]) -> list[list[tuple[list[int], bool]]]:
    """Return the tokens of each prompt and of its worked solution, which is learned; see `pretrain.Parts`."""
    tokenizer = build_tokenizer()
    return [
        [
            (tokenizer(problem.prompt)["input_ids"], False),
            ([*tokenizer(problem.response)["input_ids"], tokenizer.eos_token_id], True),
        ]
        for problem in problems
    ]

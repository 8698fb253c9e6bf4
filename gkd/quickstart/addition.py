"""Generate the quickstart's task: three-digit addition, written column by column with carries.

The data are generated, so a first run needs no download. A prompt and its worked response:

    358+467=    8+7=15,5+6+1=12,3+4+1=08;825

Units first; every column is `a+b(+1 if carried)=` and a two-digit sum whose first digit is the carry; after the
semicolon is the answer. The task is small enough for a model with half a million parameters. It is hard enough that a
student that has only learned the format fails: one wrong digit or carry makes the answer wrong.

Writes the prompt files that `gkd.data.prompts` reads.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gkd.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LOWEST, HIGHEST = 100, 999  # three digits, so all prompts have the same length
N_PAIRS = (HIGHEST - LOWEST + 1) * (HIGHEST - LOWEST + 2) // 2  # unordered pairs, including pairs of equal numbers

EOS_TOKEN = "<eos>"
PAD_TOKEN = "<pad>"


@dataclass(frozen=True, slots=True)
class Problem:
    """One addition, `left + right`."""

    left: int
    right: int

    def __post_init__(self) -> None:
        for operand in (self.left, self.right):
            if not LOWEST <= operand <= HIGHEST:
                raise DataError(f"operand {operand} is not in [{LOWEST}, {HIGHEST}]: every operand has three digits")

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


def extract_answer(response_text: str) -> str | None:
    """Return the final answer of a worked response, or None if the response is malformed.

    The answer is the text after the only semicolon: three or four digits and nothing else. None never equals a
    reference answer.
    """
    _, semicolon, tail = response_text.partition(";")
    well_formed = bool(semicolon) and tail.isascii() and tail.isdigit() and len(tail) in (3, 4)
    return tail if well_formed else None


def make_problems(seed: int, n_train: int, n_heldout: int) -> tuple[list[Problem], list[Problem]]:
    """Draw train and held-out problems. Deterministic, and disjoint by construction.

    All problems are one draw without replacement from the *unordered* operand pairs: if 358+467 is held out, neither
    358+467 nor 467+358 is in the train split. The held-out problems are drawn first.

    Returns: (train, held-out).
    Raises: ConfigError if a size is not positive or the two together exceed `N_PAIRS`.
    """
    for key, size in (("n_train", n_train), ("n_heldout", n_heldout)):
        if size < 1:
            raise ConfigError(f"addition.{key}", size, "a split needs at least one problem.", "set it to 1 or more.")
    if n_train + n_heldout > N_PAIRS:
        raise ConfigError(
            "addition.n_train + addition.n_heldout",
            n_train + n_heldout,
            f"there are only {N_PAIRS} different problems.",
            "make one of the two splits smaller.",
        )
    rng = random.Random(seed)
    drawn: dict[tuple[int, int], Problem] = {}  # keyed by the unordered pair, in the order of the draw
    while len(drawn) < n_heldout + n_train:
        left, right = rng.randint(LOWEST, HIGHEST), rng.randint(LOWEST, HIGHEST)
        drawn.setdefault((min(left, right), max(left, right)), Problem(left, right))
    problems = list(drawn.values())
    return problems[n_heldout:], problems[:n_heldout]


def write_jsonl(problems: list[Problem], path: Path) -> None:
    """Write one `{"prompt", "answer"}` object per line, without the worked response: distillation does not use it."""
    with path.open("w", encoding="utf-8") as file:
        for problem in problems:
            file.write(json.dumps({"prompt": problem.prompt, "answer": problem.answer}) + "\n")


def read_jsonl(path: Path) -> list[Problem]:
    """Read a file of `write_jsonl`.

    Raises: DataError if the file is missing, or if a line is not an addition with its correct answer (names the line).
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"cannot read the prompt file {path}: {error}") from error
    return [_parse_row(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def _parse_row(line: str, where: str) -> Problem:
    try:
        row = json.loads(line)
        left, right = row["prompt"].removesuffix("=").split("+")
        problem = Problem(int(left), int(right))
        if (row["prompt"], row["answer"]) == (problem.prompt, problem.answer):
            return problem
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{where}: not a row of the addition task ({error!r}): {line!r}") from error
    raise DataError(f"{where}: prompt and answer do not belong together: {line!r}")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte. Any text round-trips, and no special tokens are added.

    Ids 0 and 1 are `<pad>` and `<eos>`; the 256 byte symbols follow. `save_pretrained` writes a folder that
    `AutoTokenizer.from_pretrained` loads. It has no chat template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [PAD_TOKEN, EOS_TOKEN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        padding_side="left",  # decoder-only generation continues the last position, which must be a real token
        clean_up_tokenization_spaces=False,
    )

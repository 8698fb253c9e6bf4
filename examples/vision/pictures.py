"""The task of the example: pictures of one to four equal shapes, and a question about their number, color or form.

    <image>Count?    <image>Color?    <image>Shape?
     3                red              ring

There are four numbers, colors and shapes, so guesses in the form of an answer are right in a quarter of the cases.
"""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken
from transformers import CLIPImageProcessorPil, LlavaProcessor

from examples.quickstart.addition import build_tokenizer
from examples.quickstart.evaluate import greedy_rows

SIDE, PATCH, CELL = 32, 8, 16  # pixels: of the picture, of a patch of the vision tower, of the place of a shape
COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (230, 210, 40)}
SHAPES = ("ring", "square", "triangle", "cross")
MARKER = " "  # the beginning of an answer
MAX_RESPONSE_TOKENS = 10  # the longest response is " triangle" with an end token
IMAGE = "<image>"
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' }}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question about a picture."""

    picture: Image.Image
    question: str
    answer: str

    @property
    def response(self) -> str:
        return f"{MARKER}{self.answer}"


def make_problems(seed: int, n: int) -> list[Problem]:
    """Draw problems, the same ones for a seed. Places and sizes differ, so hardly any two pictures are equal."""
    rng = random.Random(seed)
    made = []
    for _ in range(n):
        facts = {"Count?": str(rng.randint(1, 4)), "Color?": rng.choice([*COLORS]), "Shape?": rng.choice(SHAPES)}
        picture = Image.new("RGB", (SIDE, SIDE), (20, 20, 20))
        for place in rng.sample(range(4), int(facts["Count?"])):
            _draw(ImageDraw.Draw(picture), place, facts["Shape?"], COLORS[facts["Color?"]], rng)
        question = rng.choice([*facts])
        made.append(Problem(picture, question, facts[question]))
    return made


def _draw(canvas: ImageDraw.ImageDraw, place: int, shape: str, color: tuple[int, int, int], rng: random.Random) -> None:
    size = rng.randint(5, 7)
    x = place % 2 * CELL + rng.randint(size, CELL - 1 - size)
    y = place // 2 * CELL + rng.randint(size, CELL - 1 - size)
    box = (x - size, y - size, x + size, y + size)
    if shape == "ring":
        canvas.ellipse(box, outline=color, width=2)
    elif shape == "square":
        canvas.rectangle(box, fill=color)
    elif shape == "triangle":
        canvas.polygon([(x, y - size), (x - size, y + size), (x + size, y + size)], fill=color)
    else:
        canvas.rectangle((x - size, y - 2, x + size, y + 2), fill=color)
        canvas.rectangle((x - 2, y - size, x + 2, y + size), fill=color)


def write_rows(problems: Sequence[Problem], path: Path) -> None:
    """Write a parquet file in the form of docs/vision.md: each row has the bytes of its PNG, as datasets on the hub."""
    rows = []
    for each in problems:
        file = io.BytesIO()
        each.picture.save(file, "PNG")
        images = [{"bytes": file.getvalue(), "path": None}]
        rows.append({"prompt": IMAGE + each.question, "images": images, "answer": each.answer})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def build_processor() -> Any:
    """Return a processor of LLaVA with one token for each byte, and a chat template."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in (IMAGE, "<user>", "<assistant>")])
    return LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )


def inputs(processor: Any, problems: Sequence[Problem], *, answered: bool = False) -> dict[str, torch.Tensor]:
    """Return a batch of prompts, with their responses if `answered`, padded on the left, as transformers makes it."""
    texts = []
    for each in problems:
        content = [{"type": "image"}, {"type": "text", "text": each.question}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        texts.append(text + each.response + processor.tokenizer.eos_token if answered else text)
    return dict(processor(images=[each.picture for each in problems], text=texts, padding=True, return_tensors="pt"))


def greedy_responses(model: Any, problems: Sequence[Problem]) -> list[list[int]]:
    """Return the token ids of greedy responses, made with transformers alone."""
    return greedy_rows(model, inputs(build_processor(), problems), MAX_RESPONSE_TOKENS)


def accuracy(model: Any, problems: Sequence[Problem]) -> float:
    """Return the share of problems whose greedy response is right."""
    decode = build_processor().tokenizer.batch_decode
    texts = decode(greedy_responses(model, problems), skip_special_tokens=True)
    return sum(text == each.response for text, each in zip(texts, problems, strict=True)) / len(problems)

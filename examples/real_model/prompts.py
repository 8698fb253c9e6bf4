"""About 1,000 short chat prompts, made of templates and subjects. Held-out prompts have subjects of their own."""

from __future__ import annotations

import json
import random
from pathlib import Path

THINGS = (
    "gravity, photosynthesis, inflation, a volcano, democracy, a black hole, an ecosystem, electricity, evolution, "
    "a rainbow, the water cycle, an earthquake, a vaccine, the internet, a battery, magnetism, a comet, sleep, memory, "
    "a glacier, the moon, a computer, chess, jazz, a bridge, a telescope, honey, chocolate, a bicycle, recycling, "
    "coral, a desert, the heart, the brain, steel, glass, paper, a thunderstorm, wind power, solar power, a library, "
    "a museum, a budget, a loan, a contract, poetry, friendship, patience, teamwork, curiosity, the immune system, "
    "a fossil, a tornado, a lighthouse, a compass, tea, bread, cheese, rice, salt"
)
ABOUT = (
    "What is {}?",
    "Explain {} to a child.",
    "Why is {} important?",
    "Tell me an interesting fact about {}.",
    "How would you describe {}?",
    "What should everyone know about {}?",
    "What do people often get wrong about {}?",
    "Write something short about {}.",
    "What makes {} special?",
    "How does {} affect our daily lives?",
)
GOALS = (
    "learn a language, sleep better, save money, cook pasta, stay focused, make new friends, start running, "
    "read more books, write a letter, plan a trip, grow tomatoes, remember names, learn to swim, repair a flat tire, "
    "drink more water, prepare for an exam, speak in public, bake a pie, paint a room, train a dog, use less plastic, "
    "find a job, keep a diary, learn the guitar, stay calm, get up early, clean a window, choose a laptop, "
    "take better photos, make good coffee, host a dinner, pack a suitcase, lift heavy boxes, start a garden, "
    "learn to draw, manage stress, improve my handwriting, fly a kite, use a map, stop a hiccup"
)
HOW = (
    "How can I {}?",
    "Give me a tip to {}.",
    "I want to {}. Where do I start?",
    "What is the best way to {}?",
    "My friend wants to {}. What should I tell them?",
    "What do I need to {}?",
    "Is it hard to {}?",
    "Why should I {}?",
    "What is a common mistake when people try to {}?",
    "How long does it take to {}?",
)
EXAMPLES = """\
Why do leaves fall in autumn? | Trees drop their leaves to save water during the cold months.
How can I whistle? | Wet your lips, form a small circle, and blow gently.
What is a dictionary? | A dictionary is a book that explains the meaning of words.
My friend wants to sing. What should I tell them? | Tell them to practice every day and to enjoy it.
What makes gold special? | Gold never rusts, and it is easy to form.
Why should I wear a helmet? | A helmet protects your head when you fall.
What is an island? | An island is land with water on all sides.
How long does it take to boil an egg? | A soft egg takes about five minutes.
Tell me an interesting fact about owls. | An owl can turn its head almost all the way around.
Is it hard to juggle? | Most people can juggle three balls after a few hours of practice.
Explain snow to a child. | Snow is rain that has frozen into small white stars.
What do people often get wrong about bats? | Many people believe that bats are blind, but they see quite well.
I want to paint. Where do I start? | Start with one brush, three colors, and a simple object.
Why is soap important? | Soap removes dirt and germs that water alone leaves behind.
What do I need to ski? | You need skis, boots, poles, and a hill with snow.
How does the sun affect our daily lives? | The sun gives us light and warmth and lets our food grow.
Write something short about rivers. | A river carries water from the mountains to the sea.
What is the best way to peel garlic? | Press the clove with the side of a knife, and the skin comes off.
How would you describe silk? | Silk is a soft and shiny cloth that is made by worms.
What should everyone know about bees? | Bees carry pollen between flowers, and many plants need them.
Give me a tip to wake up. | Open the curtains at once and drink a glass of water.
What is a common mistake when people try to iron a shirt? | Many people use an iron that is too hot.
"""
QUESTION = "Question: {}\nAnswer:"
HELD_OUT = 5  # The last subjects of each list are in held-out prompts alone.


def write_prompts(folder: Path, n_heldout: int = 32, *, with_examples: bool = False) -> None:
    """Write train.jsonl and heldout.jsonl, with a column `prompt`, in an order that is always the same.

    Args:
        with_examples: prompts are questions for a model without a chat template, and the column `teacher_prompt` has
            the examples in front of them. So has every eighth `prompt` of train.jsonl.
    """
    pairs = ((THINGS.split(", "), ABOUT), (GOALS.split(", "), HOW))
    train = [text.format(one) for subjects, texts in pairs for one in subjects[:-HELD_OUT] for text in texts]
    heldout = [text.format(one) for subjects, texts in pairs for one in subjects[-HELD_OUT:] for text in texts]
    shuffled = random.Random(0)
    for name, prompts in (("train", train), ("heldout", heldout)):
        shuffled.shuffle(prompts)
        rows = [{"prompt": prompt} for prompt in (prompts if name == "train" else prompts[:n_heldout])]
        for i, row in enumerate(rows if with_examples else ()):
            asked = QUESTION.format(row["prompt"])
            row["teacher_prompt"] = _examples() + asked
            row["prompt"] = row["teacher_prompt"] if name == "train" and i % 8 == 0 else asked
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _examples() -> str:
    """Return the examples as questions with answers."""
    pairs = (line.split(" | ") for line in EXAMPLES.splitlines())
    return "".join(f"{QUESTION.format(question)} {answer}\n\n" for question, answer in pairs)

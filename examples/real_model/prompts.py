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
HELD_OUT = 5  # The last subjects of each list are in held-out prompts alone.


def write_prompts(folder: Path, n_heldout: int = 32) -> None:
    """Write train.jsonl and heldout.jsonl, with a column `prompt`, in an order that is always the same."""
    pairs = ((THINGS.split(", "), ABOUT), (GOALS.split(", "), HOW))
    train = [text.format(one) for subjects, texts in pairs for one in subjects[:-HELD_OUT] for text in texts]
    heldout = [text.format(one) for subjects, texts in pairs for one in subjects[-HELD_OUT:] for text in texts]
    shuffled = random.Random(0)
    for name, prompts in (("train", train), ("heldout", heldout)):
        shuffled.shuffle(prompts)
        rows = [json.dumps({"prompt": prompt}) for prompt in (prompts if name == "train" else prompts[:n_heldout])]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")

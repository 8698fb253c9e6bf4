"""Write run folders with every kind of file that the report reads, through the run's own writers where they are small.

The numbers are made up from a seed, so a test compares the page with the files.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from gkd.cluster.gpu_table import GpuInfo, GpuMap, RankPlacement
from gkd.config.load import config_yaml, load_config
from gkd.metrics.catalog import PLACEHOLDERS, ROWS
from gkd.metrics.writer import MetricsWriter
from gkd.types import Sample, TokenRecord

# A response may contain anything; the fourth one ends a script element if it is not escaped.
WORDS = ("<pad>", "<eos>", " add", "</script><script>window.broken=1</script>", "<!--", " 7", "\n", "&lt;", " ü", "'\"")
EVAL = ("eval/kl", "eval/accuracy", "eval/response_tokens")
BEGAN_S = 1_700_000_000.0


def make_run(
    root: Path,
    *overrides: str,
    steps: int = 12,
    eval_every: int = 4,
    n_tokens: int = 6,
    n_ranks: int = 1,
    seed: int = 0,
) -> Path:
    """Write a finished run, and return its folder.

    Args:
        overrides: `key=value` settings.
        n_tokens: of each kept response.
        n_ranks: actor ranks with a memory curve of their own.
    """
    root.mkdir(parents=True)
    config = load_config(None, [f"trainer.run_dir={root}", f"trainer.total_steps={steps}", *overrides])
    (root / "config.yaml").write_text(config_yaml(config))
    keys = _keys(config.distill.loss, n_ranks)
    generator = random.Random(seed)
    writer = MetricsWriter(root / "metrics.jsonl", -1)
    for step in range(steps + 1):
        line = {key: _value(key, step, steps, generator) for key in keys if step or key in EVAL}
        if step % eval_every and step != steps:
            line = {key: value for key, value in line.items() if key not in EVAL}
        writer.write(step, {"time/unix_s": BEGAN_S + 10.0 * step, **line})
    writer.close()
    for step in range(0, steps + 1, eval_every):
        _write_lines(root / "token_losses", step, [_record(i, n_tokens, generator) for i in range(8)])
        samples = [Sample(i, [2, 5], [5, 1], WORDS[3] + str(step), "7", bool(i % 2), "1 + 2") for i in range(3)]
        _write_lines(root / "samples", step, samples)
    _write_rest(root)
    return root


def add_images(root: Path, names: list[str | None], **files: bytes) -> None:
    """Give each record of a run a prompt with two runs of image tokens, of 3 and of 6; `names` are its images."""
    (root / "export" / "config.json").write_text('{"image_token_index": 0}')
    (root / "images").mkdir()
    for name, data in files.items():
        (root / "images" / f"{name}.png").write_bytes(data)
    for file in [*(root / "samples").iterdir(), *(root / "token_losses").iterdir()]:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [row | {"prompt_ids": [3, 0, 0, 0, 5, *[0] * 6], "images": names} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json whose texts are `WORDS`."""
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.decoder = Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def _keys(loss: str, n_ranks: int) -> list[str]:
    chosen = {
        "loss": (loss,),
        "stage": ("data", "rollout", "teacher", "reference", "train", "weight_sync", "usage"),
        "call": (),
        "age": ("0", "1"),
        "rank": tuple(map(str, range(n_ranks))),
        "k": ("1", "4"),
        "function": ("exact_match", "length"),
        "route": ("code", "math"),
        "turn": ("1", "2"),
        "key": ("rollout.temperature",),
    }
    values = {name: chosen.get(name, all_) for name, all_ in PLACEHOLDERS.items()}
    assert not any(isinstance(options, str) for options in values.values()), "a pattern"
    keys = [row.key for row in ROWS if row.key != "time/unix_s"]
    for name, options in values.items():
        keys = [key.replace(f"<{name}>", str(option)) for key in keys for option in _options(key, name, options)]
    return keys


def _options(key: str, name: str, options: tuple[str, ...] | str) -> tuple[str, ...] | str:
    return options if f"<{name}>" in key else ("",)


def _value(key: str, step: int, steps: int, generator: random.Random) -> float:
    """Return a number that falls over the run with noise; accuracy rises, and no alarm is raised."""
    done = step / steps
    if key == "eval/accuracy":
        return 0.1 + 0.8 * done
    if key.startswith("perf/bound_by_"):
        return float(key.endswith("teacher"))
    if key.startswith("health/"):
        return 0.0
    if key == "optim/grad_norm" and step == steps // 2:
        return math.inf if steps > 4 else 1.0
    return (2.0 + math.cos(9 * done)) * (1.1 - done) * generator.uniform(0.9, 1.1) * (0.1 + len(key) / 40)


def _record(index: int, n_tokens: int, generator: random.Random) -> TokenRecord:
    ids = [2 + (index + i) % (len(WORDS) - 2) for i in range(n_tokens - 1)] + [1]
    kl = [generator.uniform(0, 2) for _ in ids]
    choices = [[(i, 0.5, 0.25), ((i + 1) % len(WORDS), 0.125, 0.0625)] for i in ids]
    values = {"total": kl, "token_kl": kl, "student_entropy": [generator.uniform(0, 1) for _ in ids]}
    return TokenRecord(100 + index, index, [2, 5, 3], ids, values, choices)


def _write_lines(folder: Path, step: int, rows: list[Any]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(asdict(row)) + "\n" for row in rows]
    (folder / f"step_{step:08d}.jsonl").write_text("".join(lines))


def _write_rest(root: Path) -> None:
    make_tokenizer(root / "export")
    gpu = GpuInfo(id="3", name="GPU <b>X</b>", memory_total_mib=81920)
    row = RankPlacement(pool="actor", rank=0, host="a", pid=1, cuda_visible_devices="3", gpus=(gpu,))
    (root / "gpus.json").write_bytes(GpuMap(device="cuda", rows=(row,), findings=(), ended=True).to_json())
    start = {"versions": {"torch": "2.13.0"}, "commit": "abc", "seeds": {"data": 1}, "data": [{"file": "<x>"}]}
    (root / "environment.jsonl").write_text(2 * (json.dumps(start) + "\n"))

"""Run the whole loop at the size of a real job on one card: the time of each stage, memory, tokens per second.

    python -m tests.gpu.bench_scale [--json FILE] [--device cuda|cpu] [--rounds STEPS] [--tokens 512]

A student of Qwen2.5-1.5B's shape and a teacher of 7B's shape take turns with vLLM, all on one card: the settings that
README names for one GPU. The weights are random, so no response ends before its limit: `--tokens` for each of 128
prompts of 256 tokens. Every sync is verified by digests. The first step, which compiles, does not count.
On a CPU: tiny models and short responses.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from tests.bench.command import add_device, parsed, parser, run_parts
from tests.bench.student_case import SIZES, save_model
from tests.bench.teacher_report import Figure, Part, Table
from tests.gpu.bench_student_cuda import COMMON, SHAPES, useful_flops
from tests.gpu.peaks import peak_tflops, share_of_peak

ROOT = Path(__file__).resolve().parents[2]
N_PROMPTS, PROMPT, SHORT = 128, 256, 16
STAGES = ("rollout", "teacher", "train", "weight_sync", "switch")


def measure(device: str, steps: int, tokens: int) -> Part:
    """Make the models, train `steps` steps after the first, and read the medians from the metrics.

    Raises:
        subprocess.CalledProcessError: the training failed.
    """
    on_card = device == "cuda"
    dtype = torch.bfloat16 if on_card else torch.float32
    student = COMMON | SHAPES["1.5b"] if on_card else SIZES
    teacher = COMMON | SHAPES["7b"] | {"num_hidden_layers": 28} if on_card else SIZES
    teacher |= {"vocab_size": student["vocab_size"]}
    n_prompts, prompt, tokens = (N_PROMPTS, PROMPT, tokens) if on_card else (8, SHORT, SHORT)
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as name:
        folder = Path(name)
        for role, sizes in (("student", student), ("teacher", teacher)):
            save_model(folder / role, device=device, dtype=dtype, **sizes)
            save_tokenizer(folder / role, student["vocab_size"])
        if on_card:
            torch.cuda.empty_cache()  # the run has other processes
        rng = np.random.default_rng(0)
        with (folder / "prompts.jsonl").open("w") as file:
            for _ in range(n_prompts * (steps + 1)):
                words = [f"t{i}" for i in rng.integers(2, student["vocab_size"], prompt)]
                file.write(json.dumps({"prompt": " ".join(words)}) + "\n")
        settings = {
            "data": {
                "train_files": [str(folder / "prompts.jsonl")],
                "max_prompt_length": prompt,
                "max_response_length": tokens,
            },
            "model": {"path": str(folder / "student"), "dtype": str(dtype).removeprefix("torch.")},
            "trainer": {
                "device": device,
                "colocate": True,
                "run_dir": str(folder / "run"),
                "total_steps": steps + 1,
                "global_batch_size": n_prompts,
            },
            "actor": {"max_tokens_per_micro_batch": 16384, "optim": {"lr": 1e-6}},
            "rollout": {"max_num_seqs": n_prompts, "enforce_eager": not on_card, "gpu_memory_utilization": 0.5},
            "teacher": {"backend": "local", "path": str(folder / "teacher"), "topk": 64},
            "weight_sync": {"verify": "always"},
        }
        (folder / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML
        subprocess.run([sys.executable, "-m", "gkd.main_gkd", "--config", folder / "run.yaml"], cwd=ROOT, check=True)
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if line["step"] > 1]
    return _part(counted, student, device, [prompt + tokens] * n_prompts, n_prompts * tokens)


def _part(
    lines: Sequence[Mapping[str, Any]], sizes: dict[str, Any], device: str, lengths: Sequence[int], n_loss: int
) -> Part:
    def mid(key: str) -> float:
        return float(median(line[key] for line in lines))

    step_s, train_s = mid("time/step_s"), mid("time/train_s")
    tflops = useful_flops(sizes, lengths, n_loss) / train_s / 1e12
    on_card = device == "cuda"
    peak = peak_tflops(torch.cuda.get_device_name()) if on_card else None
    figures = [
        Figure("response tokens/s of the whole loop", n_loss / step_s, "tokens/s"),
        Figure("response tokens/s of the engine", n_loss / mid("time/rollout_s"), "tokens/s"),
        share_of_peak("student's training call: MFU", tflops, peak),
        Figure("share of the step that the stages explain", mid("time/accounted_share"), at_least=0.9),
        Figure("KL(engine || trainer)", mid("loss/engine_kl"), "nats", at_most=0.01),
    ]
    rows = [(stage, mid(f"time/{stage}_s"), mid(f"time/{stage}_s") / step_s) for stage in STAGES]
    memory = sorted({key for line in lines for key in line if key.startswith("memory/") and key.endswith("peak_gib")})
    tables = [
        Table("stages of a step", ("stage", "seconds", "share"), [*rows, ("step", step_s, 1.0)]),
        Table("memory", ("key", "GiB"), [(key, mid(key)) for key in memory]),
    ]
    what = f"{len(lines)} steps of {len(lengths)} sequences of {lengths[0]} tokens; actor, teacher, engine in turns."
    return Part("scale", what, figures, tables, {"device": device, **sizes})


def save_tokenizer(folder: Path, n_words: int) -> None:
    """Write a tokenizer whose words are t2, t3, ...: each id of the models has one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<end>"}  # as words of their own: they are found inside words, too
    words = [*special.values(), *(f"t{i}" for i in range(2, n_words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.gpu.bench_scale", __doc__ or "", ("scale",), rounds=3)
    made.add_argument("--tokens", type=int, default=512, help="of a response; default: %(default)s")
    add_device(made, "cuda")
    args = parsed(made, ("scale",), argv)
    return run_parts(args, lambda _: measure(args.device, args.rounds, args.tokens))


if __name__ == "__main__":
    sys.exit(main())

"""Run the whole loop at the size of a real job on one card: the time of each stage of a step, memory, tokens/s.

    python -m tests.gpu.bench_step [--only megatron,fsdp2] [--json FILE] [--device cuda|cpu] [--rounds 3]

A student of Qwen2.5-1.5B's shape and a teacher of 7B's shape take turns with vLLM, all on one card: the settings that
README names for one GPU. The weights are random, so no response ends before its limit. A step has 16 sequences: in
turns of 512 tokens each (8k tokens), and of 1,024 (16k). Every sync is verified by digests. The first step of each
size, which compiles, does not count. --tiny, and on a CPU: tiny models and short sequences.
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

from tests.bench.command import ROOT, add_device, parsed, parser, run_parts
from tests.bench.student_case import SIZES, save_model, save_tokenizer
from tests.bench.teacher_report import Figure, Part, Table
from tests.gpu.bench_student_cuda import COMMON, SHAPES, useful_flops
from tests.gpu.peaks import peak_tflops, share_of_peak

BACKENDS = ("megatron", "fsdp2")
N_PROMPTS, RESPONSE, PROMPTS = 16, 256, (256, 768)
TINY_N_PROMPTS, TINY_RESPONSE, TINY_PROMPTS = 4, 8, (8, 24)
STAGES = ("rollout", "teacher", "train", "weight_sync", "switch")


def measure(backend: str, device: str, rounds: int, *, tiny: bool) -> Part:
    """Make the models, train `rounds` steps of each size after the first, and read the medians from the metrics.

    Raises:
        subprocess.CalledProcessError: the training failed.
    """
    dtype = torch.float32 if tiny else torch.bfloat16
    student = SIZES if tiny else COMMON | SHAPES["1.5b"]
    teacher = SIZES | {"num_hidden_layers": 2} if tiny else COMMON | SHAPES["7b"] | {"num_hidden_layers": 28}
    teacher |= {"vocab_size": student["vocab_size"]}
    size, response, lengths = (TINY_N_PROMPTS, TINY_RESPONSE, TINY_PROMPTS) if tiny else (N_PROMPTS, RESPONSE, PROMPTS)
    steps = len(lengths) * (rounds + 1)
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as name:
        folder = Path(name)
        for role, sizes in (("student", student), ("teacher", teacher)):
            save_model(folder / role, device=device, dtype=dtype, **sizes)
            save_tokenizer(folder / role, student["vocab_size"])
        torch.cuda.empty_cache()  # the run has other processes
        rng = np.random.default_rng(0)
        with (folder / "prompts.jsonl").open("w") as file:
            for row in range(size * steps):
                n_words = lengths[row // size % len(lengths)]
                words = [f"t{i}" for i in rng.integers(2, student["vocab_size"], n_words)]
                file.write(json.dumps({"prompt": " ".join(words)}) + "\n")
        settings = {
            "data": {
                "train_files": [str(folder / "prompts.jsonl")],
                "max_prompt_length": max(lengths),
                "max_response_length": response,
                "shuffle": False,
            },
            "model": {"path": str(folder / "student"), "dtype": str(dtype).removeprefix("torch.")},
            "trainer": {
                "device": device,
                "colocate": True,
                "run_dir": str(folder / "run"),
                "total_steps": steps,
                "global_batch_size": size,
            },
            "actor": {"strategy": backend, "max_tokens_per_micro_batch": 16384, "optim": {"lr": 1e-6}},
            "rollout": {"max_num_seqs": size, "enforce_eager": tiny, "gpu_memory_utilization": 0.5},
            "teacher": {"backend": "local", "path": str(folder / "teacher"), "topk": 64},
            "weight_sync": {"verify": "always"},
        }
        (folder / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML
        subprocess.run([sys.executable, "-m", "tests.gpu.timed_run", folder / "run.yaml"], cwd=ROOT, check=True)
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if line["step"] > len(lengths)]
    peak = None if tiny else peak_tflops(torch.cuda.get_device_name())
    by_size = {n + response: counted[i :: len(lengths)] for i, n in enumerate(lengths)}
    figures = [
        figure for n, found in by_size.items() for figure in _figures([n] * size, found, student, size * response, peak)
    ]
    figures.append(Figure("KL(engine || trainer)", _median(counted, "loss/engine_kl"), "nats", at_most=0.01))
    rows = [(stage, *(_median(found, f"time/{stage}_s") for found in by_size.values())) for stage in (*STAGES, "step")]
    memory = sorted({key for line in counted for key in line if key.startswith("memory/") and key.endswith("peak_gib")})
    tables = [
        Table("seconds of a step", ("stage", *(f"{size} x {n} tokens" for n in by_size)), rows),
        Table("memory", ("key", "GiB"), [(key, _median(counted, key)) for key in memory]),
    ]
    what = f"Steps of {size} sequences with {backend}, {rounds} of each size; actor, teacher, engine in turns."
    return Part(backend, what, figures, tables, {"device": device, **student})


def _median(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(median(line[key] for line in lines))


def _figures(
    lengths: Sequence[int], lines: Sequence[Mapping[str, Any]], sizes: dict[str, Any], n_loss: int, peak: float | None
) -> list[Figure]:
    step_s = _median(lines, "time/step_s")
    tflops = useful_flops(sizes, lengths, n_loss) / _median(lines, "time/train_s") / 1e12
    n_tokens = sum(lengths)
    return [
        Figure(f"{n_tokens} tokens: step", step_s, "s"),
        Figure(f"{n_tokens} tokens: response tokens/s of the whole loop", n_loss / step_s, "tokens/s"),
        share_of_peak(f"{n_tokens} tokens: student's training call: MFU", tflops, peak),
        Figure(
            f"{n_tokens} tokens: share of the step that the stages explain",
            _median(lines, "time/accounted_share"),
            at_least=0.9,
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.gpu.bench_step", __doc__ or "", BACKENDS, rounds=3)
    add_device(made, "cuda")
    args = parsed(made, BACKENDS, argv)
    rounds = 1 if args.tiny else args.rounds  # a rehearsal has no times
    return run_parts(args, lambda backend: measure(backend, args.device, rounds, tiny=args.tiny))


if __name__ == "__main__":
    sys.exit(main())

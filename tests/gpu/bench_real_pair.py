"""Distill a real pair for the same minutes with this project and with TRL, and judge both students in the same way.

    python -m tests.gpu.bench_real_pair [--only ours,trl] [--seconds 240] [--trl DIR] [--device cuda|cpu] [--json FILE]

12 of SmolLM2-135M-Instruct's 30 layers learn from all of them, on prompts of examples/real_model: forward KL over the
whole vocabulary, 128 responses of up to 96 tokens a step, as `tests.bench.bench_trl` compares them. The time counts
from the first step; models are loaded before. A student is judged by Transformers on 32 held-out prompts: the mean
KL(teacher || student) a token of its own greedy responses, and how many different tokens these have ("The's a a a" has
few). --tiny, and on a CPU: tiny models with random weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.real_model.prompts import write_prompts
from gkd.metrics.writer import read_metrics
from tests.bench.bench_trl import our_settings, run_trl
from tests.bench.command import ROOT, add_device, parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table
from tests.bench.trl_models import SHAPES, Shape, link_files, make_files

PROGRAMS = ("ours", "trl")
N_HELDOUT, N_SHOWN, LEARNING_RATE, STEPS = 32, 4, 3e-4, 1_000_000
PAIR = Shape((576, 12), (576, 30), 96, 128, 0, 0, None, "bfloat16", True, 128, 32, device="cuda", is_colocated=True)


def measure(program: str, args: Namespace) -> Part:
    """Train for the time, and judge the student before and after.

    Raises:
        subprocess.CalledProcessError, RuntimeError: a program failed.
    """
    shape = SHAPES["card"].on(args.device, is_tiny=True) if args.tiny else PAIR
    args.seconds = min(args.seconds, 10.0) if args.tiny else args.seconds
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as name:
        folder = Path(name)
        heldout = _make_files(shape, folder)
        trained, n_steps = (_ours if program == "ours" else _trl)(shape, folder, args)
        before, after = (
            judge(path, folder / "teacher", heldout, args.device, shape.max_response)
            for path in (folder / "student", trained)
        )
    figures = [
        Figure("KL(teacher || student) before", before["kl"], "nats"),
        Figure("KL(teacher || student) after", after["kl"], "nats", at_most=None if args.tiny else before["kl"]),
        Figure("different tokens a response, before", before["distinct"]),
        Figure("different tokens a response, after", after["distinct"], at_least=None if args.tiny else 20.0),
        Figure("steps", float(n_steps)),
    ]
    rows = list(zip(heldout, before["texts"], after["texts"], strict=True))[:N_SHOWN]
    what = (
        f"{args.seconds:g} s of training; {len(heldout)} held-out prompts, greedy, judged by Transformers in float32."
    )
    settings = {"device": args.device, "dtype": shape.dtype, "learning_rate": LEARNING_RATE}
    return Part(program, what, figures, [Table("responses", ("prompt", "before", "after"), rows)], settings)


def _make_files(shape: Shape, folder: Path) -> list[str]:
    """Write or link student, teacher, and prompts.jsonl; return the held-out prompts as the model reads them."""
    if shape.is_tiny:
        make_files(shape, folder, 400)
        return [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()[-N_HELDOUT:]]
    from transformers import AutoTokenizer

    made = ROOT / "models" / "smollm2"
    command = [sys.executable, "-m", "examples.real_model.model", "--out", str(made), "--layers", "12"]
    subprocess.run(command, cwd=ROOT, check=True)
    write_prompts(made, N_HELDOUT)
    link_files(made, folder, sys.maxsize)
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    turns = [
        [{"role": "user", "content": json.loads(line)["prompt"]}]
        for line in (made / "heldout.jsonl").read_text().splitlines()
    ]
    return [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in turns]


def _ours(shape: Shape, folder: Path, args: Namespace) -> tuple[Path, int]:
    """Return the folder of the trained student, and the number of steps."""
    (folder / "run.yaml").write_text("{}\n")
    command = [sys.executable, "-m", "tests.gpu.timed_run", str(folder / "run.yaml"), "--seconds", str(args.seconds)]
    with our_settings(shape, folder) as settings:
        settings |= {"trainer.run_dir": folder / "run", "trainer.total_steps": STEPS, "trainer.total_epochs": STEPS}
        settings["actor.optim.lr"] = LEARNING_RATE
        subprocess.run([*command, *(f"{key}={value}" for key, value in settings.items())], cwd=ROOT, check=True)
    return folder / "run" / "export", len(list(read_metrics(folder / "run" / "metrics.jsonl")))


def _trl(shape: Shape, folder: Path, args: Namespace) -> tuple[Path, int]:
    """Return the folder of the trained student, and the number of steps."""
    student = folder / "trl" / "student"
    more = {"seconds": args.seconds, "steps": STEPS, "learning_rate": LEARNING_RATE, "student_to": str(student)}
    return student, len(run_trl("distillation", shape, folder, args, **more).losses)


def judge(student: Path, teacher: Path, prompts: Sequence[str], device: str, n_tokens: int) -> dict[str, Any]:
    """Return `kl`, nats a token of the student's greedy responses; `distinct`, tokens of a response; `texts`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(teacher, padding_side="left")
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(device) for path in (student, teacher)
    ]
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True).to(device)
    n_prompt = inputs["input_ids"].shape[1]
    with torch.inference_mode():
        made = models[0].generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
            max_new_tokens=n_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        responses = made[:, n_prompt:]
        ended = (responses == tokenizer.eos_token_id).cumsum(1)
        counts = (ended == 0) | ((responses == tokenizer.eos_token_id) & (ended == 1))  # the first end is a token, too
        mask = torch.cat([inputs["attention_mask"], counts.long()], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        log_q, log_p = (
            model(input_ids=made, attention_mask=mask, position_ids=positions)
            .logits[:, n_prompt - 1 : -1]
            .log_softmax(-1)
            for model in models
        )
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)[counts].mean()
    written = [row[count].tolist() for row, count in zip(responses, counts, strict=True)]
    return {
        "kl": float(kl),
        "distinct": sum(len(set(tokens)) for tokens in written) / len(written),
        "texts": [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in written],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.gpu.bench_real_pair", __doc__ or "", PROGRAMS)
    made.add_argument("--seconds", type=float, default=240.0, help="of training; default: %(default)s")
    made.add_argument("--trl", type=Path, metavar="DIR", help="folder with TRL, if it is not installed")
    add_device(made, "cuda")
    args = parsed(made, PROGRAMS, argv)
    return run_parts(args, lambda program: measure(program, args))


if __name__ == "__main__":
    sys.exit(main())

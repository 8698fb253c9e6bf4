"""`gkd memory --config X.yaml`: predict the memory of each rank, and find settings that fit.

Reads the settings and the model's config.json. Starts nothing, loads no model and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from gkd.cluster.gpus import gpu_memory_bytes
from gkd.cluster.host import host_memory_bytes
from gkd.config.check import check_config
from gkd.config.load import add_config, load_config, parse_overrides
from gkd.errors import GkdError
from gkd.hf.model_folder import read_model_folder
from gkd.memory.footprint.estimate import read_models, scores_gib
from gkd.memory.footprint.fit import GIB, Case, remedy_lines, table
from gkd.memory.remedies import overrides
from gkd.preflight.student import with_strategy
from gkd.tools import exit_codes
from teacher_server.config.command import command_parser

_EXAMPLES = """examples:
  gkd memory --config configs/gsm8k_qwen2.5_1.5b.yaml --gpu-gib 80
  gkd memory --config mine.yaml --gpu-gib 24 --host-gib 64 actor.recompute=full
  gkd memory --config mine.yaml --json | jq '.ranks[].peak'

exit code: 0 it fits with a tenth of the GPU free, or the GPU's memory is unknown; 1 it does not: the shortages and the
changes that make it fit follow; 2 wrong settings, or a model folder that cannot be read
"""


@exit_codes(GkdError)
def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    case = _read(args)
    problems = case.problems()
    if args.json:
        ranks = {part.name: {**part.parts, "peak": part.total_bytes} for part in case.footprints()}
        changes = overrides(case.fitting()[0]) if problems else []
        print(json.dumps({"ranks": ranks, "problems": problems, "changes": changes}, indent=1))
        return 1 if problems else 0
    print(table(case), *(f"TOO LARGE {problem}" for problem in problems), sep="\n")
    if case.gpu_bytes is None:
        auto = "; trainer.device=auto counts as cuda" if case.config.trainer.device == "auto" else ""
        print(f"no GPU to compare with: give its memory with --gpu-gib{auto}")
    if problems:
        words = [word for path in args.config for word in ("--config", path)]
        command = shlex.join(["python", "-m", "gkd.main_gkd", *words, *args.overrides])
        print(*remedy_lines(case, command), sep="\n")
    if case.config.teacher.signal == "hidden" and case.models.teacher_hidden is None:
        print("not counted: the teacher's LM head on the actor's ranks; name the teacher's folder with --teacher")
    return 1 if problems else 0


def _read(args: argparse.Namespace) -> Case:
    """Read the settings and the model folders. Raises ConfigError, ModelError."""
    gpu_bytes = gpu_memory_bytes(args.gpu_gib)
    is_here = gpu_bytes is not None and args.gpu_gib is None  # the GPUs of this host are compared
    host_limit = round(args.host_gib * GIB) if args.host_gib else host_memory_bytes() if is_here else None
    config = load_config(args.config, args.overrides)
    check_config(config)
    config = with_strategy(config)
    models = read_models(config)
    if args.teacher is not None:
        teacher = read_model_folder(args.teacher, "--teacher").dims
        n_heads = teacher.vocab_size / models.student.dims.vocab_size if config.teacher.tokenizer else 1
        models = replace(models, teacher_hidden=math.ceil(teacher.hidden_size * n_heads))  # the head has its own rows
    n_heldout = config.eval.max_prompts if config.data.val_files else 0
    scores = scores_gib(config, models.student.dims.vocab_size, models.teacher_hidden or 0, n_heldout)
    return Case(config, models, gpu_bytes, host_limit, scores).settled()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "gkd memory",
        "Predict the memory of each rank of a training by part, and compare it with a GPU.",
        _EXAMPLES,
    )
    add_config(parser, "the settings of the training")
    parser.add_argument("--gpu-gib", type=float, metavar="80", help="GiB of a GPU; default: the smallest of this host")
    parser.add_argument(
        "--host-gib", type=float, metavar="512", help="GiB of a host; default: of this host, if its GPUs are compared"
    )
    parser.add_argument("--teacher", type=Path, metavar="PATH", help="the teacher, whose LM head the ranks keep")
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
    return parse_overrides(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

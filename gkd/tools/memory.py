"""`python -m gkd.tools.memory --config X.yaml`: estimate the memory of each rank, and find settings that fit.

Reads the settings and the model's config.json. Starts nothing, loads no model and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gkd.cluster.gpus import gpu_memory_bytes
from gkd.cluster.host import host_memory_bytes
from gkd.config.check import check_config
from gkd.config.load import load_config, parse_overrides
from gkd.config.schema import Config
from gkd.errors import ConfigError, GkdError
from gkd.hf.model_folder import read_model_folder
from gkd.memory.footprint import teacher_footprint
from gkd.memory.footprint.combination import Case, Combination
from gkd.memory.footprint.estimate import pool_totals, read_models, scores_gib
from gkd.memory.footprint.limits import GIB
from gkd.memory.footprint.rank import shared_phases_by_rank
from gkd.memory.footprint.report import (
    as_json,
    combination_json,
    combination_lines,
    footprint_table,
    kv_line,
    margin_line,
    rule_of_thumb,
    rule_of_thumb_table,
    shared_phases_table,
    totals_json,
    totals_lines,
)
from gkd.tools import exit_codes
from teacher_server.config.command import command_parser

_MOST_HOST_GIB = 2**20
_EXAMPLES = """examples:
  python -m gkd.tools.memory --config configs/gsm8k_qwen2.5_1.5b.yaml --gpu-gib 80
  python -m gkd.tools.memory --config mine.yaml --gpu-gib 24 --host-gib 64 actor.recompute=full
  python -m gkd.tools.memory --config mine.yaml --teacher models/Qwen2.5-7B-Instruct --json | jq '.ranks[].total_bytes'

exit code: 0 it fits with memory.margin, or the GPU's memory is unknown; 1 it does not (each line that begins with
TOO LARGE names a shortage; the changes that make it fit follow); 2 wrong settings, or a model folder that cannot be
read
"""


@exit_codes(GkdError)
def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    case = _read(args)
    problems, combination = case.problems(), None
    if case.gpu_bytes is not None:
        found = case.combination(case.gpu_bytes)
        combination = found if len(found.steps) > 1 or not found.fits else None
    print(_json(case, problems, combination) if args.json else _text(case, problems, combination, args), flush=True)
    return 1 if problems else 0


def _read(args: argparse.Namespace) -> Case:
    """Read the settings and the model folders. Raises ConfigError, ModelError."""
    gpu_bytes = gpu_memory_bytes(_gib_number("--gpu-gib", args.gpu_gib))
    host_gib = _gib_number("--host-gib", args.host_gib)
    if host_gib is not None and not 0 < host_gib <= _MOST_HOST_GIB:  # NaN is refused, too
        fix = "give the host's memory in GiB, for example 512."
        raise ConfigError("--host-gib", args.host_gib, f"not above 0 and at most {_MOST_HOST_GIB} GiB.", fix)
    host_bytes = None if host_gib is None else round(host_gib * GIB)
    if host_bytes is None and gpu_bytes is not None and args.gpu_gib is None:
        host_bytes = host_memory_bytes()  # the GPUs of this host are compared, so the training runs here
    config = load_config(args.config, args.overrides)
    check_config(config)
    models = read_models(config)
    teacher = None if args.teacher is None else read_model_folder(args.teacher, "--teacher")
    if teacher is not None and models.local_teacher is not None:
        problem = "teacher.backend is local: teacher.path is the teacher, and it is on the actor's ranks."
        raise ConfigError("--teacher", str(args.teacher), problem, "leave it out.")
    shown = teacher or models.local_teacher or models.student

    def scores(changed: Config) -> float:
        n_heldout = changed.eval.max_prompts if changed.data.val_files else 0
        return scores_gib(changed, models.student.dims.vocab_size, shown.dims.hidden_size, n_heldout)

    case = Case(config, models, gpu_bytes, host_bytes, scores)
    if teacher is not None:
        longest = config.derived.max_teacher_length
        worker = teacher_footprint(teacher.config_json, n_tokens=longest, tensors=teacher.tensors)
        hidden_size = teacher.dims.hidden_size
        if config.teacher.tokenizer:  # its head keeps its own rows: as many numbers as the student's rows of this size
            hidden_size = -(-hidden_size * teacher.dims.vocab_size // models.student.dims.vocab_size)
        case = replace(case, teacher_hidden=hidden_size, workers=(worker,))
    return case.settled()


def _text(case: Case, problems: Sequence[str], combination: Combination | None, args: argparse.Namespace) -> str:
    config, gpu_bytes, found, dims = case.config, case.gpu_bytes, case.footprints(), case.models.student.dims
    lines = [footprint_table(found, gpu_bytes), kv_line(found, dims, gpu_bytes, config)]
    lines += [case.choice] if case.choice else []
    if config.trainer.colocate:
        lines.append(shared_phases_table(found, gpu_bytes, config))
    lines += totals_lines(pool_totals(found, gpu_bytes, config), case.hosts(config, found), case.host_bytes)
    if dims.is_exact:
        lines.append(rule_of_thumb_table(rule_of_thumb(dims)))
    lines += [f"TOO LARGE {problem}" for problem in problems]
    if config.teacher.signal == "hidden" and not any("teacher_head" in part.parts for part in found):
        lines.append(
            "not counted: the teacher's LM head on the actor's ranks; name the teacher's folder with --teacher"
        )
    if gpu_bytes is None:
        lines.append("no GPU to compare with: give its memory with --gpu-gib")
    elif not problems:
        lines.append(margin_line(found, gpu_bytes, config))
    if combination is not None:
        lines += combination_lines(combination, _command(args, combination))
    return "\n".join(lines)


def _command(args: argparse.Namespace, combination: Combination) -> str:
    """Return the command of the run with the overrides that the tool was given and the combination leaves."""
    changed = {override.partition("=")[0] for override in combination.overrides}
    kept = [override for override in args.overrides if override.partition("=")[0] not in changed]
    return shlex.join(["python", "-m", "gkd.main_gkd", "--config", args.config, *kept])


def _json(case: Case, problems: Sequence[str], combination: Combination | None) -> str:
    config, found, dims = case.config, case.footprints(), case.models.student.dims
    extra = {
        "reference": rule_of_thumb(dims) if dims.is_exact else {},
        "turns": shared_phases_by_rank(found, case.gpu_bytes, config),
        "combination": None if combination is None else combination_json(combination),
        **totals_json(pool_totals(found, case.gpu_bytes, config), case.hosts(config, found), case.host_bytes),
    }
    return json.dumps(as_json(found, case.gpu_bytes, problems, extra), indent=1)


def _gib_number(flag: str, text: str | None) -> float | None:
    """Return the number of --gpu-gib or --host-gib. Raises ConfigError: it is not a number, or has a unit."""
    try:
        return None if text is None else float(text)
    except ValueError as error:
        fix = f"give the size in GiB without a unit, for example {flag} 80."
        raise ConfigError(flag, text, "it is not a number.", fix) from error


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "python -m gkd.tools.memory",
        "Estimate the memory of each rank of a training by part, and compare it with a GPU.",
        _EXAMPLES,
    )
    parser.add_argument("--config", required=True, metavar="X.yaml", help="the settings of the training")
    parser.add_argument("--gpu-gib", metavar="80", help="memory of a GPU in GiB; default: the smallest of this host")
    parser.add_argument(
        "--host-gib", metavar="512", help="memory of a host in GiB; default: of this host, if its GPUs are compared"
    )
    parser.add_argument("--teacher", type=Path, metavar="PATH", help="model folder of the teacher, one GPU per worker")
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that differ from the file")
    return parse_overrides(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m gkd.tools.memory --config X.yaml`: estimate the memory of each rank, and compare it with a GPU.

Reads the settings and the model's config.json. Starts nothing, loads no model and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gkd.cluster.gpus import gpu_memory_bytes
from gkd.config.check import check_config
from gkd.config.derived import derive
from gkd.config.load import load_config, parse_overrides
from gkd.config.schema import Config
from gkd.errors import ConfigError, GkdError
from gkd.footprint import RankFootprint, check, teacher_footprint
from gkd.footprint.estimate import RunModels, read_models
from gkd.footprint.rank import shared_phases_by_rank
from gkd.footprint.report import (
    as_json,
    footprint_table,
    kv_line,
    margin_line,
    rule_of_thumb,
    rule_of_thumb_table,
    shared_phases_table,
)
from gkd.footprint.rollout import with_engine_cache
from gkd.hf.model_folder import ModelFolder, read_model_folder

_EXAMPLES = """examples:
  python -m gkd.tools.memory --config configs/gsm8k_qwen2.5_1.5b.yaml --gpu-gib 80
  python -m gkd.tools.memory --config mine.yaml --gpu-gib 24 actor.recompute=full actor.max_tokens_per_micro_batch=4096
  python -m gkd.tools.memory --config mine.yaml --teacher models/Qwen2.5-7B-Instruct --json | jq '.ranks[].total_bytes'

exit code: 0 no shortage is predicted, or the GPU's memory is unknown; 1 it does not fit (each line that begins with
TOO LARGE names the shortage and the settings that help); 2 wrong settings, or a model folder that cannot be read
"""


def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    try:
        gpu_bytes = gpu_memory_bytes(_gib_number(args.gpu_gib))
        config = load_config(args.config, args.overrides)
        check_config(config)
        models = read_models(config)
        teacher = None if args.teacher is None else read_model_folder(args.teacher, "--teacher")
        if teacher is not None and models.local_teacher is not None:
            problem = "teacher.backend is local: teacher.path is the teacher, and it is on the actor's ranks."
            raise ConfigError("--teacher", str(args.teacher), problem, "leave it out.")
        found = with_engine_cache(_footprints(config, models, teacher), gpu_bytes, config)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    except GkdError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2

    def refit(changed: Config) -> list[RankFootprint]:
        return _footprints(changed, models, teacher)

    problems = [] if gpu_bytes is None else check(found, gpu_bytes, config, refit)
    dims = models.student.dims
    whole_model = rule_of_thumb(dims) if dims.is_exact else {}
    if args.json:
        extra: dict[str, Any] = {"reference": whole_model, "turns": shared_phases_by_rank(found, gpu_bytes, config)}
        print(json.dumps(as_json(found, gpu_bytes, problems, extra), indent=1), flush=True)
        return 1 if problems else 0
    lines = [footprint_table(found, gpu_bytes), kv_line(found, dims, gpu_bytes, config)]
    if config.trainer.colocate:
        lines.append(shared_phases_table(found, gpu_bytes, config))
    if whole_model:
        lines.append(rule_of_thumb_table(whole_model))
    if gpu_bytes is None:
        lines.append("no GPU to compare with: give its memory with --gpu-gib")
    else:
        lines += [f"TOO LARGE {problem}" for problem in problems] or [margin_line(found, gpu_bytes, config)]
    print("\n".join(lines), flush=True)
    return 1 if problems else 0


def _footprints(config: Config, models: RunModels, teacher: ModelFolder | None) -> list[RankFootprint]:
    """Return the footprints of a run; with a teacher server's folder also that of its worker."""
    found = [*models.footprint(config, None if teacher is None else teacher.dims.hidden_size)]
    if teacher is not None:
        longest = derive(config).max_sequence_length
        found.append(teacher_footprint(teacher.config_json, n_tokens=longest, tensors=teacher.tensors))
    return found


def _gib_number(text: str | None) -> float | None:
    """Return the number of --gpu-gib. Raises ConfigError: it is not a number, or has a unit."""
    try:
        return None if text is None else float(text)
    except ValueError as error:
        fix = "give the size in GiB without a unit, for example --gpu-gib 80."
        raise ConfigError("--gpu-gib", text, "it is not a number.", fix) from error


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gkd.tools.memory",
        description="Estimate the memory of each rank of a training by part, and compare it with a GPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="X.yaml", help="the settings of the training")
    parser.add_argument("--gpu-gib", metavar="80", help="memory of a GPU in GiB; default: the smallest of this host")
    parser.add_argument("--teacher", type=Path, metavar="PATH", help="model folder of the teacher, one GPU per worker")
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that differ from the file")
    return parse_overrides(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

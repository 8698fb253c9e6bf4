"""`python -m gkd.tools.memory --config X.yaml`: how much memory each rank will need, and whether a card has it.

Reads the settings and the model's config.json; starts nothing, loads no model and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gkd.cluster.gpus import card_bytes
from gkd.config.check import check_config
from gkd.config.derived import derive
from gkd.config.load import load_config, parse_overrides
from gkd.config.schema import Config
from gkd.errors import ConfigError, GkdError
from gkd.footprint import RankFootprint, check, teacher_footprint
from gkd.footprint.limits import on_card
from gkd.footprint.models import RunModels, read_models
from gkd.footprint.reference import reference
from gkd.footprint.table import as_json, footprint_table, kv_line, reference_table
from gkd.footprint.turns import turns_by_rank, turns_table
from gkd.hf.model_folder import ModelFolder, read_model_folder

_EXAMPLES = """examples:
  python -m gkd.tools.memory --config configs/gsm8k_qwen2.5_1.5b.yaml --gpu-gib 80
  python -m gkd.tools.memory --config mine.yaml --gpu-gib 24 actor.recompute=full actor.max_tokens_per_micro_batch=4096
  python -m gkd.tools.memory --config mine.yaml --teacher models/Qwen2.5-7B-Instruct --json | jq '.ranks[].total_bytes'

exit code: 0 it fits, or there is no card to compare with, 1 it does not (each line that begins with TOO LARGE says
what, and which keys would change it), 2 wrong settings, or a model folder that cannot be read
"""


def main(argv: list[str] | None = None) -> int:
    """Exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    try:
        card = card_bytes(args.gpu_gib)
        config = load_config(args.config, args.overrides)
        check_config(config)
        models = read_models(config)
        teacher = None if args.teacher is None else read_model_folder(args.teacher, "--teacher")
        if teacher is not None and models.local_teacher is not None:
            problem = "teacher.backend is local: teacher.path is the teacher, and on the actor's ranks."
            raise ConfigError("--teacher", str(args.teacher), problem, "leave it out.")
        found = on_card(_footprints(config, models, teacher), card, config)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    except GkdError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2

    def refit(changed: Config) -> list[RankFootprint]:
        return _footprints(changed, models, teacher)

    problems = [] if card is None else check(found, card, config, refit)
    known = reference(models.student.dims) if models.student.dims.is_exact else {}
    if args.json:
        extra: dict[str, Any] = {"reference": known, "turns": turns_by_rank(found, card, config)}
        print(json.dumps(as_json(found, card, problems, extra), indent=1), flush=True)
    else:
        lines = [footprint_table(found, card), kv_line(found, models.student.dims, card, config)]
        if config.trainer.colocate:
            lines.append(turns_table(found, card, config))
        if known:
            lines.append(reference_table(known))
        lines += [f"TOO LARGE {problem}" for problem in problems]
        if not problems:
            lines.append("it fits" if card else "no card to compare with: give its memory with --gpu-gib")
        print("\n".join(lines), flush=True)
    return 1 if problems else 0


def _footprints(config: Config, models: RunModels, teacher: ModelFolder | None) -> list[RankFootprint]:
    """Args: teacher: the folder of a server's."""
    found = [*models.footprint(config, None if teacher is None else teacher.dims.hidden_size)]
    if teacher is not None:
        longest = derive(config).max_sequence_length
        found.append(teacher_footprint(teacher.config_json, n_tokens=longest, tensors=teacher.tensors))
    return found


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gkd.tools.memory",
        description="How much memory each rank of a training will need, by part, and whether a card has it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="X.yaml", help="the settings of the training")
    parser.add_argument("--gpu-gib", type=float, metavar="80", help="a card's memory; default: this machine's cards")
    parser.add_argument("--teacher", type=Path, metavar="PATH", help="model folder of the teacher, one card a worker")
    parser.add_argument("--json", action="store_true", help="one JSON object, sizes in bytes")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that differ from the file")
    return parse_overrides(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

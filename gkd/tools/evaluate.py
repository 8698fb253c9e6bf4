"""`gkd eval RUN|FOLDER --data FILE`: measure a checkpoint or a model as a run does, without a run folder."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from gkd.api import open_pools
from gkd.config.load import load_config, parse_overrides
from gkd.config.schema import Config
from gkd.config.schema_actor import OptimConfig
from gkd.config.schema_sections import NO_METRIC, all_keys
from gkd.config.schema_teacher import NONE
from gkd.console.terminal import LINES, Terminal
from gkd.errors import ConfigError, DataError, ModelError, TeacherUnavailable
from gkd.metrics.writer import read_metrics
from gkd.preflight.teacher import check_reachable
from gkd.run import interrupts
from gkd.run.checkpoints import step_of
from gkd.tools import exit_codes
from gkd.tools.export import add_choice, find_checkpoint
from gkd.trainer import Trainer
from teacher_server.config.command import command_parser

_EXAMPLES = """examples:
  gkd eval runs/mine                                    # its newest checkpoint, its data.val_files
  gkd eval runs/mine --step 200 --data data/test.jsonl eval.n=8
  gkd eval Qwen/Qwen2.5-1.5B-Instruct --data data/test.jsonl eval.metric=math_verify trainer.colocate=true --json

A run has its own settings, a model the defaults. key=value sets others: eval.metric, the function that judges, eval.n,
for pass@k. All rows of --data are used. Without a teacher that replies, or with teacher.backend=none, there is no KL.

exit code: 0 done, 1 a process failed, 2 wrong settings, model or data, or nothing to measure; 130 interrupted
"""
# Keys that concern training alone, or another folder.
_OF_TRAINING = (
    *("trainer.resume", "trainer.replay", "trainer.record_batches", "trainer.loggers", "trainer.profile_steps"),
    *("trainer.keep_best", "data.domain_shares"),
)


@exit_codes(ConfigError, DataError, ModelError)
def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    interrupts.install()
    is_run = (args.model / "config.yaml").is_file() or args.step is not None or args.best
    checkpoint = find_checkpoint(args.model, args.step, best=args.best) if is_run else None
    step = None if checkpoint is None else step_of(checkpoint)
    with tempfile.TemporaryDirectory(prefix="gkd_eval_") as work, Terminal(LINES, ""):
        config = settings(args.model, args.data, args.overrides, Path(work) / "run", is_run=is_run)
        with open_pools(config) as pools:
            plan = pools.plan
            trainer = Trainer(plan.config, pools, plan.train_prompts, plan.val_prompts, plan.folder, plan.total_steps)
            trainer.evaluate(checkpoint, step or 0)
        line = read_metrics(plan.folder.metrics_file)[-1]
    shown = {
        "model": str(args.model),
        "step": step,
        "data": config.data.val_files,
        "prompts": len(plan.val_prompts[: config.eval.max_prompts or None]),
        "metric": config.eval.metric,
        "teacher": ", ".join(dict.fromkeys(teacher.model_name for teacher in plan.teachers)),
        **{key: value for key, value in line.items() if key.startswith(("eval/", "domain/"))},
    }
    texts = {**shown, "step": "-" if step is None else step, "data": ", ".join(config.data.val_files)}
    rows = [f"{key:<28}{f'{value:.6g}' if isinstance(value, float) else value}" for key, value in texts.items()]
    print(json.dumps(shown) if args.json else "\n".join(rows))
    return 0


def settings(model: Path, data: str | None, overrides: list[str], run_dir: Path, *, is_run: bool) -> Config:
    """Return the settings of the run, or the defaults, without what belongs to training. Raises ConfigError."""
    words = [] if is_run else [f"model.path={model}"]
    if data is not None:
        words += [f"data.val_files={json.dumps([data])}", "eval.max_prompts=0"]
    config = load_config(model / "config.yaml" if is_run else None, [*words, *overrides])
    files = config.data.val_files
    if not files:
        raise ConfigError("--data", "", "there are no prompts to evaluate on.", "name a file as for data.val_files.")
    values: dict[str, Any] = {key: all_keys()[key].default for key in _OF_TRAINING}
    values |= {"actor.optim": OptimConfig(), "trainer.total_steps": 1, "trainer.run_dir": str(run_dir)}
    if config.distill.on_policy_share == 1:  # losses of a mixture need responses, which the run's own files have
        values["data.train_files"] = files
    try:
        for route in () if config.derived.teacher_pool else config.derived.routes:
            check_reachable(route)
    except TeacherUnavailable as error:
        print(f"no KL, because no teacher replies: {error}", file=sys.stderr)
        values["teacher.backend"] = NONE
    chosen = config.with_values(values)
    if chosen.teacher.backend == NONE and chosen.eval.metric == NO_METRIC:
        fix = "start the teacher for the KL, or choose a function, e.g. eval.metric=exact_match."
        raise chosen.error("eval.metric", "without a teacher there is nothing to measure.", fix)
    return chosen


def _parse(argv: list[str] | None) -> argparse.Namespace:
    description = "Measure accuracy and pass@k of a run's checkpoint or of a model, and the KL to the teacher."
    parser = command_parser("gkd eval", description, _EXAMPLES)
    parser.add_argument("model", type=Path, metavar="RUN|FOLDER", help="run folder, model folder, or ORG/NAME")
    add_choice(parser)
    parser.add_argument("--data", metavar="FILE", help="prompts and answers, as data.val_files of a run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parse_overrides(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

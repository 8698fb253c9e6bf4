"""`gkd eval RUN|FOLDER --data FILE`: accuracy of a checkpoint or a model folder, and its KL to the teacher.

With a teacher the processes of a run start, and the run's own evaluation measures. Without one the engines alone start,
which generate the same responses. Neither makes a run folder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gkd.config.load import load_config, parse_overrides
from gkd.config.schema import Config
from gkd.config.schema_actor import LoraConfig, OptimConfig
from gkd.config.schema_sections import NO_METRIC, all_keys
from gkd.console.state import changed
from gkd.console.terminal import LINES, Terminal
from gkd.errors import ConfigError, DataError, ModelError, TeacherUnavailable
from gkd.log import get_logger
from gkd.pipeline.evaluate import SEED, accuracy_numbers, greedy_report, label, pass_at_numbers
from gkd.run import interrupts
from gkd.run.checkpoints import step_of
from gkd.tools import exit_codes
from gkd.tools.export import add_choice, export, find_checkpoint
from gkd.types import Prompt
from teacher_server.config.command import command_parser

log = get_logger("eval")

_EXAMPLES = """examples:
  gkd eval runs/mine                                    # its newest checkpoint, its data.val_files
  gkd eval runs/mine --step 200 --data data/test.jsonl eval.n=8
  gkd eval Qwen/Qwen2.5-1.5B-Instruct --data data/test.jsonl eval.metric=math_verify --json

A run has its own settings. Those of a model are the defaults; key=value sets others: eval.metric, the function that
judges (default: that of the run, or its first reward function), eval.n, sampled responses for pass@k, data.prompt_key,
rollout.n_gpus_per_node. All rows of --data are used, and the first eval.max_prompts of a run's own data.val_files.
The KL needs a teacher that replies, and the GPUs of a whole run; without it the engines alone start.

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
    with tempfile.TemporaryDirectory(prefix="gkd_eval_") as work, Terminal(LINES, str(args.model)) as terminal:
        config = settings(args.model, args.data, args.overrides, Path(work) / "run", is_run=is_run)
        if not args.no_kl and teacher_replies(config):
            numbers, prompts, teacher = _with_teacher(config, checkpoint, terminal)
        else:
            numbers, prompts = _engines_alone(config, checkpoint, Path(work) / "student")
            teacher = None
    kept = {key: value for key, value in numbers.items() if key.startswith("eval/") or key.endswith("/accuracy")}
    step, metric = checkpoint and step_of(checkpoint), config.eval.metric
    n = len(prompts[: config.eval.max_prompts or None])
    if args.json:
        facts = {"model": str(args.model), "step": step, "data": config.data.val_files, "prompts": n, "metric": metric}
        known = {key: None if math.isnan(value) else value for key, value in kept.items()}
        print(json.dumps({**facts, "teacher": teacher, **known}))
        return 0
    asked = f", teacher {teacher}" if teacher else ""
    print(f"{args.model}{'' if step is None else f', step {step}'}: {n} prompts, metric {metric}{asked}")
    for key, value in kept.items():
        is_share = key.endswith("/accuracy") or key.startswith("eval/pass_at_")
        print(f"  {label(key):<24}{changed('eval/accuracy' if is_share else key, None, value)}")
    return 0


def settings(model: Path, data: Path | None, overrides: list[str], run_dir: Path, *, is_run: bool) -> Config:
    """Return the settings of an evaluation: those of the run, or the defaults, without what belongs to training.

    Raises ConfigError: a setting is wrong, or there are no prompts.
    """
    given = {override.partition("=")[0] for override in overrides}
    own = [] if is_run else [f"model.path={model}"]
    config = load_config(model / "config.yaml" if is_run else None, [*own, *overrides])
    files = config.data.val_files if data is None else [str(data)]
    if not files:
        why = "the run has no data.val_files" if is_run else f"{model.absolute()}/config.yaml, of a run, does not exist"
        raise ConfigError("--data", "", f"there are no prompts: {why}.", "name a file like those of data.val_files.")
    values: dict[str, Any] = {key: all_keys()[key].default for key in _OF_TRAINING}
    values |= {"data.val_files": files, "actor.optim": OptimConfig(), "trainer.total_steps": 1}
    values["trainer.run_dir"] = str(run_dir)
    if config.distill.on_policy_share == 1:  # else the losses need responses, which the run's own files have
        values["data.train_files"] = files
    if data is not None and "eval.max_prompts" not in given:
        values["eval.max_prompts"] = 0
    if config.eval.metric == NO_METRIC and config.reward.functions and "eval.metric" not in given:
        values["eval.metric"] = config.reward.functions[0].path
    return config.with_values(values)


def teacher_replies(config: Config) -> bool:
    """Return whether there is a teacher; log why not. Raises ConfigError: the host of its address is unknown."""
    from gkd.preflight.teacher import check_reachable

    try:
        for route in () if config.derived.teacher_pool else config.derived.routes:
            check_reachable(route)
    except TeacherUnavailable as error:
        log.warning("no KL, because no teacher replies: %s", error)
        return False
    return True


def _with_teacher(
    config: Config, checkpoint: Path | None, terminal: Terminal
) -> tuple[Mapping[str, float], list[Prompt], str]:
    """Return the numbers of the run's own evaluation, its prompts, and the names of the teachers."""
    from gkd.api import open_pools
    from gkd.trainer import Trainer

    with open_pools(config) as pools:
        plan = pools.plan
        trainer = Trainer(plan.config, pools, plan.train_prompts, plan.val_prompts, plan.folder, plan.total_steps)
        with terminal.watching(trainer.metrics.state, pools.teacher_health):
            numbers = trainer.evaluate(checkpoint, (checkpoint and step_of(checkpoint)) or 0)
    return numbers, plan.val_prompts, ", ".join(dict.fromkeys(teacher.model_name for teacher in plan.teachers))


def _engines_alone(config: Config, checkpoint: Path | None, student: Path) -> tuple[Mapping[str, float], list[Prompt]]:
    """Return the accuracies and the prompts. The student of a checkpoint is exported to the folder `student`."""
    from gkd.preflight.run import check_answering
    from gkd.start.launcher import started_engines

    metric, n = config.eval.metric, config.eval.n
    if metric == NO_METRIC:
        fix = "start the teacher for the KL, or choose a function, e.g. eval.metric=exact_match."
        raise config.error("eval.metric", "without a teacher there is nothing to measure.", fix)
    if checkpoint is not None:
        export(checkpoint, student)
        config = config.with_values({"model.path": str(student)})
    config = config.with_values({"actor.lora": LoraConfig(), "weight_sync.lora": "merged"})
    config, device, eos_ids, prompts = check_answering(config)
    prompts = prompts[: config.eval.max_prompts or None]
    with started_engines(config, device, eos_ids, prompts) as (rollout, judge):
        greedy = greedy_report(metric, rollout, judge if config.derived.metrics else None, prompts)
        assert greedy is not None, "there is a metric"
        numbers = accuracy_numbers(greedy, config.derived.routes)
        if n > 1:
            temperature, indices = config.rollout.temperature, range(len(prompts))
            chunks = rollout.generate(prompts, prompt_indices=indices, n=n, temperature=temperature, seed=SEED)
            numbers |= pass_at_numbers(judge.judge_chunks(chunks), n)
    return numbers, prompts


def _parse(argv: list[str] | None) -> argparse.Namespace:
    description = "Measure accuracy and pass@k of a run's checkpoint or of a model, and the KL to the teacher."
    parser = command_parser("gkd eval", description, _EXAMPLES)
    parser.add_argument("model", type=Path, metavar="RUN|FOLDER", help="run folder, model folder, or ORG/NAME")
    add_choice(parser)
    parser.add_argument("--data", type=Path, metavar="FILE", help="prompts and answers, as data.val_files of a run")
    parser.add_argument("--no-kl", action="store_true", help="ask no teacher; the engines alone start")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that differ from the run's")
    return parse_overrides(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

"""`gkd replay RUN --step N`: whether the loss of a step comes out again.

Loads the newest checkpoint before the step, trains on the recorded batches up to it, and compares each step that it
makes with metrics.jsonl.
Starts the actor's ranks alone: no engine, no teacher. Recorded hidden states need the LM head of the running teacher.
Writes nothing into the run folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gkd.config.check import check_config
from gkd.config.load import load_config, parse_overrides
from gkd.config.schema import Config
from gkd.errors import ConfigError, GkdError
from gkd.hf.hub import with_local_copies
from gkd.metrics.writer import read_metrics
from gkd.roles import ReferenceRole, ScoringRole
from gkd.run.checkpoints import ACTOR, CheckpointStore, step_folder, step_of, verified
from gkd.run.folder import BATCHES, CHECKPOINTS, ENVIRONMENT, ORIGIN
from gkd.run.open import check_same_files, check_same_run, check_same_teacher
from gkd.text.comparison import SAME_TOKENS, Comparison
from gkd.tools import exit_codes
from gkd.types import PendingScores, Prompt, ScoredChunk, TrainStats
from teacher_server.config.command import command_parser

_EXAMPLES = """example:
  gkd replay runs/mine --step 20
  gkd replay runs/mine --step 20 cluster.ray_address=10.0.0.5:6379
  gkd replay runs/mine --step 2 --rtol 1e-3 trainer.device=cpu   # a float32 run on GPUs

The run needs trainer.record_batches=true. A checkpoint of step N - 1 is best; from an earlier one, or from model.path,
the steps in between are trained again and compared, too. trainer.device can be given, and settings that a resumed run
may change. With the same settings, versions and devices the numbers are equal bit by bit; else rounding differs.

exit code: 0 all equal (bit by bit, or within --rtol; a line for each step names which), 1 different, 2 not replayable
"""
# Key in metrics.jsonl -> attribute of TrainStats.
_COMPARED = {"loss/total": "loss", "optim/grad_norm": "grad_norm", "loss/tokens": "n_loss_tokens"}


@exit_codes(GkdError, OSError)
def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    case = find_case(args.run, args.step, args.overrides)
    print(f"replaying from {case.start or case.config.model.path}: {args.step - case.first} step(s)", flush=True)
    steps = replayed(case)
    all_equal = True
    for step, stats in enumerate(steps, case.first + 1):
        table, verdict, equal = compared(case.recorded[step], stats, args.rtol)
        print(f"{table}\nstep {step}: {verdict}")
        all_equal = all_equal and equal
    return 0 if all_equal else 1


@dataclass(frozen=True, slots=True)
class Case:
    """Names what a replay loads and compares.

    Attributes:
        start: checkpoint to load; with None the run's first step is made from model.path.
        first: number of steps made at the start.
        recorded: metrics of the run by step.
    """

    config: Config
    root: Path
    step: int
    start: Path | None
    first: int
    recorded: dict[int, dict[str, float]]


def find_case(root: Path, step: int, overrides: list[str]) -> Case:
    """Return what a replay of the step needs; changes nothing.

    Raises:
        ConfigError: the folder has no such step, batch or checkpoint; or a setting cannot be changed.
        CheckpointError: a file is damaged.
    """
    if not (root / "config.yaml").is_file():
        raise ConfigError("RUN", str(root), "it has no config.yaml, so it is no run folder.", "name a run folder.")
    config = load_config(root / "config.yaml", overrides)
    check_config(config)
    device = load_config(root / "config.yaml", []).trainer.device
    # A replay may use another device, which shows whether the run's device computes what this one does.
    check_same_run(root / "config.yaml", replace(config, trainer=replace(config.trainer, device=device)))
    lines = {int(line["step"]): line for line in read_metrics(root / "metrics.jsonl") if "loss/total" in line}
    if step not in lines:
        have = f"has steps {min(lines)} to {max(lines)}" if lines else "has no step"
        raise ConfigError("--step", step, f"{root / 'metrics.jsonl'} {have}.", "choose one of its steps.")
    if "hidden" in config.derived.signals and config.teacher.update_interval:
        problem = "hidden states need the LM head of their step, and batches do not contain it."
        raise ConfigError(
            "teacher.update_interval", config.teacher.update_interval, problem, "record with topk or logits."
        )
    start = _start(root, step)
    first = 0 if start is None else verified(start)[0].step
    missing = [n for n in range(first + 1, step + 1) if not (root / BATCHES / step_folder(n)).is_dir()]
    if missing:
        before = f"{start.name}, the newest checkpoint before it" if start else "model.path; no checkpoint is before it"
        problem = f"the batch of step {missing[0]} was not kept. The replay would start from {before}."
        fix = "make a run with trainer.record_batches=true and, for a short replay, trainer.save_every."
        raise ConfigError("trainer.record_batches", config.trainer.record_batches, problem, fix)
    return Case(config, root.absolute(), step, start, first, lines)


def _start(root: Path, step: int) -> Path | None:
    """Return the newest checkpoint before the step, of the run or that it branched from. Raises ConfigError."""
    before = [folder for folder in CheckpointStore(root / CHECKPOINTS).committed() if (step_of(folder) or 0) < step]
    if before or not (root / ORIGIN).exists():
        return before[-1].absolute() if before else None
    origin = Path((root / ORIGIN).read_text().removesuffix("\n"))
    if not origin.is_dir():
        problem = "the checkpoint that the run branched from is gone, and the run has none before this step."
        raise ConfigError("--step", step, problem, "choose a step after the run's own first checkpoint.")
    return origin


def replayed(case: Case) -> list[TrainStats]:
    """Start the actor, train up to the step, and return the numbers of each step made.

    Raises ClusterError, CheckpointError, ModelError as a training run.
    """
    from gkd.actor import worker as actor_worker
    from gkd.actor.frozen.pools import LocalScoring, ReferencePool
    from gkd.actor.pool import ActorPool
    from gkd.cluster.calls import gather
    from gkd.pipeline.replay import ReplayedBatches
    from gkd.preflight.machine import resolve_device
    from gkd.roles import NoReference
    from gkd.scoring.group_endpoint import GroupEndpoint
    from gkd.scoring.pool import teacher_heads
    from gkd.start.launcher import spawn_endpoints
    from gkd.start.pools import ACTOR as ACTOR_POOL
    from gkd.start.pools import actor_env, cpu_threads, make_cluster, pool_specs, worker_env

    device = resolve_device(case.config)
    timeout_s = case.config.trainer.init_timeout_s
    needs_head = "hidden" in case.config.derived.signals
    needs_teacher = needs_head or bool(case.config.teacher.tokenizer)
    endpoint, comparison = _of_teacher(case, device) if needs_teacher else ((GroupEndpoint,), SAME_TOKENS)
    with tempfile.TemporaryDirectory(prefix="gkd_replay_") as folder:
        trainer = replace(case.config.trainer, run_dir=folder, replay=str(case.root / BATCHES), profile_steps=[])
        config = replace(case.config, trainer=trainer)
        spec = pool_specs(config)[0]
        cluster = make_cluster(config, on_cpu=device == "cpu", pools=[spec])
        try:
            slots = cluster.make_pools([spec], timeout_s)[ACTOR_POOL]
            on_cpu = device == "cpu"
            env = worker_env(on_cpu, n_threads=cpu_threads(config)[0]) | actor_env(config, on_cpu)
            workers = slots.spawn(actor_worker.ActorWorker, env, concurrency_groups=actor_worker.CONCURRENCY_GROUPS)
            actor = ActorPool(workers, config)
            building = actor.init_model(device, _total_steps(case), timeout_s, comparison)
            gather(building, "init_model", timeout_s)
            if config.derived.reference_folder:
                actor.init_reference(timeout_s)
            endpoints = spawn_endpoints(config, actor, slots, device, *endpoint)
            if needs_teacher and config.derived.teacher_pool:
                actor.init_teacher(timeout_s)
            elif needs_head:
                heads = teacher_heads(endpoints, actor.last_stage_nodes(timeout_s), timeout_s)
                actor.set_teacher_head(heads, timeout_s)
            scoring: ScoringRole = LocalScoring(lambda: workers, endpoints, config.trainer.stage_timeout_s)
            has_reference = config.derived.loss.has_reference
            reference = ReferencePool(workers, endpoints, config) if has_reference else NoReference()
            scoring = _judged(case.root, scoring, config, endpoints)
            batches = ReplayedBatches(config, scoring)
            if case.start is not None:
                actor.load(case.start / ACTOR)
            steps = []
            for step in range(case.first, case.step):
                while early := batches.early_part(step):
                    actor.accumulate(_scored(early, reference, scoring))
                steps.append(actor.train_step(_scored(batches.next_batch(step), reference, scoring)))
        finally:
            cluster.close()
    return steps


def _of_teacher(case: Case, device: str) -> tuple[tuple[Any, ...], Comparison]:
    """Return the class of the endpoints with its arguments, and the comparison, where a step needs the teacher.

    Raises:
        ConfigError: it is not the teacher that scored the run.
        TeacherUnavailable: no teacher server replies.
    """
    from gkd.preflight.run import find_teachers, models_compared, read_student, teacher_identity
    from gkd.preflight.tokenizer_pair import teacher_tokenizer
    from gkd.scoring.endpoint import ScoringEndpoint
    from gkd.scoring.group_endpoint import GroupEndpoint
    from gkd.scoring.teacher.window import window_of_group

    config = with_local_copies(case.config, weights=False)
    derived = config.derived
    tokenizer, n_student_ids, eos_ids = read_student(config)
    teachers = find_teachers(config, device)
    check_same_teacher(case.root / "teacher.json", teacher_identity(derived.routes, teachers), config)
    comparison = models_compared(config, teachers, tokenizer, teacher_tokenizer(config), n_student_ids, eos_ids)
    if derived.teacher_pool:
        return (GroupEndpoint,), comparison
    windows = [window_of_group(config.teacher, info, 1) for info in teachers]
    fingerprints = [info.fingerprint for info in teachers]
    numerics = [info.numerics for info in teachers]
    return (ScoringEndpoint, comparison, fingerprints, windows, (), numerics), comparison


def _scored(pending: list[PendingScores], reference: ReferenceRole, scoring: ScoringRole) -> list[ScoredChunk]:
    logprobs = reference.compute_logprobs(pending, blocking=False)
    return logprobs.wait(scoring.collect(pending))


def compared(recorded: dict[str, Any], stats: TrainStats, rtol: float) -> tuple[str, str, bool]:
    """Return a table of the numbers, the verdict, and whether they are equal.

    Args:
        rtol: largest relative difference of loss and gradient norm that counts as equal; the tokens are compared
            exactly.
    """
    rows = [f"{'':<16}{'recorded':>24}{'replayed':>24}{'difference':>14}"]
    exact = True
    close = True
    for key, attribute in _COMPARED.items():
        before = float(recorded[key] if recorded[key] is not None else "nan")
        now = float(getattr(stats, attribute))
        rows.append(f"{key:<16}{before!r:>24}{now!r:>24}{now - before:>14.3g}")
        limit = 0.0 if attribute == "n_loss_tokens" else rtol * abs(before)
        is_same = repr(now) == repr(before)  # both NaN: the batch has no loss token
        exact &= is_same
        close &= is_same or abs(now - before) <= limit
    verdict = "equal, bit by bit" if exact else f"equal within --rtol {rtol:g}" if close else "DIFFERENT"
    return "\n".join(rows), verdict, close


def _total_steps(case: Case) -> int:
    """Return the steps of the run, on which a learning rate schedule may depend. Raises DataError, ConfigError."""
    config = case.config
    if config.actor.optim.schedule == "constant":
        return case.step
    return config.planned_steps(len(_prompts(case.root, config)))


def _judged(root: Path, scoring: ScoringRole, config: Config, endpoints: list[Any]) -> ScoringRole:
    """Return the scoring that also judges, if the run has functions for it. Raises RewardError, ConfigError."""
    from gkd.scoring.judged import init_judging, judged_training

    derived = replace(config.derived, metrics=())
    if not (derived.rewards or derived.groups):
        return scoring
    init_judging(config, derived, _prompts(root, config), [], endpoints, config.trainer.init_timeout_s)
    return judged_training(scoring, config, derived, endpoints)


def _prompts(root: Path, config: Config) -> list[Prompt]:
    """Load the training prompts of a run with their rows. Raises ConfigError, also if a file has changed."""
    from gkd.data.prompts import RowReader, load_prompts, load_tokenizer
    from gkd.data.row_files import describe_files

    config = with_local_copies(config, ("model.path", "data.train_files", "data.val_files"), weights=False)
    check_same_files(root / ENVIRONMENT, describe_files(config.data), config)
    tokenizer = load_tokenizer(config.model.path, "model.path", trust_remote_code=config.model.trust_remote_code)
    reader = RowReader(config.data, tokenizer, config.teacher)
    prompts, _ = load_prompts(config.data.train_files, "data.train_files", reader, keep_rows=True)
    return prompts


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "gkd replay",
        "Make a recorded step of a run again, and compare loss, gradient norm and tokens.",
        _EXAMPLES,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step to make again")
    parser.add_argument("--rtol", type=float, default=1e-3, metavar="X", help="default: %(default)s")
    return parse_overrides(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

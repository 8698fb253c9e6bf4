"""`gkd split RUN`: the rates of a run's stages, and the split of the GPUs with the fastest steps.

Reads what the loop waited for from metrics.jsonl, and how long engines, teacher workers and ranks computed from
spans.jsonl. The time of a stage is its work by its GPUs. See docs/split.md.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from gkd.cluster.gpu_table import TEACHER
from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_sections import AHEAD
from gkd.console.state import plain_s
from gkd.console.summary import MIN_STEPS, WARM_UP
from gkd.errors import ConfigError
from gkd.metrics.span_file import read_spans
from gkd.spans import Phase
from gkd.tools import exit_codes
from gkd.tools.report.read import Run, read_runs
from teacher_server.config.command import command_parser

_SHOWN = 3  # splits
_WAITS = ("rollout", "teacher", "reference", "train")  # stages in which the loop waits for a pool
_ENGINE = (Phase.GENERATE.span,)
_FROZEN = (Phase.REFERENCE.span, Phase.LOGPROBS.span)
_SOME_CLUSTER = "planned:6379"  # stands for the planned run's Ray cluster while its settings are checked
_EXAMPLES = """examples:
  gkd split runs/mine
  gkd split runs/mine --gpus 16 --gpus-per-node 8
  gkd split runs/mine --gpus 6 --teacher-elsewhere     # the teacher keeps its GPUs, which do not count

exit code: 0 a split was printed, 1 a file of the run is damaged, 2 wrong arguments, no split is possible with the
settings, or a run that cannot be measured (too few steps, roles that share GPUs)
"""


class Split(NamedTuple):
    """GPUs of each pool. A pool that is larger than a node has whole nodes. A teacher elsewhere has 0."""

    rollout: int
    teacher: int
    student: int


class Estimate(NamedTuple):
    """Seconds of a step, and of the work of all pools in it: of equally fast splits the one with more room is first."""

    step_s: float
    work_s: float
    split: Split


@dataclass(frozen=True, slots=True)
class Measured:
    """A mean step of a run, without evaluation, checkpoint and recording, and what it ran on.

    Attributes:
        teacher_s: compute time of a teacher worker.
        student_s: training, with the teacher's LM head if the ranks have it, and the reference's pass.
        late_s: from the last response to its score.
        rest_s: weight sync, and what else does not depend on the sizes of the pools.
    """

    step_s: float
    rollout_s: float
    teacher_s: float
    student_s: float
    late_s: float
    rest_s: float
    split: Split
    gpus_per_worker: int  # GPUs of a teacher worker; 0: the teacher has its own
    is_sync: bool
    bound: Mapping[str, float]  # pool of `perf/bound_by_<pool>` -> share of the steps

    def on(self, other: Split) -> Estimate:
        """Return the estimate for another split."""
        fewer = self.split.teacher / other.teacher if other.teacher else 1.0
        rollout_s = self.rollout_s * self.split.rollout / other.rollout
        student_s = self.student_s * self.split.student / other.student
        teacher_s = self.teacher_s * fewer
        if self.is_sync:  # the teacher scores while the rollouts are generated
            step_s = max(rollout_s + self.late_s * fewer, teacher_s) + student_s + self.rest_s
        else:
            step_s = max(rollout_s, teacher_s, student_s) + self.rest_s
        return Estimate(step_s, rollout_s + teacher_s + student_s, other)


@exit_codes(ConfigError)
def main(argv: list[str] | None = None) -> int:
    """Return the exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    (run,) = read_runs([args.run])
    config = load_config(run.root / "config.yaml")
    lines = steps_of(run, config)
    measured = measure(run, config, lines, elsewhere=args.teacher_elsewhere)
    estimates = ranked(config, measured, args.gpus or sum(measured.split), args.gpus_per_node)
    print("\n".join(_text(config, lines, measured, estimates, args.gpus_per_node)), flush=True)
    return 0


def steps_of(run: Run, config: Config) -> Sequence[Mapping[str, float]]:
    """Return the lines of the steps to measure.

    Raises:
        ConfigError: too few steps, or none that shows the work of three separate roles.
        CheckpointError: environment.jsonl is damaged.
    """
    for key, is_unfit, problem in (
        ("trainer.colocate", config.trainer.colocate, "actor and engines share their GPUs."),
        ("teacher.backend", bool(config.derived.teacher_pool), "the teacher is on the GPUs of another role."),
        ("trainer.replay", bool(config.trainer.replay), "engines and teacher of a replay are idle."),
    ):
        if is_unfit:
            raise ConfigError(key, config.value(key), problem, "measure a run whose roles work on GPUs of their own.")
    starts = run.environment()
    ahead = config.trainer.staleness_bound
    begun_s = starts[-1]["unix_s"] if starts else 0.0  # an earlier start may have had other pools
    lines = [{key: value for key, value in line.items() if value is not None} for line in run.lines]
    trained = [line for line in lines if "loss/total" in line and line["time/unix_s"] > begun_s]
    # Prefetching engines have nothing left to do in the last steps.
    measured = [line for line in trained[WARM_UP : len(trained) - ahead] if "time/eval_s" not in line]
    if len(measured) < MIN_STEPS:
        problem = f"{len(measured)} steps since its last start can be measured: not the first, last and evaluated ones."
        fix = f"let it make {WARM_UP + MIN_STEPS + ahead} steps without an evaluation."
        raise ConfigError("RUN", str(run.root), problem, fix)
    return measured


def measure(run: Run, config: Config, lines: Sequence[Mapping[str, float]], *, elsewhere: bool) -> Measured:
    """Return the mean step of some lines of a run.

    Args:
        elsewhere: the teacher keeps its GPUs, which do not count.

    Raises:
        CheckpointError, ClusterError: spans.jsonl or gpus.json is damaged.
    """
    places = run.gpu_map()
    workers = [max(len(row.gpus), 1) for row in places.rows if row.pool == TEACHER] if places is not None else []
    per_worker = 0 if elsewhere or len(config.derived.routes) > 1 else max(workers, default=0)
    engine_gpus = config.rollout.nnodes * config.rollout.n_gpus_per_node
    split = Split(engine_gpus, per_worker * len(workers), config.derived.world_size)
    busy = _busy_s(run.root, {int(line["step"]) for line in lines})
    n = len(lines)
    by_worker = [seconds for (process, _), seconds in busy.items() if process.startswith("teacher ")]
    rollout_s, reference_s = (
        max((seconds for (_, span), seconds in busy.items() if span in names), default=0.0) / n
        for names in (_ENGINE, _FROZEN)
    )
    teacher_s = sum(by_worker) / n / max(len(workers), len(by_worker), 1)
    waited_s = {stage: fmean(line.get(f"time/{stage}_s", 0.0) for line in lines) for stage in _WAITS}
    step_s = fmean(map(plain_s, lines))
    stages_s = sum(waited_s.values())
    rest_s = max(0.0, step_s - stages_s)
    student_s = waited_s["train"] + max(reference_s, waited_s["reference"])
    late_s = max(0.0, stages_s - waited_s["rollout"] - student_s)  # a reference computes while the teacher scores
    bound = {pool: fmean(line[f"perf/bound_by_{pool}"] for line in lines) for pool in ("rollout", "teacher", "actor")}
    if is_sync := AHEAD.get(config.trainer.scheduler) == 0:
        rollout_s = waited_s["rollout"]
    else:  # the loop waited for the slowest stage, which took as long as the step
        slowest = max(bound, key=lambda pool: bound[pool])
        rollout_s = max(rollout_s, stages_s) if slowest == "rollout" else rollout_s
        teacher_s = max(teacher_s, stages_s) if slowest == "teacher" else teacher_s
    return Measured(step_s, rollout_s, teacher_s, student_s, late_s, rest_s, split, per_worker, is_sync, bound)


def _busy_s(folder: Path, steps: set[int]) -> dict[tuple[str, str], float]:
    """Return (process, span) -> seconds of the spans that start in these steps."""
    busy: defaultdict[tuple[str, str], float] = defaultdict(float)
    for line in read_spans(folder / "spans.jsonl"):
        if line.step in steps:
            for span in line.spans:  # merged spans know how long they were busy
                busy[line.process, span.name] += span.args.get("busy_s", span.duration_s)
    return busy


def ranked(config: Config, run: Measured, n_gpus: int, per_node: int) -> list[Estimate]:
    """Return the fastest splits that a run would accept, at most `_SHOWN`.

    Raises:
        ConfigError: too few GPUs for all roles, or the settings, such as actor.tp, forbid each split.
    """
    accepted: list[Estimate] = []
    refused: list[ConfigError] = []
    for one in sorted(map(run.on, splits(n_gpus, per_node, run.gpus_per_worker))):
        planned = settings_of(one.split, per_node) | {"cluster.gpus": []}
        if n_gpus > per_node:
            planned["cluster.ray_address"] = config.cluster.ray_address or _SOME_CLUSTER
        try:
            check_config(config.with_values(planned))
            accepted.append(one)
        except ConfigError as error:
            refused.append(error)
        if len(accepted) == _SHOWN:
            break
    if not accepted:
        problem = "some role would have no GPU."
        raise refused[0] if refused else ConfigError("--gpus", n_gpus, problem, "use more, or --teacher-elsewhere.")
    return accepted


def splits(n_gpus: int, per_node: int, gpus_per_worker: int) -> Iterator[Split]:
    """Yield the splits of nodes of `per_node` GPUs; the teacher has the ones that remain, 0 if it has its own."""
    nodes = [per_node] * (n_gpus // per_node) + [n_gpus % per_node]
    sizes = [n for n in range(1, n_gpus) if n <= per_node or n % per_node == 0]
    for student, rollout in itertools.product(sizes, sizes):
        if (free := _free(nodes, max(student, rollout), min(student, rollout), per_node)) is None:
            continue
        n_workers = sum(size // gpus_per_worker for size in free) if gpus_per_worker else 0
        if n_workers or not gpus_per_worker:
            yield Split(rollout, n_workers * gpus_per_worker, student)


def _free(nodes: Sequence[int], larger: int, smaller: int, per_node: int) -> list[int] | None:
    """Return the GPUs of each node that two pools leave, each on the fullest node that has room; None: no room."""
    free = list(nodes)
    for n_gpus in [min(per_node, pool - start) for pool in (larger, smaller) for start in range(0, pool, per_node)]:
        room = [size for size in free if size >= n_gpus]
        if not room:
            return None
        free[free.index(min(room))] -= n_gpus
    return free


def settings_of(split: Split, per_node: int) -> dict[str, object]:
    """Return the keys of a run with this split."""
    settings: dict[str, object] = {}
    for section, n_gpus in (("trainer", split.student), ("rollout", split.rollout)):
        settings[f"{section}.nnodes"] = max(1, n_gpus // per_node)
        settings[f"{section}.n_gpus_per_node"] = min(n_gpus, per_node)
    return settings


def _text(
    config: Config, lines: Sequence[Mapping[str, float]], run: Measured, estimates: Sequence[Estimate], per_node: int
) -> Iterator[str]:
    """Yield the lines to print."""
    responses, prompts, dataset, observed = (
        fmean(line.get(f"rollout/{name}_tokens", 0.0) for line in lines)
        for name in ("response", "prompt", "dataset_response", "observed")
    )
    tokens = responses + prompts + observed
    split = run.split
    yield f"{len(lines)} steps of {config.trainer.scheduler}, {run.step_s:.3g} s without evaluations and checkpoints"
    yield f"{'pool':10}{'GPUs':>5}{'s a step':>10}{'tokens/s per GPU':>18}{'waited for':>12}{'bottleneck':>12}"
    for pool, key, n_gpus, seconds, n_tokens in (
        ("rollout", "rollout", split.rollout, run.rollout_s, responses - dataset),
        ("teacher", "teacher", split.teacher, run.teacher_s, tokens),
        ("student", "actor", split.student, run.student_s, tokens),
    ):
        rate = f"{n_tokens / seconds / n_gpus:.4g}" if seconds and n_gpus else "-"
        waited = fmean(line[f"perf/waited_{key}_share"] for line in lines)
        yield f"{pool:10}{n_gpus or '-':>5}{seconds:>10.3g}{rate:>18}{waited:>12.0%}{run.bound[key]:>12.0%}"
    yield f"{'the rest':15}{run.rest_s:>10.3g}"
    if not run.gpus_per_worker:
        yield "the teacher keeps its GPUs, which do not count"
    running = config.trainer.global_batch_size * config.rollout.n * config.rollout.tp / split.rollout
    if running <= config.rollout.sequence_limit:
        yield f"an engine runs all its {running:.0f} sequences at once: more engines gain less than estimated"
    yield f"\n{'split':10}{'rollout':>8}{'teacher':>8}{'student':>8}{'s a step':>10}{'speed-up':>10}"
    same = run.on(split)
    for name, one in [*((f"{i}", one) for i, one in enumerate(estimates, start=1)), ("this run", same)]:
        gpus = f"{one.split.rollout:>8}{one.split.teacher or '-':>8}{one.split.student:>8}"
        yield f"{name:10}{gpus}{one.step_s:>10.3g}{same.step_s / one.step_s:>9.2f}x"
    best = estimates[0].split
    yield "\nset " + " ".join(f"{key}={value}" for key, value in settings_of(best, per_node).items())
    if best.teacher:
        yield f"give `gkd teacher --gpus` {best.teacher} GPUs, for {best.teacher // run.gpus_per_worker} workers"
    if config.cluster.gpus:
        yield f"set cluster.gpus to {best.rollout + best.student} GPUs that the teacher does not have, or remove it"
    yield "`gkd memory` with these keys tells whether the split fits"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 1")
    return int(text)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    about = "Print the rates of a run's stages, and the split of the GPUs with the fastest steps."
    parser = command_parser("gkd split", about, _EXAMPLES)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder of a finished or running job")
    parser.add_argument("--gpus", type=_positive, metavar="N", help="GPUs to split; default: those of the run")
    parser.add_argument(
        "--gpus-per-node", type=_positive, default=8, metavar="N", help="GPUs of a node; default: %(default)s"
    )
    parser.add_argument("--teacher-elsewhere", action="store_true", help="--gpus are those of student and rollout")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

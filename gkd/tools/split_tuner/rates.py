"""Read a run folder: its settings, its layout, and the rates that its metrics show.

A rate is fitted to the times of the steps. What they do not determine is assumed, and reported as a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np

from gkd.cluster.gpu_table import TEACHER, gpu_map_from_json
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_trainer import STREAM
from gkd.console.state import NOT_EACH_STEP
from gkd.errors import ConfigError
from gkd.metrics.bottleneck import (
    DP,
    ENGINES,
    GENERATE_S,
    LONGEST,
    MAX_NUM_SEQS,
    PASS_SUMS,
    REFERENCE_S,
    SEQUENCES,
    SINCE_START,
    TOKENS,
    WITH_EVALUATION,
    WORKERS,
    busy_name,
)
from gkd.metrics.step import DATASET_TOKENS
from gkd.metrics.writer import read_metrics
from gkd.run.folder import PLACES
from gkd.tools.split_tuner.splits import Rates, Sizes, Workload

WARM_UP = 2  # steps that are excluded: loading, compiling and first caches
_MIN_STEPS = 4  # after them
_STAGES = ("rollout", "teacher", "reference", "train", "weight_sync")
_OF_TEACHER = (SEQUENCES, TOKENS, *map(busy_name, WORKERS))
_SURE = 0.2  # maximum relative standard error of an accepted slope
_ROUNDING = 1e-12  # share of a sum of squares
_SPREAD = 0.02  # relative spread of the sequences per pass; below it the slope is undetermined


@dataclass(frozen=True, slots=True)
class Run:
    """Settings and rates of a measured run."""

    config: Config
    scheduler: str  # trainer.scheduler of the measured steps
    sizes: Sizes
    gpus_per_worker: int  # GPUs of a teacher worker
    workload: Workload
    rates: Rates
    step_s: float  # mean of the first folder's steps, without evaluations and checkpoints
    n_steps: int  # number of these steps
    notes: tuple[str, ...]  # assumptions


def check_plannable(config: Config) -> None:
    """Check that the roles have separate GPUs. Raises ConfigError: they share some."""
    shared = {
        "trainer.colocate": (config.trainer.colocate, "actor and engines share their GPUs."),
        "teacher.backend": (bool(config.derived.teacher_pool), "the teacher is on the GPUs of another role."),
    }
    for key, (is_shared, problem) in shared.items():
        if is_shared:
            value = config.teacher.backend if key == "teacher.backend" else True
            raise ConfigError(key, value, problem, "use a run whose three roles have separate GPUs.")


def read_run(folders: Sequence[Path], *, workers: int = 0, gpus_per_worker: int = 0, last: int = 0) -> Run:
    """Return the rates of one run, or of several that differ only in rollout.max_num_seqs (settings of the first).

    Args:
        workers: teacher workers; 0 means as in gpus.json.
        gpus_per_worker: GPUs of a teacher worker; 0 means as in gpus.json.
        last: number of last steps to use of each run; 0 means all.

    Raises:
        ConfigError: a folder does not hold a run; the run is a replay, or too short since its last start; the number of
            teacher workers is unknown; or as `check_plannable`.
        CheckpointError: metrics.jsonl is damaged.
        ClusterError: gpus.json is damaged.
    """
    lines_of = [_steps(folder, last) for folder in folders]
    config = load_config(folders[0] / "config.yaml")
    check_plannable(config)
    if not config.rollout.max_num_seqs:  # the number that preflight chose
        config = replace(config, rollout=replace(config.rollout, max_num_seqs=int(lines_of[0][0][MAX_NUM_SEQS])))
    notes: list[str] = []
    n_workers, per_worker = _teacher(folders[0], workers, gpus_per_worker, notes)
    derived = config.derived
    sizes = Sizes(derived.dp_size, derived.n_engines, n_workers)
    first, table = (_Table(folders[0], lines) for lines in (lines_of[0], [line for some in lines_of for line in some]))
    workload, rates = _workload(config, table), _rates(config, sizes, table, notes)
    step_s = float(np.mean(first["time/step_s"] - first.stages(NOT_EACH_STEP)))
    scheduler = config.trainer.scheduler
    return Run(config, scheduler, sizes, per_worker, workload, rates, step_s, len(lines_of[0]), tuple(notes))


class _Table:
    """Numbers of the steps, by column."""

    def __init__(self, folder: Path, lines: Sequence[dict[str, float]]) -> None:
        self._folder, self._lines = folder, lines

    def __getitem__(self, name: str) -> np.ndarray:
        """Return [steps] float64. Raises ConfigError: a line lacks the number."""
        if any(not isinstance(line.get(name), int | float) for line in self._lines):
            raise self.lacks(name)
        return np.array([line[name] for line in self._lines], float)

    def lacks(self, name: str) -> ConfigError:
        """Return the error for a number that is missing, or 0 although it must not be."""
        steps = [line["step"] for line in self._lines if not isinstance(line.get(name), int | float)]
        if not steps:
            zeros = [line["step"] for line in self._lines if not line[name]]
            problem = f"{name} is 0 in {len(zeros)} steps of its metrics, the first is {zeros[0]}."
            return ConfigError("--run", str(self._folder), problem, "use a run whose pools all had work.")
        problem = f"{len(steps)} steps of its metrics, the first is {steps[0]}, lack {name}."
        return ConfigError("--run", str(self._folder), problem, "use a run of this version of gkd.")

    def get(self, name: str) -> np.ndarray:
        """Return the same, with 0 for missing numbers."""
        return np.array([line.get(name) or 0.0 for line in self._lines], float)

    def stages(self, names: Sequence[str]) -> np.ndarray:
        return sum((self.get(f"time/{name}_s") for name in names), np.zeros(len(self._lines)))


def read_steps(folder: Path) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl, each with the numbers of its step in tuner.jsonl."""
    lines = read_metrics(folder / "metrics.jsonl")
    tuner = folder / "tuner.jsonl"
    by_step = {line["step"]: line for line in read_metrics(tuner)} if tuner.exists() else {}
    return [
        line | by_step[line["step"]] if "loss/total" in line and line["step"] in by_step else line for line in lines
    ]


def _steps(folder: Path, last: int) -> list[dict[str, float]]:
    """Return the lines of the steps to measure."""
    if not (folder / "config.yaml").is_file() or not (folder / "metrics.jsonl").is_file():
        problem = "config.yaml or metrics.jsonl is missing: not the folder of a run that has made a step."
        raise ConfigError("--run", str(folder), problem, "name the run_dir of a run.")
    config = load_config(folder / "config.yaml")
    if config.trainer.replay:
        problem = "the run trains on recorded batches, so its engines and teacher are idle."
        raise ConfigError("trainer.replay", config.trainer.replay, problem, "use a run that is not a replay.")
    lines = [line for line in read_steps(folder) if "time/step_s" in line and "loss/total" in line]
    lines = _of_last_start(folder, config, lines)
    # With prefetching, the engines are idle during the last steps.
    n_last = config.trainer.staleness_bound
    lines = [line for line in _with_own_teacher(lines, n_last)[WARM_UP:] if WITH_EVALUATION not in line]
    if len(lines) < _MIN_STEPS:
        problem = (
            f"it has {len(lines)} steps since its last start, without the first {WARM_UP} and the last {n_last}, which "
            "are excluded."
        )
        raise ConfigError("--run", str(folder), problem, f"run at least {WARM_UP + _MIN_STEPS + n_last} steps.")
    return lines[-last:] if last else lines


def _of_last_start(folder: Path, config: Config, lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the steps since the last start: layout and teacher may have been different before.

    Raises:
        ConfigError: the run was started with another layout, and has made no step since.
    """
    if not lines:
        return lines
    newest, first, derived = _Table(folder, lines[-1:]), len(lines) - 1, config.derived
    for name, value in (
        (DP, derived.dp_size),
        (ENGINES, derived.n_engines),
        (MAX_NUM_SEQS, config.rollout.max_num_seqs or newest[MAX_NUM_SEQS][0]),
    ):
        if newest[name][0] != value:
            problem = f"{name} is {value} in its config.yaml, and {newest[name][0]:g} in its last step."
            raise ConfigError("--run", str(folder), problem, "run some steps with these settings.")
    for since_start in range(int(newest[SINCE_START][0]) - 1, 0, -1):
        if not first or lines[first - 1].get(SINCE_START) != since_start:
            break
        first -= 1
    return lines[first:]


def _with_own_teacher(lines: Sequence[dict[str, float]], delay: int) -> list[dict[str, float]]:
    """Return all but the last `delay` steps, each with the teacher's numbers from the line `delay` steps later."""
    without = [{name: value for name, value in line.items() if name not in _OF_TEACHER} for line in lines]
    of_teacher = [{name: line[name] for name in _OF_TEACHER if name in line} for line in lines]
    return [line | teacher for line, teacher in zip(without, of_teacher[delay:], strict=False)]


def _teacher(folder: Path, workers: int, gpus_per_worker: int, notes: list[str]) -> tuple[int, int]:
    """Return the number of teacher workers, and the GPUs of each."""
    table = folder / PLACES
    rows = (
        [row for row in gpu_map_from_json(table.read_bytes(), str(table)).rows if row.pool == TEACHER]
        if table.exists()
        else []
    )
    if not rows and not workers:
        problem = f"{PLACES} of {folder} lists no teacher workers."
        raise ConfigError("--teacher-workers", 0, problem, "give the number of workers that the teacher server had.")
    per_worker = gpus_per_worker or max((len(row.gpus) for row in rows), default=0)
    if not per_worker:
        notes.append(f"a teacher worker has one GPU: {PLACES} does not list them")
    return workers or len(rows), per_worker or 1


def _workload(config: Config, table: _Table) -> Workload:
    sequences, on_policy = table["rollout/sequences"].sum(), table["rollout/on_policy_sequences"].sum()
    if not on_policy:
        problem = "its steps train on dataset responses only, so there are no rollouts to plan for."
        raise ConfigError("distill.on_policy_share", config.distill.on_policy_share, problem, "use another run.")
    longest = table.get(LONGEST)  # 0 for a step of a stream in which no response finished
    if not longest.any():
        raise table.lacks(LONGEST)
    # A stream has short steps with few responses between long ones with many, so the longer ones count more.
    weights = (longest > 0) * (table["time/step_s"] if config.trainer.scheduler == STREAM else 1.0)
    dataset_tokens = table[DATASET_TOKENS].sum()
    dataset = sequences - on_policy
    return Workload(
        n_prompts=config.trainer.global_batch_size,
        n_on_policy=config.distill.on_policy_share * config.trainer.global_batch_size,
        n=config.rollout.n,
        max_num_seqs=config.rollout.sequence_limit,
        prompt_tokens=float(table["rollout/prompt_tokens"].sum() / sequences),
        dataset_tokens=float(dataset_tokens / dataset) if dataset else 0.0,
        response_tokens=float((table["rollout/response_tokens"].sum() - dataset_tokens) / on_policy),
        longest_tokens=float(np.average(longest, weights=weights)),
        early_parts=config.derived.early_parts,
    )


def _rates(config: Config, sizes: Sizes, table: _Table, notes: list[str]) -> Rates:
    products = np.zeros((4, 4))
    for name, (i, j) in PASS_SUMS.items():
        products[i, j] = products[j, i] = table[name].sum()
    if not products[0, 0]:
        raise table.lacks("perf/pass_n")
    (pass_s, sequence_s, prefill_s), assumed = fit_passes(products)
    if assumed:
        notes.append(
            f"the duration of an engine's pass does not depend on its number of sequences: all passes had about "
            f"{products[0, 1] / products[0, 0]:.1f}; --calibrate varies it"
        )
    hand_over_s = float(table["perf/gap_s"].sum() / table["rollout/on_policy_sequences"].sum())
    batch_s = 0.0
    if config.trainer.scheduler == STREAM:
        notes.append("generating a batch takes no longer than its engines' time, which a stream does not show")
        if config.derived.early_parts:
            notes.append(
                "a step trains in as many and as uneven parts as in this stream; --calibrate measures whole batches"
            )
    else:
        of_engine_s = table["perf/engine_busy_max_s"] + table["perf/gap_s"] / sizes.engines
        batch_s = max(0.0, float(np.mean(table[GENERATE_S] - of_engine_s)))
    score_s, score_token_s = _scoring(sizes, table, notes)
    train_s, train_token_s = _training(sizes, table, notes)
    sync_s = float(np.mean(table["time/weight_sync_s"]))
    if config.trainer.scheduler == STREAM:  # this includes waiting for the end of the engines' passes
        one_pass_s = products[0, 3] / products[0, 0]
        sync_s = max(0.0, sync_s - one_pass_s * sizes.engines / (sizes.engines + 1))
    notes.append("the duration of a weight sync does not depend on the number of engines")
    other_s = max(0.0, float(np.median(table["time/step_s"] - table.stages((*_STAGES, *NOT_EACH_STEP)))))
    return Rates(
        pass_s=float(pass_s),
        sequence_s=float(sequence_s),
        prefill_s=float(prefill_s),
        hand_over_s=hand_over_s,
        batch_s=batch_s,
        score_s=score_s,
        score_token_s=score_token_s,
        train_s=train_s,
        train_token_s=train_token_s,
        sync_s=float(sync_s),
        other_s=other_s,
    )


def _scoring(sizes: Sizes, table: _Table, notes: list[str]) -> tuple[float, float]:
    """Return the seconds of a teacher worker per sequence, and per token of it."""
    # Fewer requests than workers were open where a step lacks a number.
    columns = np.maximum.accumulate([table.get(busy_name(n)) for n in WORKERS])
    sequences, tokens = table.get(SEQUENCES), table.get(TOKENS)
    timed = columns[0] > 0  # False for steps whose scores came from a checkpoint
    if not timed.any():
        raise table.lacks(busy_name(1))
    if not tokens[timed].any():
        raise table.lacks(TOKENS)
    busy_s = np.array([np.interp(sizes.workers, WORKERS, step) for step in columns.T[timed]])
    sequence_s, token_s, is_assumed = fit_line(tokens[timed], busy_s, sequences[timed])
    if is_assumed:
        notes.append("scoring is proportional to the tokens: the mean lengths of the steps differ too little")
    return sequence_s, token_s


def _training(sizes: Sizes, table: _Table, notes: list[str]) -> tuple[float, float]:
    """Return the seconds of a training step, and per token of its largest data-parallel group.

    The pass of a reference is included, since the same ranks run it.
    """
    tokens = (table["rollout/response_tokens"] + table["rollout/prompt_tokens"]) / sizes.dp
    step_s, token_s, is_assumed = fit_line(tokens, table["time/train_s"] + table.get(REFERENCE_S))
    if is_assumed:
        notes.append("training is proportional to the tokens: the tokens of the steps differ too little")
    return step_s, token_s


def fit_line(x: np.ndarray, y: np.ndarray, n: np.ndarray | None = None) -> tuple[float, float, bool]:
    """Fit y = fixed n + slope x by least squares; return (fixed >= 0, slope >= 0, whether fixed = 0 is assumed).

    It is assumed if x varies too little.

    Args:
        x, y: [rows] float64; x must not be all 0.
        n: [rows], number of items that each row sums over; None means one.
    """
    n = np.ones(len(x)) if n is None else n
    proportional = float(y.sum() / x.sum())
    centred = x - n * (n @ x / (n @ n))
    spread = float(centred @ centred)
    if len(x) < 4 or spread <= _ROUNDING * float(x @ x):
        return 0.0, proportional, True
    slope = float(centred @ y) / spread
    fixed = float(n @ (y - slope * x) / (n @ n))
    rest = y - fixed * n - slope * x
    error = float(np.sqrt(rest @ rest / (len(x) - 2) / spread))
    if slope <= 0.0 or error > _SURE * slope:
        return 0.0, proportional, True
    if fixed < 0.0:  # no fixed part, within the accuracy of the measurement
        return 0.0, proportional, False
    return fixed, slope, False


def fit_non_negative(products: np.ndarray, with_y: np.ndarray) -> np.ndarray:
    """Return the c >= 0 that minimizes sum (c x - y)^2.

    Args:
        products: [k, k], the sum of x x^T; k is small, so all sets of nonzero entries are tried.
        with_y: [k], the sum of x y.
    """
    k = len(with_y)
    scale = np.sqrt(np.maximum(np.diag(products), 1e-300))  # so that seconds per pass and per token have equal weight
    scaled, right = products / np.outer(scale, scale), with_y / scale
    best, best_cost = np.zeros(k), 0.0
    for size in range(1, k + 1):
        for chosen in combinations(range(k), size):
            some = list(chosen)
            c = np.linalg.lstsq(scaled[np.ix_(some, some)], right[some], rcond=1e-10)[0]
            cost = float(c @ scaled[np.ix_(some, some)] @ c - 2 * c @ right[some])
            if (c >= 0).all() and cost < best_cost:
                best, best_cost = np.zeros(k), cost
                best[some] = c
    return best / scale


def fit_passes(products: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return (pass_s, sequence_s, prefill_s), and whether sequence_s is undetermined and assumed to be 0.

    It is undetermined if all passes had about the same number of sequences.

    Args:
        products: [4, 4], the sum over passes of x x^T with x = (1, b, p, seconds), see `gkd.rollout.vllm.engine`.
    """
    n, total, squares = products[0, 0], products[0, 1], products[1, 1]
    variance = max(0.0, squares / n - (total / n) ** 2)
    if np.sqrt(variance) > _SPREAD * total / n:
        return fit_non_negative(products[:3, :3], products[:3, 3]), False
    some = [0, 2]
    fixed, prefill = fit_non_negative(products[np.ix_(some, some)], products[some, 3])
    return np.array([fixed, 0.0, prefill]), True

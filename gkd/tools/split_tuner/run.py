"""Read a run folder: its settings, its layout, and the rates that its metrics show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gkd.cluster.gpu_table import TEACHER, gpu_map_from_json
from gkd.config.derived import derive
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_trainer import STREAM
from gkd.console.forecast import NOT_EACH_STEP
from gkd.data.chunks import chunk_size
from gkd.errors import ConfigError
from gkd.metrics.pools import (
    DP,
    ENGINES,
    FINISHED,
    GENERATE_S,
    LENGTH_MEAN,
    MAX_NUM_SEQS,
    PASS_SUMS,
    QUANTILES,
    REFERENCE_S,
    SINCE_START,
    WITH_EVALUATION,
    WORKERS,
    busy_name,
    quantile_name,
)
from gkd.metrics.step import DATASET_TOKENS
from gkd.metrics.teacher_meter import SEQUENCES, TOKENS
from gkd.metrics.writer import read_metrics
from gkd.run.folder import PLACES
from gkd.tools.split_tuner.fit import line, passes
from gkd.tools.split_tuner.rates import Lengths, Rates, Sizes, Workload, independent

WARM_UP = 2  # steps that are excluded: loading, compiling and first caches
_MIN_STEPS = 4  # after them
_STAGES = ("rollout", "teacher", "reference", "train", "weight_sync")
_OF_TEACHER = (SEQUENCES, TOKENS, *map(busy_name, WORKERS))


@dataclass(frozen=True, slots=True)
class Run:
    """Settings and rates of a measured run."""

    config: Config
    sizes: Sizes
    gpus_per_worker: int  # of the teacher
    workload: Workload
    rates: Rates
    step_s: float  # mean, without evaluations and checkpoints
    n_steps: int  # that were measured
    notes: tuple[str, ...]  # assumptions


def check_plannable(config: Config) -> None:
    """Check that the roles have separate GPUs. Raises ConfigError: they share some."""
    shared = {
        "trainer.colocate": (config.trainer.colocate, "actor and engines share their GPUs."),
        "teacher.backend": (bool(derive(config).teacher_pool), "the teacher is on the GPUs of another role."),
    }
    for key, (is_shared, problem) in shared.items():
        if is_shared:
            value = config.teacher.backend if key == "teacher.backend" else True
            raise ConfigError(key, value, problem, "use a run whose three roles have separate GPUs.")


def read_run(folders: Sequence[Path], *, workers: int = 0, gpus_per_worker: int = 0, last: int = 0) -> Run:
    """Return the rates of one run, or of several that differ only in rollout.max_num_seqs (settings of the first).

    Args:
        workers: teacher workers; 0: as in gpus.json.
        gpus_per_worker: GPUs of a teacher worker; 0: as in gpus.json.
        last: number of last steps to use of each run; 0: all.

    Raises:
        ConfigError: a folder does not hold a run; the run is a replay, or too short since its last start; the number of
            teacher workers is unknown; or as `check_plannable`.
        CheckpointError: metrics.jsonl is damaged.
        ClusterError: gpus.json is damaged.
    """
    lines = [line for folder in folders for line in _steps(folder, last)]
    config = load_config(folders[0] / "config.yaml")
    check_plannable(config)
    if not config.rollout.max_num_seqs:  # the number that preflight chose
        config = replace(config, rollout=replace(config.rollout, max_num_seqs=int(lines[0][MAX_NUM_SEQS])))
    notes: list[str] = []
    n_workers, per_worker = _teacher(folders[0], workers, gpus_per_worker, notes)
    derived = derive(config)
    sizes = Sizes(derived.dp_size, derived.n_engines, n_workers)
    table = _Table(folders[0], lines)
    workload = _workload(config, table)
    rates = _rates(config, sizes, table, notes)
    step_s = float(np.mean(table["time/step_s"] - table.stages(NOT_EACH_STEP)))
    return Run(config, sizes, per_worker, workload, rates, step_s, len(lines), tuple(notes))


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
    """Return the lines of metrics.jsonl, each with the numbers of its step in tuner.jsonl.

    Runs of older versions have no tuner.jsonl: all their numbers are in metrics.jsonl, some under another name.
    """
    lines = read_metrics(folder / "metrics.jsonl")
    tuner = folder / "tuner.jsonl"
    by_step = {line["step"]: line for line in read_metrics(tuner)} if tuner.exists() else {}
    merged = [
        line | by_step[line["step"]] if "loss/total" in line and line["step"] in by_step else line for line in lines
    ]
    older = {GENERATE_S: "perf/answer_s", REFERENCE_S: "time/reference_s"}
    return [{name: line[old] for name, old in older.items() if old in line} | line for line in merged]


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
    newest, first, derived = _Table(folder, lines[-1:]), len(lines) - 1, derive(config)
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
    # In a stream no response may finish during a step; such a step has no lengths.
    means = table.get(LENGTH_MEAN)
    with_lengths = means > 0
    if not with_lengths.any():
        raise table.lacks(LENGTH_MEAN)
    quantiles = np.stack([table.get(quantile_name(q))[with_lengths] for q in QUANTILES], axis=1)
    if not quantiles.all():  # a response has at least one token
        raise table.lacks(quantile_name(QUANTILES[int((quantiles == 0).any(axis=0).argmax())]))
    lengths = Lengths(np.array(QUANTILES, float), quantiles, float(means[with_lengths].mean()))
    if config.trainer.scheduler == STREAM:  # long responses finish in long steps, with many others
        lengths = _pooled(lengths, table[FINISHED][with_lengths])
    dataset = sequences - on_policy
    return Workload(
        n_prompts=config.trainer.global_batch_size,
        n_on_policy=config.distill.on_policy_share * config.trainer.global_batch_size,
        n=config.rollout.n,
        max_num_seqs=config.rollout.sequence_limit,
        chunk_size=chunk_size(config),
        prompt_tokens=float(table["rollout/prompt_tokens"].sum() / sequences),
        dataset_tokens=float(table[DATASET_TOKENS].sum() / dataset) if dataset else 0.0,
        overlap=True,
        balance=True,
        early_parts=derive(config).early_parts,
        lengths=lengths,
    )


def _pooled(lengths: Lengths, counts: np.ndarray) -> Lengths:
    """Return the lengths of all steps as one distribution.

    Args:
        counts: [steps], responses of each.
    """
    points = np.linspace(0.0, 100.0, 1001)
    values = np.stack([np.interp(points, lengths.percent, row) for row in lengths.tokens])
    return independent(values.ravel(), counts.repeat(len(points)))


def _rates(config: Config, sizes: Sizes, table: _Table, notes: list[str]) -> Rates:
    products = np.zeros((4, 4))
    for name, (i, j) in PASS_SUMS.items():
        products[i, j] = products[j, i] = table[name].sum()
    if not products[0, 0]:
        raise table.lacks("perf/pass_n")
    (pass_s, sequence_s, prefill_s), assumed = passes(products)
    if assumed:
        notes.append(
            f"the duration of an engine's pass does not depend on its number of sequences: all passes had about "
            f"{products[0, 1] / products[0, 0]:.1f}; --calibrate varies it"
        )
    hand_over_s = float(table["perf/gap_s"].sum() / table["rollout/on_policy_sequences"].sum())
    batch_s = 0.0
    if config.trainer.scheduler == STREAM:
        notes.append("generating a batch takes no longer than its engines' time, which a stream does not show")
    else:
        of_engine_s = table["perf/engine_busy_max_s"] + table["perf/gap_s"] / sizes.engines
        batch_s = max(0.0, float(np.mean(table[GENERATE_S] - of_engine_s)))
    score_s, score_token_s = _scoring(sizes, table, notes)
    train_s, train_token_s = _training(config, sizes, table, notes)
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
        sync_s=sync_s,
        other_s=other_s,
    )


def _scoring(sizes: Sizes, table: _Table, notes: list[str]) -> tuple[float, float]:
    """Return the seconds of a teacher worker per sequence, and per token of it."""
    columns = [table.get(busy_name(n)) for n in WORKERS]
    sequences, tokens = table.get(SEQUENCES), table.get(TOKENS)
    timed = columns[0] > 0  # not steps whose scores came from a checkpoint
    if not timed.any():
        raise table.lacks(busy_name(1))
    if not tokens[timed].any():
        raise table.lacks(TOKENS)
    for i in range(1, len(columns)):  # fewer requests were open than the next entry
        columns[i] = np.maximum(columns[i], columns[i - 1])
    below = max(i for i, n in enumerate(WORKERS) if n <= sizes.workers)
    above = min(below + 1, len(WORKERS) - 1)
    share = min(1.0, (sizes.workers - WORKERS[below]) / max(1, WORKERS[above] - WORKERS[below]))
    busy_s = (columns[below] * (1 - share) + columns[above] * share)[timed]
    fitted = line(tokens[timed], busy_s, sequences[timed])
    if fitted.is_assumed:
        notes.append("scoring is proportional to the tokens: the mean lengths of the steps differ too little")
    return fitted.fixed, fitted.slope


def _training(config: Config, sizes: Sizes, table: _Table, notes: list[str]) -> tuple[float, float]:
    """Return the seconds of a training step, and per token of its largest data-parallel group.

    The pass of a reference is included, since the same ranks run it.
    """
    tokens = (table["rollout/response_tokens"] + table["rollout/prompt_tokens"]) / sizes.dp
    fitted = line(tokens, table["time/train_s"] + table.get(REFERENCE_S))
    if fitted.is_assumed:
        notes.append("training is proportional to the tokens: the tokens of the steps differ too little")
    return fitted.fixed, fitted.slope

"""A run folder whose stages took exactly what given rates say, for tests of the tuner; the product's code writes it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np

from gkd.cluster.gpu_table import TEACHER, GpuInfo, GpuMap, RankPlacement
from gkd.config.load import config_yaml, load_config
from gkd.config.schema import Config
from gkd.metrics.bottleneck import TeacherMeter, layout_numbers, rollout_numbers, shares
from gkd.metrics.step import step_numbers
from gkd.metrics.writer import MetricsWriter
from gkd.rollout.vllm.engine import PassMeter
from gkd.tools.split_tuner.splits import Rates
from gkd.types import EngineUsage, RolloutUsage, ScoredChunk, ScoreTimes, SyncReport, TrainStats
from tests.rollout_chunks import chunk_of

PROMPT = 12  # tokens
_WRITTEN: dict[tuple[Hashable, ...], dict[str, bytes]] = {}  # files of runs


def settings(tmp_path: Path, *overrides: str) -> Config:
    usual = ["data.train_files=[a]", "model.path=m", f"trainer.run_dir={tmp_path}", "trainer.global_batch_size=24"]
    return load_config(None, [*usual, "rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=2", *overrides])


def write_run(
    folder: Path,
    config: Config,
    rates: Rates,
    *,
    n_steps: int = 12,
    workers: int = 2,
    lengths: Callable[[np.random.Generator, int], np.ndarray] | None = None,
) -> Path:
    """sync steps with these rates; `workers` of the teacher, of one GPU each; 0: gpus.json names none.

    A run that was written before is copied.

    Args:
        lengths: draws a step's response lengths; by default lognormal around 40.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings_text = config_yaml(config)
    (folder / "config.yaml").write_text(settings_text)
    key = (settings_text.replace(config.trainer.run_dir, "RUN"), rates, n_steps, workers, lengths)
    if key in _WRITTEN:
        for name, content in _WRITTEN[key].items():
            (folder / name).write_bytes(content)
        return folder
    row = {"host": "h", "pid": 1, "cuda_visible_devices": None, "gpus": (GpuInfo(id="0"),)}
    rows = tuple(RankPlacement(pool=TEACHER, rank=i, **row) for i in range(workers))  # type: ignore[arg-type]
    (folder / "gpus.json").write_bytes(GpuMap(device="cpu", rows=rows, findings=()).to_json())
    metrics, tuner = (MetricsWriter(folder / f"{name}.jsonl", -1) for name in ("metrics", "tuner"))
    rng = np.random.default_rng(0)
    draw = lengths or (lambda rng, n: np.clip(rng.lognormal(3.5, 0.6, n), 1, 300).astype(int))
    at_s = [0.0]
    meter = TeacherMeter(config.trainer.staleness_bound, clock=lambda: at_s[0])
    meter.end_step()
    for step in range(1, n_steps + 1):
        lengths_of_step = draw(rng, config.trainer.global_batch_size)
        batch, numbers, sums = _one_step(config, rates, lengths_of_step, max(workers, 1), step)
        meter.add(batch)
        at_s[0] = 1000.0 * (step + 1)
        metrics.write(step, numbers)
        tuner.write(step, sums | meter.end_step() | layout_numbers(config, step))
    metrics.close()
    tuner.close()
    _WRITTEN[key] = {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "tuner.jsonl", "gpus.json")}
    return folder


def _one_step(
    config: Config, rates: Rates, lengths: np.ndarray, workers: int, step: int
) -> tuple[list[ScoredChunk], dict[str, float], dict[str, float]]:
    dp, engines = (derived := config.derived).dp_size, derived.n_engines
    place = np.arange(len(lengths))
    usages = [_answered(lengths[place % engines == e].tolist(), config, rates) for e in range(engines)]
    batch, now_s = [], 1000.0 * step
    for i, n_tokens in enumerate(lengths.tolist()):
        tokens = n_tokens + PROMPT
        free_s = now_s + i // workers  # each worker asked a second after its last question: busy for its own time
        took_s = rates.score_s + rates.score_token_s * tokens
        chunk = chunk_of([i], n_tokens, n_prompt=PROMPT, dp_rank=i % dp)
        batch.append(ScoredChunk(chunk, None, None, 8, ScoreTimes(free_s, np.array([free_s + took_s]))))
    total = float((lengths + PROMPT).sum())
    heaviest = total / dp
    generate_s = max(usage.busy_s + usage.gap_s for usage in usages) + rates.batch_s
    times = {
        "time/rollout_s": generate_s,
        "time/teacher_s": 0.01,
        "time/train_s": rates.train_s + rates.train_token_s * heaviest,
        "time/weight_sync_s": rates.sync_s,
    }
    times["time/step_s"] = sum(times.values()) + rates.other_s
    numbers = step_numbers(batch, TrainStats(1.0, 1), SyncReport(8, 0), version=0) | times
    sums = rollout_numbers(RolloutUsage(usages, generate_s))
    return batch, numbers | shares(numbers | sums, config.trainer.scheduler), sums


def _answered(lengths: list[int], config: Config, rates: Rates) -> EngineUsage:
    """Pass by pass."""
    now, limit = [0.0], config.rollout.sequence_limit
    meter = PassMeter(limit, clock=lambda: now[0])
    waiting, running = list(lengths), list[int]()
    for _ in lengths:
        meter.added(PROMPT)
    while waiting or running:
        begun, waiting = waiting[: limit - len(running)], waiting[limit - len(running) :]
        running += begun
        took_s = rates.pass_s + rates.sequence_s * len(running) + rates.prefill_s * PROMPT * len(begun)

        def one_pass(took_s: float = took_s) -> None:
            now[0] += took_s

        meter.time_pass(one_pass)
        running = [left - 1 for left in running]
        for _ in range(running.count(0)):
            meter.finished(1)
        running = [left for left in running if left]
    usage = meter.pop_usage()
    return EngineUsage(usage.busy_s, rates.hand_over_s * len(lengths), usage.products, max(lengths))

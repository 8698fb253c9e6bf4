"""CPU and memory of the driver at scale: 1,024 ranks, 65,536 sequences a step, steps of 10 s, scheduler `stream`.

    python -m tests.bench.bench_driver_scale [--steps 1000] [--engines 64] [--tp 8] [--pp 4] [--json FILE]

Real: `Trainer`, `StreamedBatches`, `StreamScheduler`, the sampler, the scattering of sequences to ranks, the decoding
of chunks' sizes and scores' summaries, the step's metrics and their files. Not real: the engines, endpoints and ranks,
which are objects of this process and answer at once, so the CPU time of a step is divided by 10 s instead of measured
over 10 s; and Ray: its calls cost extra, which bench_sequence_cost measures. The time of the objects themselves is
measured and not counted.

Half of the ranks train, the others generate. A prompt's samples are spread over ten seconds. An engine returns those of
one data-parallel group that finish in the same second as one chunk: with more engines and groups the chunks are
smaller, and the driver has more of them. About 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import psutil

from gkd.actor.megatron.layout import ParallelLayout
from gkd.actor.pool import batch_args
from gkd.config.load import load_config
from gkd.data.chunks import chunk_size, decode_sizes
from gkd.handles import (
    Computation,
    EngineUsage,
    FileDigest,
    PendingScores,
    ProcessSpans,
    RolloutChunk,
    RolloutUsage,
    ScoredChunk,
    ScoreTimes,
    SyncReport,
    TrainStats,
)
from gkd.run.manifest import digest_bytes
from gkd.run.open import open_run_folder
from gkd.teacher.records import ScoreSummary
from gkd.trainer import Roles, Trainer
from gkd.types import Prompt
from tests.bench.teacher_report import machine

RANKS, N_SEQUENCES, N, STEP_S, MAX_STALENESS = 1024, 65_536, 8, 10.0, 2
SLOTS = 10  # seconds over which the samples of a step's prompts finish
MOST_SHARE, MOST_GROWTH = 0.05, 0.02  # of a core; of the memory at a third of the run, until its end
_WARM_UP = 5


class Apparatus:
    """CPU time of the objects that stand for other processes, over all threads."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        began_s = time.thread_time()
        try:
            yield
        finally:
            used_s = time.thread_time() - began_s
            with self._lock:
                self.cpu_s += used_s


class World:
    """All roles. Samples finish in a random order as soon as their prompts are admitted."""

    def __init__(self, apparatus: Apparatus, n_engines: int, tp: int, pp: int, steps: Callable[[], None]) -> None:
        self._apparatus, self._n_engines, self._steps = apparatus, n_engines, steps
        world = RANKS // 2
        self._layouts = [ParallelLayout(tp=tp, pp=pp, world_size=world, rank=rank) for rank in range(world)]
        self.n_groups = self._layouts[0].dp
        self._rng = np.random.default_rng(0)
        self._results: SimpleQueue[bytes | None] = SimpleQueue()
        self._lengths = np.minimum(self._rng.geometric(1 / 400, 2000), 4096).astype(np.int32)
        self._version = 0
        self._size = chunk_size(N_SEQUENCES)
        self.n_chunks = 0

    # RolloutRole, RolloutStream

    def open_stream(self, *, n: int, temperature: float, seed: int) -> World:
        return self

    def admit(self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int]) -> None:
        with self._apparatus.not_counted():
            positions = np.repeat(np.array(prompt_indices), N)
            samples = positions * N + np.tile(np.arange(N), len(prompt_indices))
            slots = self._rng.integers(0, SLOTS, len(samples))
            engines = np.repeat(self._rng.permutation(len(prompt_indices)) % self._n_engines, N)
            groups = positions % self.n_groups
            order = np.lexsort((groups, engines, slots))
            keys = np.stack((slots, engines, groups))[:, order]
            cuts = np.flatnonzero(np.any(keys[:, 1:] != keys[:, :-1], axis=0)) + 1
            for part in np.split(order, cuts):
                for start in range(0, len(part), self._size):
                    at = part[start : start + self._size]
                    self._results.put(self._sizes(int(groups[at[0]]), samples[at]))

    def _sizes(self, group: int, samples: np.ndarray) -> bytes:
        """Return what an engine sends of a chunk, see `gkd.data.chunks.encode_sizes`."""
        n = len(samples)
        self.n_chunks += 1
        table = np.zeros((6, n), "<i4")
        lengths = self._lengths[int(samples[0]) % 1000 :][:n]
        table[0], table[1], table[2], table[4] = samples, lengths + 200, lengths, self._version
        return np.array((0, group, n, 1), "<i4").tobytes() + table.tobytes()

    def finished(self, timeout_s: float | None = None) -> list[RolloutChunk]:
        sizes = self._results.get(timeout=timeout_s)
        return [] if sizes is None else [decode_sizes(sizes, None)[1]]

    def close(self) -> None:
        self._results.put(None)

    def usage(self) -> RolloutUsage:
        with self._apparatus.not_counted():
            lengths = np.full(N_SEQUENCES // self._n_engines, 400, np.int32)
            engines = [EngineUsage(9.0, 0.1, np.eye(4), lengths) for _ in range(self._n_engines)]
        return RolloutUsage(engines, 0.0)

    # ScoringRole

    def submit(self, chunk: RolloutChunk) -> PendingScores:
        with self._apparatus.not_counted():
            n = chunk.n_sequences
            times = ScoreTimes(0.0, (1.0,) * n)
            summary = ScoreSummary(np.ones(n, np.float32), np.full(n, 1000, np.int64), times).encode()
        return PendingScores(chunk, None, summary)

    def collect(self, pending: Sequence[PendingScores]) -> list[ScoredChunk]:
        return [ScoreSummary.decode(p.summary).scored(p) for p in pending]

    def take_computations(self, *, wait: bool) -> dict[str, list[Computation]]:
        return {}

    # ActorRole, WeightSyncRole

    def train_step(self, batch: Sequence[ScoredChunk]) -> TrainStats:
        batch_args(batch, self._layouts, balance=True)
        n_tokens = sum(chunk.rollouts.n_response_tokens for chunk in batch)
        with self._apparatus.not_counted():
            self._steps()
        return TrainStats(1.0, n_tokens, 0.1, 1e-5)

    def memory_numbers(self) -> dict[str, float]:
        return {}

    def take_spans(self) -> list[ProcessSpans]:
        return []

    def push(self, policy_version: int) -> SyncReport:
        self._version = policy_version
        return SyncReport(8, 0)

    def load(self, folder: Path) -> None:
        raise AssertionError("the run starts anew")

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "rank_0").write_bytes(b"nothing")

    def save_finished(self, *, wait: bool, timeout_s: float | None = None) -> dict[str, FileDigest]:
        return {"rank_0": digest_bytes(b"nothing")}

    def export_hf(self, folder: Path) -> None:
        folder.mkdir()


def measure(n_steps: int, n_engines: int, tp: int, pp: int, root: Path) -> dict[str, Any]:
    settings = {
        "data.train_files": "[none]",
        "model.path": "none",
        "eval.metric": "none",
        "memory.timeline": "false",
        "trainer.device": "cpu",
        "trainer.run_dir": root / "run",
        "trainer.scheduler": "stream",
        "trainer.max_staleness": MAX_STALENESS,
        "trainer.global_batch_size": N_SEQUENCES // N,
        "trainer.save_every": 0,
        "trainer.spans_every": 0,
        "rollout.n": N,
        "trainer.total_steps": n_steps,
    }
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    prompts = [Prompt(i, np.ones(8, np.int32)) for i in range(N_SEQUENCES // N)]
    apparatus, process = Apparatus(), psutil.Process()
    used_s: list[float] = []  # CPU of the driver until each step
    rss: list[int] = []

    def step() -> None:
        used_s.append(time.process_time() - apparatus.cpu_s)
        rss.append(process.memory_info().rss)
        if len(used_s) % 50 == 0:
            print(f"step {len(used_s)}: {rss[-1] / 2**20:.0f} MiB", file=sys.stderr, flush=True)

    world = World(apparatus, n_engines, tp, pp, step)
    roles = Roles(actor=world, rollout=world, scoring=world, weight_sync=world)  # type: ignore[arg-type]
    folder = open_run_folder(config, {"name": "none", "fingerprint": "none"})
    Trainer(config, roles, prompts, [], folder, n_steps).fit()
    steps_s = np.diff(used_s)[_WARM_UP : -MAX_STALENESS - 1]
    third = len(rss) // 3
    before, after = (float(np.median(part)) for part in (rss[third : third + 20], rss[-20:]))
    per_step = float(steps_s.mean())
    return {
        "ranks": RANKS,
        "engines": n_engines,
        "groups": world.n_groups,
        "steps": n_steps,
        "sequences": N_SEQUENCES,
        "sequences_per_chunk": N_SEQUENCES * n_steps / world.n_chunks,
        "driver_cpu_s": per_step,
        "driver_share": per_step / STEP_S,
        "us_per_sequence": per_step / N_SEQUENCES * 1e6,
        "rss_mib": [round(value / 2**20, 1) for value in rss[:: max(1, n_steps // 50)]],
        "rss_growth": after / before - 1,
        "met": per_step / STEP_S < MOST_SHARE and after / before - 1 < MOST_GROWTH,
    }


def main() -> int:
    """Return 1 if the driver takes too much CPU, or its memory grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="default: %(default)s; 50 for a glance")
    parser.add_argument("--engines", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--tp", type=int, default=8, help="of the actor, default: %(default)s")
    parser.add_argument("--pp", type=int, default=4, help="of the actor: 512 / (tp pp) groups; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="bench_driver_scale.") as root:
        result = measure(args.steps, args.engines, args.tp, args.pp, Path(root))
    print(json.dumps({key: value for key, value in result.items() if key != "rss_mib"}, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())

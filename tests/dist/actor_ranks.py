"""Real ranks with real students, which start again for other settings: importing the libraries takes longest."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch.distributed as dist

from gkd.actor.pool import ActorPool
from gkd.actor.worker import ActorWorker
from gkd.cluster.calls import gather
from gkd.config.load import load_config
from gkd.data.chunks import chunk_sizes
from gkd.memory.states import KINDS
from gkd.types import ScoredChunk, TeacherScores
from gkd.weight_sync.buckets import plan_buckets
from teacher_server.wire.table import TopKTable
from tests.bench.student_case import sequences
from tests.device import kind
from tests.dist.helpers import destroy_groups
from tests.processes import wait_until

N_RANKS = 2


class Rank(ActorWorker):
    """A rank that reports what is on its device."""

    def start_again(self) -> None:
        """Be a new rank, with other settings, in a process that has imported the libraries."""
        if dist.is_initialized():
            destroy_groups()
            dist.destroy_process_group()
        super().__init__(self._rank)

    def device_bytes(self) -> dict[str, int]:
        return self._student.states.device_bytes()

    def wait_for(self, path: Path) -> None:
        """Be busy until the file exists."""
        wait_until(path.exists, 600.0, str(path))

    def limit_memory(self, n_bytes: int) -> None:
        """Limit the size of further files, also of those in memory; -1: no limit."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, -1))

    def poison(self) -> None:
        """Set all weights to NaN."""
        self._offload.reload_states()
        for tensor in self._student.live_states()["params"]:  # type: ignore[attr-defined]
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(float("nan"))
        self._offload.offload_states()


class Actor:
    """A pool whose ranks have a student."""

    def __init__(self, workers: list[Any], model: Path, *overrides: str) -> None:
        base = ["data.train_files=[a]", f"model.path={model}", "model.dtype=float32", "trainer.run_dir=none"]
        sizes = [f"trainer.n_gpus_per_node={N_RANKS}", "actor.micro_batch_size=4", "actor.optim.lr=0.01"]
        ray.get([worker.start_again.remote() for worker in workers])
        self.workers, self.config = workers, load_config(None, [*base, *sizes, *overrides])
        self.pool = ActorPool(self.workers, self.config)
        gather(self.pool.init_model(kind(), 9, 400), "init_model", 400)

    def device_bytes(self) -> dict[str, int]:
        """Return the bytes on the devices of all ranks, by kind."""
        ranks = ray.get([worker.device_bytes.remote() for worker in self.workers])
        return {kind: sum(rank[kind] for rank in ranks) for kind in KINDS}

    def is_offloaded(self) -> bool:
        return not any(self.device_bytes().values())

    def export(self, meta: dict[str, Any] | None = None) -> None:
        """Export as a weight sync does, without a receiver. Some ranks may not take part."""
        (ranks,) = self.pool.exporters()
        plan = plan_buckets(ray.get(ranks[0].export_plan.remote("merged")), 1 << 20)
        sent = {str(i): worker.send_weights.remote(plan, False, **(meta or {})) for i, worker in enumerate(ranks)}
        gather(sent, "export", 240)


def batch() -> list[ScoredChunk]:
    rollouts, scores = sequences("even")
    scores = [_descending(score) for score in scores]
    chunks = []
    for rank in range(N_RANKS):
        kept, scored = rollouts[rank:4:N_RANKS], scores[rank:4:N_RANKS]
        sizes = replace(chunk_sizes(rank, kept, 0), ref=ray.put(kept))
        chunks.append(ScoredChunk(sizes, ray.put(scored), 0.8, 0))
    return chunks


def _descending(scores: TeacherScores) -> TeacherScores:
    """Return the scores with the top-k sorted, as a teacher lists them."""
    order = np.argsort(-scores.topk.logprobs, axis=1)
    ids, logprobs = (np.take_along_axis(t, order, 1) for t in (scores.topk.ids, scores.topk.logprobs))
    return TeacherScores(TopKTable(ids, logprobs, scores.topk.tail))

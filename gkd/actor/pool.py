"""Driver side of the actor: call all ranks, each with the sequences of its data-parallel group; combine the results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gkd.actor import shared_folder
from gkd.actor.frozen.pools import PartialResults, call_scattered, data_parallel_groups
from gkd.actor.megatron.layout import layouts_of
from gkd.cluster.calls import Pending, fetch, gather
from gkd.config.schema import Config
from gkd.config.schema_rollout import IPC
from gkd.data.scatter import ChunkInputs, gather_results, scatter_to_groups
from gkd.errors import ConfigError, ModelError
from gkd.hf.model_dims import attention_length
from gkd.hf.model_folder import read_config_json
from gkd.log import get_logger
from gkd.memory.usage import merge
from gkd.spans import ProcessSpans
from gkd.text.comparison import SAME_TOKENS, Comparison
from gkd.types import FileDigest, PendingScores, ScoredChunk, TrainStats

log = get_logger("actor")


class ActorPool:
    """Implement `gkd.roles.ActorRole` over the pool's Ray actors, in rank order."""

    def __init__(self, workers: Sequence[Any], config: Config) -> None:
        self.workers = list(workers)
        self._config = config
        self._timeout_s = config.trainer.stage_timeout_s
        self._layouts = layouts_of(config.actor, len(workers))
        self.dp_size = self._layouts[0].dp
        self._in_step = config.actor.backend_name == "fsdp2" or config.actor.ep > 1  # collectives in each micro-batch
        self._spans: list[ProcessSpans] = []

    @cached_property
    def _attention_length(self) -> float:
        """See `attention_length`. Infinite, so that tokens count alone, for a model with other names of its sizes."""
        try:
            return attention_length(read_config_json(self._config.model.path, "model.path"))
        except (ConfigError, ModelError) as error:
            log.info("groups are balanced by tokens alone: %s", error)
            return math.inf

    def init_model(
        self, device: str, total_steps: int, timeout_s: float, comparison: Comparison = SAME_TOKENS
    ) -> dict[str, Any]:
        """Start `ActorWorker.init_model` on all ranks. Return the handles by rank's name, to be gathered.

        Args:
            timeout_s: for the rendezvous with rank 0.
        """
        root = {"actor rank 0": self.workers[0].rendezvous.remote()}
        address = gather(root, "actor rendezvous", timeout_s)["actor rank 0"]
        run_dir = Path(self._config.trainer.run_dir).absolute()
        return self._call("init_model", self._config, device, address, total_steps, run_dir, comparison)

    def init_teacher(self, timeout_s: float) -> None:
        """Build the local teacher on all ranks; blocks. Raises as `LocalTeacher`."""
        gather(self._call("init_teacher"), "init_teacher", timeout_s)

    def init_reference(self, timeout_s: float) -> None:
        """Build the reference on all ranks; blocks. Raises as `FrozenModel`."""
        gather(self._call("init_reference"), "init_reference", timeout_s)

    def check_run_dir(self, root: Path, timeout_s: float) -> None:
        """Check that all ranks, which may still be starting, share the run folder and can write to it.

        Raises ConfigError.
        """
        root = root.absolute()
        word = shared_folder.offer(root)
        try:
            nodes = gather(self._call("check_run_dir", root, word), "starting the processes", timeout_s)
            shared_folder.collect(root, word, nodes)
        finally:
            shared_folder.clear(root)

    def offload_states(self, include: Sequence[str] | None = None, *, blocking: bool = True) -> Pending:
        """See `MovableStates`; later calls of the ranks run after it. It, or the wait for it, raises ClusterError."""
        return self._move("offload_states", include, blocking)

    def reload_states(self, include: Sequence[str] | None = None, *, blocking: bool = True) -> Pending:
        """See `MovableStates`. Errors as for `offload_states`."""
        return self._move("reload_states", include, blocking)

    def accumulate(self, part: Sequence[ScoredChunk]) -> None:
        """See `ActorRole.accumulate`."""
        if not self._config.derived.early_parts:
            problem = "the loss needs the whole batch, or the actor's states are offloaded between two calls."
            fix = "train on whole batches, or without rewards, teacher.routes and offloading and by token."
            raise ConfigError("distill.normalize", self._config.distill.normalize, problem, fix)
        self._on_batch("accumulate", part)

    def train_step(self, batch: Sequence[ScoredChunk], meta: Mapping[str, Any] | None = None) -> TrainStats:
        """See `ActorRole.train_step`. Raises ValueError: `meta` has another key."""
        return self._on_batch("train_step", batch, **_options(meta))[0]

    def evaluate(
        self, batch: Sequence[ScoredChunk], *, keep_tokens: int = 0, meta: Mapping[str, Any] | None = None
    ) -> TrainStats:
        """See `ActorRole.evaluate`. Raises ValueError: `meta` has another key."""
        results = self._on_batch("evaluate", batch, keep_tokens=keep_tokens, **_options(meta))
        tokens = [record for result in results for record in result.tokens]  # each data-parallel group has its own
        return replace(results[0], tokens=sorted(tokens, key=lambda record: record.sample_index))

    def compute_logprobs(
        self,
        batch: Sequence[PendingScores | ScoredChunk],
        *,
        blocking: bool = True,
        meta: Mapping[str, Any] | None = None,
    ) -> Pending:
        """See `ActorRole.compute_logprobs`. The sequences are scattered over the data-parallel groups.

        Raises ValueError: `meta` has another key.
        """
        options = _options(meta, "disable_adapter")
        chunks = [chunk.rollouts for chunk in batch]
        groups = data_parallel_groups(len(self.workers), self._config)
        length = math.inf if self._in_step else self._attention_length
        calls, results = call_scattered(
            self.workers, "compute_logprobs", chunks, groups=groups, attention_length=length, **options
        )
        pending = Pending(calls, "compute_logprobs", self._timeout_s, finish=lambda _: list(map(_logprobs, results)))
        if blocking:
            pending.wait()
        return pending

    def save(self, folder: Path, *, blocking: bool = False) -> None:
        self._call_and_wait("save", folder.absolute(), blocking)

    def save_finished(self, *, wait: bool, timeout_s: float | None = None) -> dict[str, FileDigest] | None:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        results = gather(self._call("save_finished", wait), "save_finished", limit_s).values()
        if any(digests is None for digests in results):
            return None
        return {name: digest for digests in results for name, digest in digests.items()}

    def load(self, folder: Path) -> None:
        self._call_and_wait("load", folder.absolute())

    def export_hf(self, folder: Path) -> None:
        self._call_and_wait("export_hf", folder.absolute())

    def allocated_bytes(self) -> int:
        """Return the bytes that the rank with most of them has on its device, see `OffloadController`."""
        return max(gather(self._call("allocated_bytes"), "allocated_bytes", self._timeout_s).values())

    def memory_numbers(self) -> dict[str, float]:
        by_rank = gather(self._call("memory_numbers"), "memory_numbers", self._timeout_s).values()
        self._spans += [spans for _, spans in by_rank]
        return merge([numbers for numbers, _ in by_rank])

    def take_spans(self) -> list[ProcessSpans]:
        spans = self._spans
        self._spans = []
        return spans

    def exporters(self, device: str = "cpu") -> list[list[Any]]:
        """Return, by pipeline stage, the ranks that export its tensors together; the first of them sends.

        Megatron: see `ParallelLayout.exports`. fsdp2: all ranks, because each has a shard of every tensor. With CUDA
        IPC all ranks, each of which sends to the engine on its card.

        Args:
            device: "cpu" | "cuda".
        """
        if self._config.actor.backend.shards_every_tensor or self._config.transport(device) == IPC:
            return [self.workers]
        stages: list[list[Any]] = [[] for _ in range(self._config.actor.pp)]
        for worker, layout in zip(self.workers, self._layouts, strict=True):
            if layout.exports:
                stages[layout.pp_rank].append(worker)
        return stages

    def last_stage_ranks(self) -> list[int]:
        """Return the first rank of each data-parallel group's last pipeline stage, by data-parallel rank."""
        return [place.rank for place in self._layouts if place.is_last_stage and place.tp_rank == place.cp_rank == 0]

    def last_stage_nodes(self, timeout_s: float) -> list[str]:
        """Return the Ray ids of the nodes of `last_stage_ranks`."""
        refs = {f"actor rank {rank}": self.workers[rank].node_id.remote() for rank in self.last_stage_ranks()}
        return list(gather(refs, "node ids", timeout_s).values())

    def set_teacher_head(self, heads: Sequence[Any], timeout_s: float) -> None:
        """Send the teacher's LM head to the ranks that compute the loss; blocks.

        Args:
            heads: by data-parallel rank, a handle of [V, D] float32 on the host of that group's last stage.
        """
        refs = {
            f"actor rank {layout.rank}": worker.set_teacher_head.remote(heads[layout.dp_rank])
            for worker, layout in zip(self.workers, self._layouts, strict=True)
            if layout.is_last_stage
        }
        gather(refs, "set_teacher_head", timeout_s)

    def _move(self, method: str, include: Sequence[str] | None, blocking: bool) -> Pending:
        pending = Pending(self._call(method, include), method, self._timeout_s)
        if blocking:
            pending.wait()
        return pending

    def _on_batch(self, method: str, batch: Sequence[ScoredChunk], **options: Any) -> list[TrainStats]:
        """Call a method of all ranks on a batch. Return the results by rank; all have the same numbers."""
        groups = scatter_to_groups(batch, self.dp_size, self._attention_length, in_step=self._in_step)
        refs = {}
        for worker, layout in zip(self.workers, self._layouts, strict=True):
            inputs = ChunkInputs.of_parts(groups[layout.dp_rank], is_last_stage=layout.is_last_stage)
            refs[f"actor rank {layout.rank}"] = getattr(worker, method).remote(*inputs.to_args(), **options)
        return list(gather(refs, method, self._timeout_s).values())

    def _call_and_wait(self, method: str, *args: Any) -> None:
        gather(self._call(method, *args), method, self._timeout_s)

    def _call(self, method: str, *args: Any, **options: Any) -> dict[str, Any]:
        return {
            f"actor rank {rank}": getattr(worker, method).remote(*args, **options)
            for rank, worker in enumerate(self.workers)
        }


def _logprobs(chunk: PartialResults) -> list[np.ndarray]:
    """Fetch the logprobs of a chunk's sequences, in its order."""
    results = gather_results(chunk.sequence_indices, [fetch(ref, "logprobs") for ref in chunk.refs])
    return [logprobs for logprobs in results if logprobs is not None]


def _options(meta: Mapping[str, Any] | None, *further: str) -> dict[str, Any]:
    """Return the `meta` of a call as keyword arguments of the ranks' method.

    Args:
        further: keys that the call supports in addition to `is_offload_states`.

    Raises:
        ValueError: the call does not support a key.
    """
    options = dict(meta or {})
    supported = ("is_offload_states", *further)
    if unknown := sorted(set(options) - set(supported)):
        raise ValueError(f"meta has unknown keys {', '.join(unknown)}; this call supports {', '.join(supported)}")
    return {key: bool(value) for key, value in options.items()}

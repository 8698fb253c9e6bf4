"""The driver's side of the rollout pool: spread prompts over the engines, merge what they finish."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from gkd.cluster.calls import Pending, gather
from gkd.config.schema import Config
from gkd.data.chunks import CHUNK_SIZE, dataset_chunks
from gkd.data.prompt_codec import encode_prompts
from gkd.errors import ClusterError, RankTimeout
from gkd.handles import GreedyReport, RolloutChunk, RolloutUsage
from gkd.memory.timeline import merge
from gkd.rollout.sampling import Sampling
from gkd.rollout.stream import EngineStreams, next_chunk
from gkd.types import Prompt


class RolloutPool:
    """Implements `gkd.roles.RolloutRole` over the pool's Ray actors.

    The prompt at place i of a batch goes to data-parallel group i mod dp, whoever answers it; the j-th of those that
    the student answers to engine j mod engines. So a step's composition never depends on timing.
    """

    def __init__(self, workers: Sequence[Any], config: Config, dp_size: int) -> None:
        self.workers, self._config, self._dp_size = list(workers), config, dp_size
        self._eos_ids: frozenset[int] = frozenset()
        self._stream: EngineStreams | None = None
        self._generate_s = 0.0  # in `generate`, since `usage` was last called

    def init_model(self, device: str, eos_ids: Sequence[int]) -> dict[str, Any]:
        """Start building all engines; returns refs by name, to be gathered."""
        run_dir = Path(self._config.trainer.run_dir).absolute()
        self._eos_ids = frozenset(eos_ids)
        return {
            f"rollout engine {i}": worker.init_model.remote(self._config, device, list(eos_ids), run_dir)
            for i, worker in enumerate(self.workers)
        }

    def generate(
        self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int], n: int, temperature: float, seed: int
    ) -> Iterator[RolloutChunk]:
        """Chunks in order of completion, from all engines.

        Args:
            prompt_indices: index of each prompt in the whole batch.

        Raises:
            ClusterError: an engine died. RankTimeout: all were silent for trainer.stage_timeout_s.
        """
        config = self._config
        sampling = Sampling(n, temperature, config.rollout.top_p, config.data.max_response_length, seed)
        streams: dict[Any, str] = {}
        for engine, worker in enumerate(self.workers):
            mine = range(engine, len(prompts), len(self.workers))
            if mine:
                asked = encode_prompts([prompts[j] for j in mine], [prompt_indices[j] for j in mine])
                stream = worker.generate.options(num_returns="streaming").remote(
                    asked, self._dp_size, sampling, CHUNK_SIZE
                )
                streams[stream] = f"rollout engine {engine}"
        timeout_s = config.trainer.stage_timeout_s
        began = heard = time.monotonic()
        while streams:
            left_s = max(0.0, heard + timeout_s - time.monotonic())
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=left_s, fetch_local=False)
            if not ready:
                late = sorted(streams.values())
                raise RankTimeout(f"rollout: nothing finished for {timeout_s:.0f} s on: {', '.join(late)}", late)
            heard = time.monotonic()
            chunk = next_chunk(ready[0], f"generate on {streams[ready[0]]}", timeout_s)
            if chunk is None:
                del streams[ready[0]]
            else:
                yield chunk
        self._generate_s += time.monotonic() - began

    def open_stream(self, *, n: int, temperature: float, seed: int) -> EngineStreams:
        """Raises ClusterError: a stream is open already, or an engine died or did not answer in time."""
        if self._stream is not None and not self._stream.closed:
            raise ClusterError("a rollout stream is open, and the engines take one at a time. Fix: close it first")
        config = self._config
        sampling = Sampling(n, temperature, config.rollout.top_p, config.data.max_response_length, seed)
        self._stream = EngineStreams(self.workers, sampling, self._dp_size, config.trainer.stage_timeout_s)
        return self._stream

    def dataset(
        self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int], policy_version: int
    ) -> list[RolloutChunk]:
        """The dataset's responses as finished chunks; nothing is asked of an engine.

        Raises:
            DataError: a prompt was loaded without its response.
        """
        chunks = dataset_chunks(
            prompts,
            prompt_indices,
            n=self._config.rollout.n,
            dp_size=self._dp_size,
            chunk_size=CHUNK_SIZE,
            policy_version=policy_version,
            eos_ids=self._eos_ids,
        )
        return [dataclasses.replace(sizes, ref=ray.put(rollouts)) for rollouts, sizes in chunks]

    def greedy(self, prompts: Sequence[Prompt], *, n_samples: int) -> GreedyReport:
        """All engines side by side."""
        refs = {
            f"rollout engine {i}": worker.greedy.remote(
                list(prompts[i :: len(self.workers)]), self._config.eval.answer_marker, n_samples
            )
            for i, worker in enumerate(self.workers)
        }
        answered = gather(refs, "greedy evaluation", self._config.trainer.stage_timeout_s)
        samples = sorted((s for _, part in answered.values() for s in part), key=lambda s: s.prompt_id)
        accuracy = sum(n_correct for n_correct, _ in answered.values()) / len(prompts)
        return GreedyReport(accuracy, samples[:n_samples])

    def usage(self) -> RolloutUsage:
        """Raises ClusterError: an engine died."""
        refs = {f"rollout engine {i}": worker.usage.remote() for i, worker in enumerate(self.workers)}
        engines = gather(refs, "usage", self._config.trainer.stage_timeout_s)
        generate_s, self._generate_s = self._generate_s, 0.0
        found = list(engines.values())
        return RolloutUsage(found, generate_s, merge([engine.memory for engine in found]))

    def offload_states(
        self,
        include: Sequence[str] | None = None,
        level: int = 1,
        *,
        blocking: bool = True,
        non_blocking: bool = False,
    ) -> Pending:
        """Have all engines free their GPUs, side by side; see `RolloutWorker.offload_states`. Whatever is asked of an
        engine after this is done after it.

        Args:
            blocking: wait for all. Else the caller does, with the handle, which also brings an engine's error.
            non_blocking: the engines themselves return while copies are under way, see `RolloutWorker`.

        Raises:
            ClusterError: an engine refused, died or did not answer in time.
        """
        refs = [worker.offload_states.remote(include, level, non_blocking=non_blocking) for worker in self.workers]
        return self._moving(refs, "offload_states", blocking)

    def reload_states(
        self, include: Sequence[str] | None = None, *, blocking: bool = True, non_blocking: bool = False
    ) -> Pending:
        """The reverse."""
        refs = [worker.reload_states.remote(include, non_blocking=non_blocking) for worker in self.workers]
        return self._moving(refs, "reload_states", blocking)

    def settle_states(self) -> Pending:
        """Wait for what non-blocking moves have left under way. Raises ClusterError: one failed."""
        return self._moving([worker.settle_states.remote() for worker in self.workers], "settle_states", True)

    def _moving(self, refs: Sequence[Any], what: str, blocking: bool) -> Pending:
        named = {f"rollout engine {i}": ref for i, ref in enumerate(refs)}
        pending = Pending(named, what, self._config.trainer.stage_timeout_s)
        if blocking:
            pending.wait()
        return pending

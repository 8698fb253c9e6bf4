"""Driver side of the rollout pool: distribute prompts over the engines and merge their finished chunks."""

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

    Prompt i of a batch belongs to data-parallel group i mod dp. The j-th prompt of a `generate` call runs on engine
    j mod n_engines. The composition of a step therefore does not depend on timing.
    """

    def __init__(self, workers: Sequence[Any], config: Config, dp_size: int) -> None:
        self.workers, self._config, self._dp_size = list(workers), config, dp_size
        self._eos_ids: frozenset[int] = frozenset()
        self._stream: EngineStreams | None = None
        self._generate_s = 0.0  # spent in `generate` since the last `usage` call

    def init_model(self, device: str, eos_ids: Sequence[int]) -> dict[str, Any]:
        """Start building all engines; return their refs by name, to be gathered."""
        run_dir = Path(self._config.trainer.run_dir).absolute()
        self._eos_ids = frozenset(eos_ids)
        return {
            f"rollout engine {i}": worker.init_model.remote(self._config, device, list(eos_ids), run_dir)
            for i, worker in enumerate(self.workers)
        }

    def generate(
        self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int], n: int, temperature: float, seed: int
    ) -> Iterator[RolloutChunk]:
        """Yield chunks of all engines in order of completion.

        Args:
            prompt_indices: index of each prompt in the whole batch.

        Raises:
            ClusterError: an engine died.
            RankTimeout: no engine finished a chunk for trainer.stage_timeout_s.
        """
        config = self._config
        sampling = Sampling(n, temperature, config.rollout.top_p, config.data.max_response_length, seed)
        streams: dict[Any, str] = {}
        for engine, worker in enumerate(self.workers):
            mine = range(engine, len(prompts), len(self.workers))
            if mine:
                encoded = encode_prompts([prompts[j] for j in mine], [prompt_indices[j] for j in mine])
                stream = worker.generate.options(num_returns="streaming").remote(
                    encoded, self._dp_size, sampling, CHUNK_SIZE
                )
                streams[stream] = f"rollout engine {engine}"
        timeout_s = config.trainer.stage_timeout_s
        began_s = progress_s = time.monotonic()
        while streams:
            left_s = max(0.0, progress_s + timeout_s - time.monotonic())
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=left_s, fetch_local=False)
            if not ready:
                late = sorted(streams.values())
                raise RankTimeout(f"rollout: no chunk finished within {timeout_s:.0f} s on: {', '.join(late)}", late)
            progress_s = time.monotonic()
            chunk = next_chunk(ready[0], f"generate on {streams[ready[0]]}", timeout_s)
            if chunk is None:
                del streams[ready[0]]
            else:
                yield chunk
        self._generate_s += time.monotonic() - began_s

    def open_stream(self, *, n: int, temperature: float, seed: int) -> EngineStreams:
        """Open a stream on every engine. Raises ClusterError: a stream is open, or an engine died or timed out."""
        if self._stream is not None and not self._stream.closed:
            raise ClusterError("a rollout stream is already open. Fix: close it before opening another")
        config = self._config
        sampling = Sampling(n, temperature, config.rollout.top_p, config.data.max_response_length, seed)
        self._stream = EngineStreams(self.workers, sampling, self._dp_size, config.trainer.stage_timeout_s)
        return self._stream

    def dataset(
        self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int], policy_version: int
    ) -> list[RolloutChunk]:
        """Return the dataset's responses as finished chunks; uses no engine.

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
        """Evaluate greedily on all engines concurrently; see `RolloutWorker.greedy`."""
        refs = {
            f"rollout engine {i}": worker.greedy.remote(
                list(prompts[i :: len(self.workers)]), self._config.eval.answer_marker, n_samples
            )
            for i, worker in enumerate(self.workers)
        }
        results = gather(refs, "greedy evaluation", self._config.trainer.stage_timeout_s)
        samples = sorted((s for _, part in results.values() for s in part), key=lambda s: s.prompt_id)
        accuracy = sum(n_correct for n_correct, _ in results.values()) / len(prompts)
        return GreedyReport(accuracy, samples[:n_samples])

    def usage(self) -> RolloutUsage:
        """Return and reset the counters of all engines. Raises ClusterError: an engine died."""
        refs = {f"rollout engine {i}": worker.usage.remote() for i, worker in enumerate(self.workers)}
        engines = list(gather(refs, "usage", self._config.trainer.stage_timeout_s).values())
        generate_s, self._generate_s = self._generate_s, 0.0
        return RolloutUsage(engines, generate_s, merge([engine.memory for engine in engines]))

    def offload_states(
        self,
        include: Sequence[str] | None = None,
        level: int = 1,
        *,
        blocking: bool = True,
        non_blocking: bool = False,
    ) -> Pending:
        """Release the GPU memory of all engines concurrently; see `RolloutWorker.offload_states`.

        Calls on an engine made after this one run after it.

        Args:
            blocking: wait for all engines. Otherwise wait on the returned handle, which also raises their errors.
            non_blocking: the engines return while copies are in progress.

        Raises:
            ClusterError: an engine refused, died or timed out.
        """
        refs = [worker.offload_states.remote(include, level, non_blocking=non_blocking) for worker in self.workers]
        return self._pending(refs, "offload_states", blocking)

    def reload_states(
        self, include: Sequence[str] | None = None, *, blocking: bool = True, non_blocking: bool = False
    ) -> Pending:
        """Reload the states of all engines; arguments as for `offload_states`."""
        refs = [worker.reload_states.remote(include, non_blocking=non_blocking) for worker in self.workers]
        return self._pending(refs, "reload_states", blocking)

    def allocated_bytes(self) -> int:
        """Return the bytes of weights and KV cache on the GPUs of the engine with most of them, after pending moves."""
        return max(sum(held.values()) for held in self.settle_states().wait().values())

    def settle_states(self) -> Pending:
        """Wait for non-blocking moves in progress. Raises ClusterError: one failed."""
        return self._pending([worker.settle_states.remote() for worker in self.workers], "settle_states", True)

    def _pending(self, refs: Sequence[Any], call: str, blocking: bool) -> Pending:
        named = {f"rollout engine {i}": ref for i, ref in enumerate(refs)}
        pending = Pending(named, call, self._config.trainer.stage_timeout_s)
        if blocking:
            pending.wait()
        return pending

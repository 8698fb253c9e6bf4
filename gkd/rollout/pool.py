"""Driver side of the rollout pool: distribute prompts over the engines and merge their finished chunks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from gkd.cluster.calls import Pending
from gkd.config.schema import Config
from gkd.data.chunks import CHUNK_SIZE, dataset_chunks
from gkd.data.prompt_codec import encode_prompts
from gkd.errors import ClusterError, RankFailed, RankTimeout
from gkd.handles import GreedyReport, RolloutChunk, RolloutUsage, Sample
from gkd.memory.timeline import merge
from gkd.rollout.recovery import Engines
from gkd.rollout.sampling import Sampling
from gkd.rollout.stream import EngineStreams, name_of, next_chunk
from gkd.types import Prompt


@dataclass(frozen=True, slots=True)
class _Share:
    """What an engine generates in one call."""

    engine: int
    worker: Any
    prompts: Sequence[int]  # places in the batch


class RolloutPool:
    """Implements `gkd.roles.RolloutRole` over the pool's Ray actors.

    Prompt i of a batch belongs to data-parallel group i mod dp. The prompts of a `generate` call are dealt to the
    engines that are up; which one answers does not change the tokens.
    """

    def __init__(self, workers: Sequence[Any], config: Config, dp_size: int) -> None:
        self.workers, self._config, self._dp_size = list(workers), config, dp_size
        self.engines = Engines(self.workers, config.rollout)
        self._eos_ids: frozenset[int] = frozenset()
        self._stream: EngineStreams | None = None
        self._generate_s = 0.0  # spent in `generate` since the last `usage` call

    def init_model(self, device: str, eos_ids: Sequence[int]) -> dict[str, Any]:
        """Start building all engines; return their refs by name, to be gathered."""
        self._device, self._eos_ids = device, frozenset(eos_ids)
        return {name_of(i): self.build(worker) for i, worker in enumerate(self.workers)}

    def build(self, worker: Any) -> Any:
        """Start building the engine of a process as in `init_model`; return its ref."""
        run_dir = Path(self._config.trainer.run_dir).absolute()
        return worker.init_model.remote(self._config, self._device, sorted(self._eos_ids), run_dir)

    def generate(
        self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int], n: int, temperature: float, seed: int
    ) -> Iterator[RolloutChunk]:
        """Yield chunks of all engines in order of completion. What an engine has not returned before it dies, the
        engines that are up generate.

        Args:
            prompt_indices: index of each prompt in the whole batch.

        Raises:
            EngineFailed: an engine failed for good.
            RankTimeout: no engine finished a chunk for trainer.stage_timeout_s.
        """
        config = self._config
        sampling = Sampling(n, temperature, config.rollout.top_p, config.data.max_response_length, seed)
        places = {index: j for j, index in enumerate(prompt_indices)}
        missing = {j: n for j in range(len(prompts))}  # prompts with samples that are not returned, and their number
        returned: set[int] = set()  # sample indices
        streams: dict[Any, _Share] = {}

        def start(left: Sequence[int]) -> None:
            """Divide prompts among the engines that are up."""
            members = self.engines.wait_up(config.trainer.init_timeout_s)
            for place, (engine, worker) in enumerate(members.items()):
                mine = left[place :: len(members)]
                if mine:
                    indices = [prompt_indices[j] for j in mine]
                    skip = [s for i in indices for s in range(i * n, (i + 1) * n) if s in returned]
                    stream = worker.generate.options(num_returns="streaming").remote(
                        encode_prompts([prompts[j] for j in mine], indices), self._dp_size, sampling, CHUNK_SIZE, skip
                    )
                    streams[stream] = _Share(engine, worker, mine)

        timeout_s = config.trainer.stage_timeout_s
        began_s = progress_s = time.monotonic()
        start(list(missing))
        while streams:
            left_s = max(0.0, progress_s + timeout_s - time.monotonic())
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=left_s, fetch_local=False)
            if not ready:
                late = sorted(name_of(share.engine) for share in streams.values())
                raise RankTimeout(f"rollout: no chunk finished within {timeout_s:.0f} s on: {', '.join(late)}", late)
            progress_s = time.monotonic()
            share = streams[ready[0]]
            try:
                chunk = next_chunk(ready[0], f"generate on {name_of(share.engine)}", timeout_s)
            except RankFailed as error:
                del streams[ready[0]]
                left = [j for j in share.prompts if missing.get(j)]
                self.engines.lost(share.engine, share.worker, error, n_prompts=len(left))
                if left:
                    start(left)
                progress_s = time.monotonic()
                continue
            if chunk is None:
                del streams[ready[0]]
                continue
            for sample_index in chunk.sample_index.tolist():
                returned.add(sample_index)
                missing[places[sample_index // n]] -= 1
            yield chunk
        self._generate_s += time.monotonic() - began_s

    def open_stream(self, *, n: int, temperature: float, seed: int) -> EngineStreams:
        """Open a stream on every engine. Raises ClusterError: a stream is open, or an engine died or timed out."""
        if self._stream is not None and not self._stream.closed:
            raise ClusterError("a rollout stream is already open. Fix: close it before opening another")
        config = self._config
        sampling = Sampling(n, temperature, config.rollout.top_p, config.data.max_response_length, seed)
        self._stream = EngineStreams(self.engines, sampling, self._dp_size, config.trainer.stage_timeout_s)
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
        """Evaluate greedily on all engines concurrently; see `RolloutWorker.greedy`.

        Raises:
            EngineFailed: an engine failed for good.
        """
        marker = self._config.eval.answer_marker
        n_correct, samples, left = 0, list[Sample](), list(prompts)
        while left:
            members = self.engines.wait_up(self._config.trainer.init_timeout_s)
            shares = {index: left[place :: len(members)] for place, index in enumerate(members)}
            calls = {i: worker.greedy.remote(shares[i], marker, n_samples) for i, worker in members.items()}
            left = []
            for i, result in self._settled(members, calls, "greedy evaluation").items():
                if result is None:
                    left += shares[i]
                else:
                    n_correct += result[0]
                    samples += result[1]
        return GreedyReport(n_correct / len(prompts), sorted(samples, key=lambda s: s.prompt_id)[:n_samples])

    def usage(self) -> RolloutUsage:
        """Return and reset the counters of all engines that are up."""
        members = self.engines.up()
        calls = {index: worker.usage.remote() for index, worker in members.items()}
        engines = [usage for usage in self._settled(members, calls, "usage").values() if usage is not None]
        generate_s, self._generate_s = self._generate_s, 0.0
        memory = merge([engine.memory for engine in engines])
        return RolloutUsage(engines, generate_s, memory, self.engines.take_restarts())

    def offload_states(
        self,
        include: Sequence[str] | None = None,
        level: int = 1,
        *,
        blocking: bool = True,
        non_blocking: bool = False,
    ) -> Pending:
        """Release the GPU memory of all engines concurrently; see `RolloutWorker.offload_states`.

        Calls on an engine made after this one run after it. Until `reload_states` no engine is restarted.

        Args:
            blocking: wait for all engines. Otherwise wait on the returned handle, which also raises their errors.
            non_blocking: the engines return while copies are in progress.

        Raises:
            ClusterError: an engine refused or timed out.
        """
        self.engines.hold()
        return self._pending(
            lambda worker: worker.offload_states.remote(include, level, non_blocking=non_blocking),
            "offload_states",
            blocking,
        )

    def reload_states(
        self, include: Sequence[str] | None = None, *, blocking: bool = True, non_blocking: bool = False
    ) -> Pending:
        """Reload the states of all engines; arguments as for `offload_states`."""
        self.engines.release()
        return self._pending(
            lambda worker: worker.reload_states.remote(include, non_blocking=non_blocking), "reload_states", blocking
        )

    def allocated_bytes(self) -> int:
        """Return the bytes of weights and KV cache on the GPUs of the engine with most of them, after pending moves."""
        return max(sum(held.values()) for held in self.settle_states().wait().values())

    def settle_states(self) -> Pending:
        """Wait for non-blocking moves in progress. Raises ClusterError: one failed."""
        return self._pending(lambda worker: worker.settle_states.remote(), "settle_states", True)

    def _pending(self, start: Callable[[Any], Any], call: str, blocking: bool) -> Pending:
        members = self.engines.up()
        refs = {name_of(i): start(worker) for i, worker in members.items()}
        pending = Pending(refs, call, self._config.trainer.stage_timeout_s, partial(self._report, members))
        if blocking:
            pending.wait()
        return pending

    def _settled(self, members: Mapping[int, Any], calls: Mapping[int, Any], what: str) -> dict[int, Any]:
        """Wait for a call on each of these engines; the result of one that failed is None."""
        refs = {name_of(i): ref for i, ref in calls.items()}
        results = Pending(refs, what, self._config.trainer.stage_timeout_s, partial(self._report, members)).wait()
        return {i: results.get(name_of(i)) for i in calls}

    def _report(self, members: Mapping[int, Any], failed: Mapping[str, RankFailed]) -> None:
        for i, worker in members.items():
            if name_of(i) in failed:
                self.engines.lost(i, worker, failed[name_of(i)])

"""Driver side of the rollout pool: distribute prompts over the engines and merge their finished chunks."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

from gkd.cluster.calls import Pending, gather
from gkd.config.schema import Config
from gkd.data.chunks import CHUNK_SIZE, ColumnList, dataset_chunks
from gkd.environment.worker import Start
from gkd.errors import ClusterError, RankFailed, RankTimeout
from gkd.memory.usage import merge
from gkd.rollout.driver.dispatcher import Dispatcher, JobStream, name_of
from gkd.rollout.driver.recovery import Engines
from gkd.rollout.messages import Sampling
from gkd.types import GreedyReport, Prompt, ResponseLimits, RolloutChunk, RolloutUsage, Sample
from gkd.user_code import search_path

_CLOSE_S = 5.0  # an engine replies within milliseconds, unless its process hangs or is being created


class RolloutPool:
    """Implements `gkd.roles.RolloutRole` over the pool's Ray actors.

    Prompt i of a batch belongs to data-parallel group i mod dp. The engine that is free first gets the next prompt;
    which one answers does not change the tokens.
    """

    def __init__(self, workers: Sequence[Any], config: Config, dp_size: int) -> None:
        self.workers = list(workers)
        self._config = config
        self._dp_size = dp_size
        self.engines = Engines(self.workers, config.rollout)
        self._eos_ids: frozenset[int] = frozenset()
        self._dispatcher = Dispatcher(self.engines, config, dp_size)
        self._generating = threading.Lock()  # one batch at a time
        self._stream: JobStream | None = None

    def init_model(self, device: str, eos_ids: Sequence[int], *, sleeps: bool = False) -> dict[str, Any]:
        """Start building all engines; return their refs by name, to be gathered.

        Args:
            sleeps: let `offload_states` release the engines' memory, which it does with trainer.colocate in any case.
        """
        self._device = device
        self._eos_ids = frozenset(eos_ids)
        self._sleeps = sleeps or self._config.trainer.colocate
        return {name_of(i): self.build(worker) for i, worker in enumerate(self.workers)}

    def build(self, worker: Any) -> Any:
        """Start building the engine of a process as in `init_model`; return its ref."""
        run_dir = Path(self._config.trainer.run_dir).absolute()
        path = self._config.rollout.environment
        environment = Start(path, search_path()) if path else None
        arguments = self._config, self._device, sorted(self._eos_ids), run_dir, self._sleeps, environment
        return worker.init_model.remote(*arguments)

    def close(self) -> None:
        """End all jobs, and remove the files of vLLM on all hosts, except files of dead engines.

        Call it before the engines are killed. Raises RankTimeout: an engine did not reply in time.
        """
        self._dispatcher.close()
        calls = {name_of(i): worker.close.remote() for i, worker in self.engines.up().items()}
        gather(calls, "removing the files of vLLM", _CLOSE_S, failed={})

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        prompt_indices: Sequence[int],
        n: int,
        temperature: float,
        seed: int,
        limits: ResponseLimits | None = None,
    ) -> Iterator[RolloutChunk]:
        """Yield chunks of all engines in order of completion. What an engine has not returned before it dies, the
        engines that are up generate.

        Args:
            prompt_indices: index of each prompt in the whole batch.
            limits: None: those of the settings.

        Raises:
            EngineFailed: an engine failed for good.
            RankTimeout: no engine finished a chunk for trainer.stage_timeout_s.
        """
        config = self._config
        with self._generating:
            job = self._dispatcher.start(self._sampling(n, temperature, seed, limits), lingers=False, first=True)
            try:
                job.admit(prompts, prompt_indices=prompt_indices)
                n_left = len(prompts) * n
                while n_left:
                    chunks = job.finished(config.trainer.stage_timeout_s)
                    if not chunks and self._dispatcher.is_any_open():
                        limit_s = config.trainer.stage_timeout_s
                        late = self._dispatcher.busy()
                        text = f"rollout: no chunk finished within {limit_s:.0f} s on: {', '.join(late)}"
                        raise RankTimeout(text, late)
                    if not chunks:
                        self.engines.wait_up(config.trainer.init_timeout_s)
                    n_left -= sum(chunk.n_sequences for chunk in chunks)
                    if not n_left:
                        job.close()  # before the last chunk is used: an engine with an open stream cannot sleep
                    yield from chunks
            finally:
                job.close()

    def up(self) -> list[Any]:
        """Return the handles of all engines that are up; block until there is one. Raises RankTimeout."""
        return list(self.engines.wait_up(self._config.trainer.init_timeout_s).values())

    def open_stream(self, *, n: int, temperature: float, seed: int) -> JobStream:
        """Open a stream on every engine. Raises ClusterError: a stream is open, or an engine timed out."""
        if self._stream is not None and not self._stream.closed:
            raise ClusterError("a rollout stream is already open. Fix: close it before opening another")
        self._stream = self._dispatcher.start(self._sampling(n, temperature, seed), lingers=True)
        return self._stream

    def _sampling(self, n: int, temperature: float, seed: int, limits: ResponseLimits | None = None) -> Sampling:
        rollout = self._config.rollout
        limits = limits or ResponseLimits(self._config.data.max_response_length, rollout.max_turns)
        return Sampling(
            n,
            temperature,
            rollout.top_p,
            limits.tokens,
            seed,
            self._config.derived.n_student_ids,
            rollout.top_k,
            rollout.min_p,
            limits.turns,
        )

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
        return [dataclasses.replace(sizes, ref=ray.put(ColumnList(rollouts))) for rollouts, sizes in chunks]

    def greedy(self, prompts: Sequence[Prompt], *, n_samples: int) -> GreedyReport:
        """Evaluate greedily on all engines concurrently; see `RolloutWorker.greedy`.

        Raises:
            EngineFailed: an engine failed for good.
        """
        marker = self._config.eval.answer_marker
        n_correct = Counter[int]()
        samples = list[Sample]()
        left = list(range(len(prompts)))
        while left:
            members = self.engines.wait_up(self._config.trainer.init_timeout_s)
            shares = {index: left[place :: len(members)] for place, index in enumerate(members)}
            calls = {
                i: worker.greedy.remote([prompts[position] for position in shares[i]], shares[i], marker, n_samples)
                for i, worker in members.items()
            }
            left = []
            for i, result in self._settled(members, calls, "greedy evaluation").items():
                if result is None:
                    left += shares[i]
                else:
                    n_correct += result[0]
                    samples += result[1]
        by_route = {route: n_correct[route] / n for route, n in Counter(prompt.route for prompt in prompts).items()}
        first = sorted(samples, key=lambda s: s.prompt_id)[:n_samples]
        return GreedyReport(n_correct.total() / len(prompts), first, by_route)

    def texts(self, chunks: Sequence[RolloutChunk], *, n: int, n_samples: int) -> list[Sample]:
        """Return one response to each of the first `n_samples` prompts of finished chunks as text; see `RolloutRole`.

        Raises:
            EngineFailed: an engine failed for good.
        """
        index = np.concatenate([chunk.sample_index for chunk in chunks])
        last = np.sort(index[index % n == 0])[:n_samples][-1:]  # the first sample of each prompt
        wanted = [np.flatnonzero((chunk.sample_index % n == 0) & (chunk.sample_index <= last)) for chunk in chunks]
        used = [(chunk, indices) for chunk, indices in zip(chunks, wanted, strict=True) if len(indices)]
        positions = [indices if c.sequence_indices is None else c.sequence_indices[indices] for c, indices in used]
        while True:
            i, worker = next(iter(self.engines.wait_up(self._config.trainer.init_timeout_s).items()))
            call = worker.texts.remote([rows.tolist() for rows in positions], *(chunk.ref for chunk, _ in used))
            samples: list[Sample] | None = self._settled({i: worker}, {i: call}, "decoding responses")[i]
            if samples is not None:
                return sorted(samples, key=lambda sample: sample.prompt_id)

    def usage(self) -> RolloutUsage:
        """Return and reset the counters of all engines that are up."""
        members = self.engines.up()
        calls = {index: worker.usage.remote() for index, worker in members.items()}
        engines = [usage for usage in self._settled(members, calls, "usage").values() if usage is not None]
        return RolloutUsage(engines, merge([engine.memory for engine in engines]), self.engines.take_restarts())

    def offload_states(self, include: Sequence[str] | None = None, level: int = 1, *, blocking: bool = True) -> Pending:
        """See `RolloutRole.offload_states`. Until `reload_states` no engine is restarted.

        Calls on an engine made after this one run after it. It, or the wait for it, raises ClusterError.
        """
        self.engines.hold()
        return self._pending(lambda worker: worker.offload_states.remote(include, level), "offload_states", blocking)

    def reload_states(self, include: Sequence[str] | None = None, *, blocking: bool = True) -> Pending:
        """Reload the states of all engines; arguments as for `offload_states`."""
        self.engines.release()
        return self._pending(lambda worker: worker.reload_states.remote(include), "reload_states", blocking)

    def allocated_bytes(self) -> int:
        """Return the bytes of weights and KV cache on the GPUs of the engine with most of them, after pending moves."""
        state_bytes = self._pending(lambda worker: worker.state_bytes.remote(), "state_bytes", True).wait()
        return max(sum(held.values()) for held in state_bytes.values())

    def _pending(self, start: Callable[[Any], Any], call: str, blocking: bool) -> Pending:
        members = self.engines.up()
        refs = {name_of(i): start(worker) for i, worker in members.items()}
        pending = Pending(refs, call, self._config.trainer.stage_timeout_s, on_failure=partial(self._report, members))
        if blocking:
            pending.wait()
        return pending

    def _settled(self, members: Mapping[int, Any], calls: Mapping[int, Any], what: str) -> dict[int, Any]:
        """Wait for a call on each of these engines; the result of one that failed is None."""
        refs = {name_of(i): ref for i, ref in calls.items()}
        results = Pending(
            refs, what, self._config.trainer.stage_timeout_s, on_failure=partial(self._report, members)
        ).wait()
        return {i: results.get(name_of(i)) for i in calls}

    def _report(self, members: Mapping[int, Any], failed: Mapping[str, RankFailed]) -> None:
        for i, worker in members.items():
            if name_of(i) in failed:
                self.engines.lost(i, worker, failed[name_of(i)])

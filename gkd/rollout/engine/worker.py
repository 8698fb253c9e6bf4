"""Ray actor of one rollout engine. Finished sequences are returned in chunks, each for one data-parallel group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import ray
import torch

from gkd.cluster.gpu_table import RankPlacement
from gkd.cluster.startup import WATCH, sort_visible_gpus, this_placement
from gkd.config.schema import Config
from gkd.data.answers import as_text, greedy_sample
from gkd.data.chat_delta import ChatDelta
from gkd.data.chunks import ColumnList, chunk_sizes, encode_sizes
from gkd.data.prompts import load_tokenizer
from gkd.data.scatter import map_selected
from gkd.environment.calls import written_calls
from gkd.environment.pool import Environments
from gkd.environment.worker import Start
from gkd.errors import ClusterError
from gkd.hf.hub import with_local_copies
from gkd.log import get_logger
from gkd.memory.offload_manager import GIB
from gkd.memory.oom import diagnosed
from gkd.memory.remedies import advice
from gkd.rollout.engine.loop import Coalescer, EngineLoop
from gkd.rollout.messages import Job, Pulse, Sampling, decode_prompts
from gkd.rollout.vllm.engine import RolloutEngine
from gkd.rollout.vllm.self_scoring import self_scores
from gkd.rollout.vllm.sleep_state import STATES, WEIGHTS, tags_of
from gkd.rollout.vllm.start import ENGINE_PHASES, engine_folder, link_shared_memory, remove_files
from gkd.rollout.vllm.turns import Turns
from gkd.spans import Phase, Progress, SpanRecorder
from gkd.types import EngineUsage, Prompt, Rollout, Sample
from gkd.weight_sync.buckets import Bucket, Content
from gkd.weight_sync.group import GroupSpec

T = TypeVar("T")

# Ray concurrency groups: methods of each group run concurrently with all other methods. `stream` runs as long as the
# stream is open, and `admit` is called while the main thread may be busy with a `greedy`.
STREAM = "stream"
ADMIT = "admit"
CONCURRENCY_GROUPS = (STREAM, ADMIT, WATCH)


class RolloutWorker:
    """One rollout engine. Ray runs all methods outside of `CONCURRENCY_GROUPS` in one thread, one at a time.

    While a stream is open, only the `stream` thread uses the engine and executes the other methods' calls. Methods that
    need offloaded states reload them first and leave them on the GPU. `rank` is the index of the engine in the pool.
    """

    def __init__(self, rank: int) -> None:
        sort_visible_gpus()
        self._rank = rank
        self._log = get_logger(f"rollout.{rank}")
        self._spans = SpanRecorder(f"engine {rank}", Phase.STARTED)
        self._loop: EngineLoop | None = None  # loop of the open stream
        self._session = 0  # number of the open stream's session
        self._peaks: dict[str, float] = {}  # metric name -> peak since the last `usage` call

    def placement(self, ask_driver: bool) -> RankPlacement:
        return this_placement("rollout", self._rank, ask_driver=ask_driver)

    @ray.method(concurrency_group=WATCH)
    def progress(self) -> Progress:
        """Return the current phase; during `init_model`, vLLM's start-up phase."""
        return self._spans.progress(ENGINE_PHASES)

    @ray.method(concurrency_group=WATCH)
    def pulse(self) -> Pulse:
        """Return a sign of life for `EngineWatch`; the engine is built."""
        phase = self._spans.progress().phase
        engine = self._engine
        # An engine whose sequences all wait for their environments makes no pass, and does not hang.
        is_working = phase is Phase.OPEN_STREAM or (phase is Phase.READY and engine.n_generating and engine.has_weights)
        return Pulse(engine.n_passes, not is_working)

    @ray.method(concurrency_group=WATCH)
    def close(self) -> None:
        """Remove the files of vLLM, also while it starts, generates or hangs. The process is killed next."""
        link_shared_memory(engine_folder())
        remove_files(engine_folder())

    def init_model(
        self,
        config: Config,
        device: str,
        eos_ids: Sequence[int],
        run_dir: Path,
        sleeps: bool,
        environment: Start | None = None,
    ) -> None:
        """Build the engine; blocks until it is ready.

        Args:
            run_dir: trainer.run_dir as an absolute path on the driver.
            sleeps: the engine can release its memory between two calls.
            environment: the class of rollout.environment, and where its module is.

        Raises:
            EnvironmentError: the class cannot be imported on this host.
        """
        self._log.info(self.placement(ask_driver=False).line())
        self._spans.enter("fetching the model")
        config = with_local_copies(config, ("model.path",))
        self._set_up(config, torch.device(device, 0) if device == "cuda" else torch.device("cpu"), run_dir)
        remove_files(engine_folder())  # left by a process of this slot that was killed
        self._tokenizer: Any = load_tokenizer(
            config.model.path, "model.path", trust_remote_code=config.model.trust_remote_code
        )
        turns = None if environment is None else self._start_environments(config, environment, eos_ids)
        self._spans.enter("starting vLLM")
        derived = config.derived
        with self._diagnosed(Phase.BUILD_ENGINE):
            self._engine = RolloutEngine(
                config.model.path,
                config.rollout,
                dtype=config.model.dtype,
                max_model_len=derived.max_engine_length,
                device=device,
                eos_ids=eos_ids,
                n_vocab=config.model.n_vocab,
                trust_remote_code=config.model.trust_remote_code,
                enable_sleep_mode=sleeps,
                lora=config.actor.lora if derived.engine_adapter_rank else None,
                turns=turns,
                spans=self._spans,
                vision=derived.vision,
            )
            if config.weight_sync.verify != "never":
                self._engine.keep_digests()
        self._spans.enter(Phase.READY)
        self._log.info("engine ready")

    def _start_environments(self, config: Config, start: Start, eos_ids: Sequence[int]) -> Turns:
        self._spans.enter("starting the environments")
        rollout = config.rollout
        variables = config.data.chat_template_kwargs
        setting = "rollout.environment", rollout.environment
        start = msgspec.structs.replace(start, written=written_calls(self._tokenizer, variables))
        environments = Environments(start, rollout.environment_workers, rollout.environment_timeout_s)
        environments.wait_ready(config.trainer.init_timeout_s)
        delta = ChatDelta(self._tokenizer, variables, eos_ids, environments.tools, setting=setting)
        return Turns(environments, delta)

    def _set_up(self, config: Config, device: torch.device, run_dir: Path) -> None:
        self._config = config
        self._device = device
        self._run_dir = run_dir

    def greedy(
        self, prompts: Sequence[Prompt], prompt_indices: Sequence[int], marker: str, n_samples: int
    ) -> tuple[Counter[int], list[Sample]]:
        """Return the number of greedy exact matches by route, without truncated ones, and some responses.

        Args:
            prompt_indices: index of each prompt in the whole evaluation, from which environments get their seeds.
            n_samples: the responses to the prompts in front of this index are returned.
        """
        max_tokens = self._config.data.max_response_length
        max_turns = self._config.rollout.max_turns
        sampling = Sampling(n=1, temperature=0.0, top_p=1.0, max_tokens=max_tokens, seed=0, max_turns=max_turns)
        n_correct = Counter[int]()
        samples: dict[int, Sample] = {}
        answers = {i: prompt.answer or "" for i, prompt in zip(prompt_indices, prompts, strict=True)}
        for rollout in self._generate(prompts, sampling, prompt_indices):
            index = rollout.sample_index
            sample = greedy_sample(self._tokenizer, rollout, answers[index], marker)
            n_correct[rollout.route] += bool(sample.correct)
            if index < n_samples:
                samples[index] = sample
        return n_correct, [samples[index] for index in sorted(samples)]

    def texts(self, positions: Sequence[Sequence[int]], *chunks: Sequence[Rollout]) -> list[Sample]:
        """Return the sequences at these positions of each chunk as text."""
        return [
            as_text(self._tokenizer, chunk[i]) for chunk, chosen in zip(chunks, positions, strict=True) for i in chosen
        ]

    def score(self, sequence_indices: Sequence[bytes | None], *chunks: list[Rollout]) -> Any:
        """Compute the scores of this engine's sequences, as their teacher; no stream may be open.

        Args:
            sequence_indices: of each chunk, the sequences scored by this engine, see `gkd.data.scatter`.

        Returns:
            None, and then for each chunk a list of `TeacherScores`; without chunks None alone. One object each.

        Raises:
            ClusterError, TeacherError: see `self_scores`.
        """
        self._ensure_awake()
        signals = self._config.derived.signals
        topk = self._config.teacher.topk
        with self._spans.span(Phase.SCORE), self._diagnosed(Phase.SCORE):
            compute = partial(self_scores, self._engine, signals=signals, topk=topk)
            scores = map_selected(sequence_indices, chunks, compute)
        return (None, *scores) if scores else None

    def open_stream(self, session: int, n_groups: int, chunk_size: int) -> None:
        """Reserve the engine for a following call of `stream`.

        Args:
            session: number of this stream; calls of `admit` for another one have no effect.
            n_groups, chunk_size: see `Coalescer`.

        Raises:
            ClusterError: a stream is open.
        """
        if self._loop is not None:
            raise ClusterError(f"rollout engine {self._rank} already has an open stream. Fix: close it first")
        self._ensure_awake()
        with self._spans.span(Phase.OPEN_STREAM):
            self._engine.synchronize()
        # A step may wait for sequences of this age. With a bound of 1 too many are of age 1 to send them early.
        late_age = max(2, self._config.trainer.staleness_bound)
        chunks = Coalescer(n_groups, chunk_size, late_age, whole=bool(self._config.derived.groups))
        max_running = self._config.rollout.sequence_limit
        self._session = session  # before the loop exists: no late prompt of the last stream gets into it
        self._loop = EngineLoop(self._engine, max_running, chunks, partial(self._diagnosed, Phase.GENERATE))

    @ray.method(concurrency_group=STREAM)
    def stream(self) -> Iterator[list[Rollout] | bytes]:
        """Run the stream until `close_stream`. Yields two objects per chunk of finished sequences.

        The rollouts, which the driver never fetches, and their encoded sizes. (A handle inside the sizes would save an
        object, but Ray 2.60 occasionally freed objects whose handle was nested in a streamed item. The driver owns
        streamed items themselves.)
        """
        if self._loop is None:
            raise ClusterError(f"rollout engine {self._rank} has no open stream")
        for job, group, rollouts in self._loop.run():
            yield ColumnList(rollouts)
            yield encode_sizes(chunk_sizes(group, rollouts), job)

    @ray.method(concurrency_group=ADMIT)
    def admit(self, session: int, job: Job, encoded_prompts: bytes, first: bool) -> None:
        """Append prompts (see `encode_prompts`) to the open stream; does not wait for them.

        The caller does not read this call's result: `stream` raises the error of a prompt that the engine refuses, and
        a stream that has ended needs no prompts.
        """
        if (loop := self._loop) is not None and session == self._session:
            with suppress(ClusterError):
                loop.admit(job, *decode_prompts(encoded_prompts), first=first)

    @ray.method(concurrency_group=ADMIT)
    def waiting(self, session: int, job_id: int) -> bytes:
        """Return the indices of a job's prompts, of earlier calls of `admit`, that have not started: bytes of int32."""
        loop = self._loop
        indices = loop.waiting(job_id) if loop is not None and session == self._session else []
        return np.array(indices, np.int32).tobytes()

    def close_stream(self) -> None:
        """Stop the stream and abort unfinished sequences. Idempotent. After an error the engine is unusable."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None
            self._record(Phase.GENERATE)

    def join_groups(self, specs: list[GroupSpec]) -> None:
        with self._spans.span(Phase.JOIN):
            self._on_engine(lambda: self._engine.join_groups(specs))

    def receive(self, plans: list[list[Bucket]], policy_version: int, content: Content = "merged") -> int:
        """Load one version of the weights or adapters; see `RolloutEngine.receive`."""

        def receive() -> int:
            with self._diagnosed(Phase.RECEIVE):
                n_bytes = self._engine.receive(plans, policy_version, adapters=content == "adapters")
            self._record(Phase.RECEIVE)
            return n_bytes

        with self._spans.span(Phase.RECEIVE):
            self._ensure_awake([WEIGHTS])
            return self._on_engine(receive)  # after an error the engine generates nothing until the next one succeeds

    def digests(self) -> dict[str, str]:
        self._ensure_awake([WEIGHTS])
        return self._on_engine(self._engine.digests)

    def offload_states(self, include: Sequence[str] | None = None, level: int = 1) -> dict[str, int]:
        """Release the GPU memory of these states. Idempotent.

        Args:
            include: "params", "kv_cache"; None = both.
            level: 1 = copy the parameters to host memory | 2 = discard them; the next `receive` must follow.

        Returns:
            state -> bytes left on the engine's GPUs.

        Raises:
            ClusterError, ConfigError: a stream is open, or the engine cannot sleep (see `RolloutEngine.sleep`).
        """
        if self._loop is not None:
            raise ClusterError(
                f"rollout engine {self._rank} has an open stream, which may use its memory at any time. "
                "Fix: close the stream before offload_states"
            )
        tags = tags_of(include)
        with self._spans.span(Phase.OFFLOAD):
            with self._diagnosed(Phase.OFFLOAD):
                self._engine.sleep(level, tags)
            self._record(Phase.OFFLOAD)
            return self._state_bytes()

    def reload_states(self, include: Sequence[str] | None = None) -> dict[str, int]:
        """Allocate the GPU memory again. Idempotent. Arguments and result as for `offload_states`."""
        tags = tags_of(include)
        if self._loop is None:
            with self._spans.span(Phase.ONLOAD):
                self._ensure_awake(tags)
        return self.state_bytes()

    def state_bytes(self) -> dict[str, int]:
        """Return state -> bytes on the engine's GPUs."""
        return self._on_engine(self._state_bytes)

    def _state_bytes(self) -> dict[str, int]:
        held = self._engine.memory_bytes()
        return {state: held[tag] for state, tag in STATES.items()}

    def _record(self, phase: Phase) -> None:
        """Record the memory held at the end of a phase."""
        for name, n_bytes in (self._state_bytes() | self._engine.process_memory()).items():
            metric = f"memory/{phase.metric}/rollout_{name}_gib"
            self._peaks[metric] = max(n_bytes / GIB, self._peaks.get(metric, 0.0))

    def usage(self) -> EngineUsage:
        """Return and reset the engine's counters and spans, and its memory after each phase."""
        peaks = self._peaks
        self._peaks = {}
        return replace(self._engine.usage(), memory=peaks, spans=self._spans.take())

    def _generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, prompt_indices: Sequence[int]
    ) -> Iterator[Rollout]:
        self._ensure_awake()
        if self._loop is not None:
            yield from self._loop.generate(prompts, sampling, prompt_indices)
        else:
            with self._diagnosed(Phase.GENERATE):
                yield from self._engine.generate(prompts, sampling, prompt_indices)
        self._on_engine(lambda: self._record(Phase.GENERATE))

    def _ensure_awake(self, tags: Sequence[str] | None = None) -> None:
        if self._loop is None:  # the engine of an open stream is awake
            with self._diagnosed(Phase.ONLOAD):
                self._engine.wake_up(tags)

    def _on_engine(self, function: Callable[[], T]) -> T:
        """Call `function` in the thread that may use the engine."""
        return function() if self._loop is None else self._loop.call(function)

    def _diagnosed(self, phase: Phase) -> AbstractContextManager[None]:
        """Explain out-of-memory errors raised in this context.

        Only around engine calls: the stream's error is raised in all waiting calls and must be explained once.
        """
        return diagnosed(
            self._run_dir / "memory",
            device=self._device,
            who=f"rollout engine {self._rank}",
            phase=phase,
            advice=lambda on_cuda: advice(self._config, "rollout", phase, on_cuda=on_cuda),
        )

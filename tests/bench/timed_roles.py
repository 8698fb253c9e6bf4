"""The processes of a run whose stages only hold for the time that they would take, for bench_pipeline.

Everything around the stages is the product's own: the pools and Ray's actors, the engine's loop and its streams,
chunks, endpoints, the scoring pool, the weight-sync coordinator. A stage sleeps, so eight slots fit onto two cores.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from gkd.config.schema import Config
from gkd.data.scatter import ChunkInputs, select
from gkd.rollout.engine.worker import RolloutWorker
from gkd.rollout.messages import Sampling
from gkd.rollout.vllm.engine import PassMeter, RolloutEngine
from gkd.rollout.vllm.sleep_state import SleepState
from gkd.run.manifest import digest_bytes
from gkd.spans import Phase, ProcessSpans, SpanRecorder
from gkd.types import FileDigest, Prompt, Rollout, Sample, TrainStats, VersionSpan
from gkd.weight_sync.buckets import Bucket, Content, TensorSpec
from gkd.weight_sync.group import GroupSpec

SAVES = "saves"


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds. A pass that decodes b sequences and prefills p tokens takes pass_s + sequence_s b + prefill_s p."""

    pass_s: float
    sequence_s: float
    prefill_s: float
    score_token_s: float  # time of the teacher per token, prompt and response
    train_s: float  # time of the actor, per step
    train_token_s: float  # and per token
    sync_s: float  # duration of a weight sync


@dataclass(frozen=True, slots=True)
class Stages:
    """How long everything takes, and how long the answers are."""

    rates: Rates
    mean_tokens: float
    sigma: float

    def length(self, seed: int, index: int, longest: int) -> int:
        """Return the length of one response, seeded as in a real run."""
        drawn = np.random.default_rng([seed, index]).lognormal(np.log(self.mean_tokens) - self.sigma**2 / 2, self.sigma)
        return int(np.clip(np.rint(drawn), 1, longest))


class Clock:
    """Sleep until consecutive passes should end, so that the delays of single sleeps do not add up."""

    def __init__(self) -> None:
        self._until = 0.0

    def start(self) -> None:
        """Restart the schedule now."""
        self._until = time.perf_counter()

    def hold(self, seconds: float) -> None:
        self._until += seconds
        time.sleep(max(0.0, self._until - time.perf_counter()))


class TimedEngine(RolloutEngine):
    """Engine that runs up to max_num_seqs sequences first-in, first-out, with one token per pass.

    Responses depend on the seed only, not on the engine.
    """

    def __init__(self, config: Config, stages: Stages, meeting: Any, spans: SpanRecorder) -> None:
        self.policy_version = 0
        self._stages, self._meeting, self._max_running = stages, meeting, config.rollout.sequence_limit
        self._meter = PassMeter(spans)
        self._sleep_state = SleepState(lambda *_: [], enabled=False)
        self._clock = Clock()
        self._finished: Any = {}
        self._queue: deque[_Sequence] = deque()
        self._moving: list[_Sequence] = []
        self._unread = 0

    @property
    def n_running(self) -> int:
        return len(self._queue) + len(self._moving)

    @property
    def n_generating(self) -> int:
        return self.n_running

    def add(
        self,
        owner: Hashable,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        prompt_indices: Sequence[int],
    ) -> None:
        for position, prompt in zip(prompt_indices, prompts, strict=True):
            for index in range(position * sampling.n, (position + 1) * sampling.n):
                n_tokens = self._stages.length(sampling.seed, index, sampling.max_tokens)
                self._queue.append(_Sequence(owner, prompt, index, n_tokens))

    def step(self) -> None:
        if self.n_running:
            self._meter.time_pass(self._pass)

    def _pass(self) -> None:
        rates, n_read = self._stages.rates, self._unread
        self._unread = 0
        if not self._moving:
            self._clock.start()
        while self._queue and len(self._moving) < self._max_running:
            begun = self._queue.popleft()
            begun.version = self.policy_version
            n_read += len(begun.prompt.token_ids)
            self._moving.append(begun)
        self._clock.hold(rates.pass_s + rates.sequence_s * len(self._moving) + rates.prefill_s * n_read)
        for sequence in self._moving:
            sequence.n_written += 1
        done = [s for s in self._moving if s.n_written == s.n_tokens]
        self._moving = [s for s in self._moving if s.n_written < s.n_tokens]
        for sequence in done:
            self._finished.setdefault(sequence.owner, []).append(sequence.rollout(self.policy_version))

    def abort(self, owner: Hashable) -> None:
        self._queue = deque(s for s in self._queue if s.owner != owner)
        self._moving = [s for s in self._moving if s.owner != owner]
        self._finished.pop(owner, None)

    def synchronize(self) -> None:
        """Do nothing: no work is in flight between two passes."""

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do nothing: this engine is never asleep."""

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": 0, "kv_cache": 0}

    def process_memory(self) -> dict[str, int]:
        return {"host_rss": 0}

    def join_groups(self, specs: list[GroupSpec]) -> None:
        del specs

    def receive(self, plans: list[list[Bucket]], policy_version: int, *, adapters: bool = False) -> int:
        del plans, adapters
        ray.get(self._meeting.arrive.remote(policy_version))
        time.sleep(self._stages.rates.sync_s)
        self._unread += sum(len(s.prompt.token_ids) + s.n_written for s in self._moving)
        self.policy_version = policy_version
        self._clock.start()
        return 8


@dataclass(slots=True)
class _Sequence:
    owner: Hashable
    prompt: Prompt
    index: int
    n_tokens: int
    n_written: int = 0
    version: int = 0

    def rollout(self, last_version: int) -> Rollout:
        spans = [VersionSpan(0, self.n_tokens, self.version)]
        if last_version > self.version:  # those in between do not matter
            spans = [
                VersionSpan(0, self.n_tokens - 1, self.version),
                VersionSpan(self.n_tokens - 1, self.n_tokens, last_version),
            ]
        return Rollout(
            prompt_id=self.prompt.prompt_id,
            sample_index=self.index,
            prompt_ids=self.prompt.token_ids,
            response_ids=np.ones(self.n_tokens, np.int32),
            rollout_logprobs=np.zeros(self.n_tokens, np.float32),
            version_spans=tuple(spans),
            finish_reason="stop",
        )


class TimedRolloutWorker(RolloutWorker):
    def prepare(self, config: Config, stages: Stages, meeting: Any) -> None:
        self._set_up(config, torch.device("cpu"), Path(config.trainer.run_dir))
        self._engine = TimedEngine(config, stages, meeting, self._spans)

    def texts(self, positions: Sequence[Sequence[int]], *chunks: Sequence[Rollout]) -> list[Sample]:
        return []  # There is no tokenizer.


class Meeting:
    """A weight sync begins when every engine has stopped for it."""

    def __init__(self, n: int) -> None:
        self._n, self._here, self._all = n, 0, asyncio.Event()

    async def arrive(self, version: int) -> None:
        del version
        self._here += 1
        if self._here == self._n:
            self._here = 0
            self._all.set()
            self._all = asyncio.Event()
        else:
            await self._all.wait()


class TimedActorWorker:
    """A rank that trains for as long as its group's tokens take."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._spans = SpanRecorder(f"actor {rank}")

    def prepare(self, stages: Stages) -> None:
        self._stages = stages
        self._spans.take()

    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def accumulate(self, *inputs: Any) -> None:
        self.train_step(*inputs)

    def train_step(self, *inputs: Any, meta: Any = None) -> TrainStats:
        del meta
        given = ChunkInputs.of_args(*inputs)
        rollouts, _ = select(given.indices, given.rollouts, None)
        n_tokens = sum(rollout.n_tokens for rollout in rollouts)
        with self._spans.span(Phase.TRAIN):
            time.sleep(self._stages.rates.train_s + self._stages.rates.train_token_s * n_tokens)
        return TrainStats(loss=1.0, n_loss_tokens=n_tokens)

    def save(self, folder: Path, blocking: bool) -> None:
        del blocking
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank_{self._rank}").write_bytes(b"nothing")

    @ray.method(concurrency_group=SAVES)
    def save_finished(self, wait: bool) -> dict[str, FileDigest]:
        del wait
        return {f"rank_{self._rank}": digest_bytes(b"nothing")}

    def export_hf(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)

    def memory_numbers(self) -> tuple[dict[str, float], ProcessSpans]:
        return {}, self._spans.take()

    def export_plan(self, content: Content) -> list[TensorSpec]:
        del content
        return [TensorSpec("nothing", (2,), "float32")]

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def join_group(self, spec: GroupSpec) -> str:
        del spec
        return "none"

    def send_weights(
        self, buckets: Sequence[Bucket], with_digests: bool, content: Content = "merged", meta: Any = None
    ) -> dict[str, str]:
        del buckets, with_digests, content, meta
        return {}

"""The Ray surface of one rollout engine. Finished sequences leave in chunks, each for one data-parallel group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch

from gkd.cluster.assignment import sort_visible_gpus, this_place
from gkd.cluster.gpu_table import RankPlace
from gkd.cluster.progress import UP, WATCH, Phases, Progress
from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.data.answers import is_correct
from gkd.data.chunks import chunk_sizes, encode_sizes
from gkd.data.prompt_codec import decode_prompts
from gkd.data.prompts import load_tokenizer
from gkd.errors import ClusterError
from gkd.handles import EngineUsage, Sample
from gkd.log import get_logger
from gkd.memory.advice import engine_advice
from gkd.memory.oom import diagnosed
from gkd.memory.usage import GIB
from gkd.rollout.engine import RolloutEngine
from gkd.rollout.engine_loop import EngineLoop
from gkd.rollout.engine_start import ENGINE_PHASES
from gkd.rollout.residency import KV_CACHE, WEIGHTS
from gkd.rollout.sampling import Sampling
from gkd.types import Prompt, Rollout
from gkd.weight_sync.buckets import Bucket
from gkd.weight_sync.transfer import GroupSpec

T = TypeVar("T")

# Methods of these groups are answered while others run; the pool is spawned with them. `stream` runs as long as the
# stream is open, and prompts may come while the other methods' thread waits for the end of a `generate`.
STREAM, ADMITS = "stream", "admits"
BESIDE = (STREAM, ADMITS, WATCH)
# What the actor's workers call these parts, and so `offload_states`.
STATES = {"params": WEIGHTS, "kv_cache": KV_CACHE}


class RolloutWorker:
    """One engine. Ray calls all methods but those of `BESIDE` in one thread, one after the other.

    While a stream is open, `stream` alone uses the engine and does what the others ask for. Else they do it themselves.

    Whatever needs states that are offloaded reloads them first, and leaves them there.

    Args:
        rank: which engine of the pool.
    """

    def __init__(self, rank: int) -> None:
        sort_visible_gpus()
        self._rank = rank
        self._log = get_logger(f"rollout.{rank}")
        self._phases = Phases()
        self._loop: EngineLoop | None = None  # of the stream that is open
        self._memory: dict[str, float] = {}  # what was noted since it was last asked
        self._mover = ThreadPoolExecutor(1, "mover")
        self._moves: Future[None] | None = None  # of its thread, which has the engine meanwhile

    def place(self, ask_driver: bool) -> RankPlace:
        return this_place("rollout", self._rank, ask_driver=ask_driver)

    @ray.method(concurrency_group=WATCH)
    def progress(self) -> Progress:
        """How far `init_model` is, and what vLLM is at in it."""
        return self._phases.now(ENGINE_PHASES)

    def init_model(self, config: Config, device: str, eos_ids: Sequence[int], run_dir: Path) -> None:
        """Build the engine; blocks for its start-up.

        Args:
            run_dir: trainer.run_dir as the driver means it.
        """
        self._log.info(self.place(ask_driver=False).line())
        self._config, self._run_dir = config, run_dir
        self._device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        self._phases.enter("starting vLLM")
        with self._diagnosed("building the engine"):
            self._engine = RolloutEngine(
                config.model.path,
                config.rollout,
                dtype=config.model.dtype,
                max_model_len=derive(config).max_sequence_length,
                device=device,
                eos_ids=eos_ids,
                trust_remote_code=config.model.trust_remote_code,
                can_sleep=config.trainer.colocate,
            )
        self._tokenizer: Any = load_tokenizer(
            config.model.path, "model.path", trust_remote_code=config.model.trust_remote_code
        )
        self._phases.enter(UP)
        self._log.info("engine up")

    def generate(
        self, asked: bytes, dp_size: int, sampling: Sampling, chunk_size: int
    ) -> Iterator[list[Rollout] | bytes]:
        """Two objects whenever `chunk_size` sequences of one data-parallel group are finished, and for the rest at the
        end: the rollouts, which the driver never fetches, and then their sizes (`encode_sizes`), which it does.

        (A handle inside the sizes would be one object less, but Ray 2.60 now and then freed what such a handle, nested
        in a streamed item, stood for. The driver owns streamed items themselves.)

        Args:
            asked: prompts and their indices, see `encode_prompts`; an index modulo dp_size is the group that scores it.
        """
        prompts, prompt_indices = decode_prompts(asked)
        finished: dict[int, list[Rollout]] = defaultdict(list)
        for rollout in self._answers(prompts, sampling, prompt_indices):
            dp_rank = rollout.sample_index // sampling.n % dp_size
            finished[dp_rank].append(rollout)
            if len(finished[dp_rank]) == chunk_size:
                full = finished.pop(dp_rank)
                yield full
                yield encode_sizes(chunk_sizes(dp_rank, full, _oldest_version(full)))
        for dp_rank, rest in finished.items():
            yield rest
            yield encode_sizes(chunk_sizes(dp_rank, rest, _oldest_version(rest)))

    def greedy(self, prompts: Sequence[Prompt], marker: str, n_samples: int) -> tuple[int, list[Sample]]:
        """Answer greedily: how many end by themselves with exactly the reference answer, and the first few answers."""
        max_tokens = self._config.data.max_response_length
        sampling = Sampling(n=1, temperature=0.0, top_p=1.0, max_tokens=max_tokens, seed=0)
        n_correct = 0
        samples: dict[int, Sample] = {}
        for rollout in self._answers(prompts, sampling, range(len(prompts))):
            place = rollout.sample_index
            text = self._tokenizer.decode(rollout.response_ids, skip_special_tokens=True)
            answer = str(prompts[place].answer)
            correct = rollout.finish_reason == "stop" and is_correct(text, answer, marker)
            n_correct += correct
            if place < n_samples:
                samples[place] = Sample(
                    prompt_id=rollout.prompt_id,
                    prompt_ids=rollout.prompt_ids.tolist(),
                    response_ids=rollout.response_ids.tolist(),
                    text=text,
                    answer=answer,
                    correct=correct,
                )
        return n_correct, [samples[place] for place in sorted(samples)]

    def open_stream(self, sampling: Sampling) -> None:
        """From now on the engine waits for `stream` to use it. Raises ClusterError: a stream is open."""
        if self._loop is not None:
            raise ClusterError(f"rollout engine {self._rank} has an open stream; it takes one at a time. Fix: close it")
        self._wake()
        self._engine.settle()
        explained = partial(self._diagnosed, "generating")
        self._loop = EngineLoop(self._engine, sampling, self._config.rollout.max_num_seqs, explained)

    @ray.method(concurrency_group=STREAM)
    def stream(self, dp_size: int) -> Iterator[list[Rollout] | bytes]:
        """Runs from `open_stream` to `close_stream`. Two objects, as of `generate`, for each prompt admitted, when all
        its samples are finished.
        """
        for rollouts in self._open_loop().run():
            dp_rank = rollouts[0].sample_index // len(rollouts) % dp_size
            yield rollouts
            yield encode_sizes(chunk_sizes(dp_rank, rollouts, _oldest_version(rollouts)))

    @ray.method(concurrency_group=ADMITS)
    def admit(self, asked: bytes) -> None:
        """Give the open stream more prompts, see `encode_prompts`; does not wait for them. What is wrong with one of
        them comes out of `stream`.
        """
        self._open_loop().admit(*decode_prompts(asked))

    def close_stream(self) -> None:
        """Stop and drop what is not finished; harmless if none is open. If it raises, the engine is of no use."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def join_groups(self, specs: list[GroupSpec]) -> None:
        with self._phases.during("joining the weight-sync groups"):
            self._do(lambda: self._engine.join_groups(specs))

    def receive(self, plans: list[list[Bucket]], policy_version: int) -> int:
        def take() -> int:
            with self._diagnosed("receiving weights"):
                n_bytes = self._engine.receive(plans, policy_version)
            self._note("receiving_weights")
            return n_bytes

        with self._phases.during("receiving weights"):
            self._wake([WEIGHTS])
            return self._do(take, vital=True)  # an engine that has a part of the new weights must not write on

    def digests(self) -> dict[str, str]:
        self._wake([WEIGHTS])
        return self._do(self._engine.digests)

    def offload_states(
        self, include: Sequence[str] | None = None, level: int = 1, *, non_blocking: bool = False
    ) -> dict[str, int]:
        """Free the GPU's memory of these states. Harmless when repeated.

        Args:
            include: "params", "kv_cache"; None = both.
            level: 1 = host memory keeps the parameters | 2 = nobody does, and the next `receive` brings them.
            non_blocking: return while the copies are under way, in a thread of their own, since vLLM's sleep waits for
                them. `settle_states`, or the next call that uses the engine, waits for the end, and has its error.

        Returns:
            What is left on the engine's GPUs, bytes by state; nothing with `non_blocking`.

        Raises:
            ClusterError: a stream is open, or the engine cannot sleep (see `RolloutEngine.sleep`).
        """
        if self._loop is not None:
            raise ClusterError(
                f"rollout engine {self._rank} has an open stream, which may use its memory at any time. "
                "Fix: close the stream before offload_states"
            )
        parts = _parts(include)

        def sleep() -> None:
            with self._diagnosed("offloading states"):
                self._engine.sleep(level, parts)
            self._note("offloading_states")

        return self._moved("offloading states", sleep, non_blocking)

    def reload_states(self, include: Sequence[str] | None = None, *, non_blocking: bool = False) -> dict[str, int]:
        """Take the memory again. Harmless when repeated. Arguments and result as of `offload_states`."""
        parts = _parts(include)
        if self._loop is not None:  # a stream's engine is awake
            return self._do(self._state_bytes)
        return self._moved("reloading states", lambda: self._woken(parts), non_blocking)

    def settle_states(self) -> dict[str, int]:
        """The last non-blocking move has ended when this returns, or raises its error; else as `offload_states`."""
        self._settle()
        return self._do(self._state_bytes)

    def usage(self) -> EngineUsage:
        """What the engine did since it was last asked, and with `memory.timeline` what it held when a phase ended."""
        memory, self._memory = self._memory, {}
        return replace(self._engine.usage(), memory=memory)

    def _moved(self, phase: str, move: Callable[[], None], non_blocking: bool) -> dict[str, int]:
        with self._phases.during(phase):
            self._settle()
            if not non_blocking:
                move()
                return self._state_bytes()
            self._engine.settle()  # CUDA does not order the other thread's work after this one's

            def apart() -> None:
                move()
                self._engine.settle()

            self._moves = self._mover.submit(apart)
            return {}

    def _settle(self) -> None:
        moves, self._moves = self._moves, None
        if moves is not None:
            moves.result()

    def _wake(self, parts: Sequence[str] | None = None) -> None:
        if self._loop is None:  # a stream's engine is awake
            self._settle()
            self._woken(parts)

    def _woken(self, parts: Sequence[str] | None) -> None:
        with self._diagnosed("reloading states"):
            self._engine.wake_up(parts)

    def _state_bytes(self) -> dict[str, int]:
        held = self._engine.memory_bytes()
        return {state: held[part] for state, part in STATES.items()}

    def _note(self, phase: str) -> None:
        """What is held now, as this phase has left it. Called where the engine may be used."""
        if not self._config.memory.timeline:
            return
        for what, n_bytes in (self._state_bytes() | self._engine.process_memory()).items():
            name = f"memory/{phase}/rollout_{what}_gib"
            self._memory[name] = max(n_bytes / GIB, self._memory.get(name, 0.0))

    def _diagnosed(self, phase: str) -> AbstractContextManager[None]:
        """Memory that runs out here is explained. Around what uses the engine, and not around who waits for it: an
        error of the stream's reaches all of them.
        """
        return diagnosed(
            self._run_dir / "memory",
            device=self._device,
            who=f"rollout engine {self._rank}",
            phase=phase,
            advice=lambda shortage: engine_advice(self._config, shortage),
        )

    def _do(self, what: Callable[[], T], *, vital: bool = False) -> T:
        if self._loop is not None:
            return self._loop.call(what, vital=vital)
        self._settle()
        return what()

    def _answers(
        self, prompts: Sequence[Prompt], sampling: Sampling, prompt_indices: Sequence[int]
    ) -> Iterator[Rollout]:
        self._wake()
        if self._loop is not None:
            yield from self._loop.generate(prompts, sampling, prompt_indices)
        else:
            with self._diagnosed("generating"):
                yield from self._engine.generate(prompts, sampling, prompt_indices)
        self._do(lambda: self._note("generating"))

    def _open_loop(self) -> EngineLoop:
        if self._loop is None:
            raise ClusterError(f"rollout engine {self._rank} has no open stream")
        return self._loop


def _parts(include: Sequence[str] | None) -> list[str]:
    """Raises ClusterError: a rollout engine has no such state."""
    wanted = list(STATES if include is None else include)
    unknown = [state for state in wanted if state not in STATES]
    if unknown:
        raise ClusterError(f"a rollout engine has no state {unknown[0]!r}. Fix: include some of {', '.join(STATES)}")
    return [STATES[state] for state in wanted]


def _oldest_version(rollouts: Sequence[Rollout]) -> int:
    return min(rollout.policy_version for rollout in rollouts)

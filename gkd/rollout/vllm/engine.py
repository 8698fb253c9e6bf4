"""One in-process vLLM engine that samples rollouts from the student.

No ray here; `gkd.rollout.engine.worker` runs it in a Ray actor. Tokens in, tokens out: the engine never sees text, so
student tokens are never re-tokenized.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from gkd.config.schema_actor import LoraConfig
from gkd.config.schema_rollout import RolloutConfig
from gkd.config.schema_sections import Vision
from gkd.errors import ClusterError, DataError
from gkd.log import get_logger
from gkd.rollout.messages import Sampling
from gkd.rollout.vllm.sampling import Request, vllm_params
from gkd.rollout.vllm.sleep_state import TAGS, WEIGHTS, SleepState, check_level
from gkd.rollout.vllm.start import adapter_request, start_vllm
from gkd.rollout.vllm.turns import Turns
from gkd.rollout.vllm.worker_errors import raise_sync_error
from gkd.spans import Phase, SpanRecorder
from gkd.types import EngineUsage, Prompt, Rollout
from gkd.weight_sync.buckets import Bucket
from gkd.weight_sync.group import GroupSpec
from teacher_server.vision.vllm_input import image_input

log = get_logger("rollout")

_WAIT_S = 0.02  # upper bound on how long calls of other threads wait while all sequences wait for environments


class RolloutEngine:
    """Generate with continuous batching, and receive new weights at any time between two steps.

    Several owners can submit sequences; one `step` advances all of them. Not thread-safe: while a stream is open,
    `gkd.rollout.engine.loop` serializes the calls.

    Args:
        model_path: Hugging Face folder; its weights are version 0 until the first `receive`.
        dtype: "float32" | "bfloat16".
        max_model_len: maximum prompt plus response length, tokens.
        device: "cpu" | "cuda".
        eos_ids: a response ends with the first of these, inclusive.
        n_vocab: ids from this one on are never generated; 0: all are.
        enable_sleep_mode: allow `sleep`. On CUDA, weights and KV cache then use vLLM's own allocator.
        lora: adapters that `receive` must load before `generate`; None means the engine has none.
        turns: continues the trajectories; None means that a response is one turn.
        spans: records the passes.
        vision: whether prompts may have images, and whether `receive` gets weights that compute their features.
    """

    def __init__(
        self,
        model_path: str,
        config: RolloutConfig,
        *,
        dtype: str,
        max_model_len: int,
        device: str,
        eos_ids: Sequence[int],
        n_vocab: int = 0,
        trust_remote_code: bool = False,
        enable_sleep_mode: bool = False,
        lora: LoraConfig | None = None,
        turns: Turns | None = None,
        spans: SpanRecorder | None = None,
        vision: Vision = "none",
    ) -> None:
        self.policy_version = self._n_requests = 0
        self._running: dict[str, Request] = {}  # vLLM's request id -> sequence whose turn vLLM generates
        self._turns = turns
        self._finished: defaultdict[Hashable, list[Rollout]] = defaultdict(list)
        self._eos_ids = list(eos_ids)
        self._meter = PassMeter(spans)
        self.llm = start_vllm(
            model_path,
            config,
            dtype=dtype,
            max_model_len=max_model_len,
            device=device,
            trust_remote_code=trust_remote_code,
            enable_sleep_mode=enable_sleep_mode,
            lora=lora,
            vision=vision,
        )
        n_rows = self.llm.model_config.get_vocab_size()
        self._masked: range | tuple[int, ...] = range(n_vocab or n_rows, n_rows)
        self._vision = vision
        self._input: tuple[Prompt | None, Any] = None, None  # the last prompt with images, and vLLM's input
        if vision != "none":  # a sampled placeholder would stand for an image that there is none of
            hf = self.llm.model_config.hf_config
            names = ("image_token_id", "video_token_id")
            self._masked = (*self._masked, *(int(i) for name in names if (i := getattr(hf, name, None)) is not None))
        self.request_options: dict[str, Any] = {} if lora is None else {"lora_request": adapter_request()}
        self._sleep_state = SleepState(self._call_workers, enabled=enable_sleep_mode)
        self._model_path = model_path
        self._compares = False  # whether the workers have digests of what vLLM has made of the folder

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, prompt_indices: Sequence[int] | None = None
    ) -> Iterator[Rollout]:
        """Yield `sampling.n` rollouts per prompt in order of completion.

        Args:
            prompt_indices: index of each prompt in its batch; None means 0, 1, 2, ...

        Raises:
            DataError: a prompt leaves no room for a response.
            ClusterError: the engine is asleep, or its weights were discarded.
        """
        owner = object()
        n_left = len(prompts) * sampling.n
        try:
            self.add(owner, prompts, sampling, prompt_indices or range(len(prompts)))
            while n_left:
                self.step()
                for rollout in self.pop_finished(owner):
                    n_left -= 1
                    yield rollout
        finally:  # the caller stopped early or a step failed: leave no sequence in the engine
            self.abort(owner)

    def add(
        self, owner: Hashable, prompts: Sequence[Prompt], sampling: Sampling, prompt_indices: Sequence[int]
    ) -> None:
        """Submit `sampling.n` sequences per prompt; `step` advances them.

        Each sequence has its own seed, derived from (seed, sample_index). Its tokens therefore do not depend on the
        engine or, up to rounding, on the other sequences in its batches.

        Args:
            owner: key of the caller for `pop_finished` and `abort`.
            prompt_indices: index of each prompt in its batch; sample_index = prompt_index * sampling.n + sample.

        Raises:
            DataError: a prompt leaves no room for a response. The prompts before it have been submitted.
            ClusterError: the engine is asleep, or its weights were discarded.
        """
        from vllm.exceptions import VLLMValidationError

        self._sleep_state.require_awake(TAGS, "generate")
        self._sleep_state.require_weights("generate")
        if not self.n_running:
            # Prefixes cached by earlier calls would change the composition of batches and so the rounding: a resumed
            # run would differ from an uninterrupted one. The samples of a prompt still share its prefix.
            self._reset_prefix_cache()
        for prompt_index, prompt in zip(prompt_indices, prompts, strict=True):
            for sample_index in range(prompt_index * sampling.n, (prompt_index + 1) * sampling.n):
                try:
                    self._start_turn(Request(owner, prompt, sample_index, sampling, self._n_requests + 1))
                except (ValueError, VLLMValidationError) as error:
                    raise DataError(f"the rollout engine refused prompt {prompt.prompt_id}: {error}") from error

    def _start_turn(self, request: Request) -> None:
        """Let vLLM generate the next turn of a sequence."""
        self._n_requests += 1
        request_id = str(self._n_requests)
        params = vllm_params(request, self._eos_ids, self._masked)
        tokens = np.concatenate([request.prompt.token_ids, *request.ids]).tolist()
        prompt: Any = {"type": "token", "prompt_token_ids": tokens}
        if request.prompt.images:
            prompt = {**self._image_input(request.prompt), "prompt_token_ids": tokens}
        request.engine_id = self.llm.llm_engine.add_request(request_id, prompt, params, **self.request_options)
        self._running[request_id] = request

    def _image_input(self, prompt: Prompt) -> Any:
        """Return vLLM's input of a prompt with images. Raises ImageError, a ValueError.

        The samples of a prompt start one after the other and share it; pixels of many prompts would take gigabytes.
        """
        if self._input[0] is not prompt:
            self._input = prompt, image_input(self.llm.llm_engine.renderer, prompt.token_ids.tolist(), prompt.images)
        return self._input[1]

    @property
    def n_running(self) -> int:
        """Number of unfinished sequences of all owners."""
        return len(self._running) + (0 if self._turns is None else len(self._turns))

    @property
    def n_generating(self) -> int:
        """Number of unfinished sequences that do not wait for their environment."""
        return len(self._running)

    @property
    def n_passes(self) -> int:
        """Number of forward passes since the start."""
        return self._meter.n_passes

    @property
    def has_weights(self) -> bool:
        """Tell whether the engine has one complete version; otherwise `add` and `step` raise ClusterError."""
        return self._sleep_state.has_weights

    def step(self) -> None:
        """Run one forward pass; finished rollouts are kept for their owner's `pop_finished`.

        While all sequences wait for their environments, wait for a reply instead, for a moment.
        """
        self._sleep_state.require_weights("generate")
        if self._turns is not None:
            self._continue(self._turns)
        if self._running:
            self._meter.time_pass(self._step)
        elif self._turns:
            self._turns.wait(_WAIT_S)

    def usage(self) -> EngineUsage:
        """Return and reset the counters since the last call. Thread-safe."""
        return EngineUsage(self._meter.pop_busy_s())

    def _step(self) -> None:
        for output in self.llm.llm_engine.step():
            if output.finished:
                request = self._running.pop(output.request_id)
                completion = output.outputs[0]
                request.add_turn(completion.logprobs, completion.token_ids, self.policy_version)
                if self._turns is None:
                    self._finished[request.owner].append(request.rollout(str(completion.finish_reason)))
                else:
                    self._turns.ended(request, str(completion.finish_reason))

    def _continue(self, turns: Turns) -> None:
        """Go on with the trajectories whose environments have replied."""
        for reply in turns.replies():
            if isinstance(reply, Request):
                self._start_turn(reply)
            else:
                request, rollout = reply
                self._finished[request.owner].append(rollout)

    def pop_finished(self, owner: Hashable) -> list[Rollout]:
        """Return this owner's rollouts that finished since the last call."""
        return self._finished.pop(owner, [])

    def abort(self, owner: Hashable) -> None:
        """Drop all sequences of this owner, finished or not."""
        request_ids = [request_id for request_id, request in self._running.items() if request.owner == owner]
        if request_ids:
            self.llm.llm_engine.abort_request(request_ids)
        for request_id in request_ids:
            del self._running[request_id]
        if self._turns is not None:
            self._turns.abort(owner)
        self._finished.pop(owner, None)

    def join_groups(self, specs: list[GroupSpec]) -> None:
        """Join the weight-sync group of every sender with all workers of this engine; blocks."""
        self._sync_workers("gkd_join_groups", specs)

    def receive(self, plans: list[list[Bucket]], policy_version: int, *, adapters: bool = False) -> int:
        """Load one version of the weights, or of the adapters; blocks for all senders. Return the bytes received.

        Unfinished sequences keep their tokens and continue with the new weights; their KV cache is recomputed. The KV
        cache may be asleep. With adapters, weights are a part of a version: `has_weights` is False until they follow.

        Raises ClusterError: the weights are asleep, or adapters follow weights that were discarded. After any other
        error `has_weights` is False until a transfer succeeds.
        """
        self._sleep_state.require_awake([WEIGHTS], "receive weights")
        if adapters:
            self._sleep_state.require_base("receive adapters")
        self._drain_async_passes()
        # Between the two, the engine would generate with the old adapters what counts as of the new version.
        with self._sleep_state.loading(adapters=adapters, adapters_follow=bool(self.request_options) and not adapters):
            n_bytes = self._sync_workers("gkd_receive_adapters" if adapters else "gkd_receive", plans)[0]
            if policy_version == 0 and not adapters and self._compares:
                self._compare_with_folder()
        requests = self.llm.llm_engine.engine_core.engine_core.scheduler.requests
        for request in self._running.values():
            n_generated = request.n_tokens + requests[request.engine_id].num_output_tokens
            request.record_span(n_generated, self.policy_version)
        self._reset_prefix_cache()
        self.policy_version = policy_version
        return int(n_bytes)

    def keep_digests(self) -> None:
        """Compare this engine's parameters and buffers with those of now, after a `receive` of version 0.

        To be called before `sleep`. Version 0 has the weights of the folder, which vLLM has loaded by itself.
        """
        self._compares = True
        self._call_workers("gkd_keep_digests")

    def _compare_with_folder(self) -> None:
        """Log how many parameters and buffers are equal. Raises WeightSyncError: see `sorted_changes`."""
        for n_tensors, rounded, sent in self._sync_workers("gkd_compare"):
            if sent:
                text = "%d of %d parameters and buffers cannot be compared: version 0 has other weights than %s (%s)"
                log.warning(text, len(sent), n_tensors, self._model_path, ", ".join(sent[:3]))
            else:
                text = "%d of %d parameters and buffers are bit for bit what vLLM has made of %s; %d are rounded%s"
                shown = f" ({', '.join(rounded[:3])})" if rounded else ""
                log.info(text, n_tensors - len(rounded), n_tensors, self._model_path, len(rounded), shown)

    def synchronize(self) -> None:
        """Wait for the device. Required before another thread uses it: CUDA does not order the work of two threads."""
        self._drain_async_passes()
        self.llm.collective_rpc("gkd_synchronize")

    def _drain_async_passes(self) -> None:
        """Complete the passes that vLLM has started ahead (asynchronous scheduling) without starting others.

        Their tokens belong to the old weights. Resetting the cache instead would discard these tokens after they were
        drawn from the sequences' random generators, and the tokens of a preempted sequence would be returned later as
        if the new weights had generated them.
        """
        core = self.llm.llm_engine.engine_core.engine_core
        if not core.batch_queue:
            return
        core.pause_scheduler("keep", clear_cache=False)
        try:
            while core.batch_queue:  # The last pass may have no sequences: it was started before they ended.
                self._meter.time_pass(self._step)
        finally:
            core.resume_scheduler()

    def _reset_prefix_cache(self) -> None:
        """Clear the KV cache; running sequences are preempted and recomputed."""
        if self._vision == "trained":  # vLLM finds features by the image alone, whichever weights have computed them
            self.llm.llm_engine.reset_encoder_cache()
        if not self.llm.reset_prefix_cache(reset_running_requests=bool(self._running)):
            raise ClusterError("vLLM did not reset the prefix cache of the rollout engine: requests are still running")

    def sleep(self, level: int = 1, tags: Sequence[str] | None = None) -> None:
        """Release device memory; blocks. Idempotent: tags that are asleep are not changed, also at another level.

        Args:
            level: 1 = copy the weights to host memory | 2 = discard the weights (the model's buffers are kept); then
                the engine generates only after `wake_up` and `receive`. The KV cache is always discarded.
            tags: "weights", "kv_cache"; None = both.

        Raises:
            ClusterError: sequences are unfinished, or level 2 for an engine with adapters.
            ConfigError: the engine was built without enable_sleep_mode.
        """
        check_level(level)
        tags = TAGS if tags is None else tags
        if level == 2 and WEIGHTS in tags and self.request_options:  # a sync brings the adapters alone
            raise ClusterError(
                "sleep level 2 would discard the base weights of the rollout engine, which weight_sync.lora = adapters "
                "sends only once. Fix: level 1, which keeps them in host memory"
            )
        awake = self._sleep_state.awake_tags(tags)
        if not awake:
            return
        if self.n_running:
            raise ClusterError(
                f"the rollout engine cannot sleep: {self.n_running} sequences are unfinished. "
                "Fix: wait for them, or abort them"
            )
        self._drain_async_passes()
        self._reset_prefix_cache()
        self._sleep_state.sleep(awake, level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the device memory of these tags (as for `sleep`) again; blocks. Idempotent.

        For a weight sync: wake_up(["weights"]), `receive`, wake_up(["kv_cache"]). The GPU then holds the weights of
        actor and engine at the same time, but not the KV cache.
        """
        self._sleep_state.wake_up(TAGS if tags is None else tags)

    def memory_bytes(self) -> dict[str, int]:
        """Return bytes of "weights" (including buffers) and "kv_cache" on the devices, summed over the workers."""
        return self._sleep_state.memory_bytes()

    def process_memory(self) -> dict[str, int]:
        """Return bytes, maximum over the workers: `host_rss` and, on CUDA, `device_used` by all processes."""
        by_worker: list[dict[str, int]] = self._call_workers("gkd_process_memory")
        return {name: max(held[name] for held in by_worker) for name in by_worker[0]}

    def _call_workers(self, method: str, *args: Any) -> list[Any]:
        return list(self.llm.collective_rpc(method, args=args))

    def _sync_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method that `returns_sync_errors`. Raises WeightSyncError."""
        results = self._call_workers(method, *args)
        raise_sync_error(results)
        return results

    def digests(self) -> dict[str, str]:
        """Return HF name -> digest of each weight and factor. Raises ClusterError: they are asleep or discarded."""
        self._sleep_state.require_awake([WEIGHTS], "compute digests")
        self._sleep_state.require_weights("compute digests")
        return self.llm.collective_rpc("gkd_digests")[0]


class PassMeter:
    """Measures the time of one engine's passes.

    One thread runs the passes. Any thread may call `pop_busy_s`, which does not wait for the current pass. `spans`
    records the periods of successive passes as `generate`, on the same clock.
    """

    def __init__(self, spans: SpanRecorder | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._spans = spans
        self._clock = clock
        self._lock = threading.Lock()  # guards the sum
        self._busy_s = 0.0
        self.n_passes = 0  # finished since the start

    def time_pass(self, step: Callable[[], None]) -> None:
        """Run one pass and measure it."""
        began_s = self._clock()
        step()
        ended_s = self._clock()
        self.n_passes += 1
        if self._spans is not None:
            self._spans.extend(Phase.GENERATE, began_s, ended_s)
        with self._lock:
            self._busy_s += ended_s - began_s

    def pop_busy_s(self) -> float:
        """Return and reset the seconds in passes since the last call."""
        with self._lock:
            busy_s = self._busy_s
            self._busy_s = 0.0
        return busy_s

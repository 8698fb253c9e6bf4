"""One vLLM engine in this process: the student as the sampler of its own training data.

No ray here; `gkd.rollout.worker` puts one of these into a Ray actor. Tokens in, tokens out: the engine
never sees text, so student tokens are never re-tokenized.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from gkd.config.schema import RolloutConfig
from gkd.errors import ClusterError, DataError
from gkd.handles import EngineUsage
from gkd.rollout.engine_start import start_vllm
from gkd.rollout.residency import PARTS, WEIGHTS, Residency, check_level
from gkd.rollout.sampling import Request, Sampling, vllm_params
from gkd.rollout.usage import PassMeter
from gkd.types import Prompt, Rollout
from gkd.weight_sync.buckets import Bucket
from gkd.weight_sync.transfer import GroupSpec


class RolloutEngine:
    """Generate with continuous batching and streaming completion; take new weights at any time between two steps.

    It may have several users at a time: each gives it sequences under a name of its own (`owner`), and one `step` moves
    all of them. Not thread-safe: whoever uses it at a time, `gkd.rollout.engine_loop` decides.

    Args:
        model_path: Hugging Face folder; its weights are version 0 until the first `receive`.
        config: sizes of the engine.
        dtype: "float32" | "bfloat16".
        max_model_len: longest prompt plus response, tokens.
        device: "cpu" | "cuda".
        eos_ids: a response ends with (and includes) the first of these.
        can_sleep: it can give its memory away. On CUDA that takes vLLM's own allocator for weights and KV cache.
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
        trust_remote_code: bool = False,
        can_sleep: bool = False,
    ) -> None:
        self.policy_version = 0
        self._eos_ids = list(eos_ids)
        self._serial = 0
        self._running: dict[str, Request] = {}
        self._finished: defaultdict[Hashable, list[Rollout]] = defaultdict(list)
        self._meter = PassMeter(config.max_num_seqs)
        self.llm = start_vllm(
            model_path,
            config,
            dtype=dtype,
            max_model_len=max_model_len,
            device=device,
            trust_remote_code=trust_remote_code,
            can_sleep=can_sleep,
        )
        self._residency = Residency(self._call_workers, can_sleep=can_sleep)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, prompt_indices: Sequence[int] | None = None
    ) -> Iterator[Rollout]:
        """Yield rollouts as they finish, in any order; `sampling.n` for each prompt. Arguments as of `add`.

        Args:
            prompt_indices: index of each prompt in its batch; None: 0, 1, 2, ...

        Raises:
            DataError: a prompt leaves no room for a response.
            ClusterError: a part of the engine is asleep, or its weights are none.
        """
        owner = object()
        n_left = len(prompts) * sampling.n
        try:
            self.add(owner, prompts, sampling, prompt_indices or range(len(prompts)))
            while n_left:
                self.step()
                for rollout in self.take(owner):
                    n_left -= 1
                    yield rollout
        finally:  # the caller stopped early, or a step failed: leave nothing running in the engine
            self.drop(owner)

    def add(
        self, owner: Hashable, prompts: Sequence[Prompt], sampling: Sampling, prompt_indices: Sequence[int]
    ) -> None:
        """Begin `sampling.n` sequences for each prompt; `step` moves them.

        Every sequence has a seed of its own, made from (seed, sample_index), so what it says does not depend on
        which engine it ran on or, beyond rounding, on what ran beside it.

        Args:
            prompt_indices: index of each prompt in its batch, which determines sample_index.

        Raises:
            DataError: a prompt leaves no room for a response. Those before it have begun.
            ClusterError: a part of the engine is asleep, or its weights are none.
        """
        from vllm.exceptions import VLLMValidationError

        self._residency.require(PARTS, "write")
        self._residency.require_content("write")
        if not self._running:
            # What an earlier call left there would change the batches of this one, and with them its rounding: a
            # resumed run would not write what the uninterrupted one wrote. Samples of one prompt still share it.
            self._forget_prefixes()
        for prompt_index, prompt in zip(prompt_indices, prompts, strict=True):
            for index in range(prompt_index * sampling.n, (prompt_index + 1) * sampling.n):
                self._serial += 1
                request_id = str(self._serial)
                params = vllm_params(sampling, index, self._eos_ids)
                tokens = {"prompt_token_ids": prompt.token_ids.tolist()}
                try:
                    engine_id = self.llm.llm_engine.add_request(request_id, tokens, params)
                except (ValueError, VLLMValidationError) as error:
                    raise DataError(f"the rollout engine refused prompt {prompt.prompt_id}: {error}") from error
                self._running[request_id] = Request(owner, prompt, index, engine_id)
                self._meter.added(len(prompt.token_ids))

    @property
    def n_running(self) -> int:
        """Sequences that are not finished, of all owners."""
        return len(self._running)

    def step(self) -> None:
        """One forward pass for all that run; what is finished by it waits for its owner's `take`."""
        self._meter.time_pass(self._step)

    def usage(self) -> EngineUsage:
        """What it did since it was last asked; from any thread."""
        return self._meter.taken()

    def _step(self) -> None:
        for output in self.llm.llm_engine.step():
            if output.finished:
                request = self._running.pop(output.request_id)
                self._finished[request.owner].append(self._rollout(request, output.outputs[0]))

    def take(self, owner: Hashable) -> list[Rollout]:
        """What has finished of this owner's since it last asked."""
        return self._finished.pop(owner, [])

    def drop(self, owner: Hashable) -> None:
        """Forget all that this owner has here, finished or not."""
        mine = [request_id for request_id, request in self._running.items() if request.owner == owner]
        if mine:
            self.llm.llm_engine.abort_request(mine)
        for request_id in mine:
            del self._running[request_id]
        self._finished.pop(owner, None)
        self._meter.dropped(len(self._running))

    def _rollout(self, request: Request, completion: Any) -> Rollout:
        tokens = np.asarray(completion.token_ids, dtype=np.int32)
        flat = completion.logprobs
        # logprobs=0 keeps the sampled token only (it may stand beside the top one): its first entry a position
        sampled = np.asarray([flat.logprobs[start] for start in flat.start_indices], dtype=np.float32)
        request.written(len(tokens), self.policy_version)
        self._meter.finished(len(tokens))
        return Rollout(
            prompt_id=request.prompt.prompt_id,
            sample_index=request.index,
            prompt_ids=np.asarray(request.prompt.token_ids, dtype=np.int32),
            response_ids=tokens,
            rollout_logprobs=sampled,
            version_spans=tuple(request.spans),
            finish_reason=str(completion.finish_reason),
        )

    def join_groups(self, specs: list[GroupSpec]) -> None:
        """Join every sender's weight-sync group with all of this engine's workers; blocks."""
        self.llm.collective_rpc("gkd_join_groups", args=(specs,))

    def receive(self, plans: list[list[Bucket]], policy_version: int) -> int:
        """Take one weight version (blocks until every sender sent it) and forget what the old one computed.

        Sequences that are being written go on with the new weights: what they have so far stays, and its cache is
        computed anew. The KV cache may be asleep.

        Raises ClusterError: the weights are asleep.
        """
        self._residency.require([WEIGHTS], "receive weights")
        self._land()
        n_bytes = self.llm.collective_rpc("gkd_receive", args=(plans,))[0]
        self._residency.written()
        states = self.llm.llm_engine.output_processor.request_states
        n_forgotten = 0
        for request in self._running.values():
            n_written = states[request.engine_id].detokenizer.num_output_tokens()
            request.written(n_written, self.policy_version)
            if n_written:  # what no pass has moved yet has nothing in the cache
                n_forgotten += len(request.prompt.token_ids) + n_written
        self._meter.paused(n_forgotten)
        self._forget_prefixes()
        self.policy_version = policy_version
        return int(n_bytes)

    def settle(self) -> None:
        """Finish all that is under way on the device; before another thread uses the engine, whose work CUDA does not
        order after this one's.
        """
        self._land()
        self.llm.collective_rpc("gkd_settle")

    def _land(self) -> None:
        """Finish the passes that vLLM has begun ahead (asynchronous scheduling), and begin no other.

        Their tokens are the old weights'. Resetting the cache would drop them, but after their draws from the
        sequences' random generators; and those of a sequence that was preempted for want of memory would come out
        after it, as the new weights' own.
        """
        core = self.llm.llm_engine.engine_core.engine_core
        if not core.batch_queue:
            return
        core.pause_scheduler("keep", clear_cache=False)
        try:
            while core.batch_queue:
                self.step()
        finally:
            core.resume_scheduler()

    def _forget_prefixes(self) -> None:
        """Empty the cache; sequences that are being written wait until theirs is computed anew."""
        if not self.llm.reset_prefix_cache(reset_running_requests=bool(self._running)):
            raise ClusterError("the rollout engine cannot forget its cached prefixes: requests are still running")

    def sleep(self, level: int = 1, tags: Sequence[str] | None = None) -> None:
        """Give memory of the device back; blocks. Harmless when repeated: what is asleep stays as it is, so level 2
        after level 1 drops nothing more.

        Args:
            level: 1 = the host keeps the weights | 2 = nobody does (but the model's buffers are kept): after `wake_up`
                the engine writes only when it has received weights. Nobody ever keeps the KV cache.
            tags: "weights", "kv_cache"; None = both. The weights of an engine may sleep alone, though it is of no more
                use then.

        Raises:
            ClusterError: sequences are being written, or the engine was built without can_sleep.
        """
        check_level(level)
        parts = self._residency.to_sleep(PARTS if tags is None else tags)
        if not parts:
            return
        if self._running:
            raise ClusterError(
                f"the rollout engine cannot sleep: {len(self._running)} sequences are being written. "
                "Fix: let them finish, or drop them"
            )
        self._land()
        self._forget_prefixes()
        self._residency.sleep(parts, level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory of the device again; blocks. Harmless when repeated.

        Around a sync: wake_up(["weights"]), `receive`, wake_up(["kv_cache"]). Beside the actor's weights there has to
        be room for the engine's, and not for its KV cache.

        Args:
            tags: as of `sleep`.
        """
        self._residency.wake_up(PARTS if tags is None else tags)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of "weights" (buffers included) and "kv_cache" on the devices of all its workers together."""
        return self._residency.memory_bytes()

    def process_memory(self) -> dict[str, int]:
        """Bytes, of its workers the largest: `host_rss` of a process, and on CUDA `device_used` by everybody."""
        answers: list[dict[str, int]] = self._call_workers("gkd_process_memory")
        return {name: max(answer[name] for answer in answers) for name in answers[0]}

    def _call_workers(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = self.llm.collective_rpc(method, args=args)
        return answers

    def digests(self) -> dict[str, str]:
        """Digest by Hugging Face name of every tensor the engine holds.

        Raises ClusterError: the weights are asleep, or none.
        """
        self._residency.require([WEIGHTS], "show its weights")
        self._residency.require_content("show its weights")
        return self.llm.collective_rpc("gkd_digests")[0]

"""One vLLM engine in this process: the student as the sampler of its own training data.

No ray here; `gkd.rollout.worker` puts one of these into a Ray actor. Tokens in, tokens out: the engine
never sees text, so student tokens are never re-tokenized.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gkd.config import RolloutConfig
from gkd.errors import ClusterError, DataError
from gkd.types import Prompt, Rollout, VersionSpan
from gkd.weight_sync.buckets import Bucket
from gkd.weight_sync.transfer import GroupSpec

# What vLLM reads from the environment when it is imported; `gkd.cluster` puts it into the actor's environment.
CPU_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one call of `generate` samples. temperature 0 is greedy."""

    n: int
    temperature: float
    top_p: float
    max_tokens: int
    seed: int


class RolloutEngine:
    """Generate with continuous batching and streaming completion; take new weights between calls.

    Args:
        model_path: Hugging Face folder; its weights are version 0 until the first `receive`.
        config: sizes of the engine.
        dtype: "float32" | "bfloat16".
        max_model_len: longest prompt plus response, tokens.
        device: "cpu" | "cuda".
        eos_ids: a response ends with (and includes) the first of these.
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
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        on_cpu = device == "cpu"
        self.policy_version = 0
        self._eos_ids = list(eos_ids)
        self._serial = 0
        self.llm = LLM(
            model=model_path,
            dtype=dtype,
            tensor_parallel_size=config.tp,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            enforce_eager=config.enforce_eager or on_cpu,
            skip_tokenizer_init=True,
            trust_remote_code=trust_remote_code,
            disable_log_stats=True,
            # The logprobs of the distribution that was sampled from: temperature and top-p applied.
            logprobs_mode="processed_logprobs",
            # Never "ray": inside a Ray actor vLLM would choose it, and wait for GPUs that this very actor holds.
            distributed_executor_backend="mp" if config.tp > 1 else "uni",
            worker_extension_cls="gkd.rollout.weights.WeightReceiver",
            **(
                {"kv_cache_memory_bytes": config.cpu_kv_cache_mib << 20}
                if on_cpu
                # This kernel computes experts from the weights as they are loaded; others reorder them once, at start.
                else {"gpu_memory_utilization": config.gpu_memory_utilization, "moe_backend": "triton"}
            ),
        )

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, places: Sequence[int] | None = None
    ) -> Iterator[Rollout]:
        """Yield rollouts as they finish, in any order; `sampling.n` for each prompt.

        Every sequence has a seed of its own, made from (seed, sample_index), so what it says does not depend on
        which engine it ran on or, beyond rounding, on what ran beside it.

        Args:
            places: place of each prompt in its batch, which makes sample_index; by default, its place here.

        Raises:
            DataError: a prompt leaves no room for a response.
        """
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        # What an earlier call left there would change the batches of this one, and with them its rounding: a resumed
        # run would not write what the uninterrupted one wrote. Samples of one prompt still share their prefix.
        self._forget_prefixes()
        waiting: dict[str, tuple[Prompt, int]] = {}
        try:
            for place, prompt in zip(places or range(len(prompts)), prompts, strict=True):
                for index in range(place * sampling.n, (place + 1) * sampling.n):
                    self._serial += 1
                    request_id = str(self._serial)
                    params = SamplingParams(
                        temperature=sampling.temperature,
                        top_p=sampling.top_p,
                        max_tokens=sampling.max_tokens,
                        seed=_sequence_seed(sampling.seed, index),
                        logprobs=0,
                        flat_logprobs=True,
                        detokenize=False,
                        stop_token_ids=self._eos_ids,
                        ignore_eos=True,  # there is no tokenizer here that would know it; eos_ids decide
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    )
                    try:
                        engine.add_request(request_id, {"prompt_token_ids": prompt.token_ids.tolist()}, params)
                    except (ValueError, VLLMValidationError) as error:
                        raise DataError(f"the rollout engine refused prompt {prompt.prompt_id}: {error}") from error
                    waiting[request_id] = (prompt, index)
            while waiting:
                for output in engine.step():
                    if output.finished:
                        prompt, index = waiting.pop(output.request_id)
                        yield self._rollout(prompt, index, output.outputs[0])
        finally:
            if waiting:  # the caller stopped early, or a step failed: leave nothing running in the engine
                engine.abort_request(list(waiting))

    def _rollout(self, prompt: Prompt, index: int, completion: object) -> Rollout:
        tokens = np.asarray(completion.token_ids, dtype=np.int32)  # type: ignore[attr-defined]
        flat = completion.logprobs  # type: ignore[attr-defined]
        # logprobs=0 keeps the sampled token only (it may stand beside the top one): its first entry a position
        sampled = np.asarray([flat.logprobs[start] for start in flat.start_indices], dtype=np.float32)
        return Rollout(
            prompt_id=prompt.prompt_id,
            sample_index=index,
            prompt_ids=np.asarray(prompt.token_ids, dtype=np.int32),
            response_ids=tokens,
            rollout_logprobs=sampled,
            version_spans=(VersionSpan(0, len(tokens), self.policy_version),),
            finish_reason=str(completion.finish_reason),  # type: ignore[attr-defined]
        )

    def join_groups(self, specs: list[GroupSpec]) -> None:
        """Join every sender's weight-sync group with all of this engine's workers; blocks."""
        self.llm.collective_rpc("gkd_join_groups", args=(specs,))

    def receive(self, plans: list[list[Bucket]], policy_version: int) -> int:
        """Take one weight version (blocks until every sender sent it) and forget cached prefixes of the old one."""
        n_bytes = self.llm.collective_rpc("gkd_receive", args=(plans,))[0]
        self._forget_prefixes()
        self.policy_version = policy_version
        return int(n_bytes)

    def _forget_prefixes(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise ClusterError("the rollout engine cannot forget its cached prefixes: requests are still running")

    def digests(self) -> dict[str, str]:
        """Digest by Hugging Face name of every tensor the engine holds."""
        return self.llm.collective_rpc("gkd_digests")[0]


def _sequence_seed(seed: int, sample_index: int) -> int:
    return int(np.random.SeedSequence([seed, sample_index]).generate_state(1, np.uint32)[0])

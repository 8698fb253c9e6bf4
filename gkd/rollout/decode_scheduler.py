"""vLLM's scheduler with a short path for passes in which every sequence decodes one token.

For small models vLLM's own bookkeeping takes longer than the forward pass. In most passes of a rollout nothing is to be
decided: no sequence starts or ends, and each has a slot in its last KV block for the next token. `schedule` then lists
the sequences, and `update_from_output` appends their tokens. Everything else is left to the base class: prefills,
preemption, new KV blocks, and the last token of a sequence. If others start in a pass, the base class schedules it,
but does not look for KV blocks of sequences that have a slot.

Tokens reach the output processor only with the last one. Sequences do not differ from the base class's.

It needs the synchronous scheduler, so it is used on CPU; on GPUs, vLLM overlaps its bookkeeping with the forward pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


class DecodeScheduler(Scheduler):
    """Schedules sequences of `gkd.rollout.engine`: text only, with logprobs, no speculative decoding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        groups = self.kv_cache_config.kv_cache_groups
        self._has_short_path = (
            len(groups) == 1
            and type(groups[0].kv_cache_spec) is FullAttentionSpec  # others free blocks while a sequence decodes
            and not self.use_pp
            and not self.use_v2_model_runner
            and not self.scheduler_config.async_scheduling
            and not self.num_spec_tokens
            and self.connector is self.ec_connector is self.aux_output_connector is None
        )
        # Most passes of a busy engine start a sequence, so the base class schedules them.
        self._allocate_slots, self.kv_cache_manager.allocate_slots = (
            self.kv_cache_manager.allocate_slots,
            self._slots_of,
        )
        # Request id -> (token, ids and logprobs of the sampled and the top tokens, rank) not yet output.
        self._held: dict[str, list[tuple[int, list[int], list[float], int]]] = {}

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Return what the next pass computes."""
        if self._has_short_path and self._only_decodes():
            return self._schedule_decodes()
        return super().schedule(throttle_prefills)

    def _only_decodes(self) -> bool:
        """Return whether the base class would schedule one token of each running sequence, without a new KV block."""
        running = self.running
        may_start = bool(self.waiting or self.kv_holding_waiting) and len(running) < self.max_num_active_reqs
        if may_start or not 0 < len(running) <= self.max_num_scheduled_tokens:
            return False
        if self._pause_state != PauseState.UNPAUSED:
            return False
        in_last_pass = self.prev_step_scheduled_req_ids
        for request in running:
            if request.num_computed_tokens + 1 != len(request.all_token_ids) or request.request_id not in in_last_pass:
                return False
            if not self._has_slot(request):
                return False
        return True

    def _has_slot(self, request: Request) -> bool:
        """Return whether the base class neither allocates nor caches a block for the next token.

        It allocates a block before its first token, and caches it with its last one.
        """
        return (request.num_computed_tokens + 1) % self.block_size >= 2

    def _slots_of(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        """Return the new KV blocks of a request, see `KVCacheManager.allocate_slots`."""
        decodes = num_new_tokens == 1 and request.num_computed_tokens >= request.num_prompt_tokens
        if self._has_short_path and decodes and request.status == RequestStatus.RUNNING and self._has_slot(request):
            return self.kv_cache_manager.empty_kv_cache_blocks
        return self._allocate_slots(request, num_new_tokens, *args, **kwargs)

    def _schedule_decodes(self) -> SchedulerOutput:
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        request_ids = [request.request_id for request in self.running]
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=request_ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(request_ids),
            num_computed_tokens=[request.num_computed_tokens for request in self.running],
            num_output_tokens=[request.num_output_tokens for request in self.running],
        )
        output.num_scheduled_tokens = dict.fromkeys(request_ids, 1)
        output.total_num_scheduled_tokens = len(request_ids)
        output.preempted_req_ids = self.reset_preempted_req_ids
        output.finished_req_ids = self.finished_req_ids
        self.prev_step_scheduled_req_ids.clear()
        self.prev_step_scheduled_req_ids.update(request_ids)
        self._update_after_schedule(output)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Append the sampled tokens; return the tokens of sequences that end, with the tokens held back before."""
        logprobs = model_runner_output.logprobs
        if not self._has_short_path or logprobs is None:
            return self._released(super().update_from_output(scheduler_output, model_runner_output))
        ids, values, ranks = (table.tolist() for table in logprobs[:3])
        sampled, rows = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        left: dict[str, int] = {}  # scheduled tokens of the requests left to the base class
        for request_id, n_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            row = rows[request_id]
            tokens = sampled[row]
            if request is None or n_tokens != 1 or len(tokens) != 1 or self._may_end(request, tokens[0]):
                left[request_id] = n_tokens
                continue
            request.num_in_flight_tokens -= 1
            request.append_output_token_ids(tokens[0])
            self._held.setdefault(request_id, []).append((tokens[0], ids[row], values[row], ranks[row]))
        rest = replace(scheduler_output, num_scheduled_tokens=left)
        return self._released(super().update_from_output(rest, model_runner_output))

    def _may_end(self, request: Request, token: int) -> bool:
        """Return whether the base class must check if `token` is the last one."""
        params = request.sampling_params
        n_output, n_all = request.num_output_tokens + 1, request.num_tokens + 1
        return (
            token in params.stop_token_ids
            or token == params.eos_token_id
            or n_output >= request.max_tokens
            or n_all >= self.max_model_len
            or params.repetition_detection is not None
            or request.num_stale_output_tokens > 0
            or request.is_finished()
        )

    def _released(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        """Put the tokens held back before the outputs' tokens."""
        for of_client in outputs.values():
            for output in of_client.outputs:
                held = self._held.pop(output.request_id, None)
                if held is None or output.new_logprobs is None:
                    continue  # nothing held back, or ended by an error
                tokens, ids, values, ranks = zip(*held, strict=True)
                latest_ids, latest_values, latest_ranks = output.new_logprobs[:3]
                # A pass has as many columns as one of its sequences needs; this one needs at most the fewest.
                n = min(latest_ids.shape[1], *map(len, ids))
                output.new_logprobs = LogprobsLists(
                    np.array([*(row[:n] for row in ids), *latest_ids[:, :n]], latest_ids.dtype),
                    np.array([*(row[:n] for row in values), *latest_values[:, :n]], np.float32),
                    np.array([*ranks, *latest_ranks]),
                    None,
                )
                output.new_token_ids = [*tokens, *output.new_token_ids]
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        """End sequences from outside; their tokens are dropped."""
        ended: list[Request] = super().finish_requests(*args, **kwargs)
        for request in ended:
            self._held.pop(request.request_id, None)
        return ended

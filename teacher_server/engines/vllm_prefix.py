"""Let vLLM reuse the KV cache of a prompt, but never of a row whose hidden state is needed.

vLLM's prefix cache finds the longest beginning of a request that it has computed, whole blocks of it, at most all
tokens but the last. Cached tokens are not computed, so they have no hidden states. Two responses may begin alike, and a
request may be repeated; then the longest beginning reaches into the response. This scheduler ends it at the first row
that the request needs.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from teacher_server.engines.vllm_extension import ROW_RANGES, RowRange


class CappedScheduler(Scheduler):
    """vLLM's scheduler, for requests with `ROW_RANGES`: `EngineArgs.scheduler_cls`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        find = self.kv_cache_manager.get_computed_blocks
        self.kv_cache_manager.get_computed_blocks = lambda request: find(_Beginning(request))


class _Beginning:
    """A request that ends with the first row that it needs. vLLM looks for all of its tokens but the last."""

    def __init__(self, request: Any) -> None:
        first = RowRange(*request.sampling_params.extra_args[ROW_RANGES][0]).position
        self._request, self.num_tokens = request, min(request.num_tokens, first + 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

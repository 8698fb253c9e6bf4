"""vLLM's worker on a CPU, with a KV cache of the size that its layers state."""

from __future__ import annotations

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.cpu_worker import CPUWorker

_SPARE_TOKENS = 1024  # sequences begin with a block of their own
_N_STATES = 16  # sequences that layers with a state, such as Mamba's, compute at once


class CpuWorker(CPUWorker):
    """Sizes a KV cache of 0 bytes for two steps of `max_num_batched_tokens`, or one sequence of `max_model_len`.

    Without a size, vLLM would take a part of the machine's memory.
    """

    def determine_available_memory(self) -> int:
        if not self.cache_config.kv_cache_memory_bytes:
            n_tokens = max(self.model_config.max_model_len, 2 * self.scheduler_config.max_num_batched_tokens)
            self.cache_config.kv_cache_memory_bytes = sum(
                spec.page_size_bytes
                * (_N_STATES if isinstance(spec, MambaSpec) else cdiv(n_tokens + _SPARE_TOKENS, spec.block_size))
                for spec in self.get_kv_cache_spec().values()
            )
        return super().determine_available_memory()

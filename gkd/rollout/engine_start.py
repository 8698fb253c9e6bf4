"""vLLM in this process, made for rollouts: what it needs of the environment, its settings, the phases of its start."""

from __future__ import annotations

import os
from typing import Any

from gkd.cluster.imports import quick_imports
from gkd.config.schema import RolloutConfig

# What vLLM reads from the environment when it is imported; `gkd.cluster` puts it into the actor's environment.
CPU_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}

# What its construction is at, by the functions of vLLM that it is in.
ENGINE_PHASES = {
    "_find_and_load": "importing",
    "init_device": "joining its workers' group",
    "initialize_model": "building the model",
    "load_weights": "loading weights",
    "process_weights_after_loading": "laying out weights",
    "determine_available_memory": "measuring memory",
    "initialize_from_config": "making the KV cache",
    "compile_or_warm_up_model": "warming up",
}


def start_vllm(
    model_path: str,
    config: RolloutConfig,
    *,
    dtype: str,
    max_model_len: int,
    device: str,
    trust_remote_code: bool,
    can_sleep: bool,
) -> Any:
    """vLLM's LLM; blocks until it can answer. Arguments as of `gkd.rollout.engine.RolloutEngine`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with quick_imports():
        from vllm import LLM

    on_cpu = device == "cpu"
    return LLM(
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
            #
            # gpu_memory_utilization is a share of the whole GPU, also where others hold some of it: vLLM refuses to
            # start if less than that is free, and if others give memory back while it measures how much its own
            # passes take. What others take only later, it does not know of.
            else {
                "gpu_memory_utilization": config.gpu_memory_utilization,
                "moe_backend": "triton",
                "enable_sleep_mode": can_sleep,
            }
        ),
    )

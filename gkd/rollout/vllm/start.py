"""Start vLLM in this process for rollouts: environment, arguments, start-up phases; remove what it leaves on a host.

vLLM removes its files when it is shut down, but that takes 5 s, and a killed process does not do it; its sockets it
never removes. So each engine keeps its files in a folder, with links to its names in /dev/shm, and any process of the
host can remove them: the engine at the end of the run, the next process of its slot, the driver.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from gkd.cluster.garbage import quick_imports
from gkd.cluster.host import temporary_folder
from gkd.cluster.stacks import RANK_ENV
from gkd.config.schema import engine_rank
from gkd.config.schema_actor import LoraConfig
from gkd.config.schema_rollout import RolloutConfig
from gkd.config.schema_sections import Vision
from gkd.errors import ConfigError, RankFailed, WeightSyncError
from gkd.memory.oom import is_out_of_memory
from gkd.spans import Phase
from teacher_server.engines.weight_files import FolderError
from teacher_server.wire.machine import OTHER_MODELS, thread_env
from teacher_server.wire.protocol import MAX_K

# vLLM reads these variables at import, so they are set in the environment of the Ray actor.
CPU_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    **thread_env(1),
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # hides vLLM's warning that it binds memory to the only NUMA node
}

# Start-up phase by the vLLM function that is executing.
ENGINE_PHASES: dict[str, Phase | str] = {
    "_find_and_load": "importing",
    "init_device": "initializing the workers' process group",
    "initialize_model": "building the model",
    "load_weights": "loading weights",
    "process_weights_after_loading": "processing weights",
    "determine_available_memory": "profiling memory",
    "initialize_from_config": Phase.CACHE,
    "compile_or_warm_up_model": "warming up",
}


ADAPTER_ID = 1  # an engine has one adapter


def start_vllm(
    model_path: str,
    config: RolloutConfig,
    *,
    dtype: str,
    max_model_len: int,
    device: str,
    trust_remote_code: bool,
    enable_sleep_mode: bool,
    lora: LoraConfig | None,
    vision: Vision = "none",
) -> Any:
    """Return a vLLM `LLM` that is ready to generate; blocks. Arguments as for `RolloutEngine`.

    Raises:
        ConfigError: naming model.path: vLLM cannot load the folder, or would compute with something else than it holds.
        RankFailed: vLLM failed otherwise, but for errors of memory, which pass.
    """
    for name in OTHER_MODELS:
        os.environ.pop(name, None)
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    # vLLM sets this level only after its first modules have logged that Triton has no backend for the CPU.
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    # Without a tokenizer, vLLM cannot render a chat and logs a traceback about it.
    logging.getLogger("vllm.renderers.base").addFilter(lambda record: "Chat template warmup" not in record.msg)
    folder = engine_folder()
    with quick_imports():
        from vllm import LLM, SamplingParams

        import teacher_server.engines.vllm_process as both

        both.keep_files_in(folder, remove_files)
    on_cpu = device == "cpu"
    kv_cache_bytes = config.kv_cache_bytes(on_cpu=on_cpu)
    try:
        llm = LLM(
            model=model_path,
            dtype=dtype,
            tensor_parallel_size=config.tp,
            max_model_len=max_model_len,
            max_num_seqs=config.sequence_limit,
            enforce_eager=config.enforce_eager or on_cpu,
            trust_remote_code=trust_remote_code,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            # Logprobs of the sampling distribution, after temperature, top-p, top-k and min-p.
            logprobs_mode="processed_logprobs",
            max_logprobs=MAX_K,  # vLLM's limit of 20 protects public servers; teacher.topk is the limit here
            # vLLM's default inside a Ray actor, "ray", would wait for GPUs that this actor already holds.
            distributed_executor_backend="mp" if config.tp > 1 else "uni",
            worker_extension_cls="gkd.rollout.vllm.weights.WeightReceiver",
            **both.architecture_arguments(model_path, images=vision != "none"),
            additional_config={"trains_tower": vision == "trained"},
            **({} if lora is None else _adapter_settings(lora)),
            **(
                {
                    "kv_cache_memory_bytes": kv_cache_bytes,
                    "async_scheduling": False,
                    # A pass computes a sequence's prefix as a whole. After a part of it vLLM would rewind the
                    # sequence's random generator, which torch cannot do on the CPU.
                    "enable_chunked_prefill": False,
                    # Without it, vLLM has no prefixes of recurrent layers. None: vLLM's default.
                    "enable_prefix_caching": False if both.has_state(model_path, trust_remote_code) else None,
                }
                if on_cpu
                # The triton MoE kernel uses the expert weights as they are loaded; other kernels reorder them once, at
                # start-up, so later weight syncs would not reach them.
                #
                # Without the size of the KV cache vLLM fails to start if less than gpu_memory_utilization of the GPU is
                # free. It also profiles its own peak, and fails if another process frees memory meanwhile. It does not
                # account for memory that others allocate later.
                else {
                    **both.gpu_memory_arguments(config.gpu_memory_utilization, kv_cache_bytes),
                    "moe_backend": "triton",
                    "enable_sleep_mode": enable_sleep_mode,
                }
            ),
        )
        both.check_taken(model_path, llm.llm_engine)
        if on_cpu:  # for some models vLLM has no kernel, and finds out in the first pass
            llm.generate([{"prompt_token_ids": [0, 0]}], SamplingParams(max_tokens=1), use_tqdm=False)
    except FolderError as error:
        fix = "copy the whole folder again; if it is complete, vLLM does not compute this model: use another one."
        raise ConfigError("model.path", model_path, error.problem, fix) from error
    except Exception as error:  # vLLM has code for each model, which may raise any error
        if is_out_of_memory(error):
            raise
        what = f"{type(error).__name__}: {error}"
        fix = "if it is not about memory or the device, use a model that vLLM computes."
        text = f"vLLM cannot start with model.path = {model_path!r}: {what}. Fix: {fix}"
        raise RankFailed(text, what.partition("\n")[0]) from error
    link_shared_memory(folder)
    return llm


def _adapter_settings(lora: LoraConfig) -> dict[str, Any]:
    # vLLM wraps only these layers; the others keep their speed.
    layers = sorted({target.rpartition(".")[2] for target in lora.targets})
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": engine_rank(lora.rank), "lora_target_modules": layers}


def adapter_request() -> Any:
    """Return what makes a request compute with the adapters that the engine has received."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("student", ADAPTER_ID, "received by weight sync, never read from a path")


@contextmanager
def shared_nccl_env() -> Iterator[None]:
    """Create NCCL groups with processes that do not run vLLM, without the NCCL settings that vLLM pins for its own.

    It pins them with VLLM_BATCH_INVARIANT=1, in its own processes only. Members with different settings hang. NCCL
    reads most settings once. From version 2.29.7 on it can read them again, and vLLM uses that in `unpinned_nccl_env`.
    Without either the settings stay, also if the variables are removed. Raises WeightSyncError: the pinned settings
    would apply here, too.
    """
    if not int(os.environ.get("VLLM_BATCH_INVARIANT") or 0):
        yield
        return
    from vllm.utils import nccl

    if nccl._unpinned_env == {}:  # vLLM has found an older NCCL
        raise WeightSyncError(
            "VLLM_BATCH_INVARIANT = 1: the rollout engine keeps the NCCL settings that vLLM has pinned, so an NCCL "
            "group with the actor would hang. Fix: weight_sync.transport = gloo, or NCCL 2.29.7"
        )
    with nccl.unpinned_nccl_env():
        yield


_SHARED_MEMORY = Path("/dev/shm")
# Messages between vLLM's processes, their semaphores, and collectives on a CPU.
_NAMES = ("psm_*", "sem.mp-*", "vllm_dist_*")
_BYTES = len("/gkd_vllm_12345678_9999/00000000-0000-0000-0000-000000000000")  # the path of a socket of vLLM


def engine_folder(owner: str = "") -> Path:
    """Return the folder of an engine, the same for all processes of a slot of a run.

    Args:
        owner: RUN/RANK; RUN/*: a pattern of all engines of a run; empty means this process.
    """
    run, _, rank = (owner or os.environ.get(RANK_ENV, str(os.getpid()))).partition("/")
    return temporary_folder(_BYTES) / f"gkd_vllm_{run[:8]}_{rank.rpartition(' ')[2]}"


def link_shared_memory(folder: Path) -> None:
    """Link in `folder` the names in /dev/shm that this process and its children have mapped."""
    mapped = set[str]()  # inodes: a semaphore is mapped under another name
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(OSError):  # it has ended
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            mapped |= {line.split()[4] for line in lines if f" {_SHARED_MEMORY}/" in line}
    for path in (path for pattern in _NAMES for path in _SHARED_MEMORY.glob(pattern)):
        with suppress(OSError):  # it, or the folder, has been removed; or it is linked already
            if str(path.stat().st_ino) in mapped:
                (folder / path.name).symlink_to(path)


def remove_files(pattern: Path) -> None:
    """Remove these folders, and what they link to in /dev/shm. The engines have ended, or are about to be killed."""
    for folder in pattern.parent.glob(pattern.name):
        for path in folder.glob("*"):
            with suppress(OSError):  # the path is not a link, or another process has removed it
                path.readlink().unlink()
        shutil.rmtree(folder, ignore_errors=True)

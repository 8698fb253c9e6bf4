"""Make the environment variables with which a process finds the stand-in cards.

env = environment(cards=2)
try:
    subprocess.run([gpu_python(), "-m", "gkd.main_gkd", ...], env=env)
finally:
    remove_segments(env)
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from tests.dry_card.build import HERE, build

ROOT = HERE.parents[1]


def gpu_python() -> Path:
    """Return the Python of the GPU environment: of $GKD_GPU_VENV, or of .venv-gpu in the repository."""
    return Path(os.environ.get("GKD_GPU_VENV") or ROOT / ".venv-gpu").absolute() / "bin" / "python"


def environment(cards: int = 1, gib: float = 8.0, **settings: object) -> dict[str, str]:
    """Return the variables of this process plus those of a machine with stand-in cards; compile if needed.

    Args:
        settings: the variables DRY_CARD_* of README.md, such as late=1. They win over those of this process.
    """
    built = build(next(gpu_python().parents[1].glob("lib/python3.*/site-packages")))
    library = str(built / "libcards.so")
    env = {"OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    env |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}  # they need multicast memory
    env |= {"DRY_CARD_MACHINE": uuid.uuid4().hex[:12], "DRY_CARD_VALUES": "1"} | os.environ
    settings |= {"count": cards, "gib": gib, "build": built}
    env |= {f"DRY_CARD_{name.upper()}": str(value) for name, value in settings.items()}
    if env["DRY_CARD_VALUES"] == "1":  # The kernels that a compiler makes have no values.
        env = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"} | env
    env |= {"TRITON_LIBCUDA_PATH": str(built), "VLLM_NCCL_SO_PATH": library, "VLLM_CUDART_SO_PATH": library}
    first = {"PYTHONPATH": f"{HERE / 'hooks'}:{ROOT}", "LD_LIBRARY_PATH": built, "PATH": HERE / "bin"}
    for name, path in (first | {"LD_PRELOAD": library}).items():
        env[name] = f"{path}:{env[name]}" if env.get(name) else str(path)
    return env


def remove_segments(env: dict[str, str]) -> None:
    """Remove the shared memory of the machine of `env`. Call it after the last of its processes has ended."""
    for path in Path("/dev/shm").glob(f"dry-card.{os.getuid()}.{env['DRY_CARD_MACHINE']}.*"):
        path.unlink(missing_ok=True)

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


def environment(
    cards: int = 1, gib: float = 8.0, machine: str | None = None, values: bool = True, **settings: object
) -> dict[str, str]:
    """Return the variables of this process plus those of a machine with stand-in cards; compile if needed.

    Args:
        cards: number of cards of the machine.
        gib: memory of a card in GiB. Only the touched pages take host memory.
        machine: name; processes with the same name share the memory numbers of the cards. None: a new name.
        values: compute each operation on the CPU. Otherwise kernels do nothing, and Triton and Inductor compile.
        settings: other variables, such as late=1 for DRY_CARD_LATE=1; README.md lists them.
    """
    built = build(next(gpu_python().parents[1].glob("lib/python3.*/site-packages")))
    library = str(built / "libcards.so")
    # The variables of the caller win over these. The two of VLLM_ALLREDUCE need multicast memory.
    env = {"OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    env |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
    if values:  # A kernel that a compiler makes has no values: Triton interprets, and Inductor is off.
        env |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    env |= os.environ
    settings |= {"count": cards, "gib": gib, "machine": machine or uuid.uuid4().hex[:12], "values": int(values)}
    env |= {f"DRY_CARD_{name.upper()}": str(value) for name, value in (settings | {"build": built}).items()}
    env |= {"TRITON_LIBCUDA_PATH": str(built / "lib"), "VLLM_NCCL_SO_PATH": library, "VLLM_CUDART_SO_PATH": library}
    for name, first in (
        ("PYTHONPATH", f"{HERE / 'hooks'}:{ROOT}"),
        ("LD_LIBRARY_PATH", str(built / "lib")),
        ("PATH", str(HERE / "bin")),
        ("LD_PRELOAD", library),
    ):
        env[name] = f"{first}:{env[name]}" if env.get(name) else first
    return env


def remove_segments(env: dict[str, str]) -> None:
    """Remove the shared memory of the machine of `env`. Call it after the last of its processes has ended."""
    for path in Path("/dev/shm").glob(f"dry-card.{os.getuid()}.{env['DRY_CARD_MACHINE']}.*"):
        path.unlink(missing_ok=True)

"""Run `nvidia-smi` with a time limit, read CUDA_VISIBLE_DEVICES, set the threads of a process; for trainer and server.

`nvidia-smi` is used and not NVML: a call into a driver that is stuck never returns, but a program can be abandoned.
"""

from __future__ import annotations

import subprocess
from itertools import takewhile

# Libraries read them once, at their import, and job scripts set some of them. If they differ, torch and vLLM disagree
# about the number of threads, and vLLM's kernels for the CPU end the process.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
OTHER_MODELS = ("VLLM_USE_MODELSCOPE", "VLLM_MODEL_REDIRECT_PATH")  # with them vLLM loads another model than the folder


class SmiError(Exception):
    """`nvidia-smi` exists but timed out or failed; the text gives the reason."""


class SmiTimeout(SmiError):
    """`nvidia-smi` did not finish in time."""


def run_nvidia_smi(*args: str, timeout_s: float) -> str:
    """Return the output of `nvidia-smi`; empty if there is no such program, or no permission to run it.

    Raises:
        SmiTimeout: it did not finish in time.
        SmiError: it ended with an error.
    """
    try:
        done = subprocess.run(["nvidia-smi", *args], capture_output=True, text=True, timeout=timeout_s, check=False)
    except (FileNotFoundError, PermissionError):
        return ""
    except subprocess.TimeoutExpired as error:
        raise SmiTimeout(
            f"nvidia-smi {args[0]} did not finish within {timeout_s:.0f} s: the driver may hang"
        ) from error
    if done.returncode:
        raise SmiError(f"nvidia-smi {args[0]}: exit code {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def visible_ids(visible: str) -> tuple[str, ...]:
    """Return the valid entries of a CUDA_VISIBLE_DEVICES: CUDA stops at the first that is empty or -1."""
    return tuple(takewhile(lambda entry: entry not in ("", "-1"), (part.strip() for part in visible.split(","))))


def thread_env(n_threads: int) -> dict[str, str]:
    """Return the environment of a process with this number of CPU threads."""
    return dict.fromkeys(_THREADS, str(n_threads))

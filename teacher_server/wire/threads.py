"""Name the environment variables that set the number of CPU threads of a process.

Libraries read them once, at their import. Job scripts set some of them. If they differ, torch and vLLM disagree about
the number of threads, and vLLM's kernels for the CPU end the process.
"""

from __future__ import annotations

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def thread_env(n_threads: int) -> dict[str, str]:
    """Return the environment of a process with this number of threads."""
    return dict.fromkeys(_VARIABLES, str(n_threads))

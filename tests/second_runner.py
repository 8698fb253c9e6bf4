"""vLLM's second model runner, which it chooses itself for dense models on GPUs, on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

from tests.e2e.conftest import save_model

N_VOCAB = 199  # the interpreter takes 0.2 s for each 1,024 tokens of a sequence's vocabulary
# For the process that loads vLLM. Triton reads its variable when it is imported.
ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


def allow_second_runner() -> None:
    """Call this before vLLM is imported, in a process with `ENVIRONMENT`; in others it does nothing.

    Triton's interpreter runs the kernels. vLLM's build for CPUs requires a backend of Triton for them, which the
    interpreter does not need.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        from triton.backends import backends

        backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def small_student(folder: Path) -> Path:
    """Save a student with `N_VOCAB` token ids, and more rows than vLLM's second runner masks by itself."""
    save_model(folder, seed=1, layers=2, n_vocab=N_VOCAB + 1100)
    return folder

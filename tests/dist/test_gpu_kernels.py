"""Recurrent layers on a CPU where packages with kernels for GPUs are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import model_parts as parts

pytestmark = pytest.mark.dist
ERROR = "RuntimeError('0 active drivers ([]). There should only be one.')"  # Triton's, without a GPU
# Kernels that transformers imports, by package. The real ones of fla end with this error, too, on a CPU.
PACKAGES = {
    "fla": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "causal_conv1d": ("causal_conv1d_fn", "causal_conv1d_update"),
    "mamba_ssm/ops/triton/ssd_combined": ("mamba_split_conv1d_scan_combined", "mamba_chunk_scan_combined"),
}


def _packages(root: Path) -> Path:
    for package, functions in PACKAGES.items():
        folder = root / package
        folder.mkdir(parents=True)
        code = "".join(f"def {name}(*args, **kwargs):\n    raise {ERROR}\n\n\n" for name in functions)
        (folder / "__init__.py").write_text(code)
    return root


def _measure(root: Path, name: str) -> None:
    """Runs in a process with these packages."""
    import transformers.models.mamba2.modeling_mamba2 as mamba2
    import transformers.models.qwen3_5.modeling_qwen3_5 as qwen

    for kernel in (qwen.torch_chunk_gated_delta_rule, mamba2.causal_conv1d_fn, mamba2.mamba2_chunk_scan):
        with pytest.raises(RuntimeError, match="0 active drivers"):
            kernel()
    parts.make(root, name)
    for packing in (True, False):
        cell = parts.student(root, "fsdp2", packing)
        assert cell.kind == "ok", cell
    cell = parts.compare(root / "first", parts.teach(root, "hf", "float32"), "float32")
    assert cell.kind == "ok", cell


@pytest.mark.cpu_only("it is about tensors on a CPU")
@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_kernels_of_gpus_are_left_out_on_a_cpu(tmp_path: Path, name: str) -> None:
    """Fails if a student or a teacher on a CPU calls a kernel for GPUs, which transformers has chosen."""
    paths = [str(_packages(tmp_path)), *filter(None, [os.environ.get("PYTHONPATH")])]
    code = f"import pathlib, {__name__} as own\nown._measure(pathlib.Path({str(tmp_path)!r}) / 'models', {name!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

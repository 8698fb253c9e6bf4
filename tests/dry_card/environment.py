"""Compile the stand-in cards, make the environment variables with which a process finds them, and run commands there.

libcards.so has the calls of the C++ files and, for every other call that torch or vLLM needs, a stub that returns 0. It
is compiled into a cache folder, once for each state of the sources and of the GPU environment.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# These calls belong to libraries that the stand-in replaces, apart from some that work without a card.
FAMILY = re.compile(
    r"(?!cudnnGet(Version|ErrorString|CudartVersion)|cublasGetStatus|cublasLtGetVersion|cusparseLt)"
    r"(_*cuda[A-Z]|cu[A-Z]|cublas|cudnn|cusparse|cusolver|cufft|curand|nccl|cufile)"
)
PRODUCT = re.compile(r"cublas(Lt)?\w*(gemm|Gemm|Matmul)(_64|Ex|Batched|Strided)*$")  # calls that launch a product
# vLLM, Triton and torch look these up by name, so that no library lists them as undefined.
BY_NAME = """cudaDeviceReset cuCtxGetLimit cuCtxSetLimit cuLaunchKernel cuLaunchKernelEx nvmlInit_v2 nvmlInitWithFlags
    nvmlShutdown nvmlDeviceGetP2PStatus nvmlDeviceGetNvLinkRemoteDeviceType nvmlDeviceGetNvLinkRemotePciInfo_v2"""
GXX = "g++ -std=c++17 -O2 -fPIC -w -shared -Wl,-soname,libcudart.so.13"


def gpu_python() -> Path:
    """Return the Python of the GPU environment: of $GKD_GPU_VENV, or of .venv-gpu in the repository."""
    return Path(os.environ.get("GKD_GPU_VENV") or ROOT / ".venv-gpu").absolute() / "bin" / "python"


def build_cards(folder: Path, headers: Path, users: Iterable[Path] = ()) -> Path:
    """Build libcards.so in `folder`, with stubs for the calls that the libraries `users` need, and return its path."""
    library, versions, stubs = folder / "libcards.so", folder / "versions.map", folder / "stubs.cpp"
    # A library asks for a call of libcudart in a version. The calls of all other libraries are found without one.
    versions.write_text("libcudart.so.13 { global: cuda*; __cuda*; };\n")
    listing = subprocess.run(["nm", "-D", "--undefined-only", *users], capture_output=True, text=True).stdout
    needed = sorted({*filter(FAMILY.match, re.findall(r" U (\w+)", listing)), *BY_NAME.split()})
    # The linker prefers a call of the C++ files to a weak one.
    stub = 'API __attribute__((weak)) long {0}() {{ {1}dry_card_note("{0} (stub)"); return 0; }}\n'
    counts = {name: "launched[PRODUCT]++; " for name in needed if PRODUCT.match(name)}
    stubs.write_text('#include "cards.h"\n' + "".join(stub.format(name, counts.get(name, "")) for name in needed))
    options = [f"-Wl,--version-script={versions}", f"-I{headers}", f"-I{HERE}", f"-o{library}"]
    subprocess.run([*GXX.split(), *options, *HERE.glob("*.cpp"), stubs, "-ldl", "-lpthread"], check=True)
    return library


def build(site: Path) -> Path:
    """Return the cache folder for the site-packages folder `site`; compile if it does not exist."""
    state = [str(p) for name in ("torch", "vllm", "nvidia_cuda_runtime") for p in site.glob(f"{name}-*.dist-info")]
    state += [path.read_text() for path in (*sorted(HERE.glob("*.cpp")), HERE / "cards.h", Path(__file__))]
    digest = hashlib.sha256("\0".join(state).encode()).hexdigest()[:16]
    done = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gkd-dry-card" / digest
    if done.is_dir():
        return done
    print("[dry_card] compiling, about half a minute", flush=True)
    done.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=done.parent) as temporary:
        (folder := Path(temporary) / "built").mkdir()
        headers = next(site.glob("nvidia/*/include/cuda.h")).parent
        build_cards(folder, headers, [*site.glob("torch/lib/*.so"), *site.glob("vllm/**/*.so")])
        for name in ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1", "libcudart.so.13"):
            (folder / name).symlink_to("libcards.so")
        with suppress(OSError):  # Another process was faster, and its result serves.
            folder.rename(done)
    return done


def environment(cards: int = 1, gib: float = 8.0, **settings: object) -> dict[str, str]:
    """Return this process's variables and those of a machine with cards. `settings`: README.md's, such as late=1."""
    built = build(next(gpu_python().parents[1].glob("lib/python3.*/site-packages")))
    library = str(built / "libcards.so")
    env = {"OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    env |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}  # they need multicast memory
    env |= {"DRY_CARD_MACHINE": uuid.uuid4().hex[:12], "DRY_CARD_VALUES": "1"} | os.environ
    settings |= {"count": cards, "gib": gib, "build": built}
    env |= {f"DRY_CARD_{name.upper()}": str(value) for name, value in settings.items()}
    if env["DRY_CARD_VALUES"] == "1":  # What is compiled for a card computes nothing.
        env = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_USE_FUSED_MOE_GROUPED_TOPK": "0"} | env
    env |= {"TRITON_LIBCUDA_PATH": str(built), "VLLM_NCCL_SO_PATH": library, "VLLM_CUDART_SO_PATH": library}
    first = {"PYTHONPATH": f"{HERE / 'hooks'}:{ROOT}", "LD_LIBRARY_PATH": built, "PATH": HERE / "bin"}
    for name, path in (first | {"LD_PRELOAD": library}).items():
        env[name] = f"{path}:{env[name]}" if env.get(name) else str(path)
    return env


def remove_segments(env: dict[str, str]) -> None:
    """Remove the shared memory of the machine of `env`. Call it after the last of its processes has ended."""
    shutil.rmtree(f"/dev/shm/dry-card.{os.getuid()}.{env['DRY_CARD_MACHINE']}", ignore_errors=True)


def main() -> int:
    """Run a command or tests on a new machine, pass SIGTERM on, and return the exit code. run.sh calls it."""
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, command = sys.argv[1:at], sys.argv[at + 1 :]
    parser = argparse.ArgumentParser(prog="run.sh", usage=(HERE / "README.md").read_text(), allow_abbrev=False)
    parser.add_argument("--cards", type=int, default=int(os.environ.get("DRY_CARD_COUNT", 1 if command else 2)))
    parser.add_argument("--gib", type=float, default=float(os.environ.get("DRY_CARD_GIB", 8)))
    options, tests = parser.parse_known_args(arguments)
    on_cards = [str(gpu_python()), "-m", "tests.by_file", "--device", "cuda"]
    env = environment(options.cards, options.gib)
    process = subprocess.Popen(command or [*on_cards, *(tests or ["tests/unit/test_dry_card.py"])], env=env)
    signal.signal(signal.SIGINT, lambda *_: None)  # The terminal sends it to the command, too.
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        return code if (code := process.wait()) >= 0 else 128 - code
    finally:
        remove_segments(env)


if __name__ == "__main__":
    raise SystemExit(main())

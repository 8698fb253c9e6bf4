"""Compile the stand-in into a cache folder, once for each state of its sources and of the GPU environment.

There are two libraries. `libcards.so` has the CUDA runtime, the driver, NVML, NCCL, the few calls of cuBLAS and cuDNN
with a result, and a stub that returns 0 for every other call that torch or vLLM needs. `values.so` is loaded into torch
and computes its operations on the CPU.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
CARDS = ("cards.cpp", "nccl.cpp", "blas.c")
# These calls belong to libraries that the stand-in replaces.
FAMILY = re.compile(r"_*cuda[A-Z]|cu[A-Z]|cublas|cudnn|cusparse|cusolver|cufft|curand|nccl|cufile|nvml")
# These calls work without a card, so that the real library answers them.
REAL = re.compile(
    r"cudnnGetVersion|cudnnGetErrorString|cudnnGetCudartVersion|cublasGetStatus|cublasLtGetVersion|cusparseLt"
)
# Programs look for the libraries by these names.
NAMES = ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1", "libcudart.so.13")


def symbols(path: Path, kind: str) -> set[str]:
    """Return the dynamic symbols of a library without their versions; `kind` is an option of nm."""
    out = subprocess.run(["nm", "-D", kind, str(path)], capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in out.splitlines() if line.strip()}


def compile_(*arguments: str | Path) -> None:
    """Run g++ or gcc; its errors go to the terminal."""
    subprocess.run([str(a) for a in arguments], check=True)


def cards(folder: Path, headers: Path, users: Iterable[Path] = ()) -> Path:
    """Build libcards.so in `folder`, with stubs for the calls that the libraries `users` need, and return its path."""
    objects = []
    for name in CARDS:
        objects.append(folder / f"{name}.o")
        language = ("gcc",) if name.endswith(".c") else ("g++", "-std=c++17")
        compile_(*language, "-O2", "-fPIC", "-w", "-c", "-I", headers, HERE / name, "-o", objects[-1])
    library, script, stubs = folder / "libcards.so", folder / "versions.map", folder / "stubs.c"
    # Libraries ask for cudaMalloc of libcudart.so.13, in that version. All other calls are found without a version.
    script.write_text("libcudart.so.13 { global: cuda*; __cuda*; };\n")
    link = ("g++", "-shared", "-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={script}", "-o", library, *objects)
    compile_(*link, "-ldl", "-lpthread", "-lrt")
    needed = set[str]().union(*(symbols(user, "--undefined-only") for user in users))
    missing = {n for n in needed if FAMILY.match(n) and not REAL.match(n)} - symbols(library, "--defined-only")
    stub = 'long {0}(void) {{ dry_card_note("{0} (stub)"); return 0; }}\n'
    stubs.write_text("void dry_card_note(const char*);\n" + "".join(stub.format(name) for name in sorted(missing)))
    compile_("gcc", "-O1", "-fPIC", "-w", "-c", stubs, "-o", folder / "stubs.o")
    compile_(*link, folder / "stubs.o", "-ldl", "-lpthread", "-lrt")
    return library


def values(folder: Path, site: Path, headers: Path) -> None:
    """Build values.so in `folder`, beside libcards.so, for the torch in the folder `site`."""
    torch = site / "torch"
    includes = ("-I", torch / "include", "-I", torch / "include/torch/csrc/api/include", "-I", headers)
    libraries = ("-ltorch", "-ltorch_cpu", "-lc10", "-lc10_cuda", "-l:libcards.so", "-Wl,-rpath,$ORIGIN")
    options = ("-O1", "-fPIC", "-shared", "-std=c++20", "-w", "-DUSE_CUDA")
    search = ("-L", torch / "lib", "-L", folder)
    compile_("g++", *options, *includes, HERE / "values.cpp", "-o", folder / "values.so", *search, *libraries)


def build(site: Path) -> Path:
    """Return the cache folder with the libraries for the site-packages folder `site`; compile them if it is missing."""
    found = [p.name for name in ("torch", "vllm", "nvidia_cuda_runtime") for p in site.glob(f"{name}-*.dist-info")]
    inputs = [str(site), *sorted(found), *((HERE / name).read_text() for name in (*CARDS, "values.cpp", "build.py"))]
    digest = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gkd-dry-card"
    if (cache / digest).is_dir():
        return cache / digest
    print("[dry_card] compiling, about 20 s", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=cache))
    try:
        headers = next(site.glob("nvidia/*/include/cuda_runtime_api.h")).parent
        torch = site / "torch/lib"
        users = [*torch.glob("lib*cuda*.so"), torch / "libtorch_python.so", torch / "libtorch_nvshmem.so"]
        cards(folder, headers, [*users, *site.glob("vllm/*.so"), *site.glob("vllm/*/*.so")])
        values(folder, site, headers)
        (folder / "lib").mkdir()
        for name in NAMES:
            (folder / "lib" / name).symlink_to("../libcards.so")
        folder.chmod(0o755)
        folder.rename(cache / digest)  # fails if another process has made it in the meantime, which is as good
    except OSError:
        if not (cache / digest).is_dir():
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return cache / digest

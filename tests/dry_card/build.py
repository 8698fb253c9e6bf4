"""Compile the stand-in into a cache folder, once for each state of its sources and of the GPU environment.

`libcards.so` has the calls of the C++ files and, for every other call that torch or vLLM needs, a stub that returns 0.
`values.so` is loaded into torch and computes its operations on the CPU.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
# These calls belong to libraries that the stand-in replaces, apart from some that work without a card.
FAMILY = re.compile(
    r"(?!cudnnGet(Version|ErrorString|CudartVersion)|cublasGetStatus|cublasLtGetVersion|cusparseLt)"
    r"(_*cuda[A-Z]|cu[A-Z]|cublas|cudnn|cusparse|cusolver|cufft|curand|nccl|cufile)"
)
# vLLM, Triton and torch look these up by name, so that no library lists them as undefined.
BY_NAME = """cudaDeviceReset cuCtxGetLimit cuCtxSetLimit nvmlInit_v2 nvmlInitWithFlags nvmlShutdown
    nvmlDeviceGetNvLinkRemoteDeviceType nvmlDeviceGetNvLinkRemotePciInfo_v2"""


def compile_(output: Path, *arguments: str | Path) -> None:
    """Run g++ to make a shared library. Errors go to the terminal."""
    subprocess.run(["g++", "-O2", "-fPIC", "-w", "-shared", *map(str, arguments), "-o", str(output)], check=True)


def build_cards(folder: Path, headers: Path, users: Iterable[Path] = ()) -> Path:
    """Build libcards.so in `folder`, with stubs for the calls that the libraries `users` need, and return its path."""
    library, versions, stubs = folder / "libcards.so", folder / "versions.map", folder / "stubs.cpp"
    # A library asks for a call of libcudart in a version. The calls of all other libraries are found without one.
    versions.write_text("libcudart.so.13 { global: cuda*; __cuda*; };\n")
    listing = subprocess.run(["nm", "-D", "--undefined-only", *users], capture_output=True, text=True).stdout
    needed = sorted({*filter(FAMILY.match, re.findall(r" U (\w+)", listing)), *BY_NAME.split()})
    # The linker prefers a call of the C++ files to a weak one.
    stub = 'API __attribute__((weak)) long {0}() {{ dry_card_note("{0} (stub)"); return 0; }}\n'
    stubs.write_text('#include "cards.h"\n' + "".join(stub.format(name) for name in needed))
    link = ["-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={versions}", "-ldl", "-lpthread", "-lrt"]
    sources = [path for path in HERE.glob("*.cpp") if path.name != "values.cpp"]
    compile_(library, "-std=c++17", "-I", headers, "-I", HERE, *sources, stubs, *link)
    return library


def build(site: Path) -> Path:
    """Return the cache folder for the site-packages folder `site`; compile if it does not exist."""
    state = [str(p) for name in ("torch", "vllm", "nvidia_cuda_runtime") for p in site.glob(f"{name}-*.dist-info")]
    state += [path.read_text() for path in (*sorted(HERE.glob("*.cpp")), HERE / "cards.h", HERE / "build.py")]
    digest = hashlib.sha256("\0".join(state).encode()).hexdigest()[:16]
    done = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gkd-dry-card" / digest
    if done.is_dir():
        return done
    print("[dry_card] compiling, about a minute", flush=True)
    done.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=done.parent) as temporary:
        (folder := Path(temporary) / "built").mkdir()
        headers = next(site.glob("nvidia/*/include/cuda.h")).parent
        build_cards(folder, headers, [*site.glob("torch/lib/*.so"), *site.glob("vllm/**/*.so")])
        torch = site / "torch"
        includes = [f"-I{path}" for path in (torch / "include", torch / "include/torch/csrc/api/include", headers)]
        link = [f"-L{torch / 'lib'}", f"-L{folder}", "-Wl,-rpath,$ORIGIN"]
        link += ["-ltorch", "-ltorch_cpu", "-lc10", "-lc10_cuda", "-l:libcards.so"]
        compile_(folder / "values.so", "-std=c++20", "-DUSE_CUDA", *includes, HERE / "values.cpp", *link)
        for name in ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1", "libcudart.so.13"):
            (folder / name).symlink_to("libcards.so")
        with suppress(OSError):  # Another process was faster, and its result serves.
            folder.rename(done)
    return done

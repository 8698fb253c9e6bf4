"""Carry packages to a machine without a network, in parts that are small enough to be sent with a call.

    python -m tests.gpu.carry make --out DIR [--have FREEZE] [--without NAME,..] [--only SET,..]    with a package index
    python3 tests/gpu/carry.py join --store STORE [--need SET,..] [PART_FOLDER ...]                 on the target
    python3 tests/gpu/carry.py install --store STORE [--need SET,..] [PART_FOLDER ...]

`train` has what the student and the benchmarks of tests/gpu import; `trl`, `models` and `all` (Ray, vLLM) have what is
needed in addition. A set is what its roots require, in the versions of launch/constraints-gpu-*.txt; no root requires
development tools or trackers. A package that the target's `pip list --format=freeze` (--have) has in the same version
stays, and so do those of --without, in any version, with what only they require. Parts come in any order, over several
calls; exit code 3: parts of a needed set are missing. A shell that sources STORE/env.sh finds the installed packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SETS = ("train", "trl", "models", "all")
TRAIN = ("torch", "triton", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis")  # and the dependencies, less Ray
TRL = ("trl==1.16.0", "datasets==5.2.0", "pandas==3.1.1", "multiprocess==0.70.19")  # see tests/bench/bench_trl.py
COMPILER = "cuda-toolkit[nvcc,cccl]"  # for the kernels of vLLM that are compiled where they run, see launch/freeze.py
LIMIT = 60 * 10**6  # bytes of a part: 64 MiB travel with a call, and 6.5 MB of them are the working tree
MANIFEST, MISSING = "parts.json", 3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("make", "join", "install"))
    parser.add_argument("parts", type=Path, nargs="*")
    for name in ("--out", "--have", "--store"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--python", choices=("3.11", "3.12"), default="3.12", help="version on the target")
    for name in ("--without", "--only", "--need"):
        parser.add_argument(name, type=lambda text: text.split(","), default=[])
    args = parser.parse_intermixed_args(argv)
    if (args.out if args.command == "make" else args.store) is None or not {*args.only, *args.need} <= set(SETS):
        parser.error(f"make needs --out, join and install need --store; the sets are {', '.join(SETS)}")
    if args.command == "make":
        return make(args.out, args.python, args.have, args.without, args.only or SETS)
    lack = join(args.store.resolve(), args.parts)
    needed = args.need or ([] if args.command == "install" else lack)
    if not lack or any(lack.get(one, [0]) for one in needed):
        return MISSING
    if args.command == "install":
        install(args.store.resolve(), {one for one in needed or lack if not lack[one]})
    return 0


def make(out: Path, python: str, have: Path | None, without: Sequence[str], only: Sequence[str]) -> int:
    """Download the wheels, write the parts, and print a table."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"]
    gpu = project["optional-dependencies"]["gpu"]
    pins = (ROOT / "launch" / f"constraints-gpu-py{python.replace('.', '')}.txt").read_text().splitlines()[1:]
    model = (ROOT / "examples" / "real_model" / "requirements.txt").read_text().splitlines()[-1].split()[0]
    wheels = _download([*pins, *TRL, model], out / f"wheels_{python}", python)
    lines = re.findall(r"^(.+)==(.+?)(?:\+cu.*)?$", have.read_text(), re.M) if have else []
    versions = {_canonical(name): version for name, version in lines}
    train = [*(text for text in needed if not text.startswith("ray==")), *TRAIN]
    roots = {"train": train, "trl": TRL, "models": ["gguf"], "all": [*needed, *gpu, COMPILER]}
    closures = {one: closure(roots[one], wheels, python, {*map(_canonical, without)}) for one in SETS}
    closures["models"].add(_canonical(model.split("==")[0]))  # what it requires belongs to another program
    files: dict[Path, list[str]] = {}
    for one in (one for one in SETS if one in only):
        for package in sorted(closures[one] - (closures["train"] if one != "train" else set())):
            version = wheels[package].name.split("-")[1]
            if versions.get(package) != version:
                files.setdefault(wheels[package], []).append(one)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    entries = write_parts(files, out, {"commit": commit.strip(), "python": python})
    sizes = {file.name: file.stat().st_size / 1e6 for file in files}
    for one in (one for one in SETS if one in only):
        own = [name for name in entries if one in entries[name]["sets"]]
        parts = sorted({part for name in own for part, _ in entries[name]["chunks"].values()})
        print(f"{one:7}{len(own):4} packages{sum(map(sizes.get, own)):8.1f} MB, parts {' '.join(map(str, parts))}")
    print(f"{sum(sizes.values()):.1f} MB, and a call for each of {len(list(out.glob('part_*')))} parts: {out}/part_*")
    return 0


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _download(pins: Sequence[str], folder: Path, python: str) -> dict[str, Path]:
    """Return the wheel of each package; pip downloads those that the folder lacks."""
    platforms = [f"manylinux{version}" for version in (*(f"_2_{minor}" for minor in range(31, 4, -1)), 2014, 2010, 1)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--python-version", python, "--implementation", "cp"]
    command += [f"--platform={platform}_x86_64" for platform in platforms]
    # The operator === does not admit the CPU build, 2.13.0+cpu, which a local folder of wheels may have.
    command += [re.sub("^(torch.*)==", r"\1===", pin) for pin in pins]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(f"pip download failed with exit code {code}, see above")
    found = {(_canonical(file.name.split("-")[0]), file.name.split("-")[1]): file for file in folder.glob("*.whl")}
    return {_canonical(name): found[_canonical(name), version] for name, version in (pin.split("==") for pin in pins)}


def closure(roots: Sequence[str], wheels: Mapping[str, Path], python: str, left_out: set[str]) -> set[str]:
    """Return the packages that the roots and their extras require on the target."""
    from packaging.requirements import Requirement

    target = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": "x86_64"}
    seen: set[tuple[str, str]] = set()
    pending = [(Requirement(root), "") for root in roots]
    for one, extra_of_parent in pending:  # it grows
        package = _canonical(one.name)
        if package in left_out or (one.marker and not one.marker.evaluate(target | {"extra": extra_of_parent})):
            continue
        if package not in wheels:
            sys.exit(f"{package} is required and has no pinned version: run launch/freeze.py, or add it to TRL here")
        for extra in {"", *one.extras} - {extra for name, extra in seen if name == package}:
            seen.add((package, extra))
            (wheel,) = distributions(path=[str(wheels[package])])
            pending += [(Requirement(text), extra) for text in wheel.requires or ()]
    return {package for package, _ in seen}


def write_parts(files: Mapping[Path, list[str]], out: Path, head: dict[str, str], limit: int = LIMIT) -> dict[str, Any]:
    """Write the files, each with its sets, as parts of at most `limit` bytes; return their entries in the manifest."""
    for old in out.glob("part_*"):
        shutil.rmtree(old)
    entries: dict[str, Any] = {}
    used = 0
    room = limit - limit // 100  # a hundredth is for the manifest
    for file, sets in files.items():
        whole, chunks = hashlib.sha256(), {}
        with file.open("rb") as source:
            while content := source.read(room - used % room):  # a part is filled before the next one begins
                part = used // room + 1
                name = f"{file.name}.{len(chunks):03}"
                (out / f"part_{part:02}").mkdir(parents=True, exist_ok=True)
                (out / f"part_{part:02}" / name).write_bytes(content)
                whole.update(content)
                chunks[name] = (part, hashlib.sha256(content).hexdigest())
                used += len(content)
        entries[file.name] = {"sets": sets, "bytes": file.stat().st_size, "sha256": whole.hexdigest(), "chunks": chunks}
    if len(text := json.dumps({**head, "files": entries})) > limit // 100:
        sys.exit(f"the manifest has {len(text)} bytes, more than a hundredth of a part: raise LIMIT")
    for folder in out.glob("part_*"):
        (folder / MANIFEST).write_text(text)
    return entries


def join(store: Path, parts: Sequence[Path]) -> dict[str, list[int]]:
    """Take the chunks of the parts, join the files that are complete, and return the missing parts of each set."""
    chunks = store / "chunks"
    wheels = store / "wheels"
    kept = store / MANIFEST
    for manifest in (part / MANIFEST for part in parts):
        try:
            text = manifest.read_bytes()
            json.loads(text)
        except (OSError, ValueError) as error:
            sys.exit(f"{manifest} is damaged or missing ({error}): send {manifest.parent.name} again")
        if kept.exists() and kept.read_bytes() != text:
            sys.exit(f"{manifest} differs from {kept}: join the parts of one `make`, or use another --store")
        _write(text, kept, hashlib.sha256(text).hexdigest())
    files = json.loads(kept.read_text())["files"] if kept.exists() else {}
    lack: dict[str, set[int]] = {one: set() for entry in files.values() for one in entry["sets"]}
    for name, entry in files.items():
        if (wheels / name).exists():
            continue
        for source in (part / chunk for part in parts for chunk in entry["chunks"] if (part / chunk).exists()):
            number, digest = entry["chunks"][source.name]
            if not _write(source.read_bytes(), chunks / source.name, digest):
                print(f"damaged: {source}; send part {number} again", file=sys.stderr)
        absent = {number for chunk, (number, _) in entry["chunks"].items() if not (chunks / chunk).exists()}
        for one in entry["sets"]:
            lack[one] |= absent
        if not absent:
            content = b"".join((chunks / chunk).read_bytes() for chunk in entry["chunks"])
            if not _write(content, wheels / name, entry["sha256"]):
                sys.exit(f"{name} is damaged, and its chunks are not: remove {store}, and send the parts again")
            for chunk in entry["chunks"]:
                (chunks / chunk).unlink()
    for one, numbers in lack.items():
        print(f"{one:7}{'missing parts: ' + ' '.join(map(str, sorted(numbers))) if numbers else 'complete'}")
    return {one: sorted(numbers) for one, numbers in lack.items()}


def _write(content: bytes, target: Path, digest: str) -> bool:
    """Write the content if it has this digest, in one step, so that an interrupted call leaves no half of a file."""
    if is_right := hashlib.sha256(content).hexdigest() == digest:
        partial = target.with_name(f"{target.name}.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(target)
    return is_right


def install(store: Path, sets: set[str]) -> None:
    """Install the wheels of these sets that STORE/site lacks, and write the file with its variables."""
    site = store / "site"
    files = json.loads((store / MANIFEST).read_text())["files"]
    stamp = site / "carried.txt"
    partial = site.with_name(f"{site.name}.partial")
    done = set(stamp.read_text().split() if stamp.exists() else ())
    if new := sorted({name for name, entry in files.items() if sets & set(entry["sets"])} - done):
        # Into a folder of its own: pip replaces folders of an existing --target, and many packages share nvidia/.
        shutil.rmtree(partial, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        command += ["--disable-pip-version-check", "--no-cache-dir", "--target", str(partial)]
        subprocess.run([*command, *(str(store / "wheels" / name) for name in new)], check=True)
        shutil.copytree(partial, site, copy_function=os.replace, dirs_exist_ok=True)
        stamp.write_text("\n".join({*new, *done}))
    text = f'export PYTHONPATH="{ROOT}:{site}${{PYTHONPATH:+:$PYTHONPATH}}" PATH="{site}/bin:$PATH"\n'
    (store / "env.sh").write_text(text + f'export PIP_NO_INDEX=1 PIP_FIND_LINKS="{store}/wheels"\n')
    print(f"{len(new)} packages installed in {site}; its variables: {store / 'env.sh'}")


if __name__ == "__main__":
    sys.exit(main())

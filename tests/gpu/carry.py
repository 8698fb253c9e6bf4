"""Carry packages to a machine without a network, in parts that are small enough to be sent with a call.

    python -m tests.gpu.carry make --out DIR [--have FREEZE] [--without NAME,..] [--only SET,..]    with a package index
    python3 tests/gpu/carry.py join --store STORE [--need SET,..] [PART_FOLDER ...]                 on the target
    python3 tests/gpu/carry.py install --store STORE [--need SET,..] [--site DIR]                   on the target

The set `train` has what the student and the benchmarks of tests/gpu import; `models`, `trl` and `all` (Ray, vLLM) have
what is needed in addition. A set is what the metadata of its root packages requires, in the versions of
launch/constraints-gpu-*.txt: no root requires a development tool or a tracker. --have: the target's `pip list
--format=freeze`; a package that it has in the same version stays here. --without: these stay here in any version, with
what only they require. `join` takes parts in any order, over several calls; its exit code is 3 while parts of a needed
set are missing. `install` installs the complete sets, and a shell that sources STORE/env.sh finds them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
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
LIMIT = 60 * 10**6  # bytes of a part: 64 MiB travel with a call, and 6.5 MB of them are the working tree
MANIFEST, MISSING = "parts.json", 3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("make", "join", "install"))
    parser.add_argument("parts", type=Path, nargs="*")
    for name in ("--out", "--have", "--store", "--site"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--python", choices=("3.11", "3.12"), default="3.12", help="version on the target")
    for name in ("--without", "--only", "--need"):
        parser.add_argument(name, type=lambda text: text.split(","), default=[])
    args = parser.parse_intermixed_args(argv)
    if unknown := {*args.only, *args.need} - set(SETS):
        parser.error(f"no set {', '.join(sorted(unknown))}; there are {', '.join(SETS)}")
    if (args.out if args.command == "make" else args.store) is None:
        parser.error("make needs --out, and join and install need --store")
    if args.command == "make":
        make(args.out, args.python, args.have, args.without, args.only or SETS)
        return 0
    lack = join(args.store, args.parts)
    if any(lack.get(one, [0]) for one in args.need or (() if args.command == "install" and lack else lack or SETS)):
        return MISSING
    if args.command == "install":
        site = args.site or args.store / "site"
        install(args.store.resolve(), site.resolve(), {one for one in args.need or lack if not lack[one]})
    return 0


def make(out: Path, python: str, have: Path | None, without: Sequence[str], only: Sequence[str]) -> None:
    """Download the wheels, write the parts, and print a table."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed, gpu = project["dependencies"], project["optional-dependencies"]["gpu"]
    train = [*(text for text in needed if not text.startswith("ray==")), *TRAIN]
    # The last is as in launch/freeze.py: vLLM's kernels are compiled where they run.
    roots = {"train": train, "models": ["gguf"], "trl": TRL, "all": [*needed, *gpu, "cuda-toolkit[nvcc,cccl]"]}
    pins = (ROOT / "launch" / f"constraints-gpu-py{python.replace('.', '')}.txt").read_text().splitlines()[1:]
    model = (ROOT / "examples" / "real_model" / "requirements.txt").read_text().splitlines()[-1].split()[0]
    wheels = _download([*pins, *TRL, model], out / f"wheels_{python}", python)
    there = re.findall(r"^(.+)==(.+?)(?:\+cu.*)?$", have.read_text(), re.M) if have else []
    versions = {_canonical(name): version for name, version in there}
    closures = {one: closure(roots[one], wheels, python, {*map(_canonical, without)}) for one in SETS}
    closures["models"].add(_canonical(model.split("==")[0]))  # what it requires belongs to another program
    files: dict[Path, list[str]] = {}
    for one in sorted(only, key=SETS.index):
        for package in sorted(closures[one] - (closures["train"] if one != "train" else set())):
            version = wheels[package].name.split("-")[1]
            if versions.get(package) != version:
                files.setdefault(wheels[package], []).append(one)
                if package in versions:
                    print(f"the target has another version, so it travels: {package} {versions[package]} -> {version}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    manifest = write_parts(files, out, {"commit": commit.strip(), "python": python})
    sizes = {file.name: file.stat().st_size / 1e6 for file in files}
    print(f"{'set':7}{'packages':>9}{'MB':>8}  parts")
    for one in sorted(only, key=SETS.index):
        own = [name for name, entry in manifest["files"].items() if one in entry["sets"]]
        parts = sorted({chunk["part"] for name in own for chunk in manifest["files"][name]["chunks"]})
        print(f"{one:7}{len(own):9}{sum(sizes[name] for name in own):8.1f}  {' '.join(map(str, parts))}")
    print(*(f"{sizes[name]:8.1f} MB  {name}" for name in sorted(sizes, key=lambda name: -sizes[name])[:12]), sep="\n")
    print(f"{sum(sizes.values()):.1f} MB, and a call for each of {len(list(out.glob('part_*')))} parts: {out}/part_*")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _download(pins: Sequence[str], folder: Path, python: str) -> dict[str, Path]:
    """Return the wheel of each package; pip downloads those that the folder lacks."""
    platforms = [
        *(f"manylinux_2_{minor}" for minor in range(31, 4, -1)),
        "manylinux2014",
        "manylinux2010",
        "manylinux1",
    ]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--python-version", python, "--implementation", "cp"]
    command += [f"--platform={platform}_x86_64" for platform in platforms]
    # The operator === does not admit the CPU build, 2.13.0+cpu, which a local folder of wheels may have.
    command += [pin.replace("==", "===") if pin.startswith("torch") else pin for pin in pins]
    if subprocess.run(command, check=False).returncode:
        sys.exit("pip could not download the wheels, see above")
    found = {(_canonical(file.name.split("-")[0]), file.name.split("-")[1]): file for file in folder.glob("*.whl")}
    return {_canonical(name): found[_canonical(name), version] for name, version in (pin.split("==") for pin in pins)}


def closure(roots: Sequence[str], wheels: Mapping[str, Path], python: str, left_out: set[str]) -> set[str]:
    """Return the packages that the roots and their extras require on the target."""
    from packaging.requirements import Requirement

    target = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": "x86_64"}
    seen: set[tuple[str, str]] = set()
    pending = [Requirement(root) for root in roots]
    while pending:
        one = pending.pop()
        package = _canonical(one.name)
        if package not in wheels:
            sys.exit(f"{package} is required and has no pinned version: run launch/freeze.py, or add it to TRL here")
        for extra in ("", *one.extras):
            if package not in left_out and (package, extra) not in seen:
                seen.add((package, extra))
                (wheel,) = distributions(path=[str(wheels[package])])
                found = map(Requirement, wheel.requires or ())
                pending += [r for r in found if r.marker is None or r.marker.evaluate(target | {"extra": extra})]
    return {package for package, _ in seen}


def write_parts(
    files: Mapping[Path, list[str]], out: Path, about: dict[str, str], limit: int = LIMIT
) -> dict[str, Any]:
    """Write the files, each with its sets, as parts of at most `limit` bytes; return the manifest.

    A part is filled before the next one begins, so that a file is cut only where a part ends.
    """
    for old in out.glob("part_*"):
        shutil.rmtree(old)
    manifest: dict[str, Any] = {**about, "files": {}}
    used, room = 0, limit - limit // 100  # a hundredth is for the manifest
    for file, sets in files.items():
        whole, chunks = hashlib.sha256(), []
        with file.open("rb") as source:
            while content := source.read(room - used % room):
                part, name = used // room + 1, f"{file.name}.{len(chunks):03}"
                (out / f"part_{part:02}").mkdir(parents=True, exist_ok=True)
                (out / f"part_{part:02}" / name).write_bytes(content)
                whole.update(content)
                chunks.append({"name": name, "part": part, "sha256": hashlib.sha256(content).hexdigest()})
                used += len(content)
        manifest["files"][file.name] = {"sets": sets, "sha256": whole.hexdigest(), "chunks": chunks}
    if len(text := json.dumps(manifest)) > limit // 100:
        sys.exit(f"the manifest has {len(text)} bytes, more than a hundredth of a part: raise LIMIT")
    for folder in out.glob("part_*"):
        (folder / MANIFEST).write_text(text)
    return manifest


def join(store: Path, parts: Sequence[Path]) -> dict[str, list[int]]:
    """Take the chunks of the parts, join the files that are complete, and return the missing parts of each set."""
    for folder in (store / "chunks", store / "wheels"):
        folder.mkdir(parents=True, exist_ok=True)
    kept = store / MANIFEST
    for part in parts:
        text = (part / MANIFEST).read_bytes()
        if not kept.exists():
            _write(text, kept, hashlib.sha256(text).hexdigest())
        elif kept.read_bytes() != text:
            sys.exit(f"{part / MANIFEST} differs from {kept}: join the parts of one `make`, or use another --store")
    files = json.loads(kept.read_text())["files"] if kept.exists() else {}
    lack: dict[str, set[int]] = {one: set() for entry in files.values() for one in entry["sets"]}
    for name, entry in files.items():
        pieces = [store / "chunks" / chunk["name"] for chunk in entry["chunks"]]
        if (store / "wheels" / name).exists():
            continue
        for piece, chunk in zip(pieces, entry["chunks"], strict=True):
            for source in (part / piece.name for part in parts):
                if source.exists() and not piece.exists() and not _write(source.read_bytes(), piece, chunk["sha256"]):
                    print(f"damaged: {source}; send part {chunk['part']} again", file=sys.stderr)
            if not piece.exists():
                for one in entry["sets"]:
                    lack[one].add(chunk["part"])
        if all(piece.exists() for piece in pieces):
            if not _write(b"".join(piece.read_bytes() for piece in pieces), store / "wheels" / name, entry["sha256"]):
                sys.exit(f"damaged in {store}: {name} differs from its digest, and its chunks do not; check the disk")
            for piece in pieces:
                piece.unlink()
    for one, numbers in lack.items():
        print(f"{one:7}{'missing parts: ' + ' '.join(map(str, sorted(numbers))) if numbers else 'complete'}")
    return {one: sorted(numbers) for one, numbers in lack.items()}


def _write(content: bytes, target: Path, digest: str) -> bool:
    """Write the content if it has this digest, in one step, so that an interrupted call leaves no half of a file."""
    if hashlib.sha256(content).hexdigest() != digest:
        return False
    partial = target.with_name(f"{target.name}.partial")
    partial.write_bytes(content)
    partial.replace(target)
    return True


def install(store: Path, site: Path, sets: set[str]) -> None:
    """Install the wheels of these sets that the site lacks, and write the file with its variables."""
    files = json.loads((store / MANIFEST).read_text())["files"] if sets else {}
    stamp, partial = site / "carried.txt", site.with_name(f"{site.name}.partial")
    done = set(stamp.read_text().split() if stamp.exists() else ())
    if new := sorted({name for name, entry in files.items() if sets & set(entry["sets"])} - done):
        # Into a folder of its own: pip replaces folders of an existing --target, and many packages share nvidia/.
        shutil.rmtree(partial, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        command += ["--disable-pip-version-check", "--no-cache-dir", "--target", str(partial)]
        subprocess.run([*command, *(str(store / "wheels" / name) for name in new)], check=True)
        shutil.copytree(partial, site, copy_function=os.replace, dirs_exist_ok=True)
        stamp.write_text("\n".join({*new, *done}))
    paths = [shlex.quote(str(path)) for path in (ROOT, site, site / "bin", store / "wheels")]
    text = "export PYTHONPATH={}:{}${{PYTHONPATH:+:$PYTHONPATH}} PATH={}:$PATH PIP_NO_INDEX=1 PIP_FIND_LINKS={}\n"
    (store / "env.sh").write_text(text.format(*paths))
    print(f"{len(new)} packages installed in {site}; its variables: {store / 'env.sh'}")


if __name__ == "__main__":
    sys.exit(main())

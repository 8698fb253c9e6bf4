"""Write launch/constraints-gpu-py3X.txt, the versions of all packages of the gpu extra, for the Python that runs this.

    python3.11 launch/freeze.py; python3.12 launch/freeze.py

Run it after a change of a pin in pyproject.toml or launch/constraints-cpu.txt, with pip 23.2 or newer. It resolves with
pip, reads the metadata of the wheels alone, and installs nothing: about a minute. launch/install.py uses the files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_CONSTRAINTS = ROOT / "launch" / "constraints-cpu.txt"
NEWEST_GLIBC = 31  # 2.31: llguidance, which vLLM requires, has no wheel for an older one
# torch pins the CUDA toolkit's version for its own parts. Others require its compiler in any version, and a compiler of
# another version does not match the headers.
ALIGNED = ("cuda-toolkit[nvcc,cccl]",)


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = resolve([*project["dependencies"], *extras["gpu"], *extras["dev"], *ALIGNED])
    version = f"3.{sys.version_info.minor}"
    file = constraints_file()
    head = f"# Written by launch/freeze.py: the gpu and dev extras, Python {version}, x86_64, glibc 2.{NEWEST_GLIBC}.\n"
    file.write_text(head + "".join(f"{line}\n" for line in lines))
    print(f"{file.relative_to(ROOT)}: {len(lines)} packages")
    return 0


def constraints_file() -> Path:
    """Return the file for this Python."""
    return ROOT / "launch" / f"constraints-gpu-py3{sys.version_info.minor}.txt"


def resolve(requirements: list[str]) -> list[str]:
    """Return `name==version` of every package that pip would install, by name; exit with pip's output if it cannot."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, 4, -1)]
    platforms += [f"manylinux{year}_x86_64" for year in (2014, 2010, 1)]
    # No configuration of this machine: a local folder of wheels may have the CPU build of torch.
    env = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--report", str(report)]
        command += ["--use-feature=fast-deps", "--only-binary=:all:", "--target", folder, "-c", str(CPU_CONSTRAINTS)]
        command += [word for platform in platforms for word in ("--platform", platform)]
        done = subprocess.run([*command, *requirements], env=env | {"PIP_CONFIG_FILE": os.devnull}, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return sorted((f"{one['name']}=={one['version']}" for one in found), key=str.lower)


if __name__ == "__main__":
    sys.exit(main())

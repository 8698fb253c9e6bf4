"""Test the parts in which packages travel to a machine without a network."""

from __future__ import annotations

import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.gpu.carry import main, write_parts

LIMIT = 300_000


def wheel(folder: Path, name: str, *requires: str) -> Path:
    """Write a wheel with one module, in a folder that other wheels have, too."""
    lines = [f"Name: {name}\nVersion: 1.0", *(f"Requires-Dist: {one}" for one in requires), "Wheel-Version: 1.0", ""]
    file = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path in (f"shared/{name}.py", *(f"{name}-1.0.dist-info/{one}" for one in ("METADATA", "WHEEL", "RECORD"))):
            archive.writestr(path, "" if path.endswith(("py", "RECORD")) else "\n".join(lines))
    return file


def parts_of(folder: Path, commit: str = "1") -> list[Path]:
    """Make parts of a large file, which is cut twice, and two small ones."""
    (folder / "large").write_bytes(random.Random(0).randbytes(700_000))
    files = {wheel(folder, "one"): ["train"], folder / "large": ["models"], wheel(folder, "two"): ["all", "trl"]}
    write_parts(files, folder / "out", {"commit": commit}, LIMIT)
    return sorted((folder / "out").iterdir())


def run(command: str, store: Path, *words: str | Path) -> int:
    return main([command, "--store", str(store), *map(str, words)])


def test_parts_join_over_calls_of_which_one_was_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a part exceeds a call, or an order, a repetition or half of a file changes what arrives."""
    parts, store = parts_of(tmp_path), tmp_path / "store"
    sizes = [sum(file.stat().st_size for file in part.iterdir()) for part in parts]
    assert len(sizes) == 3 and max(sizes) <= LIMIT and min(sizes[:-1]) > 0.98 * LIMIT
    assert run("join", store) == run("join", store, parts[2]) == 3
    assert "models missing parts: 1 2" in capsys.readouterr().out
    for half in ("chunks/large.000.partial", "wheels/large.partial"):
        (store / half).write_bytes(b"half")
    assert run("join", store, parts[2], parts[0], "--need", "train,trl") == 0
    assert run("join", store, parts[1]) == run("join", store, *parts) == run("join", store) == 0
    assert len(arrived := list((store / "wheels").iterdir())) == 3 and not list((store / "chunks").iterdir())
    assert all(file.read_bytes() == (tmp_path / file.name).read_bytes() for file in arrived)


def test_install_adds_a_set_without_removing_what_is_there(tmp_path: Path) -> None:
    """Fails if the second set replaces a folder that both have, or if a shell does not find modules and wheels."""
    store = tmp_path / "store"
    assert run("install", store, "--need", "train", *parts_of(tmp_path)[:1]) == 0
    assert run("install", store, "--need", "train,trl", tmp_path / "out" / "part_02") == 3
    command = '. "$1"; "$2" -c "import shared.one, tests"; ls "$PIP_FIND_LINKS"/one-1.0*; "$2" -c "import shared.two"'
    shell = ["env", "-C", "/", "bash", "-ec", command, "bash", str(store / "env.sh"), sys.executable]
    assert b"No module named 'shared.two'" in subprocess.run(shell, check=False, capture_output=True).stderr
    assert run("install", store, tmp_path / "out" / "part_03", "--need", "trl") == 0
    subprocess.run(shell, check=True)

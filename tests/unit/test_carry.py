"""Test the parts in which packages travel to a machine without a network."""

from __future__ import annotations

import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.gpu.carry import closure, main, write_parts

LIMIT = 300_000


def wheel(folder: Path, name: str, *requires: str) -> Path:
    """Write a wheel with a module in the folder `shared`, which other wheels have, too."""
    file = folder / f"{name}-1.0-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" + "".join(
        f"Requires-Dist: {r}\n" for r in requires
    )
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"shared/{name}.py", "")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", metadata)
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return file


def parts_of(folder: Path, commit: str = "1") -> list[Path]:
    """Make parts of a large file, which is cut twice, and two small ones."""
    files = {wheel(folder, "one"): ["train"], folder / "large": ["models"], wheel(folder, "two"): ["all", "trl"]}
    (folder / "large").write_bytes(random.Random(0).randbytes(700_000))
    write_parts(files, folder / "out", {"commit": commit}, LIMIT)
    return sorted((folder / "out").iterdir())


def joined(store: Path, *words: str | Path) -> int:
    return main(["join", "--store", str(store), *map(str, words)])


def test_a_part_is_full_and_fits_in_a_call(tmp_path: Path) -> None:
    """Fails if a part, with its manifest, exceeds what a call takes, or if more calls are made than needed."""
    parts = parts_of(tmp_path)
    sizes = [sum(file.stat().st_size for file in part.iterdir()) for part in parts]
    assert len(parts) == 3 and max(sizes) <= LIMIT and min(sizes[:-1]) > 0.98 * LIMIT
    assert [len(list(part.glob("large.*"))) for part in parts] == [1, 1, 1]


def test_parts_join_over_calls_of_which_one_was_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if an order, a repetition, or half of a file that a killed call has left changes what arrives."""
    parts, store = parts_of(tmp_path), tmp_path / "store"
    assert joined(store) == 3
    assert joined(store, parts[2]) == 3
    assert "models missing parts: 1 2" in capsys.readouterr().out
    (store / "chunks" / "large.000.partial").write_bytes(b"half")
    (store / "wheels" / "large.partial").write_bytes(b"half")
    assert joined(store, parts[2], parts[0], "--need", "train,trl") == 0
    assert joined(store, parts[1]) == joined(store, *parts) == joined(store) == 0
    assert [file.name for file in sorted((store / "wheels").iterdir())] == [
        "large",
        "one-1.0-py3-none-any.whl",
        "two-1.0-py3-none-any.whl",
    ]
    assert all(file.read_bytes() == (tmp_path / file.name).read_bytes() for file in (store / "wheels").iterdir())
    assert not list((store / "chunks").iterdir())


def test_a_damaged_chunk_is_named_and_can_be_sent_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a damaged transfer is accepted, or hinders a good one."""
    parts, store = parts_of(tmp_path), tmp_path / "store"
    chunk = parts[1] / "large.001"
    good = chunk.read_bytes()
    chunk.write_bytes(good[:-1])
    assert joined(store, *parts) == 3
    assert f"damaged: {chunk}; send part 2 again" in capsys.readouterr().err
    chunk.write_bytes(good)
    assert joined(store, parts[1]) == 0


def test_parts_of_another_make_are_refused(tmp_path: Path) -> None:
    """Fails if the parts of two checkouts are mixed in one store."""
    store = tmp_path / "store"
    assert joined(store, parts_of(tmp_path)[0]) == 3
    with pytest.raises(SystemExit, match="differs from .*use another --store"):
        joined(store, parts_of(tmp_path, commit="2")[1])


def test_install_adds_a_set_without_removing_what_is_there(tmp_path: Path) -> None:
    """Fails if the second set replaces a folder that both have, or if a shell does not find their modules and wheels."""
    (tmp_path / "in").mkdir()
    files = {wheel(tmp_path / "in", "one"): ["train"], wheel(tmp_path / "in", "two"): ["trl"]}
    write_parts(files, tmp_path / "out", {}, LIMIT)
    store = tmp_path / "a store"
    assert main(["install", "--store", str(store), "--need", "train", str(tmp_path / "out" / "part_01")]) == 0
    assert main(["install", "--store", str(store), "--need", "models"]) == 3
    command = (
        '. "$1"; "$2" -c "import shared.one, tests"; test -f "$PIP_FIND_LINKS"/two-1.0*; "$2" -c "import shared.two"'
    )
    shell = ["env", "-C", "/", "bash", "-ec", command, "bash", str(store / "env.sh"), sys.executable]
    assert b"No module named 'shared.two'" in subprocess.run(shell, check=False, capture_output=True).stderr
    assert main(["install", "--store", str(store)]) == 0
    subprocess.run(shell, check=True)


def test_a_set_has_what_its_roots_require_on_the_target(tmp_path: Path) -> None:
    """Fails if a package of an extra or of the target's Python is left behind, or one that is not required travels."""
    requires = {"root": ["A_b[x]", "other; python_version < '3.12'"], "a-b": ["c; extra == 'x'", "d; extra == 'y'"]}
    wheels = {name: wheel(tmp_path, name.replace("-", "_"), *requires.get(name, [])) for name in ("root", "a-b", "c")}
    assert closure(["root"], wheels, "3.12", set()) == {"root", "a-b", "c"}
    assert closure(["root"], wheels, "3.12", {"a-b"}) == {"root"}
    with pytest.raises(SystemExit, match="other is required and has no pinned version"):
        closure(["root"], wheels, "3.11", set())

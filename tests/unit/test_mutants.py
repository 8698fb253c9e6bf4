"""The mutation check itself: its mutants fit the source tree, and a changed file is put back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT
from tests.mutants.mutant import Mutant, MutantError, problems
from tests.mutants.numerics import MUTANTS


def test_every_mutant_fits_the_tree() -> None:
    """Fails if code or tests moved away from under a mutant: `python -m tests.mutants` could not run."""
    assert problems(MUTANTS, ROOT) == []


def _tree(root: Path, **files: str) -> Path:
    for folder in ("code", "tests/unit"):
        (root / folder).mkdir(parents=True)
    (root / "tests/unit/test_it.py").touch()
    for name, text in files.items():
        (root / f"code/{name}.py").write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "new", "problem"),
    [
        ({"a": "x = 2 + 1\n"}, "x - 1", "found it in: no file"),
        ({"a": "x + 1\nx + 1\n"}, "x - 1", "code/a.py (2)"),
        ({"a": "x + 1\n", "b": "x + 1\n"}, "x - 1", "code/a.py (1), code/b.py (1)"),
        ({"a": "x + 1\n"}, "x  +  1", "is the same code"),
        ({"a": "x + 1\n"}, "x +", "does not parse"),
    ],
)
def test_a_mutant_that_changes_nothing_is_an_error(
    tmp_path: Path, files: dict[str, str], new: str, problem: str
) -> None:
    """Fails if a run could call a mutant caught, or survived, that never was in the code."""
    mutant = Mutant("m", "code", "x + 1", new, ("test_it.py",))
    (found,) = problems([mutant], _tree(tmp_path, **files))
    assert problem in found
    with pytest.raises(MutantError):
        mutant.mutated(tmp_path)


@pytest.mark.parametrize("test", ["test_gone.py", "test_it.py::test_gone[1]"])
def test_a_missing_test_is_an_error(tmp_path: Path, test: str) -> None:
    """Fails if a renamed test is found out after the others have run for minutes."""
    (found,) = problems([Mutant("m", "code", "x + 1", "x - 1", (test,))], _tree(tmp_path, a="x + 1\n"))
    assert "test_" in found


def test_a_file_is_changed_for_the_block_alone(tmp_path: Path) -> None:
    """Fails if one mutant stayed in the tree of the next one, or bytecode of one version ran for the other."""
    mutant, file = Mutant("m", "code", "x + 1", "x - 1", ("test_it.py",)), tmp_path / "code/a.py"
    _tree(tmp_path, a="x + 1\n")
    before = file.stat().st_mtime
    with pytest.raises(KeyboardInterrupt), mutant.applied(tmp_path):
        assert file.read_text() == "x - 1\n" and file.stat().st_mtime > before + 1
        raise KeyboardInterrupt
    assert file.read_text() == "x + 1\n" and file.stat().st_mtime == before

"""Define a mutant, and find its file and its tests in the source tree."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class MutantError(Exception):
    """A mutant that does not fit the source tree."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug.

    Args:
        name: unique.
        folder: prefix of the file to change, e.g. `gkd/loss`. Files may move below it.
        old: text that stands exactly once in exactly one file of `folder`.
        new: its replacement.
        tests: pytest node ids that must fail, without the folder of the file: `test_loss.py::test_token_mean`.
    """

    name: str
    folder: str
    old: str
    new: str
    tests: tuple[str, ...]

    def locate(self, root: Path) -> Path:
        """Return the file to change, relative to `root`. Raises MutantError if there is none, or if it is ambiguous."""
        counts = {path: _read(path).count(self.old) for path in sorted((root / self.folder).rglob("*.py"))}
        found = {path.relative_to(root): n for path, n in counts.items() if n}
        if sum(found.values()) == 1:
            return next(iter(found))
        places = ", ".join(f"{path} ({n})" for path, n in found.items()) or "no file"
        problem = f"expected the text {self.old!r} once in {self.folder}, found it in: {places}"
        raise MutantError(f"{self.name}: {problem}. Fix: update the mutant's text.")

    def mutated(self, root: Path) -> str:
        """Return the changed content of the file. Raises MutantError if it is the same code, or no Python."""
        if "".join(self.old.split()) == "".join(self.new.split()):
            raise MutantError(f"{self.name}: the mutated file is the same code")
        after = _read(root / self.locate(root)).replace(self.old, self.new)
        try:
            ast.parse(after)
        except SyntaxError as error:
            raise MutantError(f"{self.name}: the mutated file does not parse: {error}") from error
        return after

    def test_ids(self, root: Path) -> list[str]:
        """Return the tests with paths relative to `root`. Raises MutantError if one is missing or ambiguous."""
        return [_with_folder(self, test, root) for test in self.tests]

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Change the file inside the block, and restore it with its time of modification afterwards.

        Python reuses bytecode if size and time of the source agree. The mutated file gets another time, so neither
        version runs from the bytecode of the other one.
        """
        path, content = root / self.locate(root), self.mutated(root)
        before, times = path.read_bytes(), path.stat()
        try:
            path.write_text(content, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**10))
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def problems(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """Return one line for each mutant that does not fit the tree below `root`."""
    names = [mutant.name for mutant in mutants]
    found = [f"{name}: two mutants have this name" for name in sorted({n for n in names if names.count(n) > 1})]
    for mutant in mutants:
        try:
            mutant.mutated(root)
            if not mutant.test_ids(root):
                found.append(f"{mutant.name}: it names no test")
        except MutantError as error:
            found.append(str(error))
    return found


def _with_folder(mutant: Mutant, test: str, root: Path) -> str:
    file, separator, rest = test.partition("::")
    paths = [path for path in sorted((root / "tests").rglob(Path(file).name)) if path.as_posix().endswith(f"/{file}")]
    if len(paths) != 1:
        raise MutantError(f"{mutant.name}: {len(paths)} files are called tests/**/{file}, expected 1")
    function = rest.partition("[")[0]
    if function and f"def {function}(" not in _read(paths[0]):
        raise MutantError(f"{mutant.name}: {paths[0].relative_to(root)} has no {function}")
    return f"{paths[0].relative_to(root).as_posix()}{separator}{rest}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")

"""Count what an addition costs: make it in a checkout of HEAD, run its tests, and count files and lines of the product.

    python -m tests.bench.bench_additions [--only NAME,..] [--json FILE]

The additions are the patches in tests/bench/additions, written with the recipes of CONTRIBUTING.md. Generated pages are
written after a patch, and do not count. A kind of teacher is counted in the commit that added `teacher.backend: http`.
A divergence by import path (`examples/own_loss.py`) changes no file. If a patch does not apply any more, apply it with
`git apply --3way`, correct it, and write it again with `git diff`. About five minutes on two cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench.command import ROOT, parsed, parser
from tests.results import write_results

PATCHES = Path(__file__).with_name("additions")
PRODUCT = ("gkd", "teacher_server")
HTTP_TEACHER = "fdbb5573"  # a commit of this repository
# Name of a patch -> arguments of pytest.
TESTS: dict[str, tuple[str, ...]] = {
    "divergence": ("tests/unit", "-k", "loss or slopes"),
    "scheduler": ("tests/unit/test_prefetch.py", "tests/unit/test_staleness.py"),
    "config_key": ("tests/unit/test_trainer.py", "tests/unit/test_config.py"),
}


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def counted(folder: Path, *revisions: str) -> dict[str, int]:
    """Return the number of product files that a change touches, how many of them are new, and its added lines."""
    lines = [line.split("\t") for line in git(folder, "diff", "--numstat", *revisions, "--", *PRODUCT).splitlines()]
    new = git(folder, "diff", "--name-only", "--diff-filter=A", *revisions, "--", *PRODUCT).splitlines()
    return {"files": len(lines), "new": len(new), "lines": sum(int(added) for added, _, _ in lines)}


def make(name: str, checkout: Path) -> dict[str, int]:
    """Apply a patch, count it, and run its tests. Raises CalledProcessError: it does not apply, or a test fails."""
    git(checkout, "apply", "--index", str(PATCHES / f"{name}.patch"))
    found = counted(checkout, "HEAD")
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    for command in (["tests.pages"], ["pytest", "-q", "-p", "no:cacheprovider", *TESTS[name]]):
        subprocess.run([sys.executable, "-m", *command], cwd=checkout, env=environment, check=True)
    git(checkout, "reset", "--quiet", "--hard")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(parser("tests.bench.bench_additions", __doc__ or "", TESTS), TESTS, argv)
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")
        git(ROOT, "worktree", "add", "--quiet", "--detach", str(checkout))
        try:
            found = {name: make(name, checkout) for name in args.only.split(",")}
        finally:
            git(ROOT, "worktree", "remove", "--force", str(checkout))
    found["kind_of_teacher"] = counted(ROOT, f"{HTTP_TEACHER}~1", HTTP_TEACHER)
    print(f"{'addition':16}{'files':>6}{'new':>5}{'lines':>7}")
    for name, each in found.items():
        print(f"{name:16}{each['files']:6}{each['new']:5}{each['lines']:7}")
    if args.json:
        write_results(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

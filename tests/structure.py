"""Print the package structure: `python -m tests.structure [--json FILE] [--root DIR]`. CI checks `--bounds`.

A unit is a package (a folder with `__init__.py`) or a module in the root of `gkd` or `teacher_server`. An edge is an
import from one unit to another, lazy imports included, imports under `TYPE_CHECKING` not.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOP = ("gkd", "teacher_server")
# A package or root module imports only what stands above it (tests/unit/test_import_order.py). So the loop
# (`gkd.trainer`) sees its roles as Protocols, `gkd.memory.footprint` predicts memory without a backend, and the
# teacher server installs without the trainer.
_ORDER = """
teacher_server.errors teacher_server.log teacher_server.wire teacher_server.config teacher_server.vision
teacher_server.engines
teacher_server.client teacher_server.broker teacher_server.worker teacher_server.http teacher_server.cli
teacher_server.__main__
gkd.errors gkd.log gkd.spans gkd.types gkd.text gkd.user_code gkd.hosts gkd.config gkd.roles gkd.run
 gkd.console gkd.metrics gkd.data gkd.environment gkd.pipeline gkd.trainer
 gkd.cluster gkd.hf gkd.loss gkd.memory gkd.memory.footprint gkd.weight_sync
gkd.rollout gkd.rollout.vllm gkd.rollout.engine gkd.rollout.driver
gkd.scoring.reward gkd.scoring.teacher gkd.scoring
gkd.actor.common gkd.actor.megatron gkd.actor.fsdp gkd.actor.frozen gkd.actor
gkd.preflight gkd.start gkd.api gkd.main_gkd
gkd.tools.report gkd.tools gkd.cli
"""
ORDER = tuple(_ORDER.split())
# The largest figures of the project. A commit that needs more gives the reason, and raises a bound.
BOUNDS = {
    "lines": 59_900,
    "files": 344,
    "assignments of tuples": 15,  # `a, b = x, y`: two statements in one line
    "config_keys": 165,
    "lines of tests": 68_320,
    "lines of benches": 6_570,
    "lines of results": 8_000,
    "lines of the longest result": 200,
    "words of docs": 60_000,
}
_BY = "written by python -m tests.structure --write-map -->"
# Page -> the borders of its generated part.
MAP_PAGE, MAP = ROOT / "CONTRIBUTING.md", (f"<!-- package map, {_BY}", "<!-- end of the map -->")
ROOMS_PAGE, ROOMS = ROOT / "docs/architecture.md", (f"<!-- rooms, {_BY}", "<!-- end of the rooms -->")


def source_files(root: Path = ROOT) -> list[Path]:
    """Return the product's Python files, sorted."""
    return sorted(path for top in TOP for path in (root / top).rglob("*.py"))


@functools.cache  # four tests and two pages need all files
def imported_names(path: Path, *, type_checking: bool = False) -> set[str]:
    """Return the dotted names a file imports, `from a import b` as both `a` and `a.b`.

    Args:
        type_checking: include imports under `if TYPE_CHECKING`.
    """
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and not type_checking and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        pending += ast.iter_child_nodes(node)
    return found


def module_name(path: Path, root: Path = ROOT) -> str:
    """Return the dotted name of a file; a package's own for its `__init__.py`."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def file_imports(root: Path = ROOT) -> dict[str, set[str]]:
    """Return module -> modules of the project that it imports; packages count only if they alone are meant."""
    files = {module_name(path, root): path for path in source_files(root)}
    return {
        name: {m for m in imported_names(path) if m in files and m != name and files[m].name != "__init__.py"}
        for name, path in files.items()
    }


def unit_of(module: str, packages: Iterable[str]) -> str:
    """Return the package that holds a module, or the module itself if it lies in a root folder."""
    parent = module if module in packages else module.rpartition(".")[0]
    return module if parent in TOP else parent


def unit_imports(root: Path = ROOT) -> dict[str, set[str]]:
    """Return unit -> units that it imports."""
    packages = {module_name(path, root) for path in source_files(root) if path.name == "__init__.py"}
    edges: dict[str, set[str]] = {}
    for module, used in file_imports(root).items():
        unit = unit_of(module, packages)
        edges.setdefault(unit, set()).update({unit_of(other, packages) for other in used} - {unit})
    return {unit: used - set(TOP) for unit, used in edges.items() if unit not in TOP}


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that import each other (strongly connected components of two nodes or more)."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        pending = [start]
        while pending:
            new = edges.get(pending.pop(), set()) - seen
            seen |= new
            pending += new
        reach[start] = seen
    groups = {tuple(sorted({b for b in reach[a] if a in reach.get(b, ())})) for a in edges if a in reach[a]}
    return [list(group) for group in sorted(groups)]


def summary(root: Path = ROOT) -> dict[str, Any]:
    """Return the figures of the tree at `root`."""
    lengths = {path: len(path.read_text().splitlines()) for path in source_files(root)}
    functions = [length for path in lengths for length in _function_lengths(path)]
    longest = max(lengths, key=lambda path: lengths[path])
    units, files, rooms = unit_imports(root), file_imports(root), room_imports(root)
    return {
        "files": len(lengths),
        "lines": sum(lengths.values()),
        "median_file_lines": statistics.median(lengths.values()),
        "longest_file": [longest.relative_to(root).as_posix(), lengths[longest]],
        "files_over_300_lines": sum(n > 300 for n in lengths.values()),
        "median_function_lines": statistics.median(functions),
        "longest_function_lines": max(functions),
        "files_in_gkd_root": len(list((root / "gkd").glob("*.py"))),
        "rooms": len(rooms),
        "floors": len(floors(rooms)),
        "arrows": sum(len(used) for used in rooms.values()),
        "units": len(units),
        "edges_between_units": sum(len(used) for used in units.values()),
        "cycles_between_units": cycles(units),
        "cycles_between_files": cycles(files),
        "config_keys": len(re.findall(r"^\| `\w+\.[\w.]+` \|", (root / "docs/configuration.md").read_text(), re.M)),
        "words_of_architecture": len((root / "docs/architecture.md").read_text().split()),
        "tests": test_figures(root),
        **sizes(root),
    }


def sizes(root: Path = ROOT) -> dict[str, int]:
    """Return what the product is surrounded by, see `BOUNDS`."""
    results = [n for _, n in _lines_of(root, "docs/results/**/*")]
    trees = [ast.parse(path.read_text()) for path in source_files(root)]
    return {
        "assignments of tuples": sum(_is_tuple(node) for tree in trees for node in ast.walk(tree)),
        "lines of tests": sum(n for path, n in _lines_of(root, "tests/**/*") if path.suffix == ".py"),
        "lines of benches": sum(n for _, n in _lines_of(root, "tests/bench/**/*")),
        "lines of results": sum(results),
        "lines of the longest result": max(results),
        "words of docs": sum(len(path.read_text().split()) for path, _ in _lines_of(root, "docs/**/*.md")),
    }


def _lines_of(root: Path, pattern: str) -> list[tuple[Path, int]]:
    files = [path for path in sorted(root.glob(pattern)) if path.is_file() and "__pycache__" not in path.parts]
    return [(path, len(path.read_text().splitlines())) for path in files]


def _is_tuple(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


_HABITS = {
    "match= in pytest.raises": r"raises\([^\n]*match=",
    "monkeypatch.setattr": r"\bsetattr\((?!self)",
    "sleep calls": r"\b(?:time|asyncio)\.sleep\(",  # and not the sleep mode of an engine
    "private attributes of other objects": r"(?<!\bself)(?<!\bcls)(?<!\bos)(?<!super\(\))\._(?!replace\()[a-z]\w*",
}


def test_figures(root: Path = ROOT) -> dict[str, int]:
    """Return the size of the tests, and how often they look behind an interface or wait for a time."""
    files = [path.read_text() for path in sorted((root / "tests").rglob("*.py"))]
    found = {name: sum(len(re.findall(pattern, text)) for text in files) for name, pattern in _HABITS.items()}
    return {"files": len(files), "lines": sum(len(text.splitlines()) for text in files), **found}


def package_map(root: Path = ROOT) -> str:
    """Return a Markdown table of the packages, in import order, with the first line of their docstrings."""
    rows = []
    for unit in sorted(
        ORDER, key=lambda unit: unit.startswith("teacher_server")
    ):  # stable: the trainer's packages first
        file = root / unit.replace(".", "/") / "__init__.py"
        if file.exists():
            doc = ast.get_docstring(ast.parse(file.read_text())) or ""
            rows.append(f"| `{unit.replace('.', '/')}` | {doc.partition(chr(10))[0]} |")
    return "\n".join(["| package | content |", "|---|---|", *rows])


def room_of(module: str) -> str:
    """Return the room of a module: `teacher_server`, or a file or package in the root of `gkd`."""
    return "teacher_server" if module.startswith("teacher_server") else ".".join(module.split(".")[:2])


def room_imports(root: Path = ROOT) -> dict[str, set[str]]:
    """Return room -> rooms that it imports, see `room_of`."""
    edges: dict[str, set[str]] = {}
    for module, used in file_imports(root).items():
        edges.setdefault(room_of(module), set()).update({room_of(other) for other in used} - {room_of(module)})
    del edges["gkd"]
    return {room: used - {"gkd"} for room, used in edges.items()}


def floors(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the rooms by floor, the lowest first: a room is one floor above the highest one that it imports."""
    found: list[list[str]] = []
    left = dict(edges)
    while left:
        floor = sorted(room for room, used in left.items() if not used & left.keys())
        if not floor:
            raise ValueError(f"rooms that import each other: {sorted(left)}")
        found.append(floor)
        left = {room: used for room, used in left.items() if room not in floor}
    return found


def rooms_picture(root: Path = ROOT) -> str:
    """Return a drawing of the rooms, the highest floor first."""
    rows = floors(room_imports(root))
    lines = [f"{n:2}  {'  '.join(room.removeprefix('gkd.') for room in row)}" for n, row in enumerate(rows)]
    return "\n".join(["```", *reversed(lines), "```"])


def written(text: str, part: str, borders: tuple[str, str]) -> str:
    """Return a page with the part between the borders replaced."""
    before, _, rest = text.partition(borders[0])
    _, _, after = rest.partition(borders[1])
    return f"{before}{borders[0]}\n{part}\n{borders[1]}{after}"


def _function_lengths(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout to measure")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--edges", action="store_true", help="print each unit's imports, too")
    parser.add_argument("--write-map", action="store_true", help="update CONTRIBUTING.md and docs/architecture.md")
    parser.add_argument("--bounds", action="store_true", help="print the bounds; exit code 1 if one is exceeded")
    args = parser.parse_args()
    if args.write_map:
        MAP_PAGE.write_text(written(MAP_PAGE.read_text(), package_map(args.root), MAP))
        ROOMS_PAGE.write_text(written(ROOMS_PAGE.read_text(), rooms_picture(args.root), ROOMS))
    figures = summary(args.root)
    if args.bounds:
        found = {name: (figures[name], bound) for name, bound in BOUNDS.items()}
        for name, (value, bound) in found.items():
            print(f"{name:28} {value:>7} of {bound:>7}{'  exceeded' if value > bound else ''}")
        raise SystemExit(any(value > bound for value, bound in found.values()))
    for name, value in figures.items():
        print(f"{name:24} {value}")
    if args.edges:
        for unit, used in sorted(unit_imports(args.root).items()):
            print(f"{unit}: {', '.join(sorted(used))}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

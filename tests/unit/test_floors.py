"""Who may import whom: the floors of docs/architecture.md, enforced by walking every file's AST."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The one place that says which heavy library may be imported where (anywhere in the file, also lazily).
ALLOWED: dict[str, tuple[str, ...]] = {
    "megatron": ("gkd/actor/megatron/", "gkd/weight_sync/export.py"),
    "vllm": ("gkd/rollout/", "teacher_server/engines/"),
    "zmq": ("gkd/teacher/", "teacher_server/"),
    "ray": (
        "gkd/cluster/",
        "gkd/rollout/pool.py",
        "gkd/rollout/worker.py",
        "gkd/actor/worker.py",
        "gkd/wiring.py",
    ),
    "transformers": ("gkd/data.py", "gkd/actor/megatron/", "gkd/quickstart/", "teacher_server/"),
    "omegaconf": ("gkd/config.py",),
}
HEAVY = frozenset(ALLOWED)
# Floors 0 and 1: nothing heavy at all. torch only where named.
WITHOUT_TORCH = {
    "gkd/config.py",
    "gkd/config_check.py",
    "gkd/errors.py",
    "gkd/log.py",
    "gkd/disk.py",
    "gkd/roles.py",
    "gkd/sampler.py",
    "gkd/metrics.py",
    "gkd/evaluation.py",
    "gkd/run_folder.py",
    "gkd/trainer.py",
    "gkd/teacher/base.py",
    "gkd/teacher/client.py",
    "gkd/teacher/endpoint.py",
    "teacher_server/protocol.py",
}
# Floor 4: the wiring. Nobody imports it but itself.
WIRING = {"gkd.main_gkd", "gkd.wiring", "gkd.preflight", "teacher_server.main"}


def _files() -> list[Path]:
    return sorted([*(ROOT / "gkd").rglob("*.py"), *(ROOT / "teacher_server").rglob("*.py")])


def _imports(path: Path, *, runtime_only: bool = True) -> set[str]:
    """Dotted modules a file imports; those under `if TYPE_CHECKING` only when asked for."""
    tree = ast.parse(path.read_text())
    skipped: set[int] = set()
    if runtime_only:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                skipped |= {id(inner) for part in node.body for inner in ast.walk(part)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", _files(), ids=_relative)
def test_heavy_libraries_stay_behind_their_adapters(path: Path) -> None:
    """If it fails, a pure file started to load an engine, and with it every process and every unit test would."""
    name = _relative(path)
    for library in {module.partition(".")[0] for module in _imports(path)} & HEAVY:
        assert name.startswith(ALLOWED[library]), f"{name} imports {library}; allowed only in {ALLOWED[library]}"
    if name in WITHOUT_TORCH:
        assert not any(module.partition(".")[0] == "torch" for module in _imports(path)), f"{name} imports torch"


@pytest.mark.parametrize("path", _files(), ids=_relative)
def test_the_two_packages_share_only_the_protocol(path: Path) -> None:
    """If it fails, the teacher server can no longer be installed and run without the trainer, or the reverse."""
    name, modules = _relative(path), _imports(path, runtime_only=False)
    if name.startswith("teacher_server/"):
        assert not any(m.partition(".")[0] == "gkd" for m in modules), f"{name} imports gkd"
    else:
        other = {m for m in modules if m.startswith("teacher_server") and not m.startswith("teacher_server.protocol")}
        assert not other, f"{name} imports {other}"


@pytest.mark.parametrize("path", _files(), ids=_relative)
def test_nobody_imports_the_wiring(path: Path) -> None:
    """If it fails, an inner part knows how it is wired, and the roles can no longer be replaced one by one."""
    name = _relative(path)
    if name.removesuffix(".py").replace("/", ".") in WIRING or name.endswith("__main__.py"):
        return
    used = _imports(path) & WIRING
    assert not used, f"{name} imports {used}"


def test_the_loop_knows_the_others_only_as_protocols() -> None:
    """If it fails, the loop reaches into a role instead of asking it, and can no longer be read or tested alone."""
    pure = {"config", "errors", "log", "metrics", "roles", "run_folder", "sampler", "types"}
    used = {m.split(".")[1] for m in _imports(ROOT / "gkd" / "trainer.py") if m.startswith("gkd.")}
    assert used <= pure, used - pure


def test_the_named_files_exist() -> None:
    """If it fails, a rule above guards a file that was renamed, that is: nothing."""
    for name in WITHOUT_TORCH | {p for places in ALLOWED.values() for p in places}:
        assert (ROOT / name).exists(), name

"""Who may import whom: the floors of docs/architecture.md, enforced by walking every file's AST."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The one place that says which heavy library may be imported where (anywhere in the file, also lazily).
ALLOWED: dict[str, tuple[str, ...]] = {
    "megatron": ("gkd/actor/megatron/", "gkd/actor/megatron/hf_export.py"),
    "vllm": ("gkd/rollout/", "teacher_server/engines/"),
    "zmq": ("gkd/teacher/", "teacher_server/"),
    "ray": (
        "gkd/cluster/",
        "gkd/rollout/pool.py",
        "gkd/rollout/stream.py",
        "gkd/rollout/worker.py",
        "gkd/actor/worker.py",
        "gkd/launcher.py",
    ),
    "transformers": (
        "gkd/data/prompts.py",
        "gkd/actor/megatron/",
        "gkd/actor/fsdp/",
        "gkd/quickstart/",
        "teacher_server/",
    ),
    "peft": ("gkd/actor/fsdp/lora.py",),
    "accelerate": ("gkd/actor/fsdp/model.py",),
    "omegaconf": ("gkd/config/load.py",),
    "triton": ("gkd/loss/triton_rows.py",),
    "prometheus_client": ("teacher_server/broker/metrics.py", "teacher_server/cli/serve.py"),
    "yaml": ("teacher_server/config/settings.py",),
    "matplotlib": ("gkd/tools/split_tuner/plot.py",),
}
HEAVY = frozenset(ALLOWED)
# All that the trainer may know of the teacher server: what both ends of the wire must agree on.
SHARED = {
    "teacher_server.wire.protocol",
    "teacher_server.wire.payload",
    "teacher_server.wire.keys",
    "teacher_server.wire.status",
}
# The local teacher computes what the server's engines compute: with their code, which knows neither sockets nor gkd.
SAME_NUMBERS = {
    "gkd/actor/frozen/model.py": {"teacher_server.engines.base", "teacher_server.engines.signals"},
    "gkd/actor/frozen/reference.py": {"teacher_server.engines.base"},
    "gkd/actor/frozen/teacher.py": {"teacher_server.engines.base"},
}
# Whatever turns bytes from a socket into code or objects of any type. No network code may so much as name it.
NETWORK_CODE = ("gkd/teacher/", "gkd/weight_sync/", "teacher_server/")
NOT_NETWORK_CODE = ("teacher_server/engines/",)  # loads models; knows no socket
DANGEROUS_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "pickletools",
}
DANGEROUS_NAMES = {"eval", "exec", "compile", "__import__"}  # called by their bare name
DANGEROUS_ATTRIBUTES = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "allow_pickle"}
# Floors 0 and 1: nothing heavy at all. torch only where named.
WITHOUT_TORCH = {
    "gkd/pipeline/generate.py",
    "gkd/pipeline/background.py",
    "gkd/data/balance.py",
    "gkd/pipeline/prefetch.py",
    "gkd/config/schema.py",
    "gkd/config/load.py",
    "gkd/config/check.py",
    "gkd/config/check_pools.py",
    "gkd/config/check_values.py",
    "gkd/config/check_losses.py",
    "gkd/config/check_colocation.py",
    "gkd/errors.py",
    "gkd/hf/index.py",
    "gkd/cluster/imports.py",
    "gkd/pipeline/colocation.py",
    "gkd/log.py",
    "gkd/run/disk.py",
    "gkd/data/rollout_file.py",
    "gkd/pipeline/replay.py",
    "gkd/preflight/replay.py",
    "gkd/roles.py",
    "gkd/pipeline/staleness.py",
    "gkd/pipeline/source.py",
    "gkd/metrics/pools.py",
    "gkd/metrics/step.py",
    "gkd/pipeline/streaming.py",
    "gkd/metrics/teacher_meter.py",
    "gkd/data/sampler.py",
    "gkd/data/mixing.py",
    "gkd/config/check_parallel.py",
    "gkd/config/loss_spec.py",
    "gkd/memory/advice.py",
    "gkd/metrics/writer.py",
    "gkd/data/answers.py",
    "gkd/run/checkpoints.py",
    "gkd/run/manifest.py",
    "gkd/data/prompt_codec.py",
    "gkd/data/chunks.py",
    "gkd/rollout/residency.py",
    "gkd/rollout/usage.py",
    "gkd/run/export_folder.py",
    "gkd/footprint/__init__.py",
    "gkd/footprint/activations.py",
    "gkd/footprint/batch.py",
    "gkd/footprint/estimate.py",
    "gkd/footprint/folder.py",
    "gkd/footprint/fsdp.py",
    "gkd/footprint/limits.py",
    "gkd/footprint/loss.py",
    "gkd/footprint/megatron.py",
    "gkd/footprint/models.py",
    "gkd/footprint/reference.py",
    "gkd/footprint/rollout.py",
    "gkd/footprint/shapes.py",
    "gkd/footprint/table.py",
    "gkd/footprint/teacher.py",
    "gkd/footprint/turns.py",
    "gkd/footprint/types.py",
    "gkd/run/folder.py",
    "gkd/run/open.py",
    "gkd/run/resume_compat.py",
    "gkd/run/shared_folder.py",
    "gkd/run/saver.py",
    "gkd/cluster/gpus.py",
    "gkd/gpu_map/report.py",
    "gkd/cluster/placement.py",
    "gkd/cluster/gpu_table.py",
    "gkd/cluster/processes.py",
    "gkd/cluster/progress.py",
    "gkd/gpu_map/running.py",
    "gkd/cluster/stacks.py",
    "gkd/gpu_map/findings.py",
    "gkd/tools/check_gpus.py",
    "gkd/tools/memory.py",
    "gkd/tools/split.py",
    "gkd/trainer.py",
    *(
        f"gkd/tools/split_tuner/{name}.py"
        for name in ("batches", "calibration", "engine", "estimate", "fit", "layout", "outcome", "plot", "rates")
    ),
    *(f"gkd/tools/split_tuner/{name}.py" for name in ("run", "search", "simulate", "stream", "table", "teacher")),
    "gkd/teacher/base.py",
    "gkd/teacher/client.py",
    "gkd/teacher/endpoint.py",
    "gkd/teacher/exchange.py",
    "gkd/teacher/inbox.py",
    "gkd/teacher/link.py",
    "gkd/teacher/local.py",
    "gkd/teacher/outage.py",
    "gkd/teacher/pending.py",
    "gkd/gpu_map/teacher.py",
    "gkd/teacher/queries.py",
    "gkd/teacher/records.py",
    "gkd/teacher/streams.py",
    "teacher_server/wire/worker_protocol.py",
    "teacher_server/broker/broker.py",
    "teacher_server/engines/base.py",
    "teacher_server/wire/keys.py",
    "teacher_server/broker/request_queue.py",
    "teacher_server/wire/payload.py",
    "teacher_server/wire/protocol.py",
}
# Floor 4: the wiring. Nobody imports it but itself.
WIRING = {
    "gkd.main_gkd",
    "gkd.launcher",
    "gkd.preflight.run",
    "gkd.tools.check_gpus",
    "gkd.tools.memory",
    "gkd.tools.split",
    "teacher_server.main",
    "teacher_server.cli.serve",
}


def _files() -> list[Path]:
    return sorted([*(ROOT / "gkd").rglob("*.py"), *(ROOT / "teacher_server").rglob("*.py")])


def _network_files() -> list[Path]:
    names = {path.relative_to(ROOT).as_posix(): path for path in _files()}
    return [p for name, p in names.items() if name.startswith(NETWORK_CODE) and not name.startswith(NOT_NETWORK_CODE)]


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
        used = {m for m in modules if m.partition(".")[0] == "teacher_server"}
        allowed = SHARED | SAME_NUMBERS.get(name, set())
        other = {m for m in used if not any(m == shared or m.startswith(f"{shared}.") for shared in allowed)}
        assert not other, f"{name} imports {other}"


def _dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Name):
            names = {node.id} & DANGEROUS_NAMES
        elif isinstance(node, ast.Attribute | ast.keyword):
            attribute = node.attr if isinstance(node, ast.Attribute) else node.arg
            names = {str(attribute)} & DANGEROUS_ATTRIBUTES
            if attribute == "load" and ast.unparse(node).endswith("torch.load"):
                names.add("torch.load")
        else:
            continue
        for name in names:
            named = name in DANGEROUS_NAMES | DANGEROUS_ATTRIBUTES | {"torch.load"}
            if named or DANGEROUS_MODULES & set(name.split(".")):
                yield f"line {node.lineno}: {name}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", _network_files(), ids=_relative)
def test_network_code_cannot_run_what_it_receives(path: Path) -> None:
    """If it fails, whoever can reach a port may be able to run code of his own on this machine."""
    found = list(_dangers(ast.parse(path.read_text())))
    assert not found, f"{_relative(path)}: {found}"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import cloudpickle as c",
        "from pickle import loads",
        "from multiprocessing.reduction import pickle",
        "def f():\n    import marshal",
        "import shelve",
        "torch.load(file)",
        "load = torch.load",
        "from torch import load",
        "socket.recv_pyobj()",
        "socket.send_pyobj(1)",
        "np.load(file, allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "list(map(eval, texts))",
    ],
)
def test_the_walk_finds_what_it_is_for(code: str) -> None:
    """If it fails, the test above passes whatever the network code does."""
    assert list(_dangers(ast.parse(code))), code
    for harmless in ("model.eval()", "json.load(file)", "re.compile(text)", "msgspec.msgpack.decode(b)"):
        assert not list(_dangers(ast.parse(harmless))), harmless


@pytest.mark.parametrize("path", _files(), ids=_relative)
def test_nobody_imports_the_wiring(path: Path) -> None:
    """If it fails, an inner part knows how it is wired, and the roles can no longer be replaced one by one."""
    name = _relative(path)
    if name.removesuffix(".py").replace("/", ".") in WIRING or name.endswith("__main__.py"):
        return
    used = _imports(path) & WIRING
    assert not used, f"{name} imports {used}"


def test_the_gpu_table_is_pure() -> None:
    """If it fails, a verdict can no longer be tested, or a saved table be read, without a cluster."""
    pure = {"places", "verdicts", "place_table", "cards", "processes", "running", "placement"}
    for name in pure:
        modules = _imports(ROOT / "gkd" / "cluster" / f"{name}.py")
        assert not any(m.partition(".")[0] == "ray" for m in modules), name
        used = {m.split(".")[2] for m in modules if m.startswith("gkd.cluster.")}
        assert used <= pure, (name, used - pure)


def test_footprints_are_pure() -> None:
    """If it fails, nobody can ask how much memory a run needs without loading what runs it."""
    pure = {
        "gkd.config.schema",
        "gkd.config.check",
        "gkd.config.check_pools",
        "gkd.config.check_colocation",
        "gkd.errors",
        "gkd.config.loss_spec",
    }
    pure |= {"gkd.hf.index", "gkd.config.check_parallel", "gkd.pipeline.staleness"}
    for path in (ROOT / "gkd" / "footprint").glob("*.py"):
        modules = {m for m in _imports(path) if m.startswith("gkd.") and not m.startswith("gkd.footprint")}
        assert not any(m not in pure and m.rpartition(".")[0] not in pure for m in modules), (path.name, modules)


def test_memory_is_pure() -> None:
    """Fails if what looks at memory, or moves states, needs a backend, a pool or an engine."""
    for path in (ROOT / "gkd" / "memory").glob("*.py"):
        modules = {m for m in _imports(path) if m.startswith("gkd.") and not m.startswith("gkd.memory")}
        known = {"gkd.config.schema", "gkd.config.check_colocation", "gkd.errors", "gkd.log"}
        assert not any(m not in known and m.rpartition(".")[0] not in known for m in modules), (path.name, modules)


def test_the_loop_knows_the_others_only_as_protocols() -> None:
    """If it fails, the loop reaches into a role instead of asking it, and can no longer be read or tested alone."""
    pure = {"config", "errors", "log", "metrics", "mixing", "roles", "sampler", "types"}
    pure |= {"checkpoints", "disk", "run_folder", "saver", "schedule", "stage_report", "step_report", "background"}
    pure |= {"manifest", "teacher_meter", "config_sharing"}
    loop = ("trainer", "answering", "batches_ahead", "lease", "replay", "sources", "streaming")
    for name in loop:
        used = {m.split(".")[1] for m in _imports(ROOT / "gkd" / f"{name}.py") if m.startswith("gkd.")}
        assert used <= pure | set(loop), (name, used - pure)


def test_the_named_files_exist() -> None:
    """If it fails, a rule above guards a file that was renamed, that is: nothing."""
    shared = {f"{module.replace('.', '/')}.py" for module in SHARED}
    for name in (
        WITHOUT_TORCH
        | shared
        | SAME_NUMBERS.keys()
        | {*NETWORK_CODE, *NOT_NETWORK_CODE}
        | {p for places in ALLOWED.values() for p in places}
    ):
        assert (ROOT / name).exists(), name

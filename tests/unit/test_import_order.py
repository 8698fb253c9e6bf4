"""Check the order of packages, and which library may be imported where, on the syntax tree of every file."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.structure import ORDER, ROOT, cycles, file_imports, imported_names, source_files, unit_imports

# Library -> files that may import it, also lazily.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "megatron": ("gkd/actor/megatron/",),
    "vllm": ("gkd/rollout/vllm/", "teacher_server/engines/", "teacher_server/vision/vllm_input.py"),
    "zmq": ("teacher_server/",),
    "aiohttp": ("gkd/scoring/teacher/http_client.py",),
    "ray": (
        *("gkd/cluster/", "gkd/rollout/driver/", "gkd/rollout/engine/worker.py", "gkd/actor/rank.py"),
        *("gkd/actor/worker.py", "gkd/start/launcher.py", "gkd/scoring/judged.py"),
    ),
    "math_verify": ("gkd/scoring/reward/worker.py",),
    "transformers": ("gkd/data/prompts.py", "gkd/actor/", "gkd/preflight/", "teacher_server/"),
    "torch": (
        *("gkd/actor/", "gkd/data/batching.py", "gkd/data/collate.py", "gkd/data/columns.py", "gkd/loss/"),
        *(f"gkd/memory/{name}.py" for name in ("fragmentation", "host_buffer", "oom", "states", "usage")),
        *(
            "gkd/preflight/",
            "gkd/text/targets.py",
            "gkd/rollout/engine/worker.py",
            "gkd/rollout/vllm/",
            "gkd/weight_sync/",
        ),
        *("gkd/weight_sync/", "teacher_server/engines/", "teacher_server/worker/gpus.py"),
        "teacher_server/vision/rows.py",
    ),
    "peft": ("gkd/actor/fsdp/lora.py",),
    "accelerate": ("gkd/actor/fsdp/model.py",),
    "huggingface_hub": ("teacher_server/engines/hub.py", "gkd/hf/hub.py"),
    "omegaconf": ("gkd/config/load.py", "teacher_server/config/load.py"),
    "triton": ("gkd/loss/triton_rows.py",),
    "fla": ("teacher_server/engines/gpu_kernels.py",),
    "prometheus_client": ("teacher_server/broker/", "teacher_server/cli/serve.py"),
    "rich": ("gkd/console/",),
    "starlette": ("teacher_server/http/",),
    "uvicorn": ("teacher_server/http/",),
    "yaml": ("teacher_server/config/load.py",),
    **dict.fromkeys(("tensorboard", "wandb", "mlflow", "trackio"), ("gkd/metrics/trackers.py",)),
    **dict.fromkeys(("jinja2", "plotly"), ("gkd/tools/report/page.py",)),
}
# The parts of the teacher server that the trainer may import. The local teacher computes with the server's engines.
# Both programs declare and load their settings with the same code, and check model folders with the same code.
FROM_SERVER = (
    *("teacher_server.client.", "teacher_server.errors.", "teacher_server.wire."),
    *("teacher_server.config.command.", "teacher_server.vision.images."),
)
FROM_SERVER_IN = {
    "gkd/config/": ("teacher_server.config.declare", "teacher_server.config.load"),
    "gkd/rollout/vllm/": (
        *("teacher_server.engines.vllm_process", "teacher_server.engines.weight_files", "teacher_server.vision."),
    ),
    **dict.fromkeys(("gkd/actor/", "gkd/data/", "gkd/preflight/"), ("teacher_server.vision.",)),
    "gkd/hf/": (
        *("teacher_server.engines.folder_check", "teacher_server.engines.hub", "teacher_server.engines.weight_files"),
    ),
    "gkd/actor/common/shards.py": ("teacher_server.engines.weight_files",),
    "gkd/actor/common/hf_folder.py": ("teacher_server.engines.hub",),
    "gkd/actor/fsdp/": ("teacher_server.engines.hf", "teacher_server.engines.gpu_kernels"),
    "gkd/actor/frozen/": ("teacher_server.engines.base", "teacher_server.engines.signals"),
}

# Whatever turns bytes from a socket into code or into objects of any type.
NETWORK_CODE = ("gkd/environment/", "gkd/scoring/", "gkd/weight_sync/", "teacher_server/")
# Loads models, opens no socket; pipes to child processes.
NOT_NETWORK_CODE = ("teacher_server/engines/", "gkd/scoring/reward/")
DANGEROUS_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
DANGEROUS_NAMES = {"eval", "exec", "compile", "__import__"}  # called by their bare name
DANGEROUS_ATTRIBUTES = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "allow_pickle"}

FILES = {path.relative_to(ROOT).as_posix(): path for path in source_files()}


def test_packages_import_in_one_direction() -> None:
    """If it fails, two packages can no longer be read, tested or replaced one after the other."""
    edges = unit_imports()
    assert set(edges) == set(ORDER), "list each package once in ORDER"
    wrong = [
        f"{unit} imports {used}" for unit in ORDER for used in edges[unit] if ORDER.index(used) > ORDER.index(unit)
    ]
    assert not wrong
    assert not cycles(file_imports())


def test_libraries_stay_behind_their_adapters() -> None:
    """If it fails, a light process (driver, `--help`, a unit test) starts to load an engine or torch."""
    imports = {name: {module.partition(".")[0] for module in imported_names(path)} for name, path in FILES.items()}
    wrong = [
        f"{name} imports {library}"
        for name, used in imports.items()
        for library in used & LIBRARIES.keys()
        if not name.startswith(LIBRARIES[library])
    ]
    assert not wrong
    unused = {
        (library, place)
        for library, places in LIBRARIES.items()
        for place in places
        if not any(library in used for name, used in imports.items() if name.startswith(place))
    }
    assert not unused, "these rules allow what no file does"


def test_the_trainer_imports_only_the_wire_of_the_server() -> None:
    """If it fails, the teacher server can no longer be installed and run on a host of its own."""
    wrong = []
    for name, path in FILES.items():
        if name.startswith("gkd/"):
            allowed = FROM_SERVER + tuple(m for p, ms in FROM_SERVER_IN.items() if name.startswith(p) for m in ms)
            modules = {m for m in imported_names(path, type_checking=True) if m.startswith("teacher_server")}
            wrong += [f"{name}: {m}" for m in modules if not f"{m}.".startswith(allowed)]
    assert not wrong


def test_network_code_cannot_run_what_it_receives() -> None:
    """If it fails, a process that reaches a port may be able to run its own code on this machine."""
    names = [name for name in FILES if name.startswith(NETWORK_CODE) and not name.startswith(NOT_NETWORK_CODE)]
    assert len(names) > 40
    assert not [f"{name} {danger}" for name in names for danger in _dangers(ast.parse(FILES[name].read_text()))]


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


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import marshal",
        "torch.load(file)",
        "socket.recv_pyobj()",
        "np.load(file, allow_pickle=True)",
        "eval(text)",
        "list(map(eval, texts))",
    ],
)
def test_dangerous_calls_are_found(code: str) -> None:
    """If it fails, the test above passes whatever the network code does."""
    assert list(_dangers(ast.parse(code))), code
    for harmless in ("model.eval()", "json.load(file)", "re.compile(text)", "msgspec.msgpack.decode(b)"):
        assert not list(_dangers(ast.parse(harmless))), harmless

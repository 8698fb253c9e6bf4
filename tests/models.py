"""Measure what works with each model family, on tiny random models: `python -m tests.models --json FILE`.

With docs/results/models.json as FILE, `python -m tests.pages` then writes docs/models.md. All families take 10 minutes.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from teacher_server.engines.folder_check import IMPRECISE_ON_CPU
from tests import model_parts as parts
from tests.bench.command import parsed, parser
from tests.bench.teacher_report import machine
from tests.engine_process import EngineProcess
from tests.model_families import families
from tests.model_parts import Cell
from tests.results import write_results

STUDENTS = {"packed": ("fsdp2", True), "padded": ("fsdp2", False), "megatron": ("megatron", True)}
PARTS = (*STUDENTS, "export", "local", "hf", "vllm", "engine")
LIMIT_S = 120.0
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
_alone = threading.Lock()  # to write; and to start a process, which inherits the variables of this one


class Family:
    """The folders of a family, and two processes: of vLLM's engine, and of all else. They are forks of one by job."""

    def __init__(self, name: str, root: Path, job: int) -> None:
        # On a CPU vLLM has no other kernel of gated delta nets.
        settings = families()[name]
        in_16_bits = "linear_key_head_dim" in str(settings) or settings.get("type", name) in IMPRECISE_ON_CPU
        self._dtype = "bfloat16" if in_16_bits else "float32"
        self._name = name
        self._root = root
        self._job = job
        self._processes = dict[bool, EngineProcess]()

    def call(self, part: Callable[..., Any], *args: Any, on_engine: bool = False) -> Any:
        """Return what a part returns, or the cell of its error."""
        try:
            with _alone:
                if on_engine not in self._processes:
                    self._processes[on_engine] = EngineProcess(QUIET | {"GKD_TEST_JOB": str(self._job)})
            return self._processes[on_engine].call(parts.attempt, part, *args, timeout_s=LIMIT_S)
        except (EOFError, TimeoutError) as error:  # it has ended, or all have been killed
            self._processes.clear()
            return Cell("C", why=str(error))

    def _end(self, on_engine: bool) -> None:
        if on_engine in self._processes:
            self._processes.pop(on_engine).__exit__()

    def measure(self, wanted: Iterable[str]) -> dict[str, Cell]:
        """Return the outcome of each part."""
        try:
            made = self.call(parts.make, self._root, self._name)
            return {part: made or self._measure(part) for part in wanted}
        finally:
            self._end(True)
            self._end(False)

    def _measure(self, part: str) -> Cell:
        if part in STUDENTS:
            return self.call(parts.student, self._root, *STUDENTS[part])
        if part == "hf":
            return self._compared(self.call(parts.teach, self._root, "hf", "float32"))
        if part not in ("vllm", "engine"):
            return self._compared(self.call(getattr(parts, part), self._root))
        self._end(True)  # a process has one engine of vLLM
        if part == "engine":
            return self._rollouts()
        return self._compared(self.call(parts.teach, self._root, part, self._dtype, on_engine=True), self._dtype)

    def _compared(self, scored: Any, dtype: str = "float32", folder: str = "first") -> Cell:
        return scored if isinstance(scored, Cell) else self.call(parts.compare, self._root / folder, scored, dtype)

    def _rollouts(self) -> Cell:
        """Return the worst outcome of a rollout engine: of rollouts, of weight syncs, and of rollouts after them."""
        started = self.call(parts.start, self._root, self._dtype, on_engine=True)
        if started is not None:
            return started
        first = self._compared(self.call(parts.generate, on_engine=True), self._dtype)
        equal = self._synced("first", 0)
        second = synced = self._synced("second", 1)
        if synced.kind in ("ok", "W"):
            second = self._compared(self.call(parts.generate, on_engine=True), self._dtype, "second")
        cells = (first, equal, synced, second)
        stages = ("rollouts", "weight sync of equal weights", "weight sync", "rollouts after a weight sync")
        why = dict[str, str]()  # each reason once, with its first stage
        for stage, cell in zip(stages, cells, strict=True):
            if cell.kind != "ok":
                why.setdefault(cell.why, f"{stage}: {cell.why}")
        kind = min((cell.kind for cell in cells if cell.kind != "ok"), key="WCVR".index, default="ok")
        marks = " ".join(filter(None, dict.fromkeys(cell.marks for cell in cells)))
        return Cell(kind, max(cell.error for cell in cells), marks, "; ".join(why.values()))

    def _synced(self, model: str, version: int) -> Any:
        saved = self.call(parts.save_sent, self._root, model, self._dtype)
        return saved or self.call(parts.sync, self._root, version, on_engine=True)


def measure(name: str, wanted: Iterable[str] = PARTS, job: int = 0) -> dict[str, Any]:
    """Return a family's row of the JSON file. `why` has the reasons of cells that are not ok."""
    with tempfile.TemporaryDirectory() as folder:
        cells = Family(name, Path(folder), job).measure(wanted)
    row: dict[str, Any] = {"family": name}
    for part, cell in cells.items():
        row[part] = " ".join(filter(None, [cell.kind, f"{cell.error:.0e}" if cell.error else "", cell.marks]))
    return row | {"why": {part: _sentence(cell.why) for part, cell in cells.items() if cell.why}}


def _sentence(text: str) -> str:
    """Return the first sentence, without the folder."""
    text = re.sub(r"(model folder |\w+\.path = ')?/\S+/(first|second)'?:? ?", "", " ".join(text.split()))
    text = re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)[0]
    return text if len(text) <= 240 else f"{text[:236]} ..."


def main() -> None:
    made = parser("tests.models", __doc__ or "", families())
    made.add_argument("--part", default=",".join(PARTS), metavar="NAME,..", help="default: %(default)s")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="families at a time; default: %(default)s")
    args = parsed(made, families(), None)
    names = args.only.split(",")
    wanted = args.part.split(",")
    if unknown := sorted(set(wanted) - set(PARTS)):
        made.error(f"--part {args.part}: no {unknown[0]!r}; there are {', '.join(PARTS)}")
    is_new = args.json is None or not args.json.exists()
    rows = {row["family"]: row for row in ([] if is_new else json.loads(args.json.read_text())["families"])}

    def work(job: int) -> None:
        for name in names[job :: args.jobs]:
            row = measure(name, wanted, job)
            with _alone:
                print(json.dumps(row), flush=True)
                old = rows.get(name, {"why": {}})
                row["why"] |= {part: why for part, why in old["why"].items() if part not in wanted}
                rows[name] = {**old, **row}
                if args.json is not None:
                    ordered = [rows[each] for each in families() if each in rows]
                    write_results(args.json, {"machine": machine(), "families": ordered}, levels=2)

    with ThreadPoolExecutor(args.jobs) as threads:
        list(threads.map(work, range(args.jobs)))


if __name__ == "__main__":
    main()

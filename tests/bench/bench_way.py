"""Count the files that one step runs through, and the rooms that the settings pass before it.

    python -m tests.bench.bench_way [--json FILE]

A small run (sync, ZMQ teacher, top-k; fsdp2 with one rank) with every process recorded. Its second step begins when the
first one is written to metrics.jsonl. The files of the step are those with a call in this time: what a prompt passes
from the sampler to the optimizer, the weight sync behind it, and the rooms of `WATCHING`, which only watch a run. The
way of the settings is the sequence of functions of the driver's main thread that get the config or a section of it
as an argument, until the first step is written. A climb is a move to a room on a higher floor (docs/architecture.md).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from gkd.metrics.writer import read_metrics
from tests import structure
from tests.bench.way_recorder import FOLDER, TICKS
from tests.e2e.conftest import make_lab
from tests.service.harness import ServerProcess

WATCHING = ("gkd.console", "gkd.log", "gkd.memory", "gkd.metrics", "gkd.run", "gkd.spans")
SETTINGS = ("trainer.scheduler=sync", "actor.strategy=fsdp2", "trainer.total_steps=3", "eval.max_prompts=1")


def record(folder: Path) -> tuple[list[dict[str, Any]], float, float]:
    """Return the records of the processes, and when the first and the second step were written, in unix seconds."""
    records = folder / "records"
    records.mkdir()
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("from tests.bench.way_recorder import start\n\nstart()\n")
    os.environ |= {FOLDER: str(records), "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(structure.ROOT)])}
    lab = make_lab(folder)
    with ServerProcess(lab.teacher, folder) as server:
        lab.finished_run(folder / "run", server.port, *SETTINGS)
    written = {line["step"]: line["time/unix_s"] for line in read_metrics(folder / "run" / "metrics.jsonl")}
    return [json.loads(file.read_text()) for file in records.glob("*.json")], written[1], written[2]


def files_between(records: Iterable[dict[str, Any]], began: float, ended: float) -> list[str]:
    """Return the files with a call in this time, sorted."""
    ticks = set(range(int(began * TICKS) + 1, int(ended * TICKS) + 1))
    return sorted({name for each in records for name, called in each["ticks"].items() if not ticks.isdisjoint(called)})


def room_of(file: Path) -> str:
    return structure.room_of(structure.module_name(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records, began, ended = record(Path(folder))
    files = files_between(records, began, ended)
    driver = next(each for each in records if each["settings"] and "gkd" in each["command"][0])
    floor = {room: n for n, row in enumerate(structure.floors(structure.room_imports())) for room in row}
    called = [structure.ROOT / name for at, name in driver["settings"] if at < began]
    rooms = [room_of(file) for file in called]
    moves = [(a, b) for a, b in pairwise(rooms) if a != b]
    figures = {
        "files of a step": len(files),
        "without those that watch": sum(room_of(structure.ROOT / name) not in WATCHING for name in files),
        "lines of these files": sum(len((structure.ROOT / name).read_text().splitlines()) for name in files),
        "rooms of the settings": len(set(rooms)),
        "moves between rooms": len(moves),
        "climbs": sum(floor[b] > floor[a] for a, b in moves),
    }
    print("\n".join(files))
    for name, value in figures.items():
        print(f"{name:24} {value}")
    if args.json:
        args.json.write_text(json.dumps({**figures, "names": files}, indent=1) + "\n")


if __name__ == "__main__":
    main()

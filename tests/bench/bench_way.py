"""Count the files that one step runs through, and the rooms that the settings pass before it.

    python -m tests.bench.bench_way [--root CHECKOUT] [--json FILE]

A small run (sync, ZMQ teacher, top-k; fsdp2 with one rank) with every process recorded. Its second step begins when the
first one is written to metrics.jsonl. The files of the step are those with a call in this time: what a prompt passes
from the sampler to the optimizer, the weight sync behind it, and the rooms of `WATCHING`, which only watch a run. The
way of the settings is the sequence of functions of the driver's main thread that get the config or a section of it
as an argument, until the first step is written. A climb is a move to a room on a higher floor (docs/architecture.md).
`--root` runs the product and the test models of another checkout, to compare two versions.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from gkd.metrics.writer import read_metrics
from tests import structure
from tests.bench import way_recorder
from tests.results import write_results

# gkd.health was a room of its own before it became a part of the metrics.
WATCHING = ("gkd.console", "gkd.health", "gkd.log", "gkd.memory", "gkd.metrics", "gkd.run", "gkd.spans")
SETTINGS = ("trainer.scheduler=sync", "actor.strategy=fsdp2", "trainer.total_steps=3", "eval.max_prompts=1")
RUN = """
import sys
from pathlib import Path
from tests.e2e.conftest import make_lab
from tests.service.harness import ServerProcess
folder = Path(sys.argv[1])
lab = make_lab(folder)
with ServerProcess(lab.teacher, folder) as server:
    done = lab.train_run(folder / "run", server.port, *sys.argv[2:])
sys.exit(done.stderr[-3000:] if done.returncode else 0)
"""


def record(folder: Path, root: Path) -> tuple[list[dict[str, Any]], float, float]:
    """Return the records of the processes, and when the first and the second step were written, in unix seconds."""
    records, site = folder / "records", folder / "site"
    records.mkdir()
    site.mkdir()
    shutil.copy(way_recorder.__file__, site)
    (site / "sitecustomize.py").write_text("from way_recorder import start\n\nstart()\n")
    env = {
        way_recorder.FOLDER: str(records),
        way_recorder.CHECKOUT: str(root),
        "PYTHONPATH": os.pathsep.join([str(site), str(root)]),
    }
    command = [sys.executable, "-c", RUN, str(folder), *SETTINGS]
    subprocess.run(command, cwd=root, env=os.environ | env, check=True)
    written = {line["step"]: line["time/unix_s"] for line in read_metrics(folder / "run" / "metrics.jsonl")}
    return [json.loads(file.read_text()) for file in records.glob("*.json")], written[1], written[2]


def files_between(records: Iterable[dict[str, Any]], began: float, ended: float) -> list[str]:
    """Return the files with a call in this time, sorted."""
    ticks = set(range(int(began * way_recorder.TICKS) + 1, int(ended * way_recorder.TICKS) + 1))
    return sorted({name for each in records for name, called in each["ticks"].items() if not ticks.isdisjoint(called)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=structure.ROOT, help="checkout to run; default: this one")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    root = args.root.resolve()

    def room_of(name: str) -> str:
        return structure.room_of(structure.module_name(root / name, root))

    with tempfile.TemporaryDirectory() as folder:
        records, began, ended = record(Path(folder), root)
    files = files_between(records, began, ended)
    driver = next(each for each in records if each["settings"] and "main_gkd" in each["command"][0])
    floor = {room: n for n, row in enumerate(structure.floors(structure.room_imports(root))) for room in row}
    rooms = [room_of(name) for at, name in driver["settings"] if at < began]
    moves = [(a, b) for a, b in pairwise(rooms) if a != b]
    figures = {
        "files of a step": len(files),
        "without those that watch": sum(room_of(name) not in WATCHING for name in files),
        "lines of these files": sum(len((root / name).read_text().splitlines()) for name in files),
        "rooms of the settings": len(set(rooms)),
        "moves between rooms": len(moves),
        "climbs": sum(floor[b] > floor[a] for a, b in moves),
    }
    print("\n".join(files))
    for name, value in figures.items():
        print(f"{name:24} {value}")
    if args.json:
        write_results(args.json, figures)


if __name__ == "__main__":
    main()

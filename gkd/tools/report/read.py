"""Read the files of a run folder that the report shows. A run may be in progress, or killed."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gkd.cluster.gpu_table import GpuMap, gpu_map_from_json
from gkd.config.load import yaml_values
from gkd.errors import ConfigError
from gkd.metrics.writer import json_lines, read_metrics
from gkd.run.disk import naming

_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")
# Files and folders whose change makes the page out of date.
WATCHED = ("metrics.jsonl", "config.yaml", "gpus.json", "environment.jsonl", "samples", "token_losses", "export")


@dataclass(frozen=True, slots=True)
class Curve:
    """Values of one key: step -> value; None: not finite."""

    steps: Sequence[int]
    values: Sequence[float | None]


@dataclass(frozen=True)
class Run:
    """One run folder.

    Args:
        name: the folder's name; if two runs have the same one, its path.
        lines: of metrics.jsonl, in order.
        settings: of config.yaml by dotted key, as written.
    """

    name: str
    root: Path
    lines: Sequence[Mapping[str, float | None]]
    settings: dict[str, Any]

    @functools.cached_property
    def curves(self) -> dict[str, Curve]:
        """All keys of metrics.jsonl, in the order in which they first occur."""
        columns_of_key: dict[str, tuple[list[int], list[float | None]]] = {}
        for line in self.lines:
            step = int(line["step"] or 0)
            for key, value in line.items():
                if key != "step":
                    steps, values = columns_of_key.setdefault(key, ([], []))
                    steps.append(step)
                    values.append(value)
        return {key: Curve(*columns) for key, columns in columns_of_key.items()}

    def finite(self, key: str) -> list[float]:
        """Return the finite values of a key; none for a key that no line has."""
        return [value for value in self.curves[key].values if value is not None] if key in self.curves else []

    @property
    def last_step(self) -> int:
        return int(self.lines[-1]["step"] or 0) if self.lines else 0

    def gpu_map(self) -> GpuMap | None:
        """Return the content of gpus.json; None: there is none. Raises ClusterError: it is damaged."""
        file = self.root / "gpus.json"
        if not file.exists():
            return None
        with naming(file, "read"):
            return gpu_map_from_json(file.read_bytes(), str(file))

    def environment(self) -> list[dict[str, Any]]:
        """Return the lines of environment.jsonl, one per start of the run; empty: there is none.

        Raises:
            CheckpointError: a line is damaged.
        """
        file = self.root / "environment.jsonl"
        return [line for _, line in json_lines(file)] if file.exists() else []

    def step_files(self, folder: str) -> dict[int, Path]:
        """Return step -> file of samples/ or token_losses/, ascending."""
        files = {int(m[1]): file for file in (self.root / folder).glob("*") if (m := _STEP_FILE.fullmatch(file.name))}
        return dict(sorted(files.items()))


def folder_state(root: Path) -> list[tuple[int, int]]:
    """Return time and size of every file and folder that the page is made of, to compare."""
    paths = [path for name in WATCHED for path in [root / name, *sorted((root / name).glob("*"))]]
    stats = [path.stat() for path in paths if path.exists()]
    return [(stat.st_mtime_ns, stat.st_size) for stat in stats]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read several run folders.

    Raises:
        ConfigError: a folder does not exist, has no metrics.jsonl or is given twice.
        CheckpointError: a file is damaged; names the line.
    """
    resolved = [folder.resolve() for folder in folders]
    for i, folder in enumerate(resolved):
        if folder in resolved[:i]:
            raise ConfigError("RUN", str(folders[i]), "this run is given twice.", "name each run once.")
    names = [folder.name for folder in resolved]
    return [
        _read(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def _read(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        problem = f"the folder {folder.absolute()} does not exist."
        raise ConfigError("RUN", str(folder), problem, "give the folder of a run (trainer.run_dir).")
    metrics = folder / "metrics.jsonl"
    config = folder / "config.yaml"
    if not metrics.is_file():
        fix = "give the folder of a run (trainer.run_dir); a run writes this file when it starts."
        raise ConfigError("RUN", str(folder), "it has no metrics.jsonl.", fix)
    return Run(name, folder, read_metrics(metrics), yaml_values(config) if config.is_file() else {})

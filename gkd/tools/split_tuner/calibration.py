"""Run short trainings to measure the rates of the stages (`--calibrate`).

The first run has the concurrency of the settings, the second one less, which shows the cost of a sequence in an engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gkd.config.schema import Config
from gkd.errors import ClusterError, ConfigError
from gkd.files.disk import remove
from gkd.metrics.bottleneck import MAX_NUM_SEQS
from gkd.run.folder import CHECKPOINTS, delete_export
from gkd.tools.split_tuner.rates import read_steps

_STEPS = 10
_MIN_CONCURRENCY = 4  # the second run has a fourth of rollout.max_num_seqs, but not less


def calibration_folder(config: Config, named: str | None) -> Path:
    """Return the folder for the calibration runs; like trainer.run_dir it must be shared by all nodes.

    Args:
        named: the folder that the user chose; None means next to trainer.run_dir.

    Raises:
        ConfigError: it is a file, or not empty.
    """
    root = Path(named or f"{os.path.abspath(config.trainer.run_dir)}_calibration")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        problem = "it is a file, or not empty. It may hold an earlier calibration, which --run can read."
        raise ConfigError("--calibration-dir", str(root), problem, "delete it, or name a new folder.")
    return root


def calibrate(file: str, overrides: Sequence[str], config: Config, root: Path) -> list[Path]:
    """Run the calibration, and return the run folders, without checkpoints and exports. Blocks.

    Args:
        file, overrides: the settings.
        config: the same, loaded.

    Raises:
        ConfigError: a run was refused.
        ClusterError: a run failed; its error is on stderr.
    """
    most = config.rollout.max_num_seqs
    folders = [_calibrated(file, overrides, root, most)]
    if not most:  # preflight chose the number
        most = int(read_steps(folders[0])[-1][MAX_NUM_SEQS])
    fewer = max(min(_MIN_CONCURRENCY, most), most // 4)
    return folders if fewer == most else [*folders, _calibrated(file, overrides, root, fewer)]


def _calibrated(file: str, overrides: Sequence[str], root: Path, concurrency: int) -> Path:
    """Make one run. Returns and raises as `calibrate`."""
    folder = root / f"max_num_seqs_{concurrency}"
    print(
        f"calibrating: {_STEPS} steps, {concurrency or 'auto'} sequences per engine, in {folder} ...", file=sys.stderr
    )
    settings = [f"{key}={value}" for key, value in _settings(folder, concurrency).items()]
    command = [sys.executable, "-m", "gkd.main_gkd", "--config", file, *overrides, *settings]
    code = launched(command)
    remove(folder / CHECKPOINTS)
    delete_export(folder)
    if code == 2:
        problem = f"the run in {folder} was refused, see above."
        raise ConfigError("--calibrate", file, problem, "correct it, or name another folder: --calibration-dir.")
    if code:
        where = f"its files are in {folder}; delete {root} or name another --calibration-dir before the next one"
        raise ClusterError(f"the calibration run of {file} ended with exit code {code}, see above; {where}")
    return folder


def launched(command: Sequence[str]) -> int:
    """Run a command and return its exit code. Its stdout goes to stderr, since stdout is for the ranking."""
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode


def _settings(folder: Path, concurrency: int) -> dict[str, object]:
    """Return the settings of a short run that only measures."""
    return {
        "trainer.run_dir": folder,
        "trainer.scheduler": "sync",  # stages of different steps do not overlap
        "trainer.max_staleness": 1,
        "trainer.total_steps": _STEPS,
        "trainer.resume": "never",
        "trainer.save_every": 0,
        "trainer.record_batches": "false",
        "trainer.replay": "''",
        # Other schedules may require more steps.
        "actor.optim.schedule": "constant",
        "actor.optim.warmup_steps": 0,
        "actor.optim.decay_steps": 0,
        "data.val_files": "[]",
        "eval.metric": "none",
        "rollout.max_num_seqs": concurrency,
    }

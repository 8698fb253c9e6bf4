"""`--calibrate`: short runs of some settings, whose metrics say how fast the stages are. The first has the settings'
concurrency, the second less, so that one can tell what a sequence more costs an engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gkd.config.schema import Config
from gkd.errors import ClusterError, ConfigError
from gkd.run import export_folder
from gkd.run.disk import remove
from gkd.run.folder import CHECKPOINTS

SCHEDULER = "sync"  # no stage waits for another step's, or runs beside one
_STEPS = 10
_LEAST_CONCURRENCY = 4  # the second run has a fourth of rollout.max_num_seqs, but not less


def calibration_folder(config: Config, named: str | None) -> Path:
    """Where the runs' folders go; every node of the pools must see it, as it must trainer.run_dir.

    Args:
        named: what the user wants; None: beside trainer.run_dir.

    Raises:
        ConfigError: something is there already.
    """
    root = Path(named or f"{os.path.abspath(config.trainer.run_dir)}_calibration")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        problem = "it is a file, or not empty; an earlier calibration may be in it, which --run can read."
        raise ConfigError("--calibration-dir", str(root), problem, "delete it, or name a new folder.")
    return root


def calibrate(file: str, overrides: Sequence[str], config: Config, root: Path) -> list[Path]:
    """Makes the runs, and returns their folders, without checkpoints and exports. Blocks until they end.

    Args:
        file, overrides: of the settings.
        config: what these are together.

    Raises:
        ConfigError: a run was refused.
        ClusterError: a run failed; its own message is on stderr.
    """
    most = config.rollout.max_num_seqs
    fewer = max(min(_LEAST_CONCURRENCY, most), most // 4)
    folders = []
    for concurrency in dict.fromkeys((most, fewer)):
        folder = root / f"max_num_seqs_{concurrency}"
        print(f"calibrating: {_STEPS} steps, {concurrency} sequences an engine, in {folder} ...", file=sys.stderr)
        settings = [f"{key}={value}" for key, value in _settings(folder, concurrency).items()]
        command = [sys.executable, "-m", "gkd.main_gkd", "--config", file, *overrides, *settings]
        code = launched(command)
        remove(folder / CHECKPOINTS)
        export_folder.delete(folder)
        if code == 2:
            problem = f"its run in {folder} was refused, see above."
            raise ConfigError("--calibrate", file, problem, "correct it, or name another folder: --calibration-dir.")
        if code:
            where = f"what it left is in {folder}; delete {root} or name another --calibration-dir before the next one"
            raise ClusterError(f"the calibration run of {file} ended with exit code {code}, see above; {where}")
        folders.append(folder)
    return folders


def launched(command: Sequence[str]) -> int:
    """Its exit code. Stdout belongs to the ranking."""
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode


def _settings(folder: Path, concurrency: int) -> dict[str, object]:
    """What makes a run a short one that only measures."""
    return {
        "trainer.run_dir": folder,
        "trainer.scheduler": SCHEDULER,
        "trainer.max_staleness": 1,
        "trainer.total_steps": _STEPS,
        "trainer.resume": "never",
        "trainer.save_every": 0,
        "trainer.record_batches": "false",
        "trainer.replay": "''",
        # A schedule may need more steps than these.
        "actor.optim.schedule": "constant",
        "actor.optim.warmup_steps": 0,
        "actor.optim.decay_steps": 0,
        "data.val_files": "[]",
        "eval.metric": "none",
        "rollout.max_num_seqs": concurrency,
    }

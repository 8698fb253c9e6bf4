"""Serve the teacher of one run from a process of its own, on the GPUs that the pools leave: `gkd train --teacher`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gkd.cluster.gpus import machine_gpus, visible_gpus
from gkd.config.schema import Config
from gkd.errors import ConfigError, TeacherUnavailable
from gkd.log import get_logger
from gkd.preflight.machine import resolve_device

log = get_logger("teacher")

_STOP_S = 15.0  # time from SIGTERM to SIGKILL
_PR_SET_PDEATHSIG = 1


def teacher_flags(config: Config, gpus: str) -> list[str]:
    """Return the flags of the server: device and GPUs, and whether it reads images.

    Args:
        gpus: ids with commas between them; empty: those that are visible and that the pools leave.

    Raises:
        ConfigError: no GPU is left, or the run has none.
    """
    device = resolve_device(config)
    flags = ["--device", device, *(["--images"] if config.data.images_key else [])]
    if device == "cpu":
        if gpus:
            raise ConfigError("--teacher-gpus", gpus, "the run is on a CPU.", "leave it out.")
        return flags
    visible = [gpu.id for gpu in visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), machine_gpus())]
    of_pools = list(map(str, config.cluster.gpus)) or visible[: config.derived.n_gpus]
    left = gpus or ",".join(gpu for gpu in visible if gpu not in of_pools)
    if not left:
        problem = f"the pools take all GPUs that are visible: {', '.join(visible)}."
        fix = "use smaller pools, name some for both with cluster.teacher_gpu_share, or set teacher.backend=local."
        raise ConfigError("--teacher-gpus", gpus, problem, fix)
    return [*flags, "--gpus", left]


@contextmanager
def teacher_of_run(config: Config, model: str, gpus: str) -> Iterator[Config]:
    """Serve a model while the block runs, and yield the settings with its address. Raises as what it calls."""
    log_file = Path(f"{config.trainer.run_dir}.teacher.log")
    with own_teacher(model, teacher_flags(config, gpus), log_file) as port:
        yield config.with_values({"teacher.server_ip": "127.0.0.1", "teacher.server_port": port})


@contextmanager
def own_teacher(model: str, flags: Sequence[str], log_file: Path) -> Iterator[int]:
    """Run a teacher server while the block runs, and yield its port. Its log is shown until it is ready.

    Args:
        model: a folder, or a name on the hub.
        log_file: of the server; it is replaced.

    Raises:
        TeacherUnavailable: the server ended before it was ready.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gkd_teacher_") as folder:
        ready = Path(folder, "ready.json")
        words = ["--model", model, "--port", "0", *flags, "--ready-file", str(ready)]
        with log_file.open("wb") as output:
            server = subprocess.Popen(
                [sys.executable, "-m", "teacher_server", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the server when it is done
                preexec_fn=_end_with_parent,
            )
        try:
            with log_file.open(errors="replace") as lines:
                while not ready.exists():
                    ended = server.poll() is not None
                    for line in lines:
                        print(f"teacher: {line.rstrip()}", file=sys.stderr, flush=True)
                    if ended:
                        problem = f"the teacher server ended with exit code {server.returncode} before it was ready"
                        raise TeacherUnavailable(f"{problem}. Its log: {log_file}")
                    time.sleep(0.2)
            port: int = json.loads(ready.read_text())["port"]
            log.info("the teacher server is ready at 127.0.0.1:%d; its log: %s", port, log_file)
            yield port
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _end_with_parent() -> None:
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        raise OSError("prctl failed")

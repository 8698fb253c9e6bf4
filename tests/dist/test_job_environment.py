"""Variables of cluster jobs and containers around a Ray that the trainer starts, and what that Ray leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gkd.cluster import host
from gkd.cluster.host import temporary_folder
from gkd.errors import ClusterError
from tests.container import nameless, small_and_unresolved
from tests.e2e.conftest import save_model
from tests.service.harness import ServerProcess

pytestmark = [pytest.mark.dist, pytest.mark.cpu_only("Ray's slots are logical CPUs")]

# Run a task in a slot, then end as the argument names it.
_RUN = """
import os, resource, signal, sys, ray
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from gkd.cluster.cluster import Cluster
from gkd.errors import GkdError
from gkd.start.pools import worker_env
signal.signal(signal.SIGTERM, lambda *_: None)
cluster = Cluster("", n_slots=2, on_cpu=True)
print(cluster._folder)

@ray.remote(num_gpus=1, runtime_env={"env_vars": worker_env(on_cpu=True)})
def in_a_slot():
    return [os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS")]

try:
    print(*ray.get(in_a_slot.remote()), os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    if sys.argv[1] == "error":
        raise GkdError("a rank failed")
finally:
    cluster.close()
    os.kill(os.getpid(), signal.SIGTERM)  # the handler is still there
"""


@pytest.mark.parametrize(("end", "visible", "long"), [("end", "NoDevFiles", True), ("error", "GPU-4d0a9a1f", False)])
def test_a_job_environment(tmp_path: Path, end: str, visible: str, long: bool) -> None:
    """Fails if Ray does not start where HOME cannot be written, TMPDIR is long, shared memory is small, few files may
    be open, the host has no address, CUDA_VISIBLE_DEVICES hides the GPUs, or the user id has no name (only root can try
    it); if the threads of a job script reach a rank; or if each run leaves a folder. A failed one must leave its logs.
    """
    job = {"HOME": "/dev/null/home", "CUDA_VISIBLE_DEVICES": visible, "MKL_NUM_THREADS": "2", "OMP_NUM_THREADS": "7"}
    if long:
        job["TMPDIR"] = str(tmp_path / ("x" * 100))
        Path(job["TMPDIR"]).mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | job
    command = [sys.executable, "-c", _RUN, end]
    if end == "end":
        command = small_and_unresolved(tmp_path / "hosts", *command)
    elif not os.getuid():
        command = nameless(*command)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert len(done.stdout.splitlines()) == 2, done.stderr
    folder, seen = done.stdout.splitlines()
    assert seen in (f"0 1 1 {visible}", f"1 1 1 {visible}"), done.stderr
    assert ("Ray uses /tmp" in done.stderr) == long
    assert (done.returncode == 0) == (end == "end")
    left = [path for path in Path(folder).rglob("*") if path.is_file()]
    if end == "error":
        (logs,) = {path.parent for path in left if path.name == "raylet.out"}
        assert all(path.is_relative_to(logs) for path in left) and str(logs) in done.stderr
        subprocess.run(["rm", "-r", folder], check=True)
    else:
        assert not Path(folder).exists()


def test_a_user_id_without_a_name_or_home() -> None:
    """Fails if a teacher server with a model in torch, or the preview of prompts, needs the name or the home of its
    user, which containers with a user id of their own lack.
    """
    with tempfile.TemporaryDirectory() as temporary:  # pytest's folders are those of one user
        folder = Path(temporary)
        model, prompts = folder / "model", folder / "prompts.jsonl"
        save_model(model, seed=0, layers=1, n_vocab=64)
        prompts.write_text('{"prompt": "w2 w3"}\n')
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777)
        (folder / "x.yaml").write_text("{}")
        settings = [f"model.path={model}", f"data.train_files=[{prompts}]", "--show-prompts", "1"]
        command = [sys.executable, "-m", "gkd.main_gkd", "--config", f"{folder}/x.yaml", *settings]
        with ServerProcess(model, folder, options=("--engine", "hf"), run_by=nameless):
            done = subprocess.run(nameless(*command), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "w2 w3" in done.stdout, done.stderr


def test_a_long_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if Ray's traceback about a socket is all that a user sees of a long TMPDIR."""
    long = tmp_path / ("x" * 100)
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    assert temporary_folder(60) == Path("/tmp")
    monkeypatch.setattr(host, "_SHORT", tmp_path / "absent")
    n_bytes = len(str(long))
    with pytest.raises(ClusterError, match=f"RAY_TMPDIR = .* 47 .* {n_bytes}"):
        temporary_folder(60)
    monkeypatch.setenv("RAY_TMPDIR", "/" + "x" * 46)
    assert temporary_folder(60) == Path("/" + "x" * 46)

"""Test the placement of a process, the refreshed GPU map of a running job, and the command line of check_gpus."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from gkd import main_gkd
from gkd.cluster import gpus as gpus_module
from gkd.cluster.gpu_table import TEACHER, GpuInfo, GpuMap, RankPlacement, gpu_map_from_json
from gkd.cluster.gpus import machine_gpus, parse_gpus, visible_gpus
from gkd.cluster.host import process_info
from gkd.cluster.startup import this_placement
from gkd.config.load import config_yaml, load_config
from gkd.config.schema import Config, Route
from gkd.config.schema_teacher import TeacherConfig
from gkd.errors import ClusterError
from gkd.run.folder import PLACES, RunFolder
from gkd.run.open import open_run_folder
from gkd.scoring.teacher.gpus import teacher_rows
from gkd.spans import driver
from gkd.start.gpu_map import record_end, record_restart
from gkd.start.pools import worker_env
from gkd.tools import check_gpus
from gkd.tools.check_gpus import refresh
from tests.service.harness import TRIVIAL, ServerProcess, trivial_model
from tests.unit.test_launch import put_tool

GPUS = """0, GPU-aa, NVIDIA H100, 00000000:18:00.0, 143771, 143100
1, GPU-bb, NVIDIA H100, 00000000:2A:00.0, 143771, 100
2, GPU-cc, NVIDIA A100, 00000000:3A:00.0, [N/A], [N/A]
"""
PROCESSES = "GPU-bb, 4242\nGPU-bb, 17\nGPU-dd, [Not Found]\n"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a program of that name first on the PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    return partial(put_tool, tmp_path, "nvidia-smi")


def smi_script(gpus: str, processes: str) -> str:
    return f"case $1 in --query-gpu*) printf '%s' '{gpus}';; *) printf '%s' '{processes}';; esac"


def test_parsed_output_of_nvidia_smi() -> None:
    """Fails if columns of nvidia-smi are confused, or if a missing value is an error."""
    found = parse_gpus(GPUS, PROCESSES)
    assert found[1] == GpuInfo(
        id="1",
        uuid="GPU-bb",
        name="NVIDIA H100",
        pci_bus="00000000:2A:00.0",
        memory_total_mib=143771,
        memory_free_mib=100,
        pids=(4242, 17),
    )
    assert found[0].pids == () and found[2].memory_free_mib is None
    assert parse_gpus("No devices were found\n", "a text without columns\n") == []


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["0", "1", "2"]),
        ("1, 0", ["1", "0"]),
        ("GPU-b", ["GPU-b"]),
        ("0,7,1", ["0"]),  # CUDA stops at the first id without a GPU
        ("MIG-x", ["MIG-x"]),
    ],
)
def test_visible_gpus(visible: str | None, seen: list[str]) -> None:
    """Fails if the visible GPUs or their order differ from what CUDA sees."""
    found = visible_gpus(visible, parse_gpus(GPUS))
    assert [gpu.id for gpu in found] == seen
    if visible == "GPU-b":
        assert found[0].uuid == "GPU-bb"
    if visible is not None and "7" not in visible:
        assert [gpu.id for gpu in visible_gpus(visible, ())] == seen, "without a driver every entry counts"


def test_placement_of_this_process(nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a rank does not report its GPUs, or queries the driver without `ask_driver`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    nvidia_smi(smi_script(GPUS, PROCESSES))
    asked, quick = this_placement("actor", 3, ask_driver=True), this_placement("actor", 3)
    assert (asked.gpus[0].uuid, asked.gpus[0].pids) == ("GPU-bb", (4242, 17))
    assert (quick.gpus, quick.pid, quick.host) == ((GpuInfo(id="1"),), os.getpid(), socket.gethostname())
    assert quick.line().startswith("actor worker 3: CUDA_VISIBLE_DEVICES=1, GPU count=1, ")
    assert quick.started == process_info(os.getpid()).started  # type: ignore[union-attr]


def test_cuda_ids_match_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if CUDA orders GPUs of different models in another way than nvidia-smi."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert worker_env(on_cpu=False)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert worker_env(on_cpu=False)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST", "the user's setting has priority"


def test_a_driver_that_is_stuck_absent_or_broken(
    nvidia_smi: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the start of a training blocks on a hung driver, or fails without a driver."""
    monkeypatch.setattr(gpus_module, "_LIMIT_S", 0.3)
    nvidia_smi("exec sleep 300")
    began = time.monotonic()
    assert machine_gpus() == [] and time.monotonic() - began < 60
    nvidia_smi("echo NVIDIA-SMI has failed; exit 9")
    assert machine_gpus() == []
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert machine_gpus() == []


@pytest.fixture
def processes() -> Iterator[tuple[int, int, int]]:
    """Yield the pids of a rank, its child, and another process, which live until the test ends."""
    rank = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True)
    stranger = subprocess.Popen(["sleep", "60"])
    yield rank.pid, int(rank.stdout.readline()), stranger.pid
    os.killpg(rank.pid, 9)
    stranger.kill()
    rank.stdout.close()
    rank.wait(), stranger.wait()


def test_refresh_of_a_running_job(processes: tuple[int, int, int]) -> None:
    """Fails if a dead rank or a rank on another rank's GPU is missed, or another process is taken for a rank's."""
    rank, child, stranger = processes
    gpus = parse_gpus(GPUS)

    def placement(number: int, pid: int, host: str = "here") -> RankPlacement:
        started = process.started if (process := process_info(pid)) is not None else 1
        known = {"node": host, "pid": pid, "started": started, "gpus": (gpus[number],)}
        ids = str(number)
        return RankPlacement(
            pool="actor", rank=number, host=host, cuda_visible_devices=ids, ray_gpu_ids=(ids,), **known
        )

    rows = (placement(0, rank), placement(2, 1, host="there"))
    saved = GpuMap(device="cuda", rows=rows, findings=())
    healthy = [structs.replace(gpus[0], pids=(rank, child, 999_999_999), memory_free_mib=1), *gpus[1:]]
    ranks, found = refresh(saved, "here", healthy)
    assert found == [] and ranks[0].gpus[0].memory_free_mib == 1 and ranks[1] == rows[1]
    assert refresh(saved, "here", []) == (list(rows), [])

    wrong = [structs.replace(gpus[0], pids=(stranger,)), structs.replace(gpus[1], pids=(child,)), gpus[2]]
    (finding,) = refresh(saved, "here", wrong)[1]
    assert (finding.kind, finding.ranks) == ("outside_gpus", ("actor 0",))
    assert f"process {child}" in finding.problem and "GPU 1 (GPU-bb)" in finding.problem

    ended = subprocess.Popen(["true"])
    ended.wait()
    reused = structs.replace(rows[0], started=1)  # another process has the pid now
    for gone in (placement(1, ended.pid), reused):
        with pytest.raises(ClusterError, match=rf"{gone.label} \(process {gone.pid}\)"):
            refresh(structs.replace(saved, rows=(rows[0], gone) if gone.rank else (gone,)), "here", [])


@pytest.mark.service
def test_rows_of_the_teacher_workers(tmp_path: Path) -> None:
    """Fails if the teacher workers are listed without their GPUs, or if a silent teacher is not a finding."""
    options = (*TRIVIAL, "--gpus", "3,4")
    with ServerProcess(trivial_model(tmp_path / "model"), tmp_path, n_workers=2, options=options) as server:
        teacher = TeacherConfig(server_port=server.port, outage_budget_s=10)
        rows, found = teacher_rows([Route("", teacher)])
    assert found == [] and [row.label for row in rows] == [f"{TEACHER} 0 (w0.0)", f"{TEACHER} 1 (w1.0)"]
    assert sorted(row.pid for row in rows) == sorted(server.worker_pids)
    assert {(row.host, row.visible) for row in rows} == {(socket.gethostname(), rows[0].visible)}
    assert [row.gpus for row in rows] == [(GpuInfo(id="3"),), (GpuInfo(id="4"),)]
    began = time.monotonic()
    rows, found = teacher_rows([Route("", replace(teacher, outage_budget_s=0.5))])
    assert rows == [] and [finding.kind for finding in found] == ["teacher_silent"] and time.monotonic() - began < 60
    assert "Fix:" not in found[0].problem + found[0].fix and "--model PATH" in found[0].fix
    assert "teacher.server_port" in found[0].fix


GOOD = ["data.train_files=[x]", "model.path=m", "trainer.run_dir=r", "eval.metric=none", "teacher.outage_budget_s=0.5"]


@pytest.mark.parametrize(
    ("words", "code", "token"),
    [
        (["--config", "absent.yaml"], 2, "absent.yaml"),
        (["--running", "absent"], 2, "gpus.json"),
        ([*GOOD, "trainer.device=cuda"], 2, "trainer.device"),
        ([*GOOD, "trainer.device=cpu", "cluster.ray_address=127.0.0.1:1"], 1, "cluster.ray_address = '127.0.0.1:1'"),
    ],
)
def test_invalid_command_lines(
    words: list[str],
    code: int,
    token: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fails if an invalid setting ends in a traceback or with the wrong exit code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("{}\n")
    assert check_gpus.main(words if words[0].startswith("--") else ["--config", "empty.yaml", *words]) == code
    captured = capsys.readouterr()
    assert token in captured.err and captured.out == ""


def test_a_long_check_says_what_it_does_and_may_be_interrupted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gkd_log: pytest.LogCaptureFixture,
) -> None:
    """Fails if check_gpus is silent for more than 5 s, or Ctrl-C ends it with a traceback."""

    def slow(config: Config) -> GpuMap:
        with driver.doing("starting Ray"):
            threading.Event().wait(5.0)
        raise KeyboardInterrupt

    gkd_log.set_level(logging.INFO)
    (tmp_path / "empty.yaml").write_text("{}\n")
    monkeypatch.setattr(check_gpus, "check", slow)
    assert check_gpus.main(["--config", str(tmp_path / "empty.yaml")]) == 130
    (line,) = gkd_log.messages
    assert line.startswith("starting Ray: ") and line.endswith("s so far")
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


@pytest.mark.parametrize("main", [check_gpus.main, main_gkd.main], ids=["check_gpus", "main_gkd"])
def test_without_ray(
    main: Callable[[list[str]], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fails if an environment without Ray ends in a traceback."""
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "x.yaml").write_text("{}\n")
    assert main(["--config", str(tmp_path / "x.yaml"), *GOOD, "trainer.device=cpu"]) > 0
    assert "Ray" in capsys.readouterr().err


def test_running_accepts_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if settings are accepted that are then ignored."""
    with pytest.raises(SystemExit):
        check_gpus.main(["--running", "b", "actor.tp=2"])
    assert "--running" in capsys.readouterr().err


def test_map_of_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the GPU map of a run folder is not shown, a dead run or a damaged map passes, or the end of a run is a
    problem.
    """
    config = load_config(None, [*GOOD, "teacher.server_port=1"])
    (tmp_path / "config.yaml").write_text(config_yaml(config))
    mine = structs.replace(
        this_placement("actor", 0), cuda_visible_devices="0", ray_gpu_ids=("0",), gpus=(GpuInfo(id="0"),)
    )
    table = GpuMap(device="cpu", rows=(mine,), findings=())

    def shown(table: bytes, *words: str) -> tuple[int, str, str]:
        (tmp_path / "gpus.json").write_bytes(table)
        return check_gpus.main(["--running", str(tmp_path), *words]), *capsys.readouterr()

    code, out, _ = shown(table.to_json())
    assert code == 1 and out.splitlines()[1].split()[:4] == ["actor", "0", socket.gethostname(), str(os.getpid())]
    assert len(out.splitlines()) == 4 and out.splitlines()[3].startswith("WRONG teacher_silent")
    there = structs.replace(mine, rank=1, host="there", node="there")
    code, out, _ = shown(structs.replace(table, rows=(mine, there)).to_json(), "--json")
    assert [finding["kind"] for finding in json.loads(out)["findings"]] == ["teacher_silent"]
    assert "there" in json.loads(out)["note"]
    gone = structs.replace(table, rows=(structs.replace(mine, started=1),))
    code, out, error = shown(gone.to_json())
    assert (code, out) == (1, "") and "actor 0" in error and "Fix: " in error
    code, out, _ = shown(structs.replace(gone, ended=True).to_json())
    assert code == 0 and "end" in out.splitlines()[-2], "a run that has ended is no problem"
    code, _, error = shown(table.to_json()[:-20])
    assert code == 1 and "gpus.json" in error


def test_a_restarted_engine_takes_the_row_of_the_dead_one(tmp_path: Path) -> None:
    """Fails if check_gpus would report a restarted engine as a process that is gone, another rank loses its row, or a
    restart at the end of a run undoes the note of the end, for which check_gpus would wait.
    """
    folder = open_run_folder(load_config(None, [f"trainer.run_dir={tmp_path / 'run'}"]), {"name": "t"})
    ranks = [("actor", 0), ("rollout", 0), ("rollout", 1)]
    rows = tuple(
        RankPlacement(pool=pool, rank=rank, host="h", pid=i, cuda_visible_devices=str(i))
        for i, (pool, rank) in enumerate(ranks)
    )
    folder.write(PLACES, GpuMap(device="cpu", rows=rows, findings=()).to_json())
    has_read, ended = threading.Event(), threading.Event()

    class SlowFolder(RunFolder):
        def __init__(self) -> None:
            vars(self).update(vars(folder))

        def read_places(self) -> bytes:
            data = super().read_places()
            has_read.set()
            ended.wait(0.5)
            return data

    restarted = structs.replace(rows[2], pid=77)
    restart = threading.Thread(target=record_restart, args=(SlowFolder(), restarted))
    restart.start()
    assert has_read.wait(30)
    record_end(folder)
    ended.set()
    restart.join()
    after = gpu_map_from_json(folder.read_places(), "test")
    assert after.rows == (*rows[:2], restarted) and after.ended

"""What a process finds out about itself and its GPUs, what is found of a job that runs, and wrong command lines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gkd import main_gkd
from gkd.cluster import gpus as cards_module
from gkd.cluster.assignment import this_place
from gkd.cluster.gpu_table import TEACHER, Card, GpuMap, PoolNeed, RankPlace
from gkd.cluster.gpus import machine_cards, parse_cards, visible_cards, with_processes
from gkd.cluster.processes import look_at, root_among
from gkd.config.load import load_config, save_config
from gkd.config.schema import TeacherConfig
from gkd.gpu_map.running import look_again
from gkd.gpu_map.teacher import teacher_rows, with_known_cards
from gkd.launcher import worker_env
from gkd.tools import check_gpus
from tests.service.harness import ServerProcess, trivial_model

CARDS = """0, GPU-aa, NVIDIA H100, 00000000:18:00.0, 143771, 143100
1, GPU-bb, NVIDIA H100, 00000000:2A:00.0, 143771, 100
2, GPU-cc, NVIDIA A100, 00000000:3A:00.0, [N/A], [N/A]
"""
PROCESSES = "GPU-bb, 4242\nGPU-bb, 17\nGPU-dd, [Not Found]\n"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a program of that name first on the PATH."""

    def make(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


def answering(cards: str, processes: str) -> str:
    return f"case $1 in --query-gpu*) printf '%s' '{cards}';; *) printf '%s' '{processes}';; esac"


def test_the_drivers_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a column of nvidia-smi is read as another one, or a number it does not have stops the look."""
    bus = tmp_path / "0000:2a:00.0"
    bus.mkdir()
    (bus / "numa_node").write_text("1\n")
    monkeypatch.setattr(cards_module, "_SYS", tmp_path)
    found = with_processes(parse_cards(CARDS), PROCESSES)
    assert found[1] == Card(
        id="1",
        uuid="GPU-bb",
        name="NVIDIA H100",
        pci_bus="00000000:2A:00.0",
        numa_node=1,
        memory_total_mib=143771,
        memory_free_mib=100,
        pids=(4242, 17),
    )
    assert found[0].pids == () and found[0].numa_node is None and found[2].memory_free_mib is None
    assert parse_cards("No devices were found\n") == []


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("1, 0", ["1", "0"]),
        ("GPU-b", ["GPU-b"]),
        ("0,7,1", ["0"]),  # CUDA stops at the first that is not there
        ("2,-1,0", ["2"]),
        ("MIG-x", ["MIG-x"]),
    ],
)
def test_what_a_rank_sees(visible: str | None, seen: list[str]) -> None:
    """Fails if the count of GPUs, or which is cuda:0, is another one than CUDA's."""
    found = visible_cards(visible, parse_cards(CARDS))
    assert [card.id for card in found] == seen
    if visible == "GPU-b":
        assert found[0].uuid == "GPU-bb"
    if visible is not None and "7" not in visible:
        assert [card.id for card in visible_cards(visible, ())] == seen, "with no driver every entry counts"


def test_a_place_of_this_process(nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a rank does not say what it sees, or says it of a driver that it was not to ask."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    nvidia_smi(answering(CARDS, PROCESSES))
    asked, quick = this_place("actor", 3, ask_driver=True), this_place("actor", 3)
    assert (asked.cards[0].uuid, asked.cards[0].pids, asked.current_device) == ("GPU-bb", (4242, 17), 0)
    assert quick.cards == (Card(id="1"),) and quick.current_device is None
    assert (quick.pid, quick.host, quick.ray_gpu_ids) == (os.getpid(), socket.gethostname(), None)
    assert quick.started == look_at(os.getpid()).started  # type: ignore[union-attr]


def test_numbers_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if CUDA counts cards of different kinds in another order than nvidia-smi, whose names the table shows."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert worker_env(on_cpu=False)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert worker_env(on_cpu=False)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST", "the user's own setting wins"


def test_a_driver_that_is_stuck_absent_or_broken(
    nvidia_smi: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the start of a training waits for ever for a driver, or ends because there is none."""
    monkeypatch.setattr(cards_module, "_LIMIT_S", 0.3)
    nvidia_smi("exec sleep 60")
    began = time.monotonic()
    assert machine_cards() == [] and time.monotonic() - began < 5
    nvidia_smi("echo NVIDIA-SMI has failed; exit 9")
    assert machine_cards() == []
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert machine_cards() == []


@pytest.fixture
def processes() -> Iterator[tuple[int, int, int]]:
    """(a rank, its child, a stranger): processes that live until the test ends."""
    rank = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True)
    stranger = subprocess.Popen(["sleep", "60"])
    assert rank.stdout is not None
    child = int(rank.stdout.readline())
    yield rank.pid, child, stranger.pid
    os.killpg(rank.pid, 9)
    stranger.kill()
    rank.stdout.close()
    rank.wait(), stranger.wait()


def test_a_job_that_runs_is_looked_at_again(processes: tuple[int, int, int]) -> None:
    """Fails if a dead rank, a stranger on its card, or a rank on another one's card is missed, or a child is reported
    as a stranger.
    """
    rank, child, stranger = processes
    ended = subprocess.Popen(["true"])
    ended.wait()
    cards = parse_cards(CARDS)

    def place(number: int, pid: int, host: str = "here") -> RankPlace:
        started = process.started if (process := look_at(pid)) is not None else 1
        card = cards[number]
        return RankPlace(
            pool="actor",
            rank=number,
            host=host,
            node=host,
            pid=pid,
            started=started,
            cuda_visible_devices=card.id,
            ray_gpu_ids=(card.id,),
            cards=(card,),
        )

    rows = (place(0, rank), place(1, ended.pid), place(2, 1, host="there"))
    need = PoolNeed(name="actor", n_ranks=3, gpus_per_rank=1)
    saved = GpuMap(device="cuda", pools=(need,), rows=rows, verdicts=())
    well = [replace(cards[0], pids=(rank, child, 999_999_999), memory_free_mib=1), *cards[1:]]
    table = look_again(replace(saved, rows=(rows[0], rows[2]), pools=(replace(need, n_ranks=2),)), "here", well, [])
    assert table.verdicts == () and table.rows[0].cards[0].memory_free_mib == 1
    assert len(table.notes) == 1 and "1 ranks on there" in table.notes[0]

    now = [replace(cards[0], pids=(stranger,)), replace(cards[1], pids=(child,)), cards[2]]
    verdicts = look_again(saved, "here", now, []).verdicts
    assert [(verdict.kind, verdict.ranks) for verdict in verdicts] == [
        ("process_gone", ("actor 1",)),
        ("wrong_gpu", ("actor 0",)),
        ("memory_taken", ("actor 0",)),
    ]
    assert str(stranger) in verdicts[2].problem and "GPU 1 (GPU-bb)" in verdicts[1].problem
    reused = replace(rows[0], started=1)
    again = look_again(replace(saved, rows=(reused,), pools=()), "here", [], []).verdicts
    assert [verdict.kind for verdict in again] == ["process_gone"], "a pid that another process has now"
    assert root_among(child, {rank}) == rank and root_among(stranger, {rank}) is None


@pytest.mark.service
def test_the_teachers_rows_come_over_its_socket(tmp_path: Path) -> None:
    """Fails if the teacher's workers are not shown with what they hold, or an overlap with them is not seen."""
    options = ("--engine", "trivial", "--gpus", "3,4")
    with ServerProcess(trivial_model(tmp_path / "model"), tmp_path, n_workers=2, options=options) as server:
        teacher = TeacherConfig(server_port=server.port, outage_budget_s=10)
        rows, found = teacher_rows(teacher, "cpu")
    assert found == [] and [(row.pool, row.rank, row.local_rank, row.name) for row in rows] == [
        (TEACHER, 0, 0, "w0.0"),
        (TEACHER, 1, 1, "w1.0"),
    ]
    assert sorted(row.pid for row in rows) == sorted(server.worker_pids) and {row.host for row in rows} == {
        socket.gethostname()
    }
    assert [row.cards for row in rows] == [(Card(id="3"),), (Card(id="4"),)]
    assert {row.cuda_visible_devices for row in rows} == {os.environ.get("CUDA_VISIBLE_DEVICES")}
    known = with_known_cards([replace(rows[0], cards=(Card(id="3", uuid="GPU-bb"),))], rows[0].host, parse_cards(CARDS))
    assert (known[0].cards[0].id, known[0].cards[0].memory_free_mib) == ("3", 100)
    began = time.monotonic()
    rows, found = teacher_rows(replace(teacher, outage_budget_s=0.5), "cpu")
    assert rows == [] and [verdict.kind for verdict in found] == ["teacher_silent"] and time.monotonic() - began < 5


GOOD = ["data.train_files=[x]", "model.path=m", "trainer.run_dir=r", "eval.metric=none", "teacher.outage_budget_s=0.5"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--config", "absent.yaml"], 2, "no such file"),
        (["--running", "absent"], 2, "gpus.json"),
        ([*GOOD, "trainer.n_gpus_per_node=0"], 2, "trainer.n_gpus_per_node"),
        ([*GOOD, "rollout.n_gpus_per_node=-1"], 2, "rollout.n_gpus_per_node"),
        ([*GOOD, "teacher.n_gpus_per_node=4"], 2, "chosen where it is started"),
        ([*GOOD, "trainer.device=cpu", "teacher.server_ip=a b"], 2, "teacher.server_ip"),
        ([*GOOD, "trainer.device=cpu", "cluster.ray_address=127.0.0.1:1"], 1, "cluster.ray_address = '127.0.0.1:1'"),
        ([*GOOD, "trainer.device=cpu", "cluster.ray_address=a..b:1"], 1, "nobody listens there"),
    ],
)
def test_wrong_words(
    words: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fails if a wrong setting is a traceback, or ends with an exit code that a script takes for an answer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("{}\n")
    assert check_gpus.main(words if words[0].startswith("--") else ["--config", "empty.yaml", *words]) == code
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""


@pytest.mark.parametrize("main", [check_gpus.main, main_gkd.main], ids=["check_gpus", "main_gkd"])
def test_without_ray(
    main: Callable[[list[str]], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fails if an environment without Ray is a traceback, or is found out after the data have been read."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(main_gkd.signal, "signal", lambda *args: None)  # pytest's own handlers stay
    (tmp_path / "x.yaml").write_text("{}\n")
    assert main(["--config", str(tmp_path / "x.yaml"), *GOOD, "trainer.device=cpu"]) == 1
    assert "Ray is not installed" in capsys.readouterr().err


def test_the_two_ways_to_ask_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if settings are taken that are then not looked at."""
    for words in ([], ["--config", "a", "--running", "b"], ["--running", "b", "actor.tp=2"]):
        with pytest.raises(SystemExit) as caught:
            check_gpus.main(words)
        assert caught.value.code == 2 and "usage" in capsys.readouterr().err


def test_fewer_gpus_than_wanted_is_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the most common mistake ends the checker before it has said who else sits there."""
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (tmp_path / "x.yaml").write_text("{}\n")
    words = ["--json", "--config", str(tmp_path / "x.yaml"), *GOOD, "trainer.device=cuda", "teacher.server_port=1"]
    assert check_gpus.main(words) == 1
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert [verdict["kind"] for verdict in verdicts] == ["too_few_gpus", "teacher_silent"]
    assert "torch sees 1" in verdicts[0]["problem"] and "lower the pools" in verdicts[0]["fix"]


def test_a_run_folder_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a running job's table cannot be shown from its folder, or a damaged one is shown as whole."""
    config = load_config(None, [*GOOD, "teacher.server_port=1"])
    save_config(config, tmp_path / "config.yaml")
    mine = replace(this_place("actor", 0), cuda_visible_devices="0", ray_gpu_ids=("0",), cards=(Card(id="0"),))
    need = PoolNeed(name="actor", n_ranks=1, gpus_per_rank=1)
    table = GpuMap(device="cpu", pools=(need,), rows=(mine,), verdicts=())
    (tmp_path / "gpus.json").write_bytes(table.to_json())
    assert check_gpus.main(["--running", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:5] == ["actor", "0", "-", socket.gethostname(), str(os.getpid())]
    assert len(lines) == 3 and lines[2].startswith("WRONG teacher_silent")
    (tmp_path / "gpus.json").write_bytes(table.to_json()[:-20])
    assert check_gpus.main(["--running", str(tmp_path)]) == 1
    assert "is not the GPU table of a run" in capsys.readouterr().err

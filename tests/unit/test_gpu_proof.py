"""The runner of gpu_proof with real processes: verdicts, time limit, kill, Ctrl-C, bad input; and its table."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from gkd.tools.gpu_proof import __main__ as command
from gkd.tools.gpu_proof.judge import ERROR, FAIL, PASS, SKIPPED, TIMED_OUT, Outcome
from gkd.tools.gpu_proof.run import Place, missing, prepared, run_all
from gkd.tools.gpu_proof.schedule import expected_seconds
from gkd.tools.gpu_proof.stage import JSON, XML, Stage
from gkd.tools.gpu_proof.stages import STAGES, page_with_stages
from tests.gpu.peaks import peak_tflops, share_of_peak

ROOT = Path(__file__).parents[2]
CHILD = "tests.unit.proof_child"


def stage(*words: str, name: str = "one", limit_s: int = 20, figure: str = "", n_gpus: int = 1) -> Stage:
    return Stage(name, "what", words, words, limit_s, 1, "much", figure, n_gpus)


def run(tmp_path: Path, made: Stage, *, grace_s: float = 1.0) -> Outcome:
    return run_together(tmp_path, [made], cores=1, grace_s=grace_s)[made.name]


def run_together(
    tmp_path: Path, stages: list[Stage], *, cores: int, device: str = "cpu", grace_s: float = 1.0
) -> dict[str, Outcome]:
    place = Place(device, ROOT, tmp_path, (80.0,), cores=cores, grace_s=grace_s)
    return run_all(stages, place, lambda one: None, lambda one, outcome: None)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("mode", "figure", "verdict", "n_figures"),
    [
        ("met", "", PASS, 1),
        ("met", "speed", PASS, 1),
        ("met", "size", ERROR, 1),  # another figure than the table promises
        ("missed", "", FAIL, 1),
        ("met, then exit 3", "", ERROR, 1),
        ("crashes", "", ERROR, 0),
        ("unknown", "", ERROR, 0),
    ],
)
def test_verdicts_of_a_benchmark(tmp_path: Path, mode: str, figure: str, verdict: str, n_figures: int) -> None:
    """Fails if a missed bar, a crash, or results that are not there count as a pass."""
    outcome = run(tmp_path, stage(CHILD, mode, JSON, figure=figure))
    assert (outcome.verdict, len(outcome.figures)) == (verdict, n_figures)
    assert bool(outcome.reason) == (verdict != PASS)
    assert mode != "crashes" or ("out of memory" in outcome.reason and "-9" in outcome.reason)


def test_results_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    """Fails if a stage that dies early is judged by the file that an earlier run left in the folder."""
    assert run(tmp_path, stage(CHILD, "met", JSON)).verdict == PASS
    assert run(tmp_path, stage(CHILD, "crashes", JSON)).verdict == ERROR


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("def test_a(): pass\ndef test_b(): assert 0", FAIL),
        ("import pytest\n@pytest.fixture\ndef f(): raise OSError\ndef test_a(f): pass", FAIL),
        ("import pytest\n@pytest.mark.skip(reason='no card')\ndef test_a(): pass", SKIPPED),
        ("import pytest\n@pytest.mark.skip\ndef test_a(): pass\ndef test_b(): pass", PASS),
        ("import os\ndef test_a(): pass\ndef test_b(): os._exit(3)", ERROR),
        ("x = 1", ERROR),
    ],
)
def test_verdicts_of_tests(tmp_path: Path, body: str, verdict: str) -> None:
    """Fails if a failed test, a fixture's error, a crash or no test at all counts as a pass, or all skipped as one."""
    (tmp_path / "test_it.py").write_text(body)
    words = ("pytest", "-q", "-p", "no:cacheprovider", "--junitxml", XML, str(tmp_path / "test_it.py"))
    outcome = run(tmp_path, stage(*words))
    assert outcome.verdict == verdict
    assert verdict != SKIPPED or outcome.reason == "no card"
    assert verdict not in (PASS, FAIL) or outcome.figures[0]["name"] == "tests passed"


def test_a_stage_has_the_device_and_the_repository(tmp_path: Path) -> None:
    """Fails if the tests that a stage reuses run on another device than was chosen, or from another folder."""
    assert run(tmp_path, stage(CHILD, "device", JSON)).verdict == PASS
    assert (tmp_path / "one.log").read_text().split() == ["cpu", str(ROOT), "measured"]


def test_the_time_limit_leaves_no_process(tmp_path: Path) -> None:
    """Fails if a stage that ignores SIGTERM goes on after its limit, or its children do, in its group or outside."""
    began = time.monotonic()
    outcome = run(tmp_path, stage(CHILD, "hangs", JSON, limit_s=3), grace_s=0.5)
    assert outcome.verdict == TIMED_OUT and time.monotonic() - began < 15
    pids = json.loads((tmp_path / "one.json").read_text())
    assert len(pids) == 3 and all(gone(pid) for pid in pids)


def test_a_child_that_a_finished_stage_leaves_is_stopped(tmp_path: Path) -> None:
    """Fails if a leftover of one stage occupies the GPU of the next."""
    assert run(tmp_path, stage(CHILD, "leaves a child", JSON)).verdict == PASS
    assert gone(int((tmp_path / "one.pid").read_text()))


def test_it_goes_on_after_a_failure_and_skips_what_needs_more_gpus(tmp_path: Path) -> None:
    """Fails if one stage ends the others, or a stage for two cards runs on one."""
    stages = [stage(CHILD, mode, JSON, name=name) for name, mode in (("a", "missed"), ("b", "crashes"), ("c", "met"))]
    stages += [stage(name="d", n_gpus=2)]
    seen: list[str] = []
    place = Place("cuda", ROOT, tmp_path, (80.0,))
    outcomes = run_all(stages, place, lambda one: None, lambda one, outcome: seen.append(one.name))
    assert {name: outcome.verdict for name, outcome in outcomes.items()} == {
        "a": FAIL, "b": ERROR, "c": PASS, "d": SKIPPED,
    }  # fmt: skip
    assert seen == list("dabc") and "2 GPUs" in outcomes["d"].reason
    assert run(tmp_path, Stage("e", "what", ("x",), None, 1, 1, "much")).verdict == SKIPPED


@pytest.mark.parametrize(
    ("gpus_gib", "lacks"),
    [([79.6], False), ([39.4], True), ([None], False), ([79.6, 39.4], False), ([39.4, 79.6], True)],
)
def test_a_small_card_skips_what_does_not_fit(gpus_gib: list[float | None], lacks: bool) -> None:
    """Fails if a stage runs out of memory on a card that is too small, or is skipped on one that is not."""
    large = replace(stage(), min_gib=70)
    assert bool(missing(large, "cuda", gpus_gib)) == lacks and not missing(large, "cpu", [])
    assert not lacks or "70 GiB" in missing(large, "cuda", gpus_gib)


def test_a_stage_finds_what_was_prepared(tmp_path: Path) -> None:
    """Fails if a preparation is not complete when its stage runs, runs twice, sees a GPU, or is left at the end."""
    slow = ("tests.unit.proof_child", "leaves a child", str(tmp_path / "ready.json"))
    hangs = ("tests.unit.proof_child", "hangs", str(tmp_path / "hangs.json"))
    stages = [replace(stage(name="a"), prepare=slow), replace(stage(name="b"), prepare=slow), stage(name="c")]
    place = Place("cuda", ROOT, tmp_path, grace_s=0.5)
    with prepared([*stages, replace(stage(name="d"), prepare=hangs)], place) as is_ready:
        assert is_ready(stages[2]) and not is_ready(stages[0])
        for one in stages:
            while not is_ready(one):
                time.sleep(0.05)
            assert one is stages[2] or (tmp_path / "ready.json").exists()
        assert gone(int((tmp_path / "ready.pid").read_text()))
        while not (tmp_path / "hangs.json").exists():
            time.sleep(0.05)
    assert all(gone(pid) for pid in json.loads((tmp_path / "hangs.json").read_text()))
    assert [file.name for file in sorted(tmp_path.glob("*.prepare.log"))] == ["a.prepare.log", "d.prepare.log"]


def test_the_peak_of_a_card_follows_from_its_name() -> None:
    """Fails if a card is judged by the peak of another one: an A100 has no chance with an H100's."""
    names = {
        "NVIDIA H100 80GB HBM3": 989.0, "NVIDIA H100 PCIe": 756.0, "NVIDIA H200": 989.0, "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA A10": 125.0, "NVIDIA L40S": 362.0, "NVIDIA GeForce RTX 4090": 165.0, "NVIDIA B200": 2250.0,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None, "Tesla V100-SXM2-32GB": None,
    }  # fmt: skip
    assert {name: peak_tflops(name) for name in names} == names
    unknown, known = share_of_peak("MFU", 300.0, None, 0.45), share_of_peak("MFU", 300.0, 989.0, 0.45)
    assert (unknown.met, unknown.value, known.met) == (None, 300.0, False)


def test_ctrl_c_stops_all_stages_and_keeps_the_results(tmp_path: Path) -> None:
    """Fails if Ctrl-C leaves processes, loses the stages before or one of several at once, or looks like a success."""
    main = (
        "import functools, os, sys; from gkd.tools.gpu_proof import __main__ as m, stage as s\n"
        "def one(name, mode, gib):\n"
        f"    return s.Stage(name, 'w', *2 * (({CHILD!r}, mode, s.JSON),), 60, 1, 'e', shares_gib=gib)\n"
        "m.STAGES = (one('met', 'met', 0), one('a', 'hangs', 1), one('b', 'hangs', 1), one('missed', 'missed', 1))\n"
        "os.sched_getaffinity = lambda _: range(8); m.Place = functools.partial(m.Place, grace_s=0.5)\n"
        f"sys.exit(m.main(['--device', 'cpu', '--out', {str(tmp_path)!r}]))"
    )
    tool = subprocess.Popen([sys.executable, "-c", main], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline, files = time.monotonic() + 30, [tmp_path / "a.json", tmp_path / "b.json"]
    while not all(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [pid for file in files for pid in json.loads(file.read_text())]
    tool.send_signal(signal.SIGINT)
    printed, _ = tool.communicate(timeout=30)
    assert tool.returncode == 130 and len(pids) == 6 and all(gone(pid) for pid in pids)
    report = json.loads((tmp_path / "gpu_proof.json").read_text())
    verdicts = {name: row["verdict"] for name, row in report["stages"].items()}
    assert verdicts == {"met": PASS, "a": ERROR, "b": ERROR}
    assert report["machine"]["versions"]["torch"] and report["device"] == "cpu"
    assert all(f"\n{name} " in printed for name in verdicts) and "missed:" not in printed


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--stages", "loss,none"], "--stages"),
        (["--stages", ""], "--stages"),
        (["--device", "cuda"], "--device"),
        (["--device", "cpu", "--out", "{file}/folder"], "--out"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], key: str
) -> None:
    """Fails if wrong arguments start a stage, or are answered with a traceback."""
    monkeypatch.setattr(command, "machine_gpus", list)
    monkeypatch.setattr(command, "_run", lambda *_: pytest.fail("it ran"))
    file = tmp_path / "file"
    file.write_text("")
    assert command.main([word.replace("{file}", str(file)) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and key in error and "Fix:" in error


def test_an_installed_package_has_no_stages(tmp_path: Path) -> None:
    """Fails if a wheel, which has no tests, ends in a traceback."""
    shutil.copytree(ROOT / "gkd", tmp_path / "gkd", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "teacher_server", tmp_path / "teacher_server", ignore=shutil.ignore_patterns("__pycache__"))
    words = [sys.executable, "-m", "gkd.tools.gpu_proof", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PWD": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Fix:" in done.stderr, done.stderr


def test_every_stage_starts_something_that_exists() -> None:
    """Fails if a stage names a test file, a benchmark, or one of its options, that is not there, or is started
    ahead and does not wait for its turn.
    """
    assert len({one.name for one in STAGES}) == len(STAGES)
    for one in STAGES:
        assert not one.prepare or (ROOT / f"{one.prepare[0].replace('.', '/')}.py").is_file()
        assert 0 < one.expected_s < one.limit_s, one.name
        for words in (one.command, one.cpu or one.command):
            if words[0] == "pytest":
                files = [word for word in words if word.startswith("tests/")]
                assert files and all((ROOT / file.partition("::")[0]).exists() for file in files), one.name
            else:
                sources = [ROOT / "tests/bench/command.py", ROOT / f"{words[0].replace('.', '/')}.py"]
                known = "".join(source.read_text() for source in sources)
                assert not one.ahead_s or re.search(r"(wait_for_turn|parsed)\(", sources[1].read_text()), one.name
                options = [word for word in words if word.startswith("--")]
                assert "--json" in options and all(f'"{option}"' in known for option in options), (one.name, options)


def test_the_page_has_the_stages() -> None:
    """Fails if docs/gpu_proof.md lists other stages, limits or expectations than the command, or all on one GPU take
    more than ten minutes, the tests that CI has on the CPU apart.
    """
    page = (ROOT / "docs" / "gpu_proof.md").read_text()
    assert page == page_with_stages(page), "run python -m gkd.tools.gpu_proof.stages"
    assert all(f"| `{one.name}` |" in page for one in STAGES) and len(STAGES) > 15
    assert expected_seconds([one for one in STAGES if one.n_gpus == 1 and one.name not in ("dist", "service")]) <= 600


def test_a_short_run_on_the_cpu(tmp_path: Path) -> None:
    """Fails if the command, its table or its JSON do not work with real stages."""
    words = [sys.executable, "-m", "gkd.tools.gpu_proof", "--device", "cpu", "--out", str(tmp_path), "--stages"]
    done = subprocess.run([*words, SHORT], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout
    report: dict[str, Any] = json.loads((tmp_path / "gpu_proof.json").read_text())
    assert [row["verdict"] for row in report["stages"].values()] == [PASS] * len(SHORT.split(","))
    assert all(row["figure"]["met"] is not False and row["expected"] for row in report["stages"].values())
    assert not [word for row in report["stages"].values() for word in row["command"] if str(tmp_path) in word]


SHORT = "attention"

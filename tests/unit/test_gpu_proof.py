"""The runner of gpu_proof with real processes: verdicts, time limit, kill, Ctrl-C, bad input; and its table."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.peaks import peak_tflops, share_of_peak
from tests.gpu_proof import __main__ as command
from tests.gpu_proof.__main__ import FAIL, PASS, SKIPPED, TIMED_OUT, missing, run_stage
from tests.gpu_proof.stages import JSON, STAGES, Stage
from tests.processes import is_alive, wait_until

ROOT = Path(__file__).parents[2]
CHILD = "tests.unit.proof_child"


def stage(*words: str, name: str = "one", limit_s: int = 20) -> Stage:
    return Stage(name, words, words, limit_s)


def run(tmp_path: Path, *words: str, limit_s: int = 20) -> dict[str, Any]:
    return run_stage(stage(*words, limit_s=limit_s), "cpu", [], tmp_path, grace_s=0.5)


@pytest.mark.parametrize(
    ("mode", "verdict", "n_figures"),
    [("met", PASS, 1), ("missed", FAIL, 1), ("met, then exit 3", FAIL, 1), ("crashes", FAIL, 0), ("unknown", FAIL, 0)],
)
def test_verdicts_of_a_benchmark(tmp_path: Path, mode: str, verdict: str, n_figures: int) -> None:
    """Fails if a missed bar, a crash, or results that are not there count as a pass."""
    row = run(tmp_path, CHILD, mode, JSON)
    assert (row["verdict"], len(row["figures"])) == (verdict, n_figures)
    assert bool(row["reason"]) == (verdict != PASS)
    assert mode != "crashes" or ("out of memory" in row["reason"] and "-9" in row["reason"])


def test_results_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    """Fails if a stage that dies early is judged by the file that an earlier run left in the folder."""
    assert run(tmp_path, CHILD, "met", JSON)["verdict"] == PASS
    assert run(tmp_path, CHILD, "crashes", JSON)["verdict"] == FAIL


@pytest.mark.parametrize(
    ("body", "verdict", "named"),
    [
        ("def test_a(): pass\ndef test_b(): assert 0", FAIL, "test_b"),
        ("import pytest\n@pytest.fixture\ndef f(): raise OSError\ndef test_a(f): pass", FAIL, "test_a"),
        ("import pytest\n@pytest.mark.skip(reason='no card')\ndef test_a(): pass", SKIPPED, "no card"),
        ("import pytest\n@pytest.mark.skip\ndef test_a(): pass\ndef test_b(): pass", PASS, "1 skipped"),
        ("import os\ndef test_a(): pass\ndef test_b(): os._exit(3)", FAIL, ""),
        ("x = 1", FAIL, ""),
    ],
)
def test_verdicts_of_tests(tmp_path: Path, body: str, verdict: str, named: str) -> None:
    """Fails if a failed test, a fixture's error, a crash or no test at all counts as a pass, or all skipped as one."""
    (tmp_path / "test_it.py").write_text(body)
    row = run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "-ra", str(tmp_path / "test_it.py"))
    assert row["verdict"] == verdict and named in row["reason"]


def test_a_stage_has_the_device_and_the_repository(tmp_path: Path) -> None:
    """Fails if the tests that a stage reuses run on another device than was chosen, or from another folder."""
    row = run(tmp_path, CHILD, "device", JSON)
    assert row["verdict"] == PASS and not [word for word in row["command"] if str(tmp_path) in word]
    assert (tmp_path / "one.log").read_text().split() == ["cpu", str(ROOT), "measured"]


def test_the_time_limit_leaves_no_process(tmp_path: Path) -> None:
    """Fails if a stage that ignores SIGTERM goes on after its limit, or its children do, in its group or outside."""
    began = time.monotonic()
    assert run(tmp_path, CHILD, "hangs", JSON, limit_s=3)["verdict"] == TIMED_OUT and time.monotonic() - began < 15
    pids = json.loads((tmp_path / "one.json").read_text())
    assert len(pids) == 3 and not any(is_alive(pid) for pid in pids)


def test_a_child_that_a_finished_stage_leaves_is_stopped(tmp_path: Path) -> None:
    """Fails if a leftover of one stage occupies the GPU of the next."""
    assert run(tmp_path, CHILD, "leaves a child", JSON)["verdict"] == PASS
    assert not is_alive(int((tmp_path / "one.pid").read_text()))


@pytest.mark.parametrize(
    ("gpus_gib", "n_gpus", "lacks"),
    [([79.6], 1, False), ([39.4], 1, True), ([79.6, 39.4], 1, False), ([79.6, 39.4], 2, True), ([79.6], 2, True)],
)
def test_a_machine_skips_what_does_not_fit(tmp_path: Path, gpus_gib: list[float], n_gpus: int, lacks: bool) -> None:
    """Fails if a stage runs on a card that is too small or on too few, or is skipped where it fits."""
    large = replace(stage(CHILD, "met", JSON), min_gib=70, n_gpus=n_gpus)
    assert run_stage(large, "cuda", gpus_gib, tmp_path)["verdict"] == (SKIPPED if lacks else PASS)
    assert missing(replace(large, cpu=None), "cpu", []) and not missing(large, "cpu", [])


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


def report_of(folder: Path) -> dict[str, str]:
    rows = json.loads((folder / "gpu_proof.json").read_text())["stages"]
    return {name: row["verdict"] for name, row in rows.items()}


def test_ctrl_c_stops_the_stage_and_the_rest_can_follow(tmp_path: Path) -> None:
    """Fails if Ctrl-C leaves processes, loses the stages before or looks like a success, or if `--from` and `--only`
    repeat or forget what has been run.
    """
    main = (
        "import sys; from tests.gpu_proof import __main__ as m, stages as s\n"
        f"stages = [s.Stage(mode, *2 * (({CHILD!r}, mode, s.JSON),), 60) for mode in ('met', 'hangs', 'missed')]\n"
        f"sys.exit(m.main(['--device', 'cpu', '--out', {str(tmp_path)!r}, *sys.argv[1:]], stages, grace_s=0.5))"
    )
    with subprocess.Popen([sys.executable, "-c", main], cwd=ROOT, stdout=subprocess.PIPE, text=True) as tool:
        wait_until((tmp_path / "hangs.json").exists, 30.0, "the stage")
        pids = json.loads((tmp_path / "hangs.json").read_text())
        tool.send_signal(signal.SIGINT)
        printed, _ = tool.communicate(timeout=30)
    assert tool.returncode == 130 and len(pids) == 3 and not any(is_alive(pid) for pid in pids)
    assert report_of(tmp_path) == {"met": PASS} and "\nmet " in printed and "\nmissed " not in printed
    rest = subprocess.run([sys.executable, "-c", main, "--from", "missed"], cwd=ROOT, timeout=60, check=False)
    assert rest.returncode == 1 and report_of(tmp_path) == {"met": PASS, "missed": FAIL}
    subprocess.run([sys.executable, "-c", main, "--only", "met"], cwd=ROOT, timeout=60, check=False)
    assert report_of(tmp_path) == {"missed": FAIL, "met": PASS}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "loss,none"],
        ["--only", ""],
        ["--from", "none"],
        ["--device", "cuda"],
        ["--device", "cpu", "--out", "{file}/folder"],
    ],
)
def test_bad_input_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """Fails if wrong arguments start a stage, or are answered with a traceback."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file, ran = tmp_path / "file", tmp_path / "ran"
    file.write_text("")
    leaves = stage(CHILD, "met", str(ran), name="loss")
    with pytest.raises(SystemExit) as ended:
        command.main([word.replace("{file}", str(file)) for word in arguments], [leaves])
    assert ended.value.code == 2 and not ran.exists()


def test_every_stage_starts_something_that_exists() -> None:
    """Fails if a stage names a test file, a benchmark, or one of its options, that is not there."""
    assert len({one.name for one in STAGES}) == len(STAGES)
    for one in STAGES:
        for words in (one.gpu, one.cpu or one.gpu):
            if words[0] == "pytest":
                files = [word for word in words if word.startswith("tests/")]
                assert files and all((ROOT / file).exists() for file in files), one.name
            else:
                sources = [ROOT / "tests/bench/command.py", ROOT / f"{words[0].replace('.', '/')}.py"]
                known = "".join(source.read_text() for source in sources)
                options = [word for word in words if word.startswith("--")]
                assert "--json" in options and all(f'"{option}"' in known for option in options), (one.name, options)


def test_the_page_has_the_stages() -> None:
    """Fails if docs/gpu_proof.md lists other stages, GPUs, memory or limits than the command."""
    page = (ROOT / "docs" / "gpu_proof.md").read_text()
    listed = re.findall(r"^\| `([\w.]+)` \| (\d) \| (\d*) ?\| (yes|no) \| (\d+) \|", page, re.MULTILINE)
    assert listed == [
        (one.name, str(one.n_gpus), str(one.min_gib or ""), "yes" if one.cpu else "no", str(one.limit_s))
        for one in STAGES
    ]


@pytest.mark.slow  # stand-ins take the same way in the tests above
def test_a_short_run_on_the_cpu(tmp_path: Path) -> None:
    """Fails if the command, its table or its JSON do not work with a real stage."""
    words = [sys.executable, "-m", "tests.gpu_proof", "--device", "cpu", "--out", str(tmp_path), "--only", "attention"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 and "\nattention " in done.stdout, done.stdout + done.stderr
    assert report_of(tmp_path) == {"attention": PASS}

"""The runner of gpu_proof with real processes: verdicts of a stage, what a machine lacks; its table and its page."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.peaks import peak_tflops, share_of_peak
from tests.gpu_proof.__main__ import FAIL, PASS, SKIPPED, TIMED_OUT, main, missing, run_stage
from tests.gpu_proof.stages import JSON, PLANS, STAGES, Stage
from tests.results import write_results

ROOT = Path(__file__).parents[2]
CHILD = "tests.unit.proof_child"


def stage(*words: str, name: str = "one", limit_s: int = 120) -> Stage:
    return Stage(name, words, words, limit_s)


def run(tmp_path: Path, *words: str, limit_s: int = 120) -> dict[str, Any]:
    return run_stage(stage(*words, limit_s=limit_s), "cpu", [], tmp_path, grace_s=0.5)


@pytest.mark.parametrize(
    ("mode", "verdict", "n_figures"),
    [("met", PASS, 1), ("missed", FAIL, 1), ("met, then exit 3", FAIL, 1), ("crashes", FAIL, 0)],
)
def test_verdicts_of_a_benchmark(tmp_path: Path, mode: str, verdict: str, n_figures: int) -> None:
    """Fails if a missed bar, a crash, results that are not there, or those of an earlier run count as a pass."""
    (tmp_path / "one.json").write_text("{}")
    row = run(tmp_path, CHILD, mode, JSON)
    assert (row["verdict"], len(row["figures"])) == (verdict, n_figures)
    assert bool(row["reason"]) == (verdict != PASS)
    assert mode != "crashes" or ("out of memory" in row["reason"] and "-9" in row["reason"])


def test_a_stage_that_is_stopped_keeps_its_figures(tmp_path: Path) -> None:
    """Fails if the figures of the parts before the limit are lost, or count as measured."""
    row = run(tmp_path, CHILD, "hangs", JSON, limit_s=8)
    assert (row["verdict"], row["figures"][0]["value"]) == (TIMED_OUT, 0.5)


def test_a_later_call_measures_what_has_no_figures_of_this_commit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if what is measured runs again, a crash does not, old figures pass as new, or a skipped stage counts."""
    words = ["--plan", "twelve_minutes", "--device", "cpu", "--only", "environment", "--out", str(tmp_path)]

    def call(*more: str) -> tuple[dict[str, Any], str]:
        assert main([*words, *more]) == 0
        stages = json.loads((tmp_path / "twelve_minutes.json").read_text())["stages"]
        return stages.get("environment", {}), capfd.readouterr().out

    assert call("--minutes", "0.01")[0]["verdict"] == SKIPPED
    measured, output = call()
    assert measured["verdict"] == PASS and measured["machine"]["versions"] and "has figures" not in output
    row, output = call()
    assert row == measured and f"has figures of commit {row['commit'][:8]}" in output
    write_results(tmp_path / "twelve_minutes.json", {"stages": {"environment": row | {"commit": "older"}}})
    row, output = call("--minutes", "0.01")
    assert row["commit"] == "older" and "skipped" in output
    assert call()[0]["commit"] == measured["commit"]
    crashed = row | {"commit": measured["commit"], "verdict": FAIL, "figures": []}
    write_results(tmp_path / "twelve_minutes.json", {"stages": {"environment": crashed}})
    assert call()[0]["verdict"] == PASS
    monkeypatch.setenv("PATH", "")  # there is no git
    monkeypatch.delenv("GKD_COMMIT", raising=False)
    with pytest.raises(SystemExit, match="set GKD_COMMIT"):
        call()
    (tmp_path / "twelve_minutes.json").write_text("{")
    with pytest.raises(SystemExit, match="twelve_minutes.json is damaged"):
        call()


@pytest.mark.parametrize(
    ("body", "verdict", "named"),
    [
        ("def test_a(): pass\ndef test_b(): assert 0", FAIL, "test_b"),
        ("import pytest\n@pytest.mark.skip(reason='no card')\ndef test_a(): pass", SKIPPED, "no card"),
        ("import os\ndef test_a(): pass\ndef test_b(): os._exit(3)", FAIL, ""),
    ],
)
def test_verdicts_of_tests(tmp_path: Path, body: str, verdict: str, named: str) -> None:
    """Fails if a failed test or a crash counts as a pass, or all skipped as one."""
    (tmp_path / "test_it.py").write_text(body)
    row = run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "-ra", str(tmp_path / "test_it.py"))
    assert row["verdict"] == verdict and named in row["reason"]


@pytest.mark.parametrize(
    ("gpus_gib", "n_gpus", "lacks"),
    [([39.4], 1, True), ([79.6, 39.4], 1, False), ([79.6, 39.4], 2, True), ([79.6], 2, True)],
)
def test_a_machine_skips_what_does_not_fit(gpus_gib: list[float], n_gpus: int, lacks: bool) -> None:
    """Fails if a stage runs on a card that is too small or on too few, or is skipped where it fits."""
    large = replace(stage(CHILD, "met", JSON), min_gib=70, n_gpus=n_gpus)
    assert bool(missing(large, "cuda", gpus_gib)) == lacks
    assert missing(replace(large, cpu=None), "cpu", []) and not missing(large, "cpu", [])
    assert "no_such_package" in missing(replace(large, needs=("torch", "no_such_package")), "cpu", [])


def test_the_peak_of_a_card_follows_from_its_name() -> None:
    """Fails if a card is judged by the peak of another one: an A100 has no chance with an H100's."""
    names = {
        "NVIDIA H100 80GB HBM3": 989.0, "NVIDIA H100 PCIe": 756.0, "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA A10": 125.0,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None, "Tesla V100-SXM2-32GB": None,
    }  # fmt: skip
    assert {name: peak_tflops(name) for name in names} == names
    unknown, known = share_of_peak("MFU", 300.0, None, 0.45), share_of_peak("MFU", 300.0, 989.0, 0.45)
    assert (unknown.met, unknown.value, known.met) == (None, 300.0, False)


def test_every_stage_starts_something_that_exists() -> None:
    """Fails if a stage names a test file, a benchmark, or one of its options, that is not there."""
    for plan in PLANS.values():
        assert len({one.name for one in plan}) == len(plan)
    for one in itertools.chain(*PLANS.values()):
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

"""`python -m gkd.tools.split` on run folders: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gkd.tools.split import main
from tests.unit.split_run import settings, write_run
from tests.unit.test_footprint import QWEN25_15B
from tests.unit.test_split_run import RATES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", settings(tmp_path), RATES)


def test_a_run_gets_its_ranking_lines_and_plot(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the command of the README does not print what it promises."""
    plot = tmp_path / "split.png"
    assert main(["--gpus", "4", "--run", str(folder), "--plot", str(plot), "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert "measured over 10 steps" in out and "4 GPUs: 3 splits, 12 simulations" in out
    assert "assumed: a weight sync" in out and "\n1    " in out and "\nown  " in out and "\n4    " not in out
    assert "trainer:\n  scheduler: " in out and "rollout:\n  nnodes: 1" in out and "--n-workers" in out
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000


def test_json_has_every_simulated_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a script cannot read the ranking, or the same seed gives another one."""
    args = ["--gpus", "4", "--run", str(folder), "--json", "--schedulers", "sync,stream", "--lengths", "80,1.0"]
    assert main(args) == 0
    text = capsys.readouterr().out
    told = json.loads(text)
    assert len(told["ranking"]) == 6 and told["n_splits"] == 3 and told["run"]["sizes"]["workers"] == 2
    assert {c["scheduler"] for c in told["ranking"]} == {"sync", "stream"}
    assert told["run"]["rates"]["pass_s"] == pytest.approx(RATES.pass_s, rel=0.02)
    assert main(args) == 0 and capsys.readouterr().out == text


def test_a_teacher_elsewhere_keeps_its_workers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if GPUs are kept free for a teacher that has its own."""
    assert main(["--gpus", "2", "--run", str(folder), "--teacher-elsewhere"]) == 0
    out = capsys.readouterr().out
    assert "elsewhere" in out and "teacher server" not in out


def test_splits_that_do_not_fit_into_memory_are_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a split is recommended that runs out of memory, or nobody says that all of them would."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN25_15B))
    config = settings(tmp_path, f"model.path={model}", "actor.recompute=full", "data.max_response_length=512")
    args = ["--json", "--schedulers", "sync", "--run", str(write_run(tmp_path / "run", config, RATES))]
    told = {}
    for gib, code in (("80", 0), ("24", 0), ("6", 1)):
        assert main(["--gpus", "8", "--gpu-gib", gib, *args]) == code, gib
        told[gib] = json.loads(capsys.readouterr().out)["ranking"]
    assert all(not c["too_large"] for c in told["80"])
    # On 24 GiB the optimizer has to be spread over some ranks of the actor.
    small = [bool(c["too_large"]) for c in told["24"]]
    assert small == sorted(small) and 0 < sum(small) < len(small)
    assert all(c["split"]["actor"]["per_node"] == 1 for c in told["24"] if c["too_large"])
    assert all("actor rank 0 needs" in c["too_large"][0] for c in told["6"])
    assert main(["--gpus", "8", "--gpu-gib", "0", *args]) == 2
    assert "--gpu-gib = 0.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--gpus", "0"], "'0' is no whole number of at least 1"),
        (["--gpus", "2"], "2 GPUs, but actor, rollout and teacher need at least one each: use 3 or more"),
        (["--gpus", "1", "--teacher-elsewhere"], "use 2 or more"),
        (["--gpus", "eight"], "'eight' is no whole number"),
        (["--gpus", "8", "--schedulers", "sync,three_step_off"], "no scheduler 'three_step_off'"),
        (["--gpus", "8", "--lengths", "-5"], "'-5': MEAN,SIGMA"),
        (["--gpus", "8", "--lengths", "80"], "MEAN,SIGMA"),
        (["--gpus", "8", "--top", "0"], "at least 1"),
        (["--gpus", "8", "actor.tp=2"], "--run takes the run's own settings"),
        ([], "--gpus"),
    ],
)
def test_wrong_arguments_are_usage_errors(
    folder: Path, args: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a typing error ends in a traceback, or in a ranking of something else."""
    with pytest.raises(SystemExit) as exit_:
        main([*args, "--run", str(folder)])
    assert exit_.value.code == 2 and text in capsys.readouterr().err


def test_runs_that_cannot_be_read_have_their_exit_codes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a script cannot tell a wrong folder (2) from a damaged one (1)."""
    short = write_run(tmp_path / "short", settings(tmp_path), RATES, n_steps=4)
    assert main(["--gpus", "8", "--run", str(tmp_path)]) == 2
    assert "no training has made a step there" in capsys.readouterr().err
    assert main(["--gpus", "8", "--run", str(short)]) == 2
    assert "let it make at least 6 steps" in capsys.readouterr().err
    assert main(["--gpus", "3", "--run", str(folder), "--plot", str(tmp_path / "no" / "plot.png")]) == 1
    assert "No such file or directory" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text("nonsense\n")
    assert main(["--gpus", "8", "--run", str(folder)]) == 1
    assert "line 1 is garbled" in capsys.readouterr().err
    (folder / "config.yaml").write_text("trainer: {n_gpus: 3}")
    assert main(["--gpus", "8", "--run", str(folder)]) in (1, 2) and capsys.readouterr().err


def test_a_calibration_that_is_refused_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Fails if a run that never began is waited for, or its message is lost."""
    config = tmp_path / "c.yaml"
    config.write_text("model: {path: nowhere}\n")
    assert main(["--gpus", "8", "--calibrate", str(config), f"--calibration-dir={tmp_path / 'runs'}"]) == 2
    err = capfd.readouterr().err
    assert "data.train_files" in err and "the run was refused" in err
    assert main(["--gpus", "8", "--calibrate", str(tmp_path / "none.yaml")]) == 2

"""`python -m gkd.tools.split` on run folders: what it prints, and its exit codes."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from gkd.config.check import check_config
from gkd.config.load import config_yaml, load_config
from gkd.config.schema import Config
from gkd.config.schema_rollout import LEAST_SEQUENCES
from gkd.footprint.estimate import read_models
from gkd.tools.split import _memory_check, main
from gkd.tools.split_tuner.run import read_run
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
    assert "10 steps" in out and "4 GPUs: 3 splits, 12 simulations" in out
    assert "assumed: " in out and "\n1    " in out and "\nown  " in out and "\n4    " not in out
    assert "trainer.scheduler=" in out and "rollout.nnodes=1" in out and "--n-workers" in out
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
    """Fails if a split is recommended that runs out of memory, or it is not reported that all of them would."""
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
    # On 24 GiB the optimizer has to be spread over two ranks of the actor or more.
    small = [bool(c["too_large"]) for c in told["24"]]
    assert small == sorted(small) and 0 < sum(small) < len(small)
    assert {c["split"]["actor"]["per_node"] for c in told["24"] if c["too_large"]} == {1}
    assert all("actor rank 0 needs" in c["too_large"][0] for c in told["6"])
    assert main(["--gpus", "8", "--gpu-gib", "0", *args]) == 2
    assert "--gpu-gib = 0.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--gpus", "0"], "'0'"),
        (["--gpus", "2"], "2 GPUs, but actor, rollout and teacher need at least one each: use 3 or more"),
        (["--gpus", "1", "--teacher-elsewhere"], "use 2 or more"),
        (["--gpus", "eight"], "'eight'"),
        (["--gpus", "8", "--schedulers", "sync,three_step_off"], "'three_step_off'"),
        (["--gpus", "8", "--lengths", "-5"], "'-5': "),
        (["--gpus", "8", "--lengths", "80"], "MEAN,SIGMA"),
        (["--gpus", "8", "--top", "0"], "at least 1"),
        (["--gpus", "8", "--gpus-per-teacher-worker", "0"], "at least 1"),
        (["--gpus", "8", "--teacher-elsewhere", "--gpus-per-teacher-worker", "2"], "its workers take none of --gpus"),
        (["--gpus", "8", "actor.tp=2"], "--calibration-dir"),
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
    assert "metrics.jsonl" in capsys.readouterr().err
    assert main(["--gpus", "8", "--run", str(short)]) == 2
    assert "at least 6 steps" in capsys.readouterr().err
    assert main(["--gpus", "3", "--run", str(folder), "--plot", str(tmp_path / "no" / "plot.png")]) == 1
    assert "No such file or directory" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text("nonsense\n")
    assert main(["--gpus", "8", "--run", str(folder)]) == 1
    assert "line 1 " in capsys.readouterr().err
    (folder / "config.yaml").write_text("trainer: {n_gpus: 3}")
    assert main(["--gpus", "8", "--run", str(folder)]) in (1, 2) and capsys.readouterr().err


def test_the_gpus_of_a_teacher_s_worker_can_be_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a tensor-parallel teacher that gpus.json does not tell of is planned with one GPU a worker."""
    args = ["--gpus", "8", "--run", str(folder), "--schedulers", "sync", "--gpus-per-teacher-worker", "3"]
    assert main([*args, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {c["split"]["teacher_gpus"] / c["split"]["workers"] for c in [told["own"], *told["ranking"]]} == {3}
    assert main(args) == 0
    assert "--tensor-parallel-size 3" in capsys.readouterr().out


class Launched:
    """Takes the place of the started processes of a calibration: each writes the folder of a run with RATES."""

    def __init__(self, code: int = 0) -> None:
        self.configs: list[Config] = []
        self._code = code

    def __call__(self, command: list[str]) -> int:
        file = command[command.index("--config") + 1]
        config = load_config(file, command[command.index("--config") + 2 :])
        check_config(config)
        assert not any((Path(c.trainer.run_dir) / "checkpoints").exists() for c in self.configs)
        self.configs.append(config)
        folder = write_run(Path(config.trainer.run_dir), config, RATES)
        for large in ("checkpoints/step_00000010", "export", ".new_export"):
            (folder / large).mkdir(parents=True)
            (folder / large / "model.safetensors").write_bytes(b"large")
        return self._code


@pytest.fixture
def calibrated(tmp_path: Path) -> list[str]:
    """Arguments for a calibration of settings with a schedule that ten steps are too few for."""
    changed = ["actor.optim.schedule=wsd", "actor.optim.warmup_steps=30", "actor.optim.decay_steps=50"]
    changed += ["trainer.total_steps=1000", "trainer.scheduler=one_step_off", "rollout.max_num_seqs=12"]
    (tmp_path / "c.yaml").write_text(config_yaml(settings(tmp_path / "mine", *changed)))
    return ["--gpus", "4", "--calibrate", str(tmp_path / "c.yaml"), "--schedulers", "sync"]


def test_a_calibration_of_an_automatic_number_of_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the second run does not have fewer sequences than preflight chose for the first."""
    launched = Launched()
    monkeypatch.setattr("gkd.tools.split_tuner.calibration.launched", launched)
    (tmp_path / "c.yaml").write_text(config_yaml(settings(tmp_path / "mine", "rollout.max_num_seqs=0")))
    assert main(["--gpus", "4", "--calibrate", str(tmp_path / "c.yaml"), "--schedulers", "sync", "--json"]) == 0
    assert [config.rollout.max_num_seqs for config in launched.configs] == [0, LEAST_SEQUENCES // 4]


def test_a_calibration_compares_like_with_like(
    calibrated: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the measured and the simulated step have different settings, wsd is refused, or a large
    student's checkpoints fill the disk.
    """
    launched = Launched()
    monkeypatch.setattr("gkd.tools.split_tuner.calibration.launched", launched)
    assert main([*calibrated, "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    root = tmp_path / "mine_calibration"
    assert [Path(c.trainer.run_dir) for c in launched.configs] == [root / "max_num_seqs_12", root / "max_num_seqs_4"]
    assert str(root) in err
    for config in launched.configs:
        assert {file.name for file in Path(config.trainer.run_dir).iterdir()} == {
            "config.yaml",
            "gpus.json",
            "metrics.jsonl",
            "tuner.jsonl",
        }
    first = read_run([root / "max_num_seqs_12"]).step_s
    assert told["run"]["measured_scheduler"] == "sync" and told["run"]["measured_step_s"] == first
    # The written run waits 0.01 s for scores whatever they take; the simulation waits until they are there.
    assert told["run"]["simulated_step_s"] == pytest.approx(first, rel=0.1)
    assert read_run([root / "max_num_seqs_4"]).step_s > 1.2 * first
    # The plan is for the settings as they are.
    assert told["own"]["scheduler"] == "one_step_off" and told["own"]["outcome"]["step_s"] < 0.95 * first
    # Once more: nothing is overwritten, and the error names the key.
    assert main(calibrated) == 2 and len(launched.configs) == 2
    assert f"--calibration-dir = {str(root)!r}: it is a file, or not empty" in capsys.readouterr().err


def test_a_calibration_that_fails_leaves_no_checkpoints(
    calibrated: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a script cannot tell a failed run (1) from a refused one (2), or the disk stays full."""
    for code, told in ((1, 1), (2, 2)):
        monkeypatch.setattr("gkd.tools.split_tuner.calibration.launched", Launched(code))
        root = tmp_path / f"runs_{code}"
        assert main([*calibrated, "--calibration-dir", str(root)]) == told
        assert "--calibration-dir" in capsys.readouterr().err
        assert (root / "max_num_seqs_12").exists() and not list(root.glob("*/checkpoints")) + list(
            root.glob("*/*export")
        )


def test_a_calibration_that_is_refused_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Fails if a run that was refused is waited for, or its message is lost."""
    config = tmp_path / "c.yaml"
    config.write_text("model: {path: nowhere}\n")
    args = ["--gpus", "8", "--calibrate", str(config), f"--calibration-dir={tmp_path / 'runs'}"]
    assert main(args) == 2
    assert "data.train_files" in capfd.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as teacher:  # the port is checked before the model
        port = f"teacher.server_port={teacher.getsockname()[1]}"
        assert main([*args, port, "data.train_files=[no.jsonl]", f"trainer.run_dir={tmp_path / 'mine'}"]) == 2
    err = capfd.readouterr().err
    assert "nowhere" in err and "--calibrate = " in err and "--calibration-dir" in err
    assert main(["--gpus", "8", "--calibrate", str(tmp_path / "none.yaml")]) == 2


def test_a_reference_beside_the_actor_counts(tmp_path: Path) -> None:
    """Fails if a split is recommended whose actor has no room for the reference that it trains with."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN25_15B))
    base = (f"model.path={model}", "actor.recompute=full", "data.max_response_length=512", "memory.margin=0")
    free = settings(tmp_path, *base)
    held = settings(tmp_path, *base, "distill.reference_kl_weight=0.1", "reference.fsdp_cpu_offload=false")
    (actor, *_) = read_models(free).footprint(free)
    (beside, *_) = read_models(held).footprint(held)
    card = (actor.total_bytes + beside.total_bytes) // 2
    assert beside.total_bytes > actor.total_bytes
    assert not _memory_check(free, card)(free) and "actor rank 0 needs" in _memory_check(held, card)(held)[0]

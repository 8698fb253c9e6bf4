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
from gkd.tools.split import SCHEDULERS, main
from gkd.tools.split_tuner.rates import read_run
from tests.unit.split_run import settings, write_run
from tests.unit.test_footprint import QWEN25_15B
from tests.unit.test_split_run import RATES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", settings(tmp_path), RATES)


def test_a_run_gets_its_ranking_and_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the command of the README does not print what it promises."""
    assert main(["--gpus", "4", "--run", str(folder), "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "10 steps of sync" in lines[0] and "4 GPUs: 3 splits" in lines
    rows = [line.split() for line in lines if line[:3] in ("1  ", "2  ", "own")]
    shown = {(row[1], row[0]) for row in rows}
    assert shown == {(s, i) for s in SCHEDULERS for i in "12"} | {("sync", "own")}
    steps = {(row[1], row[0]): float(row[5]) for row in rows}
    assert all(steps[s, "1"] <= steps[s, "2"] for s in SCHEDULERS)
    settings_lines = [line.split() for line in lines if line.startswith("trainer.scheduler=")]
    assert {line[0] for line in settings_lines} == {f"trainer.scheduler={s}" for s in SCHEDULERS}
    assert all("rollout.nnodes=1" in line for line in settings_lines)
    assert sum("--n-workers" in line for line in lines) == 4 and any(line.startswith("assumed: ") for line in lines)


def test_json_has_every_ranked_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a script cannot read the ranking, or --lengths changes nothing."""
    args = ["--gpus", "4", "--run", str(folder), "--json", "--schedulers", "sync,stream"]
    assert main(args) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["ranking"]) == 6 and told["n_splits"] == 3 and told["run"]["sizes"]["workers"] == 2
    assert {c["scheduler"] for c in told["ranking"]} == {"sync", "stream"}
    assert told["run"]["rates"]["pass_s"] == pytest.approx(RATES.pass_s, rel=0.02)
    assert main([*args, "--lengths", "80,400"]) == 0
    longer = json.loads(capsys.readouterr().out)
    assert longer["run"]["workload"]["longest_tokens"] == 400
    assert longer["ranking"][0]["time"]["step_s"] > told["ranking"][0]["time"]["step_s"]
    assert longer["run"]["estimated_step_s"] == told["run"]["estimated_step_s"]


def test_splits_that_do_not_fit_into_memory_are_excluded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a split is recommended that runs out of memory, or it is not reported that all of them would."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN25_15B))
    config = settings(tmp_path, f"model.path={model}", "actor.recompute=full", "data.max_response_length=512")
    run = str(write_run(tmp_path / "run", config, RATES))
    args = ["--gpus", "8", "--json", "--schedulers", "sync", "--run", run]
    told = {}
    for gib in ("80", "24"):
        assert main([*args, "--gpu-gib", gib]) == 0
        told[gib] = json.loads(capsys.readouterr().out)
    assert len(told["80"]["ranking"]) == told["80"]["n_splits"] == 21 and not told["80"]["excluded"]
    # On 24 GiB the optimizer has to be spread over two ranks of the actor or more.
    assert {c["split"]["actor"]["per_node"] for c in told["24"]["ranking"]} == {2, 3, 4, 5, 6}
    (excluded,) = told["24"]["excluded"]
    assert excluded["n"] == 6 and "actor rank 0 (training step) needs" in excluded["first"]
    assert main([*args, "--gpu-gib", "6"]) == 2
    assert "actor rank 0 (training step) needs" in capsys.readouterr().err
    assert main([*args, "--gpu-gib", "0"]) == 2
    assert "--gpu-gib = 0.0" in capsys.readouterr().err
    # The missing head of the teacher is among the assumptions.
    hidden = settings(tmp_path, f"model.path={model}", "actor.recompute=full", "teacher.signal=hidden")
    assert main([*args[:-1], str(write_run(tmp_path / "hidden", hidden, RATES)), "--gpu-gib", "80"]) == 0
    assert len(json.loads(capsys.readouterr().out)["run"]["assumed"]) == len(told["80"]["run"]["assumed"]) + 1
    # A reference on the actor's ranks needs memory, too.
    held = ["distill.reference_kl_weight=0.1", "reference.fsdp_cpu_offload=false"]
    beside = settings(tmp_path, f"model.path={model}", "actor.recompute=full", "data.max_response_length=512", *held)
    args[-1] = str(write_run(tmp_path / "beside", beside, RATES))
    assert main([*args, "--gpu-gib", "24"]) == 0
    assert json.loads(capsys.readouterr().out)["excluded"][0]["n"] > excluded["n"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--gpus", "2"], "2 GPUs, but actor, rollout and teacher need at least one each: use 3 or more"),
        (["--gpus", "eight"], "'eight'"),
        (["--gpus", "8", "--schedulers", "sync,three_step_off"], "'three_step_off'"),
        (["--gpus", "8", "--lengths", "800,0.7"], "'800,0.7': "),
        (["--gpus", "8", "--top", "0"], "at least 1"),
        (["--gpus", "8", "--teacher-elsewhere", "--gpus-per-teacher-worker", "2"], "its workers take none of --gpus"),
        (["--gpus", "8", "actor.tp=2"], "--calibration-dir"),
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
    assert "6 steps" in capsys.readouterr().err
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

    def __init__(self) -> None:
        self.configs: list[Config] = []
        self.code = 0

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
        return self.code


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    made = Launched()
    monkeypatch.setattr("gkd.tools.split.launched", made)
    return made


@pytest.fixture
def calibrated(tmp_path: Path) -> list[str]:
    """Arguments for a calibration of settings with a schedule that ten steps are too few for, and with evaluations."""
    changed = ["actor.optim.schedule=wsd", "actor.optim.warmup_steps=30", "actor.optim.decay_steps=50"]
    changed += ["trainer.total_steps=1000", "trainer.scheduler=one_step_off", "rollout.max_num_seqs=12"]
    changed += ["data.val_files=[v]", "eval.metric=exact_match", "trainer.keep_best=eval/pass_at_4"]
    changed += ["eval.n=4", "eval.teacher_prompts=2"]
    (tmp_path / "c.yaml").write_text(config_yaml(settings(tmp_path / "mine", *changed)))
    return ["--gpus", "4", "--calibrate", str(tmp_path / "c.yaml"), "--schedulers", "sync"]


def test_a_calibration_of_an_automatic_number_of_sequences(
    tmp_path: Path, launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the second run does not have fewer sequences than preflight chose for the first."""
    (tmp_path / "c.yaml").write_text(config_yaml(settings(tmp_path / "mine", "rollout.max_num_seqs=0")))
    assert main(["--gpus", "4", "--calibrate", str(tmp_path / "c.yaml"), "--schedulers", "sync", "--json"]) == 0
    assert [config.rollout.max_num_seqs for config in launched.configs] == [0, LEAST_SEQUENCES // 4]


def test_a_calibration_compares_like_with_like(
    calibrated: list[str], tmp_path: Path, launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the measured and the estimated step have different settings, wsd or a best step is refused, or
    checkpoints fill the disk.
    """
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
    assert told["run"]["scheduler"] == "sync" and told["run"]["measured_step_s"] == first
    # The written run waits 0.01 s for scores whatever they take; the estimate waits until they are there.
    assert told["run"]["estimated_step_s"] == pytest.approx(first, rel=0.1)
    assert read_run([root / "max_num_seqs_4"]).step_s > 1.2 * first
    # The plan is for the settings as they are.
    assert told["own"]["scheduler"] == "one_step_off" and told["own"]["time"]["step_s"] < 0.95 * first
    # Once more: nothing is overwritten, and the error names the key.
    assert main(calibrated) == 2 and len(launched.configs) == 2
    assert f"--calibration-dir = {str(root)!r}: it is a file, or not empty" in capsys.readouterr().err


def test_a_calibration_that_fails_leaves_no_checkpoints(
    calibrated: list[str], tmp_path: Path, launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a script cannot tell a failed run (1) from a refused one (2), or the disk stays full."""
    for code, told in ((1, 1), (2, 2)):
        launched.code = code
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

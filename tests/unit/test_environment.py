"""Test environment.jsonl: versions, commit, seeds and data of each start, and no secrets."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from gkd.config.load import load_config
from gkd.data.row_files import describe_files, fingerprint
from gkd.errors import CheckpointError
from gkd.preflight.environment import PACKAGES, describe_start, git_state
from gkd.run.checkpoints import TrainerState
from gkd.run.folder import RunFolder
from gkd.run.open import open_run_folder
from tests.refusals import refuses
from tests.unit.checkpoint_files import written

ROWS = '{"prompt": "a"}\n{"prompt": "b"}\n'


def start(tmp_path: Path, *overrides: str, rows: str = ROWS) -> tuple[dict[str, Any], RunFolder]:
    """Return the description of a start with these training rows, and its run folder."""
    data = tmp_path / "train.jsonl"
    data.write_text(rows)
    settings = [f"data.train_files=[{data}]", "model.path=m", f"trainer.run_dir={tmp_path / 'run'}", *overrides]
    config = load_config(None, settings)
    files = describe_files(config.data)
    folder = open_run_folder(config, {"name": "t", "fingerprint": "f"}, files)
    teachers = (SimpleNamespace(engine="vllm"),)
    plan: Any = SimpleNamespace(device="cpu", folder=folder, teachers=teachers, data_files=files)
    return describe_start(config, plan), folder


def test_a_start_is_described(tmp_path: Path) -> None:
    """Fails if a result cannot be traced to versions, seeds, data and teacher."""
    facts, _ = start(tmp_path, "data.seed=7")
    assert facts["versions"].keys() == set(PACKAGES) and facts["versions"]["gkd"] == metadata.version("gkd")
    assert all(facts["versions"][name] for name in ("torch", "vllm", "ray", "transformers", "megatron-core"))
    assert facts["seeds"] == {"data.seed": 7} and facts["resumed_from"] is None
    assert [(d["key"], d["rows"], d["bytes"]) for d in facts["data"]] == [("data.train_files", 2, 32)]
    assert facts["teacher"] == {"name": "t", "fingerprint": "f", "engine": "vllm"}
    assert facts["cpus"] >= 1 and facts["python"].startswith("3.") and facts["host"]


def test_no_secret_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an environment variable that may hold a key is written into the run folder."""
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD"):
        monkeypatch.setenv(name, "hush-hush")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    facts, _ = start(tmp_path)
    assert "hush-hush" not in json.dumps(facts) and facts["variables"]["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_each_start_is_a_line(tmp_path: Path) -> None:
    """Fails if a resumed run overwrites what it was started with, or an unwritable folder is not named."""
    facts, folder = start(tmp_path)
    folder.add_start(facts)
    folder.add_start(facts | {"device": "cuda"})
    file = folder.root / "environment.jsonl"
    assert [json.loads(line)["device"] for line in file.read_text().splitlines()] == ["cpu", "cuda"]
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointError):
        folder.add_start(facts)


def resume(tmp_path: Path, rows: str, *overrides: str) -> RunFolder:
    """Start or resume a run with these training rows and held-out ones. The start is refused, or recorded."""
    held_out = f"data.val_files=[{tmp_path / 'val.jsonl'}]"
    facts, folder = start(tmp_path, held_out, "trainer.resume=auto", *overrides, rows=rows)
    folder.add_start(facts)
    return folder


def of_run(tmp_path: Path) -> RunFolder:
    """Start a run, and return its folder, as a first step leaves it."""
    (tmp_path / "val.jsonl").write_text(ROWS)
    folder = resume(tmp_path, ROWS)
    folder.metrics_file.write_text("{}\n")
    return folder


@pytest.mark.parametrize("rows", ['{"prompt": "b"}\n{"prompt": "a"}\n', ROWS + ROWS, ROWS.replace("a", "c")])
def test_a_resumed_run_refuses_changed_data(tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: str) -> None:
    """Fails if a run resumes on other rows than it was trained on."""
    of_run(tmp_path)
    (tmp_path / "val.jsonl").write_text(ROWS + ROWS)
    resume(tmp_path, ROWS)
    assert "data.val_files" in caplog.text and "4 rows" in caplog.text
    before = (tmp_path / "run" / "environment.jsonl").read_bytes()
    with refuses("data.train_files", str(tmp_path / "train.jsonl")) as caught:
        resume(tmp_path, rows)
    for text in (ROWS, rows):
        assert xxhash.xxh3_128_hexdigest(text.encode()) in caught.value.problem
    assert (tmp_path / "run" / "environment.jsonl").read_bytes() == before, "a refused start is none"


def test_a_branch_refuses_changed_data(tmp_path: Path) -> None:
    """Fails if a run that starts from the checkpoint of another is not compared with the data of that one."""
    folder = of_run(tmp_path)
    folder.commit_checkpoint(TrainerState(2, 12), written(folder.store.begin(2), 2))
    checkpoint = folder.store.root / "step_00000002"
    branch = (f"trainer.run_dir={tmp_path / 'branch'}", f"trainer.resume={checkpoint}")
    with refuses("data.train_files"):
        resume(tmp_path, ROWS + ROWS, *branch)
    assert not (tmp_path / "branch").exists()
    resume(tmp_path, ROWS, *branch)


def test_the_commit_is_that_of_the_package(tmp_path: Path) -> None:
    """Fails if the commit is that of another repository, changes are not noticed, or a missing commit fails the run."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert git_state(package) is None

    def git(*words: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(["git", *names, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    git("init", "-q")
    (tmp_path / "other.txt").write_text("")
    git("add", "other.txt")
    git("commit", "-qm", "x")
    assert git_state(package) is None, "the repository around an installed package is not the package's"
    git("add", ".")
    git("commit", "-qm", "y")
    commit = git("rev-parse", "HEAD").strip()
    assert git_state(package) == {"commit": commit, "dirty": False}
    (package / "new.txt").write_text("")
    assert git_state(package) == {"commit": commit, "dirty": False}
    (package / "__init__.py").write_text("x = 1")
    assert git_state(package) == {"commit": commit, "dirty": True}


@pytest.mark.parametrize(("text", "rows"), [("", 0), ("{}", 1), ("{}\n\n{}\n", 2), ('{"a": "\u2028"}\n  \n', 1)])
def test_rows_and_digest_of_a_file(tmp_path: Path, text: str, rows: int) -> None:
    """Fails if the number of rows is not that of the prompts that are read, or two files have one digest."""
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    data = text.encode()
    digest = xxhash.xxh3_128_hexdigest(data)
    assert fingerprint(str(file), "data.train_files") == {"bytes": len(data), "xxh3_128": digest, "rows": rows}


def test_a_parquet_file_and_a_missing_one(tmp_path: Path) -> None:
    """Fails if the rows of a parquet file are counted as lines, or a file that has gone is not named."""
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["x\ny"] * 7}), file)
    assert fingerprint(str(file), "data.train_files")["rows"] == 7
    file.unlink()
    with refuses("data.val_files", str(file)):
        fingerprint(str(file), "data.val_files")

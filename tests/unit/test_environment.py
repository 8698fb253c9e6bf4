"""Test environment.jsonl: versions, commit, seeds and data of each start, and no secrets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from gkd.config.load import load_config
from gkd.data.prompt_file import fingerprint
from gkd.errors import CheckpointError, ConfigError
from gkd.preflight.environment import PACKAGES, describe_start, git_state
from gkd.run.folder import RunFolder
from gkd.run.open import open_run_folder

ROOT = Path(__file__).parents[2]


def start(tmp_path: Path, *overrides: str) -> tuple[dict[str, Any], RunFolder]:
    """Return the description of a start, and its run folder."""
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    settings = [f"data.train_files=[{data}]", "model.path=m", f"trainer.run_dir={tmp_path / 'run'}", *overrides]
    config = load_config(None, settings)
    folder = open_run_folder(config, {"name": "t", "fingerprint": "f"})
    plan: Any = SimpleNamespace(device="cpu", folder=folder, teachers=(SimpleNamespace(engine="vllm"),))
    return describe_start(config, plan), folder


def test_a_start_is_described(tmp_path: Path) -> None:
    """Fails if a result cannot be traced to versions, seeds, data and teacher."""
    facts, _ = start(tmp_path, "data.seed=7")
    assert facts["versions"].keys() == set(PACKAGES) and facts["versions"]["gkd"] == "0.1.0"
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
    with pytest.raises(CheckpointError, match=r"environment\.jsonl"):
        folder.add_start(facts)


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
    with pytest.raises(ConfigError) as error:
        fingerprint(str(file), "data.val_files")
    assert (error.value.key, error.value.value) == ("data.val_files", str(file))

"""Test models and data files by their names on the hub: the real library in real processes, a stand-in of the hub."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from gkd.config.load import config_yaml, load_config
from tests.hub import Hub

# What a process does that loads the student's weights. It prints the folder of each name, or its error.
FETCH = """
import sys
from gkd.errors import ConfigError
from gkd.hf.hub import local_path
for name in sys.argv[1:]:
    try:
        print(local_path(name, "data.train_files" if "://" in name else "model.path"), flush=True)
    except ConfigError as error:
        print(f"config error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
"""
# The last file, which the stand-in may stop in the middle of.
BIG = "model.safetensors"


def model_files(words: int = 9, n_bytes: int = 3000) -> dict[str, bytes]:
    """Return the files of a model with a real tokenizer, and weights that only look like some."""
    vocab = {"<eos>": 0, **{f"w{i}": i for i in range(1, words)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "eos_token_id": 0, "vocab_size": words}
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(own).encode(),
        "chat_template.jinja": b"{{ messages[0].content }}",
        BIG: b"\0" * n_bytes,
        "pytorch_model.bin": b"a copy",
        "consolidated.safetensors": b"a copy",
        "onnx/model.onnx": b"a copy",
    }


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "cache") as hub:
        yield hub


def answers(hub: Hub, *names: str, **environment: str) -> list[str]:
    """Return what one process prints for each of the names."""
    done = subprocess.run(
        [sys.executable, "-c", FETCH, *names],
        env=hub.environment(**environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == len(names), lines
    return lines


def fetched(hub: Hub, name: str, **environment: str) -> Path:
    (folder,) = answers(hub, name, **environment)
    return Path(folder)


def refusals(hub: Hub, *names: str, **environment: str) -> list[str]:
    """Return the errors of names that must be refused, each one line that begins with its key and value."""
    lines = answers(hub, *names, **environment)
    for name, line in zip(names, lines, strict=True):
        key = "data.train_files" if "://" in name else "model.path"
        assert line.startswith(f"config error: {key} = {name!r}: ")
    return lines


def main(hub: Hub, folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "empty.yaml").write_text("{}\n")
    command = [sys.executable, "-m", "gkd.main_gkd", "--config", str(folder / "empty.yaml"), *words]
    env = hub.environment(**environment)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)


def local_run(folder: Path) -> list[str]:
    """Return settings of a run without a teacher server."""
    teacher = ("teacher.backend=rollout", "teacher.prompt_template=w1 {prompt}")
    return [*teacher, "trainer.total_steps=2", "trainer.device=cpu", f"trainer.run_dir={folder / 'run'}"]


def test_a_model_is_downloaded_once_and_then_read_offline(hub: Hub) -> None:
    """Fails if a file of a model is left out, copies of its weights are downloaded, or the cache needs the hub."""
    commit = hub.push("org/tiny", model_files())
    folder = fetched(hub, "org/tiny")
    unused = {"pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx"}
    assert {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()} == model_files().keys() - unused
    assert folder.name == commit and hub.cache in folder.parents
    hub.requests.clear()
    assert fetched(hub, "org/tiny", HF_HUB_OFFLINE="1") == folder == fetched(hub, f"org/tiny@{commit}")
    assert not hub.requests, "a commit in the cache needs no request"


def test_a_revision_is_a_branch_or_a_commit(hub: Hub) -> None:
    """Fails if org/name@revision loads the default branch, or if a name follows a branch without a new start."""
    first, other = hub.push("org/tiny", model_files(5)), hub.push("org/tiny", model_files(6), "exp/one")
    assert [Path(line).name for line in answers(hub, "org/tiny@exp/one", "org/tiny")] == [other, first]
    moved = hub.push("org/tiny", model_files(7))
    *found, refused = answers(hub, "org/tiny", f"org/tiny@{first}", "org/tiny@v9")
    assert [Path(line).name for line in found] == [moved, first]
    assert refused.startswith("config error: ") and f"{hub.address} has no revision v9" in refused


def test_refused_names_say_what_the_hub_said(hub: Hub) -> None:
    """Fails if a mistyped path, a private model, a missing license or a model without safetensors look alike."""
    hub.push("org/gated", model_files())
    hub.gated.add("org/gated")
    hub.push("org/old", {name: content for name, content in model_files().items() if "safetensors" not in name})
    none, invalid, gated, old = refusals(hub, "org/none", "org/a--b", "org/gated", "org/old")
    assert (
        f"no folder {Path('org/none').absolute()}" in none
        and f"{hub.address} has no such model" in none
        and "HF_TOKEN" in none
    )
    assert "no folder" in invalid and "no *.safetensors" in old
    assert "gated" in gated and f"{hub.address}/org/gated" in gated and "HF_TOKEN" in gated
    assert "refuses access to it (401)" in refusals(hub, "org/gated", HF_TOKEN="hf_wrong")[0]
    assert fetched(hub, "org/gated", HF_TOKEN=hub.token)
    assert "org/old/resolve" in " ".join(hub.requests) and "pytorch_model.bin" not in " ".join(hub.requests)


def test_without_a_hub_the_error_has_the_command(hub: Hub) -> None:
    """Fails if an offline machine waits, or does not say what to run on another one."""
    hub.push("org/tiny", model_files())
    (line,) = refusals(hub, "org/tiny@v2", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in line and str(hub.cache) in line and "`hf download org/tiny --revision v2`" in line
    (line,) = refusals(hub, "org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert "`hf download org/tiny`" in line and "http://127.0.0.1:9" in line
    assert not hub.requests


def test_an_interrupted_download_stops_at_once_and_goes_on_later(hub: Hub) -> None:
    """Fails if Ctrl-C waits for the end of a file, a part passes for a model, or the next start needs help."""
    files = model_files(n_bytes=64 << 20)
    commit = hub.push("org/big", files)
    hub.stalled = BIG
    command = [sys.executable, "-c", FETCH, "org/big"]
    with subprocess.Popen(command, env=hub.environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert hub.has_stalled.wait(30)
        process.send_signal(signal.SIGINT)
        hub.released.set()  # more bytes arrive, or the connection breaks: either ends the process
        process.communicate(timeout=60)
    assert process.returncode == 130
    (line,) = refusals(hub, "org/big", HF_HUB_OFFLINE="1")
    assert "hf download org/big" in line
    hub.stalled = ""
    folder = fetched(hub, "org/big")
    assert folder.name == commit and (folder / BIG).read_bytes() == files[BIG]


def test_a_folder_wins_over_a_name(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a download replaces the folder that the user has, or a mistyped path is looked up."""
    monkeypatch.chdir(tmp_path)
    hub.push("org/tiny", model_files())
    (tmp_path / "org/tiny").mkdir(parents=True)
    folder, line = answers(hub, "org/tiny", "org/typo")
    assert folder == "org/tiny"
    assert "the folder org has no typo" in line and "org/typo@main" in line
    assert not hub.requests
    assert fetched(hub, "org/tiny@main").is_relative_to(hub.cache)


def test_a_missing_prompt_file_is_not_looked_up_as_a_model(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a mistyped data/train.jsonl asks the hub for a model of that name."""
    monkeypatch.chdir(tmp_path)
    hub.push("org/tiny", model_files())
    file = "date/train.jsonl"
    done = main(hub, tmp_path, "--show-prompts", "1", "model.path=org/tiny", f"data.train_files=[{file}]")
    assert done.returncode == 2 and file in done.stderr
    assert not any("models/dat" in request for request in hub.requests)


def test_prompts_come_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    """Fails if a file of a dataset has another revision's rows, or if a preview downloads the weights."""
    hub.push("org/tiny", model_files())
    hub.push("datasets/org/sums", {"main/train.jsonl": b'{"prompt": "w1 w2"}\n'})
    hub.push("datasets/org/sums", {"main/train.jsonl": b'{"prompt": "w3 w4"}\n'}, "refs/convert/parquet")
    revision = "@refs%2Fconvert%2Fparquet/main/train.jsonl"
    words = ("--show-prompts", "1", "model.path=org/tiny", f"data.train_files=['hf://datasets/org/sums{revision}']")
    assert "ids: 3 4" in main(hub, tmp_path, *words).stdout
    file = "hf://datasets/org/sums/main/train.jsonl"
    problems = {
        "/main/none.jsonl": "has no file main/none.jsonl",
        "@v9/main/train.jsonl": "no revision v9",
        "/main/*.jsonl": "Wildcards are not supported",
        "": "hf://datasets/ORG/NAME[@REVISION]/FILE",
    }
    wrong = [f"hf://datasets/org/sums{file}" for file in problems]
    converted, default, *told = answers(
        hub, "hf://datasets/org/sums@refs/convert/parquet/main/train.jsonl", file, *wrong
    )
    assert all(problem in line for problem, line in zip(problems.values(), told, strict=True))
    assert "w3 w4" in Path(converted).read_text()
    for each in (Path(default), fetched(hub, file, HF_HUB_OFFLINE="1")):
        assert each.read_text() == '{"prompt": "w1 w2"}\n'
    assert not any(BIG in request for request in hub.requests)


def test_a_run_does_not_resume_with_another_commit(hub: Hub, tmp_path: Path) -> None:
    """Fails if a resumed run trains on a model or rows that are newer than its start, or the refusal imports torch."""
    data = "hf://datasets/org/sums/train.jsonl"
    first = hub.push("org/tiny", model_files())
    rows = hub.push("datasets/org/sums", {"train.jsonl": b'{"prompt": "w1 w2"}\n'})
    words = ["model.path=org/tiny", f"data.train_files=[{data}]", "trainer.resume=auto", *local_run(tmp_path)]
    pinned = {"model.path": f"org/tiny@{first}", "data.train_files": [data.replace("sums", f"sums@{rows}")]}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(config_yaml(load_config(None, words).with_values(pinned)))
    (tmp_path / "run/teacher.json").write_text("{}")
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch is imported')")
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    done = main(hub, tmp_path, *words, PYTHONPATH=path)
    assert "torch is imported" in done.stderr and "was started with" not in done.stderr, "the same commits"
    moved = hub.push("org/tiny", model_files(20))
    hub.push("datasets/org/sums", {"train.jsonl": b'{"prompt": "w3 w4"}\n'})
    done = main(hub, tmp_path, *words, PYTHONPATH=path)
    assert done.returncode == 2, done.stderr
    assert f"model.path = 'org/tiny@{moved}'" in done.stderr and f"was started with 'org/tiny@{first}'" in done.stderr
    assert f"was started with ['hf://datasets/org/sums@{rows}/train.jsonl']" in done.stderr

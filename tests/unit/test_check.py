"""`gkd check`: all mistakes that can be found without a start, in one list, and nothing that follows from one."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gkd import main_gkd
from gkd.config.load import load_config, read_config
from gkd.errors import ConfigError, TeacherUnavailable
from gkd.preflight.run import preflight, problems
from gkd.tools import check
from tests.dist.megatron_reference import VOCAB, make_hf_folder
from tests.hub import Hub
from tests.random_models import word_tokenizer
from tests.structure import ROOT
from tests.unit.test_quick_refusals import refusing_port

FUNCTIONS = """
def two_arguments(prompt, response):
    return 1.0

def of_a_column(prompt, response, row):
    return float(row["solution"] == response)

def of_the_answer(prompt, response, row):
    return float(prompt == "w2" and row["answer"] == response)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, prompts, functions, and right.yaml, whose teacher is a pool of the run."""
    root = tmp_path_factory.mktemp("check")
    model = make_hf_folder(root / "qwen3", "qwen3", head_dim=32)  # vLLM's attention on the CPU lacks 16
    word_tokenizer(VOCAB, eos_token="w1").save_pretrained(model)
    (root / "prompts.jsonl").write_text(json.dumps({"prompt": "w2", "answer": "w3"}) + "\n")
    (root / "judges_of_check.py").write_text(FUNCTIONS)
    (root / "right.yaml").write_text(
        "data: {train_files: [prompts.jsonl], max_prompt_length: 8, max_response_length: 8}\n"
        "model: {path: qwen3/.}\ntrainer: {device: cpu, run_dir: run}\nteacher: {backend: local, path: qwen3/.}\n"
        "distill: {reward_weight: 0.5}\nrollout: {n: 2}\nreward: {functions: [{path: 'judges_of_check:of_the_answer'}]}"
    )
    return root


@pytest.fixture
def listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ConfigError]]:
    """Return a function that returns the mistakes of right.yaml with overrides."""
    monkeypatch.chdir(folder)

    def listed(*overrides: str, with_teacher: bool = True) -> list[ConfigError]:
        return problems(*read_config("right.yaml", overrides), with_teacher=with_teacher)

    return listed


def test_five_mistakes_of_five_kinds_are_five_lines(folder: Path, tmp_path: Path) -> None:
    """Fails if a mistake hides another one, if one gives two lines, or if the list takes long: 4 s of an idle core."""
    wrong = tmp_path / "wrong.yaml"
    text = (folder / "right.yaml").read_text().replace("backend: local, path: qwen3/.", "topk: 4")
    text = text.replace("max_prompt_length", "max_prompt_len").replace("qwen3/.", f"{tmp_path}/no/model")
    text = text.replace("train_files", "prompt_key: question, train_files")
    wrong.write_text(text.replace("of_the_answer", "two_arguments"))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    with refusing_port() as port:
        words = ["--config", str(wrong), f"teacher.server_port={port}"]
        command = [sys.executable, "-m", "gkd.tools.check", *words]
        paths = {"PYTHONPATH": f"{ROOT}:{folder}"}
        done = subprocess.run(command, cwd=folder, env=paths, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    lines = done.stdout.splitlines()
    keys = ["data.max_prompt_len", "model.path", "data.prompt_key", "reward.functions", "teacher.server_port"]
    assert [line.partition(" = ")[0] for line in lines] == keys, done.stdout
    assert all(" Fix: " in line for line in lines)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime < 30  # busy hyperthreads count double


def test_a_right_run_passes_and_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gkd_log: pytest.LogCaptureFixture
) -> None:
    """Fails if a check refuses what trains, its code is not 0, it takes the run folder, or does not say what runs."""
    monkeypatch.chdir(folder)
    assert check.main(["right.yaml"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out and not (folder / "run").exists()
    assert re.search(rf"teacher qwen3 .*; 1 training, .*run folder {folder}/run", gkd_log.text)
    assert check.main(["right.yaml", "--json"]) == 0 and json.loads(capsys.readouterr().out) == []


def test_json_has_the_parts_of_each_mistake(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a program cannot read the list, or if an error of the file itself is not in it."""
    monkeypatch.chdir(folder)
    assert check.main(["right.yaml", "--json", "rollout.n=0", "rollout.m=1"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert [(each["key"], each["value"]) for each in found] == [("rollout.m", 1), ("rollout.n", 0)]
    assert all(each["problem"] and each["fix"] for each in found)
    assert check.main(["none.yaml", "--json"]) == 2
    assert [each["key"] for each in json.loads(capsys.readouterr().out)] == ["--config"]


def test_train_shows_the_same_list(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if `gkd train` names the first mistake alone: of an unknown key, the settings, or the files."""
    monkeypatch.chdir(folder)
    words = ["actor.optim.lrr=1", "rollout.n=0", "distill.alpha=0.3", "data.train_files=[none.jsonl]"]
    for overrides in (words, words[1:], words[2:]):
        assert main_gkd.main(["--config", "right.yaml", *overrides]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("config error: ")]
        assert [line.split()[2] for line in lines] == [override.partition("=")[0] for override in overrides]


def test_rewards_judge_the_first_row(listed: Callable[..., list[ConfigError]]) -> None:
    """Fails if a function that cannot be called, or reads a column that is not there, is found after the start."""
    for name, words in (("two_arguments", ""), ("of_a_column", "judges_of_check.py:6: return float(row['solution']")):
        (error,) = listed(f"reward.functions=[{{path: 'judges_of_check:{name}'}}]")
        assert error.key == "reward.functions" and words.replace("'", '"') in error.problem


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["data.promt_key=x", "data.prompt_key=question"], ["data.promt_key"]),  # the key that is meant is wrong, too
        (["model.path=/none"], ["model.path"]),
        (["teacher.backend=none", 'teacher.path=""'], ["teacher.backend"]),  # `gkd train` refuses it, too
        (["actor.tp=3", "data.prompt_key=question"], ["trainer.n_gpus_per_node", "data.prompt_key"]),
        (["distill.loss=rkl", "distill.skip_first_tokens=9"], ["distill.loss", "distill.skip_first_tokens"]),
        (["rollout.n=0", "actor.tp=3", "model.path=/none"], ["rollout.n", "trainer.n_gpus_per_node", "model.path"]),
        (["distill.alpha=0.3", "distill.skip_first_tokens=9"], ["distill.alpha", "distill.skip_first_tokens"]),
        (["teacher.keys=none", "model.path=none", "distill.losses=[{name: none}]"], None),
        (["data.max_prompt_length=0", "trainer.run_dir=qwen3"], ["data.max_prompt_length", "trainer.run_dir"]),
    ],
)
def test_each_mistake_is_one_line(
    listed: Callable[..., list[ConfigError]], overrides: list[str], keys: list[str] | None
) -> None:
    """Fails if what follows from a mistake is in the list, or a mistake of another kind is not."""
    found = [error.key for error in listed(*overrides)]
    assert found == keys if keys else len(found) == len(set(found)) == len(overrides), found


def test_all_rows_are_read(listed: Callable[..., list[ConfigError]], tmp_path: Path) -> None:
    """Fails if a row behind the first ones is found when the teacher is up, or without a model not at all."""
    rows = [json.dumps({"prompt": "w2", "answer": "w3"})] * 9
    (tmp_path / "p.jsonl").write_text("\n".join([*rows, json.dumps({"text": "w2"})]))
    for more in ([], ["model.path=/none"]):
        error = listed(f"data.train_files=[{tmp_path}/p.jsonl]", *more)[-1]
        assert error.key == "data.prompt_key" and "p.jsonl:10" in error.problem


def test_the_teachers_silence_is_told_apart(
    listed: Callable[..., list[ConfigError]], gkd_log: pytest.LogCaptureFixture
) -> None:
    """Fails if the silence of a teacher that starts later is a mistake, or the only mistake has another type."""
    with refusing_port() as port:
        server = ("teacher.backend=zmq", "teacher.path=", f"teacher.server_port={port}")
        assert not listed(*server, with_teacher=False) and str(port) not in gkd_log.text
        assert [(error.key, error.value) for error in listed(*server)] == [("teacher.server_port", port)]
        assert "the other checks go on" in gkd_log.text
        with pytest.raises(TeacherUnavailable, match=f"127.0.0.1:{port}"):
            preflight(load_config("right.yaml", server))
        with pytest.raises(ConfigError, match="teacher.server_port"):
            preflight(load_config("right.yaml", [*server, "data.prompt_key=question"]))


def test_no_model_of_the_hub_is_downloaded_if_something_is_wrong(folder: Path, tmp_path: Path) -> None:
    """Fails if a typo is found behind a download of weights, or a model that was not downloaded is a mistake."""
    with Hub(tmp_path / "cache") as hub:
        hub.push("org/model", folder / "qwen3")
        command = [sys.executable, "-m", "gkd.tools.check", "right.yaml", "model.path=org/model", "rollout.n=0"]
        paths = hub.environment(PYTHONPATH=f"{ROOT}:{folder}")
        done = subprocess.run(command, cwd=folder, env=paths, capture_output=True, text=True, timeout=120, check=False)
        is_downloaded = any("model.safetensors" in request for request in map(str, hub.requests))
    assert not is_downloaded, done.stderr
    keys = [line.partition(" = ")[0] for line in done.stdout.splitlines()]
    assert (done.returncode, keys) == (2, ["rollout.n"])

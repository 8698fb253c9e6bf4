"""Test that preflight refuses invalid input with one line and exit code 2 (1 for a missing teacher)."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from gkd.config.load import load_config
from gkd.errors import ConfigError, GkdError, TeacherUnavailable
from gkd.preflight.run import preflight
from tests.dist.helpers import free_port
from tests.e2e.conftest import EOS, Lab, resized
from tests.service.harness import TRIVIAL, ServerProcess

pytestmark = pytest.mark.e2e


def refused(lab: Lab, port: int, *overrides: str) -> GkdError:
    """Return the error of preflight, and assert that it wrote nothing."""
    run_dir = lab.root / "refused"
    command = lab.command(run_dir, port, *overrides)
    with pytest.raises(GkdError) as caught:
        preflight(load_config(None, command[command.index("--config") + 2 :]))
    assert not run_dir.exists(), "a refused run must write nothing"
    return caught.value


def copy_model(lab: Lab, name: str) -> Path:
    folder = lab.root / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(lab.student, folder)
    return folder


def test_a_wrong_model_folder(lab: Lab, teacher_port: int) -> None:
    """If it fails, a missing or damaged model is found minutes later or not at all."""
    truncated = copy_model(lab, "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    no_weights = copy_model(lab, "no_weights")
    (no_weights / "model.safetensors").unlink()
    no_config = copy_model(lab, "no_config")
    (no_config / "config.json").write_text("{")
    for folder, word in (
        (lab.root / "absent", "absent"),
        (truncated, "model.safetensors"),
        (no_weights, "safetensors"),
        (no_config, "config.json"),
    ):
        error = refused(lab, teacher_port, f"model.path={folder}")
        assert isinstance(error, ConfigError) and error.key == "model.path"
        assert word in str(error), str(error)
    reshaped = copy_model(lab, "reshaped")
    config = json.loads((reshaped / "config.json").read_text())
    (reshaped / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    assert "gate_proj" in str(refused(lab, teacher_port, f"model.path={reshaped}"))
    other = copy_model(lab, "other_architecture")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    error = refused(lab, teacher_port, f"model.path={other}")
    assert isinstance(error, ConfigError) and error.key == "model.path"
    assert "gpt2" in str(error) and "qwen3" in str(error)


def test_an_index_that_names_an_absent_file(lab: Lab, teacher_port: int) -> None:
    """If it fails, an incomplete download is accepted until the missing shard is loaded."""
    folder = copy_model(lab, "half")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    assert "model-2.safetensors" in str(refused(lab, teacher_port, f"model.path={folder}"))


def test_unsupported_layouts(lab: Lab, teacher_port: int) -> None:
    """If it fails, a layout that cannot split the model fails only after all processes have started."""
    error = refused(lab, teacher_port, "trainer.n_gpus_per_node=3", "actor.tp=3")
    assert isinstance(error, ConfigError) and error.key == "actor.tp" and " 4 " in error.problem
    error = refused(lab, teacher_port, "trainer.n_gpus_per_node=3", "actor.pp=3")
    assert isinstance(error, ConfigError) and error.key == "actor.pp" and " 2 " in error.problem
    error = refused(lab, teacher_port, "rollout.n_gpus_per_node=3", "rollout.tp=3")
    assert isinstance(error, ConfigError) and error.key == "rollout.tp"


def test_sequences_longer_than_the_model(lab: Lab, teacher_port: int) -> None:
    """If it fails, positions beyond the model's range are trained on or crash an engine."""
    error = refused(lab, teacher_port, "data.max_response_length=60")
    assert isinstance(error, ConfigError) and error.key == "data.max_response_length" and "64" in str(error)


def test_prompt_files(lab: Lab, teacher_port: int) -> None:
    """If it fails, an invalid prompt file is found only after the pools have started."""
    error = refused(lab, teacher_port, "data.train_files=[absent.jsonl]")
    assert isinstance(error, ConfigError) and error.key == "data.train_files"
    error = refused(lab, teacher_port, "data.prompt_key=question")
    assert isinstance(error, ConfigError) and error.key == "data.prompt_key"
    error = refused(lab, teacher_port, "data.max_prompt_length=2")
    assert isinstance(error, ConfigError) and error.key == "data.max_prompt_length"
    error = refused(lab, teacher_port, "data.answer_key=solution")
    assert isinstance(error, ConfigError) and error.key == "data.answer_key"


def test_different_tokenizers(lab: Lab, teacher_port: int) -> None:
    """If it fails, teacher and student may silently use the same ids for different tokens."""
    folder = copy_model(lab, "other_words")
    text = json.loads((folder / "tokenizer.json").read_text())
    vocab = text["model"]["vocab"]
    vocab["w2"], vocab["w3"] = vocab["w3"], vocab["w2"]
    (folder / "tokenizer.json").write_text(json.dumps(text))
    error = refused(lab, teacher_port, f"model.path={folder}")
    assert isinstance(error, ConfigError) and error.key == "model.path" and str(lab.teacher) in error.problem


def test_topk_above_the_vocabulary_size(lab: Lab, teacher_port: int) -> None:
    """If it fails, the teacher rejects every sequence in the first step."""
    error = refused(lab, teacher_port, "teacher.topk=40000")
    assert isinstance(error, ConfigError) and error.key == "teacher.topk" and "32003" in str(error)


def test_missing_teacher_server(lab: Lab) -> None:
    """If it fails, a missing server causes a hang instead of an error with an address and a command."""
    port = free_port()
    began = time.monotonic()
    error = refused(lab, port, "teacher.outage_budget_s=3")
    assert isinstance(error, TeacherUnavailable)
    assert f"127.0.0.1:{port}" in str(error) and "launch/teacher.sh" in str(error)
    assert time.monotonic() - began < 30


def test_the_command_line_prints_one_line(lab: Lab, teacher_port: int) -> None:
    """If it fails, users get a traceback, or the exit code does not distinguish a config error from a failed run."""
    done = lab.train_run(lab.root / "refused", teacher_port, "actor.tpp=2")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "actor.tpp = 2" in line and " actor.tp " in line


def test_an_embedding_without_rows_for_its_tokens(lab: Lab, teacher_port: int) -> None:
    """If it fails, a token of the prompts stops the run at a random step."""
    error = refused(lab, teacher_port, f"model.path={resized(lab.student, 31000)}")
    assert isinstance(error, ConfigError) and error.key == "model.path" and "32002" in str(error)


def test_a_padded_teacher_vocabulary_is_truncated_to_the_shared_ids(lab: Lab) -> None:
    """If it fails, models of one tokenizer with different embedding padding (Qwen2.5 1.5B and 7B) cannot be paired."""
    with ServerProcess(resized(lab.teacher, 32064), lab.root) as server:
        command = lab.command(lab.root / "padded_run", server.port)
        plan = preflight(load_config(None, command[command.index("--config") + 2 :]))
        assert (plan.n_vocab, plan.teachers[0].vocab_size, plan.eos_ids) == (32003, 32064, [EOS])


def test_a_teacher_without_tokenizer(lab: Lab) -> None:
    """If it fails, the error names the student's tokenizer, or the tokenizers are not compared."""
    bare = lab.root / "bare_teacher"
    shutil.copytree(lab.teacher, bare)
    for file in bare.glob("*token*"):
        file.unlink()
    with ServerProcess(bare, lab.root, options=TRIVIAL) as server:
        error = refused(lab, server.port)
    assert isinstance(error, ConfigError) and error.key == "teacher.server_port" and str(bare) in error.problem

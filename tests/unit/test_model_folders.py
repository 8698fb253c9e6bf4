"""Refuse model folders whose content transformers, vLLM and the trainer would read differently. Starts no process."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gkd.actor.common.hf_folder import write_folder
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_sections import with_values
from gkd.errors import ConfigError, ModelError
from gkd.hf.model_folder import check_engines
from gkd.preflight.meta_models import local_teacher
from gkd.preflight.student import check_student
from teacher_server.engines.folder_check import CPU_HEAD_SIZES, check_folder
from teacher_server.engines.weight_files import FolderError
from teacher_server.errors import ServerError
from teacher_server.worker.model_folder import inspect_model_folder
from tests.dist.megatron_reference import make_hf_folder
from tests.refusals import refuses

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in ("qwen3", "qwen2_tied"):
        make_hf_folder(root / kind, kind)
    return root


@pytest.fixture
def tied(models: Path, tmp_path: Path) -> Path:
    return shutil.copytree(models / "qwen2_tied", tmp_path / "model")


def _config(folder: Path, strategy: str = "megatron") -> Config:
    lengths = {"data.max_prompt_length": 16, "data.max_response_length": 16}
    return with_values(Config(), {"model.path": str(folder), "actor.strategy": strategy, **lengths})


def _set(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))


def _change(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, {"format": "pt"})


def _split(folder: Path) -> None:
    """Replace the weights by two shards with an index."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    weight_map = {name: SHARDS[i % 2] for i, name in enumerate(names)}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / SINGLE).unlink()


def _other_head(folder: Path) -> None:
    _change(folder, lambda t: t.update({HEAD: t[EMBEDDING].clone().index_fill_(0, torch.tensor([1002]), 0.5)}))


def _resized_head(folder: Path) -> None:
    _change(folder, lambda t: t.update({HEAD: t[EMBEDDING][:-1].clone()}))


def _other_head_of_gemma(folder: Path) -> None:
    """Leave the tie to the model type, as transformers writes it for the types that tie by default."""
    _other_head(folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "gemma"}
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))


def _only_head(folder: Path) -> None:
    _change(folder, lambda t: t.update({HEAD: t.pop(EMBEDDING)}))


def _merged_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "base"}))
    save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")


def _adapter_weights(folder: Path) -> None:
    save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")


def _adapter_only(folder: Path) -> None:
    _merged_adapter(folder)
    (folder / SINGLE).unlink()
    (folder / "config.json").unlink()


def _leftover_quantization(folder: Path) -> None:
    _set(folder, quantization_config={"quant_method": "fp8"})


def _stale_index(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: SHARDS[0], HEAD: SHARDS[1]}}))


def _second_copy(folder: Path) -> None:
    shutil.copy(folder / SINGLE, folder / SHARDS[0])


def _lost_index(folder: Path) -> None:
    _split(folder)
    (folder / INDEX).unlink()


DAMAGES: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (_merged_adapter, ("adapter_config.json and adapter_model.safetensors", "next to full weights", "delete")),
    (_adapter_weights, ("adapter_model.safetensors next to full weights", "delete")),
    (_adapter_only, ("LoRA adapter of base", "merge it into base")),
    (_other_head, (HEAD, EMBEDDING, "differ", "set tie_word_embeddings to false")),
    (_other_head_of_gemma, (HEAD, EMBEDDING, "differ", "set tie_word_embeddings to false")),
    (_resized_head, (HEAD, EMBEDDING, "differ", "set tie_word_embeddings to false")),
    (_only_head, (HEAD, "instead of the input embedding", "save_pretrained")),
    (_leftover_quantization, ("full precision", "remove quantization_config")),
    (_stale_index, (INDEX, SHARDS[0], f"delete {INDEX}")),
    (_second_copy, (SHARDS[0], "delete")),
    (_lost_index, (*SHARDS, f"copy {INDEX}")),
]


@pytest.mark.parametrize(("damage", "parts"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_every_program_refuses_the_folder(tied: Path, damage: Callable[[Path], None], parts: tuple[str, ...]) -> None:
    """Fails if a program serves or trains another model than the next one, or an error does not name the fix."""
    damage(tied)
    for strategy in ("megatron", "fsdp2"):
        with pytest.raises(ConfigError) as caught:
            check_student(_config(tied, strategy))
        assert caught.value.key == "model.path" and all(part in str(caught.value) for part in parts), str(caught.value)
    local = load_config(None, ["teacher.backend=local", f"teacher.path={tied}", "trainer.n_gpus_per_node=1"])
    with pytest.raises(ConfigError) as caught:
        local_teacher(local, "cpu")
    assert caught.value.key == "teacher.path" and all(part in str(caught.value) for part in parts)
    with pytest.raises(ServerError) as refused:
        inspect_model_folder(str(tied))
    assert all(part in str(refused.value) for part in (*parts, str(tied)))


def test_folders_with_one_meaning_are_accepted(tied: Path, models: Path) -> None:
    """Fails if a usual folder is refused: a second copy of the tied head, an untied head, shards, a spare index, or
    read-only links as in a hub's cache.
    """
    _change(tied, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    assert check_student(_config(tied)) == check_student(_config(tied, "fsdp2"))
    assert check_folder(models / "qwen3") == [models / "qwen3" / SINGLE]
    linked = tied.with_name("linked")
    linked.mkdir()
    for file in tied.iterdir():
        file.chmod(0o444)
        (linked / file.name).symlink_to(file)
    assert check_folder(linked) == [linked / SINGLE] and check_student(_config(linked)) == check_student(_config(tied))
    for file in tied.iterdir():
        file.chmod(0o644)
    (tied / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: SINGLE}}))
    assert check_folder(tied) == [tied / SINGLE]
    (tied / INDEX).unlink()
    _split(tied)
    assert check_folder(tied) == [tied / shard for shard in SHARDS]
    assert check_student(_config(tied)) == check_student(_config(tied, "fsdp2"))


def test_quantized_weights_are_for_servers_only(tied: Path) -> None:
    """Fails if a quantized student gets past the first check, or a quantized teacher is refused by a server."""
    _leftover_quantization(tied)
    _change(tied, lambda t: t.update({"scale": torch.zeros(3, dtype=torch.float8_e4m3fn)}))
    assert check_folder(tied) == [tied / SINGLE]
    with refuses("model.path"):
        check_student(_config(tied))


def test_an_unmerged_adapter_of_no_known_base(tmp_path: Path) -> None:
    """Fails if an adapter without its config is a traceback."""
    _adapter_weights(tmp_path)
    with pytest.raises(FolderError):
        check_folder(tmp_path)


def test_an_export_leaves_out_what_belongs_to_an_adapter(tied: Path, tmp_path: Path) -> None:
    """Fails if transformers looks for an adapter in an export and cannot load it."""
    _merged_adapter(tied)
    weight = torch.ones(2, 3)
    write_folder(iter([("a", weight)]), [[("a", (2, 3), torch.float32)]], tmp_path / "export", tied)
    names = {file.name for file in (tmp_path / "export").iterdir()}
    assert not [name for name in names if "adapter" in name] and {"config.json", SINGLE} <= names


@pytest.mark.parametrize(
    ("change", "on_cpu", "word"),
    [
        ({"head_dim": 32}, True, ""),
        ({"head_dim": 16}, False, ""),
        ({"head_dim": 16}, True, "size 16"),
        ({"head_dim": None}, True, "size 8"),  # hidden size 32, 4 heads
        ({"head_dim": None, "hidden_size": 256}, True, ""),
        ({"head_dim": 16, "model_type": "qwen2"}, True, "size 16"),
        ({"kv_lora_rank": 4, "head_dim": 16}, True, ""),
        ({"text_config": {"head_dim": 48}}, True, "size 48"),
        ({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9}, False, "sliding window"),
        ({"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 9}, False, ""),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 9}, False, ""),
        ({"layer_types": ["full_attention", "sliding_attention"], "max_window_layers": 1}, False, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"], "model_type": "gemma3"}, False, ""),
    ],
)
def test_what_vllm_cannot_compute_is_refused_early(
    models: Path, tmp_path: Path, change: dict[str, Any], on_cpu: bool, word: str
) -> None:
    """Fails if a run starts all its processes for a model that vLLM refuses at the first rollout."""
    shutil.copy(models / "qwen3" / "config.json", tmp_path)
    _set(tmp_path, **{"layer_types": None, **change})
    if not word:
        return check_engines(_config(tmp_path), "cpu" if on_cpu else "cuda")
    with pytest.raises(ConfigError, match=word) as caught:
        check_engines(_config(tmp_path), "cpu" if on_cpu else "cuda")
    assert caught.value.key == "model.path" and "GPU" not in str(caught.value)


def test_the_head_sizes_are_those_of_the_installed_vllm() -> None:
    """Fails if another version of vLLM supports other head sizes on the CPU than are refused here."""
    backend = pytest.importorskip("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    assert tuple(backend.get_supported_head_sizes()) == CPU_HEAD_SIZES


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ({"model_type": "gemma"}, "actor.strategy=fsdp2"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "model.trust_remote_code=true"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "actor.strategy=fsdp2"),
        ({"attention_bias": True}, "actor.strategy=fsdp2"),
        ({"use_sliding_window": True}, "actor.strategy=fsdp2"),
    ],
)
def test_the_fix_is_the_backend_that_takes_the_model(tied: Path, change: dict[str, Any], fix: str) -> None:
    """Fails if the fix is to copy a folder that has nothing missing."""
    _set(tied, **change)
    with pytest.raises(ConfigError) as caught:
        check_student(_config(tied))
    assert fix in caught.value.fix


def test_code_of_its_own_needs_trust(tied: Path) -> None:
    """Fails if the error names an argument of transformers instead of the setting."""
    _set(tied, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    (tied / "own.py").write_text("raise RuntimeError\n")
    with pytest.raises(ConfigError) as caught:
        check_student(_config(tied, "fsdp2"))
    assert "model.trust_remote_code=true" in caught.value.fix


def test_a_model_error_keeps_its_fix_between_processes() -> None:
    """Fails if an error of a rank loses its fix on the way to the driver."""
    error = pickle.loads(pickle.dumps(ModelError("no head.", "add one.")))
    assert (error.problem, error.fix, str(error)) == ("no head.", "add one.", "no head. Fix: add one.")
    assert str(pickle.loads(pickle.dumps(ModelError("no head.")))) == "no head."

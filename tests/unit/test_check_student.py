"""Test the preflight checks of a Megatron student's folder and layout; starts no process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from gkd.config.schema import Config
from gkd.config.schema_actor import LoraConfig
from gkd.config.schema_sections import with_values
from gkd.errors import ConfigError, GkdError
from gkd.preflight.student import check_student
from tests.dist.megatron_reference import make_hf_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("students")
    for kind in ("qwen3", "qwen3_moe", "mistral"):
        make_hf_folder(root / kind, kind)
    return root


def _config(folder: Path, **actor: object) -> Config:
    """Return settings with 4 actor ranks and sequences of up to 32 tokens."""
    values = {"model.path": str(folder), "trainer.n_gpus_per_node": 4}
    lengths = {"data.max_prompt_length": 16, "data.max_response_length": 16}
    return with_values(Config(), values | lengths | {f"actor.{key}": value for key, value in actor.items()})


def _refusal(config: Config) -> GkdError:
    with pytest.raises(GkdError) as caught:
        check_student(config)
    return caught.value


def test_layouts_of_experts(folders: Path) -> None:
    """Fails if preflight checks another layout than the one that is built, or accepts an impossible one."""
    for fits in ({}, {"ep": 2}, {"pp": 2, "ep": 2}, {"tp": 2, "ep": 2, "sequence_parallel": True}):
        check_student(_config(folders / "qwen3_moe", **fits))
    for folder, actor, key in (
        ("qwen3_moe", {"ep": 3}, "actor.ep"),  # of four ranks
        ("qwen3_moe", {"ep": 4}, "actor.ep"),  # of six experts
        ("qwen3_moe", {"pp": 2, "ep": 4}, "actor.ep"),
        ("qwen3_moe", {"tp": 2}, "actor.sequence_parallel"),
        ("qwen3", {"ep": 2}, "actor.ep"),
    ):
        error = _refusal(_config(folders / folder, **actor))
        assert isinstance(error, ConfigError) and error.key == key, (folder, actor, str(error))


def test_adapters(folders: Path) -> None:
    """Fails if adapters that a rank would refuse start a run, or layers of experts are left out silently."""
    check_student(_config(folders / "qwen3", tp=2, lora=LoraConfig(rank=2)))
    attention = ["q_proj", "k_proj", "v_proj", "self_attn.o_proj"]
    check_student(_config(folders / "qwen3_moe", lora=LoraConfig(rank=2, targets=attention)))
    for folder, targets in (
        ("qwen3_moe", ["q_proj", "down_proj"]),
        ("qwen3", ["q_proj", "lm_head"]),
        ("qwen3", ["linear_qkv"]),
        ("qwen3", []),
    ):
        error = _refusal(_config(folders / folder, lora=LoraConfig(rank=2, targets=targets)))
        assert isinstance(error, ConfigError) and error.key == "actor.lora.targets", (folder, targets)
        assert "q_proj" in error.fix and "linear_qkv" not in error.fix


@pytest.mark.parametrize("strategy", ["megatron", "fsdp2"])
def test_engines_with_experts_get_merged_weights(folders: Path, strategy: str) -> None:
    """Fails if an engine is started that computes experts with kernels for which weight syncs were never tested."""
    lora = LoraConfig(rank=2, targets=["q_proj"])
    for folder, refused in (("qwen3_moe", True), ("qwen3", False)):
        config = _config(folders / folder, lora=lora, strategy=strategy)
        check_student(config)
        config = with_values(config, {"weight_sync.lora": "adapters"})
        if refused:
            error = _refusal(config)
            assert isinstance(error, ConfigError) and error.key == "weight_sync.lora"
        else:
            check_student(config)


def test_experts_that_the_engines_cannot_split(folders: Path, tmp_path: Path) -> None:
    """Fails if a rollout engine is started that cannot split the experts' columns over its ranks."""
    folder = tmp_path / "narrow"
    shutil.copytree(folders / "qwen3_moe", folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = (tensors[name][:, :23] if "down" in name else tensors[name][:23]).contiguous()
    save_file(tensors, folder / "model.safetensors")
    config = _config(folder)
    assert all(part in str(_refusal(config)) for part in ("experts.0.gate_proj.weight", "[23, 32]"))
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"moe_intermediate_size": 23}))
    check_student(config)
    error = _refusal(with_values(config, {"rollout.tp": 2}))
    assert isinstance(error, ConfigError) and error.key == "rollout.tp" and "23" in str(error)


def test_a_sliding_window_shorter_than_a_sequence(folders: Path, tmp_path: Path) -> None:
    """Fails if a Mistral is trained with full attention on sequences longer than its window."""
    folder = tmp_path / "window"
    shutil.copytree(folders / "mistral", folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"sliding_window": 32}))
    check_student(_config(folder))
    (folder / "config.json").write_text(json.dumps(content | {"sliding_window": 31}))
    error = _refusal(_config(folder))
    assert error.key == "model.path" and "sliding_window = 31" in str(error) and "32" in str(error)

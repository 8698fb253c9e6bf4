"""What the driver finds out about an fsdp2 student before any process starts, on real folders of tiny models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gkd.actor.pool import ActorPool
from gkd.config import ActorConfig, Config, DataConfig, LoraConfig, ModelConfig, TrainerConfig
from gkd.errors import ConfigError
from gkd.preflight import check_student
from tests.dist.megatron_reference import VOCAB, make_hf_folder


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_folder(tmp_path_factory.mktemp("fsdp_checks") / "qwen3", "qwen3")


def _config(folder: Path, **actor: Any) -> Config:
    """Sequences fit the model's 64 positions."""
    return Config(
        data=DataConfig(max_prompt_length=32, max_response_length=32),
        model=ModelConfig(path=str(folder)),
        actor=replace(ActorConfig(strategy="fsdp2"), **actor),
    )


def test_a_whole_folder_passes_with_its_sizes(qwen3: Path) -> None:
    """Fails if sizes that the rollout's layout is checked against are read wrongly."""
    sizes = check_student(_config(qwen3, lora=LoraConfig(rank=2)))
    found = (sizes.vocab_size, sizes.n_heads, sizes.n_kv_heads, sizes.ffn_size, sizes.max_positions)
    assert found == (VOCAB, 4, 2, 48, 64)


@pytest.mark.parametrize(
    ("actor", "key", "text"),
    [
        ({"lora": LoraConfig(rank=2, targets=["q_proj", "c_attn"])}, "actor.lora.targets", "c_attn"),
        ({"lora": LoraConfig(rank=2, targets=[])}, "actor.lora.targets", "nothing"),
    ],
)
def test_settings_that_the_model_does_not_bear(qwen3: Path, actor: dict[str, Any], key: str, text: str) -> None:
    """Fails if such a run starts and dies on the ranks, minutes later."""
    with pytest.raises(ConfigError) as caught:
        check_student(_config(qwen3, **actor))
    assert caught.value.key == key and text in str(caught.value)


def test_a_broken_folder_is_named(qwen3: Path, tmp_path: Path) -> None:
    """Fails if the driver takes a folder that the ranks cannot load."""
    (tmp_path / "config.json").write_bytes((qwen3 / "config.json").read_bytes())
    with pytest.raises(ConfigError) as caught:
        check_student(_config(tmp_path))
    assert caught.value.key == "model.path" and "model.safetensors" in str(caught.value)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ConfigError) as caught:
        check_student(_config(tmp_path))
    assert caught.value.key == "model.path" and "no_such_model" in str(caught.value)


def test_sequences_longer_than_the_model_are_refused(qwen3: Path) -> None:
    """Fails if positions beyond the model's are trained without a word."""
    config = _config(qwen3)
    config.data.max_response_length = 33
    with pytest.raises(ConfigError) as caught:
        check_student(config)
    assert caught.value.key == "data.max_response_length"


def test_all_ranks_export_together() -> None:
    """Fails if the weight sync calls only some of the ranks that hold parts of every tensor: it would hang."""
    ranks = ["rank 0", "rank 1", "rank 2"]  # handles; only passed on
    config = Config(actor=ActorConfig(strategy="fsdp2"), trainer=TrainerConfig(n_gpus_per_node=3))
    assert ActorPool(ranks, config).exporters() == [ranks]
    config.actor.strategy = "megatron"
    assert ActorPool(ranks, config).exporters() == [["rank 0"]]

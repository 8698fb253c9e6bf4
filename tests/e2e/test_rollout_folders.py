"""Real engines compute with all that a model's folder holds, or refuse it with the names of its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gkd.errors import ConfigError, RankFailed
from teacher_server.engines.base import ScoreParams, TokenSequence
from teacher_server.engines.load import EngineSettings, load_engine
from teacher_server.errors import ServerError
from tests.engine_process import EngineProcess
from tests.random_models import save_random

pytestmark = pytest.mark.e2e
SINGLE, VOCAB = "model.safetensors", 211
Tensors = dict[str, torch.Tensor]
Q, K, OUT, UP = (f"model.layers.1.{x}_proj.weight" for x in ("self_attn.q", "self_attn.k", "self_attn.o", "mlp.up"))
BIAS = OUT.replace("weight", "bias")


# What is done to a folder -> the tensor or the parameter that the engines of vLLM name.
DAMAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "one too many": (lambda t: t.update({BIAS: torch.ones(64)}), BIAS),
    "one of no layer": (lambda t: t.update({"value_head.weight": torch.ones(1, 64)}), "value_head.weight"),
    "one missing": (lambda t: t.pop(OUT), OUT),  # vLLM's own check leaves linear layers out
    "one missing of a fused parameter": (lambda t: t.pop(K), "model.layers.1.self_attn.qkv_proj.weight"),
    "more rows": (lambda t: t.update({Q: torch.cat([t[Q], t[Q]])}), Q),
    "fewer rows": (lambda t: t.update({UP: t[UP][:-1].clone()}), UP),
    "transposed": (lambda t: t.update({UP: t[UP].t().contiguous()}), UP),
}


def _save(folder: Path, kind: str, **settings: Any) -> Path:
    return save_random(folder, kind, vocab_size=VOCAB, bos_token_id=None, eos_token_id=1, pad_token_id=0, **settings)


def _settings(folder: Path, engine: str) -> EngineSettings:
    return EngineSettings(model=str(folder), max_tokens=32, max_batch_tokens=128, engine=engine, device="cpu")


def _rollout_engine(folder: Path, tp: int = 1) -> Any:
    from gkd.config.schema_rollout import RolloutConfig
    from gkd.rollout.vllm.engine import RolloutEngine

    config = RolloutConfig(kv_cache_mib=32, max_num_seqs=8, tp=tp)
    return RolloutEngine(str(folder), config, dtype="float32", max_model_len=32, device="cpu", eos_ids=[1])


def _refusal(folder: Path, engine: str) -> str:
    """Run in a child process."""
    try:
        load_engine(_settings(folder, "vllm")) if engine == "teacher" else _rollout_engine(folder, int(engine[-1]))
    except (ServerError, ConfigError) as error:
        assert getattr(error, "key", "model.path") == "model.path" and str(folder) in str(error)
        return str(error)
    return ""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(tmp_path_factory.mktemp("model") / "whole", "Qwen3")


@pytest.fixture
def damaged(whole: Path, tmp_path: Path, damage: str) -> Path:
    tensors = load_file(whole / SINGLE)
    DAMAGES[damage][0](tensors)
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    return tmp_path


SLOW = [("one of no layer", "rollout 2"), *((damage, "teacher") for damage in DAMAGES)]
CASES = [*((d, "rollout 1") for d in DAMAGES), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("damage", "engine"), CASES)
def test_vllm_takes_the_whole_folder(damaged: Path, damage: str, engine: str) -> None:
    """Fails if an engine computes with a part of the folder, or with numbers that no file has, or hides which."""
    with EngineProcess() as process:
        assert DAMAGES[damage][1] in process.call(_refusal, damaged, engine)


@pytest.mark.parametrize("damage", DAMAGES)
def test_transformers_takes_the_whole_folder(damaged: Path) -> None:
    """Fails if the engine hf serves a model with a tensor that is left out or made up."""
    with pytest.raises(ServerError, match=str(damaged)):
        load_engine(_settings(damaged, "hf"))


def test_an_error_of_vllm_is_a_sentence(whole: Path, tmp_path: Path) -> None:
    """Fails if the user reads vLLM's traceback, and no fix, when an engine cannot start with a model."""
    config = json.loads((whole / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    (tmp_path / SINGLE).symlink_to(whole / SINGLE)
    with EngineProcess() as process, pytest.raises(RankFailed, match="(?s)model.path = .*max_model_len.* Fix: "):
        process.call(_rollout_engine, tmp_path)


def _digests(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Run in a child process: return the digests that the engine has after its start, and those of the folder."""
    from gkd.weight_sync.buckets import digest

    held = _rollout_engine(folder).digests()
    tensors = load_file(folder / SINGLE)
    ignored = (".attn.bias", ".attention.bias", *(["lm_head.weight"] if "wte.weight" in tensors else []))
    return held, {name: digest(tensor) for name, tensor in tensors.items() if not name.endswith(ignored)}


def _save_gpt2(folder: Path) -> None:
    """Save a model without the prefix, as the hub has it. It has ignored masks and a copy of the head, and no class."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 1}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids)).save_pretrained(folder)
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(folder / SINGLE).items()}
    unused = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(2)}
    unused["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors | unused, folder / SINGLE, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": None}))


MORE: list[tuple[str, dict[str, Any]]] = [
    ("Phi3", {"hidden_size": 128, "original_max_position_embeddings": 64}),
    ("Mixtral", {"num_local_experts": 4}),
    ("GPTNeoX", {"num_attention_heads": 2}),
]


@pytest.mark.parametrize("kind", ["GPT2", *(pytest.param(kind, marks=pytest.mark.slow) for kind, _ in MORE)])
def test_an_engine_reads_back_what_it_has_loaded(tmp_path: Path, kind: str) -> None:
    """Fails if the first weight sync of a run ends it because the engine fuses, renames or transposes tensors.

    Or if vLLM takes a folder that names no class for a model that computes embeddings, and does not start.
    """
    if kind == "GPT2":
        _save_gpt2(tmp_path)
    else:
        _save(tmp_path, kind, **dict(MORE)[kind])
    if kind == "GPTNeoX":  # vLLM changes its class of transformers, which ignores masks
        mask = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 64, 64).tril()}
        save_file(load_file(tmp_path / SINGLE) | mask, tmp_path / SINGLE, {"format": "pt"})
    with EngineProcess() as process:
        held, expected = process.call(_digests, tmp_path)
    assert held == expected


def _scores_of_auto(folder: Path) -> tuple[str, np.ndarray]:
    """Run in a child process: as on a GPU, where vLLM is the first choice."""
    from teacher_server.engines import load

    load.default_engine = lambda device: "vllm"
    engine = load_engine(_settings(folder, "auto"))
    tokens = np.arange(2, 22, dtype=np.int32)
    (scores,) = engine.score([TokenSequence(tokens, 1)], ScoreParams("sampled"))
    assert isinstance(scores, np.ndarray)
    return engine.name, scores


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Qwen3", {"attention_bias": True}),
        pytest.param("Qwen2", {"hidden_size": 128, "head_dim": 64}, marks=pytest.mark.slow),
    ],
)
def test_auto_takes_the_engine_that_computes_the_model(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    """Fails if a teacher on a GPU is scored by a vLLM that reads a part of its heads, or no bias of o_proj."""
    from transformers import AutoModelForCausalLM

    _save(tmp_path, kind, **settings)
    tensors = load_file(tmp_path / SINGLE)
    save_file({name: t + 0.3 * torch.randn_like(t) for name, t in tensors.items()}, tmp_path / SINGLE, {"format": "pt"})
    with EngineProcess() as process:
        assert "self_attn." in process.call(_refusal, tmp_path, "teacher")
        name, scores = process.call(_scores_of_auto, tmp_path)
    tokens = torch.arange(2, 22)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(tokens[None]).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
    assert name == "hf"
    np.testing.assert_allclose(scores, expected.numpy(), atol=1e-4)

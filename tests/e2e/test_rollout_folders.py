"""Real engines compute with all that a model's folder holds, or refuse it with the names of its tensors."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gkd.config.schema_actor import LoraConfig
from gkd.errors import ConfigError, RankFailed
from gkd.log import get_logger
from teacher_server.engines.base import ScoreParams, TokenSequence
from teacher_server.engines.load import EngineSettings, load_engine
from teacher_server.errors import ServerError
from tests import device
from tests.dist.helpers import caught
from tests.dist.hf_models import IMAGE_KINDS, language_model, make_model_folder
from tests.dist.megatron_reference import logprob_rows, read_model, response_logprobs
from tests.e2e.conftest import VOCAB as LAB_VOCAB
from tests.e2e.conftest import Lab
from tests.engine_process import EngineProcess
from tests.model_families import save_family
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


def _rollout_engine(folder: Path, tp: int = 1, *, lora: LoraConfig | None = None, dtype: str = "float32") -> Any:
    from gkd.config.schema_rollout import RolloutConfig
    from gkd.rollout.vllm.engine import RolloutEngine

    config = RolloutConfig(kv_cache_mib=32, max_num_seqs=8, tp=tp, enforce_eager=device.on_stand_in())
    place = {"dtype": dtype, "max_model_len": 32, "device": device.kind(), "eos_ids": [1], "lora": lora}
    return RolloutEngine(str(folder), config, **place)


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


def _logprobs(folder: Path, tokens: torch.Tensor) -> np.ndarray:
    """Return those of transformers for all tokens but the first."""
    with torch.no_grad():
        rows = read_model(folder, dtype=torch.float32)(tokens[None]).logits[0].log_softmax(-1)
    return rows[:-1].gather(-1, tokens[1:, None])[:, 0].numpy()


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
    _save(tmp_path, kind, **settings)
    tensors = load_file(tmp_path / SINGLE)
    save_file({name: t + 0.3 * torch.randn_like(t) for name, t in tensors.items()}, tmp_path / SINGLE, {"format": "pt"})
    with EngineProcess() as process:
        assert "self_attn." in process.call(_refusal, tmp_path, "teacher")
        name, scores = process.call(_scores_of_auto, tmp_path)
    assert name == "hf"
    np.testing.assert_allclose(scores, _logprobs(tmp_path, torch.arange(2, 22)), atol=1e-4)


def _rollouts(engine: Any) -> list[Any]:
    from gkd.rollout.messages import Sampling
    from gkd.types import Prompt

    prompts = [Prompt(i, np.arange(5 + i, 12 + 2 * i, dtype=np.int32)) for i in range(3)]
    return list(engine.generate(prompts, Sampling(1, 1.0, 1.0, 12, seed=11)))


def _check_rollouts(folder: Path, rollouts: list[Any], tolerance: float) -> None:
    model = read_model(folder, dtype=torch.float32)
    for rollout in rollouts:
        expected = response_logprobs(logprob_rows(model, rollout), rollout)
        np.testing.assert_allclose(rollout.rollout_logprobs, expected, atol=tolerance)


def _rollouts_of(folder: Path) -> list[Any]:
    """Run in a child process."""
    return _rollouts(_rollout_engine(folder, dtype="bfloat16"))


def test_linear_attention_on_a_cpu(tmp_path: Path) -> None:
    """Fails if vLLM takes weights that are kept as they were sent for packed ones, or does not start without chunks."""
    sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1}
    layers = {"layer_types": ["linear_attention", "full_attention"], "initializer_range": 0.1}
    _save(tmp_path, "Qwen3Next", **sizes, **layers)
    with EngineProcess() as process:
        _check_rollouts(tmp_path, process.call(_rollouts_of, tmp_path), 0.1)


def _synced_in_16_bits(folder: Path, later: Path) -> tuple[bool, list[Any]]:
    """Run in a child process: return whether the engine holds what was sent, buffers in their own dtype; rollouts."""
    from gkd.weight_sync.buckets import differing, digest
    from tests.e2e.weight_sender import WeightSender

    engine = _rollout_engine(folder, dtype="bfloat16")
    tensors = {n: t if n.endswith("_bias") else t.bfloat16() for n, t in load_file(later / SINGLE).items()}
    WeightSender(engine).push(tensors, 1)
    sent = {name: digest(tensor, torch.device(device.kind())) for name, tensor in tensors.items()}
    return not differing(sent, engine.digests()), _rollouts(engine)


def test_latents_and_a_bias_in_full_precision_are_synced_in_16_bits(tmp_path: Path) -> None:
    """Fails if a router's bias in float32 is taken for another one, or the engine keeps products of old weights."""
    # Sizes for which vLLM has kernels on CPUs and GPUs.
    sizes = {"kv_lora_rank": 512, "q_lora_rank": 16, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    groups = {"n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.05}
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        _save(folder, "DeepseekV3", **sizes, **groups, seed=seed)
        config = json.loads((folder / "config.json").read_text())
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        (folder / "config.json").write_text(json.dumps(config))
    with EngineProcess() as process:
        is_same, rollouts = process.call(_synced_in_16_bits, *folders)
    assert is_same
    _check_rollouts(folders[1], rollouts, 0.1)


A = "backbone.layers.0.mixer.A"


def _load_as_it_is(worker: Any) -> None:
    """Runs in vLLM's worker: let a sync write A_log itself, where vLLM's loader has written -exp(A_log)."""
    parameter = dict(worker.model_runner.get_model().named_parameters())[A]
    parameter.weight_loader = lambda held, sent: held.data.copy_(sent)


def _first_syncs(folder: Path, later: Path, dtype: str) -> list[str]:
    """Run in a child process: return the lines of first syncs, the second one with other weights; an error."""
    from tests.e2e.weight_sender import WeightSender

    engine = _rollout_engine(folder, dtype=dtype)
    engine.keep_digests()
    sender = WeightSender(engine)
    first, second = (
        {n: t.to(getattr(torch, dtype)) for n, t in load_file(x / SINGLE).items()} for x in (folder, later)
    )
    handler = BufferingHandler(99)
    get_logger("rollout").addHandler(handler)
    said = []
    for tensors in (first, second, first):
        sender.push(tensors, 0)
        said.append(" ".join(record.getMessage() for record in handler.buffer))
        handler.buffer.clear()
    engine.llm.collective_rpc(_load_as_it_is)
    said.append(str(caught(lambda: sender.push(first, 0))))
    sender.push(first, 1)
    return said


@pytest.mark.cpu_only("vLLM's Mamba has no kernel on stand-in cards")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_sync_loads_what_vllm_loads(tmp_path: Path, dtype: str) -> None:
    """Fails if a sync may leave other numbers than vLLM's loader where no tensor of the folder can be read back.

    Or if rounding, weights that are not those of the folder, or a later version is taken for such an error.
    """
    folders = [save_family(tmp_path / str(seed), "mamba2", seed=seed) for seed in range(2)]
    with EngineProcess() as process:
        equal, other, again, error = process.call(_first_syncs, *folders, dtype)
    is_rounded = dtype == "bfloat16"  # vLLM has A in float32
    assert f"are rounded ({A}" in equal if is_rounded else " 0 are rounded" in equal
    assert again == equal and "cannot be compared" in other
    assert is_rounded or (A in error and "although the student sent the same weights" in error)


# Models that read images: text alone.

NAMES = Path(__file__).resolve().parents[1] / "torchvision_names"
LOST, TARGETS = "layers.1.self_attn.o_proj.weight", ["q_proj", "down_proj"]
OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in IMAGE_KINDS if kind != "gemma3"]


def _import_path() -> str:
    """Return the PYTHONPATH of processes that import torchvision."""
    own = [] if find_spec("torchvision") else [str(NAMES)]
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *own]))


def _enter() -> None:
    """Call this in a child process. vLLM inspects a model's code in a further one."""
    os.environ["PYTHONPATH"] = _import_path()
    sys.path.append(str(NAMES))


def _synced(folder: Path, later: Path, targets: list[str]) -> tuple[bool, str, list[Any]]:
    """Run in a child process: return if an engine got the later language model, and adapters; an error; rollouts."""
    from gkd.weight_sync.buckets import differing
    from tests.e2e.weight_sender import WeightSender

    engine = _rollout_engine(folder, lora=LoraConfig(rank=4, targets=targets) if targets else None)
    sender, tensors = WeightSender(engine), load_file(later / SINGLE)
    tensors = {name: tensors[name] for name in language_model(tensors)}
    sent, _ = sender.push(tensors, 1, **({"adapters": False} if targets else {}))
    if targets:  # under the names of transformers, as a student sends them
        modules = [*read_model(later).get_decoder().named_modules(prefix="model.language_model")]
        layers = [(name, layer) for name, layer in modules if name.endswith(tuple(targets))]
        factors = {f"{name}.lora_A.weight": 0.1 * torch.randn(4, layer.in_features) for name, layer in layers}
        factors |= {f"{name}.lora_B.weight": 0.1 * torch.randn(layer.out_features, 4) for name, layer in layers}
        sent |= sender.push(factors, 2, adapters=True)[0]
    held, rollouts = engine.digests(), _rollouts(engine)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(LOST)}
    error = str(caught(lambda: sender.push(kept, 3, **({"adapters": False} if targets else {}))))
    return not differing(sent, held) and held.keys() == sent.keys(), error, rollouts


@pytest.mark.parametrize("targets", [[], TARGETS])
@pytest.mark.parametrize("kind", ["gemma3", *OTHERS])
def test_a_sync_replaces_the_language_model(tmp_path: Path, kind: str, targets: list[str]) -> None:
    """Fails if vLLM requires the tower, computes text otherwise, does not know names, or keeps what a step changed."""
    folder, later = make_model_folder(tmp_path / "a", kind), make_model_folder(tmp_path / "b", kind, seed=1)
    with EngineProcess() as process:
        process.call(_enter)
        is_same, error, rollouts = process.call(_synced, folder, later, targets)
    assert is_same and LOST in error
    if not targets:
        _check_rollouts(later, rollouts, 1e-4)


@pytest.mark.parametrize("kind", ["gemma3", *OTHERS])
def test_a_teacher_of_vllm_scores_as_transformers(tmp_path: Path, kind: str) -> None:
    """Fails if it scores with another part of the folder, or starts without a tensor of the language model."""
    folder, damaged = make_model_folder(tmp_path / "a", kind), make_model_folder(tmp_path / "b", kind)
    kept = {name: t for name, t in load_file(folder / SINGLE).items() if not name.endswith(LOST)}
    save_file(kept, damaged / SINGLE, {"format": "pt"})
    with EngineProcess() as process:
        process.call(_enter)
        assert LOST in process.call(_refusal, damaged, "teacher")
        name, scores = process.call(_scores_of_auto, folder)
    assert name == "vllm"
    np.testing.assert_allclose(scores, _logprobs(folder, torch.arange(2, 22)), atol=1e-4)


@pytest.mark.slow
def test_a_run_distills_text_into_a_model_that_reads_images(
    lab: Lab, teacher_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a part of the system does not know such a folder, or the export is not a whole one."""
    student = make_model_folder(tmp_path / "gemma3", "gemma3", n_vocab=LAB_VOCAB)
    for file in lab.student.glob("*token*"):
        shutil.copyfile(file, student / file.name)
    (student / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}))
    monkeypatch.setenv("PYTHONPATH", _import_path())
    run_dir = tmp_path / "run"
    own = "actor.strategy=fsdp2", "actor.packing=false", f"model.path={student}"
    lab.finished_run(run_dir, teacher_port, *own, "trainer.total_steps=2", "weight_sync.verify=always")
    source, exported = load_file(student / SINGLE), load_file(run_dir / "export" / SINGLE)
    trained = language_model(source)
    assert exported.keys() == source.keys()
    assert {name for name in source if not torch.equal(source[name], exported[name])} == trained
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["weight_sync/verified_tensors"] for row in steps if row["step"]] == [len(trained)] * 2

"""Test the driver's checks of an fsdp2 student before any process starts, on folders of tiny models."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

from gkd.actor.common.optim_spec import clip_factor
from gkd.actor.fsdp.model import LossModel, allocate, build_on_meta
from gkd.actor.fsdp.probe import probe_on_meta
from gkd.actor.fsdp.weights import file_parts, match_files
from gkd.config.schema import Config
from gkd.config.schema_actor import ActorConfig, LoraConfig
from gkd.config.schema_sections import DataConfig, ModelConfig
from gkd.errors import ConfigError, ModelError
from gkd.hf.model_dims import check_engine_split
from gkd.hf.model_folder import check_engines, open_tensors, read_model_folder, tensor_shapes, weights_digest
from gkd.preflight.meta_models import check_fsdp_student, distinct_sizes
from gkd.preflight.student import check_student, chosen
from teacher_server.engines.hf import HfEngine
from teacher_server.engines.load import EngineSettings
from teacher_server.errors import ServerError
from tests.dist.hf_models import IMAGE_KINDS, language_model, make_model_folder
from tests.dist.megatron_reference import VOCAB, make_hf_folder
from tests.random_models import save_random
from tests.refusals import refuses


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_folder(tmp_path_factory.mktemp("fsdp_checks") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fsdp_models")
    for kind in ("mamba", "falcon", "opt", "gemma2", "mixtral", "olmo2", "qwen3_moe"):
        make_model_folder(root / kind, kind)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    save_random(root / "phimoe", "Phimoe", vocab_size=64, head_dim=16, sliding_window=4, **experts)
    return root


def _config(folder: Path, **actor: Any) -> Config:
    """Return settings whose sequences fit the model's 64 positions."""
    return Config(
        data=DataConfig(max_prompt_length=32, max_response_length=32),
        model=ModelConfig(path=str(folder)),
        actor=replace(ActorConfig(strategy="fsdp2"), **actor),
    )


def test_a_whole_folder_passes_with_its_sizes(qwen3: Path) -> None:
    """Fails if sizes that the rollout's layout is checked against are read wrongly."""
    config = _config(qwen3, lora=LoraConfig(rank=2))
    assert check_fsdp_student(config) == (VOCAB, 64)
    assert check_student(config) == VOCAB
    with refuses("rollout.tp"):
        check_student(config.with_values({"rollout.tp": 3}))
    with pytest.raises(ConfigError, match="65 tokens"):
        check_student(config.with_values({"data.max_response_length": 33}))


@pytest.mark.parametrize("kind", ["Phi3", "Phimoe"])
def test_a_sequence_keeps_the_frequencies_of_longrope(tmp_path: Path, kind: str) -> None:
    """Fails if a sequence may be so long that transformers computes the others of its micro-batch differently."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
    rope |= {"original_max_position_embeddings": 32, "short_mscale": 1.0, "long_mscale": 1.0}
    sizes = {"vocab_size": VOCAB, "head_dim": 16, "pad_token_id": 0, "sliding_window": None}
    config = _config(save_random(tmp_path, kind, **sizes, rope_parameters=rope, original_max_position_embeddings=32))
    with refuses("data.max_response_length"):
        check_student(config)
    assert check_student(config.with_values({"data.max_prompt_length": 16, "data.max_response_length": 16})) == VOCAB


def test_sizes_that_a_model_does_not_name_are_not_checked(folders: Path) -> None:
    """Fails if a model without heads, or with one MLP size for each layer, is refused."""
    config = _config(folders / "mamba", packing=False).with_values({"rollout.tp": 4})
    assert check_fsdp_student(config)[1] == sys.maxsize
    falcon = _config(folders / "falcon", packing=False)
    check_student(falcon)
    with refuses("rollout.tp"):
        check_student(falcon.with_values({"rollout.tp": 3}))
    assert distinct_sizes(PretrainedConfig(intermediate_size=[48, 96, 48]), "intermediate_size") == (48, 96)
    with pytest.raises(ConfigError) as caught:
        check_engine_split(5, (10,), (5,), {"MLP columns": (10, 12)})
    assert caught.value.key == "rollout.tp" and "12 MLP columns" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "actor", "key", "text"),
    [
        ("phimoe", {}, "actor.packing", "Phimoe"),
        ("mamba", {"cp": 2}, "actor.cp", "MambaMixer"),
        ("falcon", {}, "actor.packing", "falcon"),
        ("opt", {}, "actor.fused_lm_head", "opt"),
        ("olmo2", {"lora": LoraConfig(rank=2, targets=["q_proj", "c_attn"])}, "actor.lora.targets", "c_attn"),
        ("olmo2", {"lora": LoraConfig(rank=2, targets=[])}, "actor.lora.targets", "q_proj"),
    ],
)
def test_models_that_do_not_support_the_settings(
    folders: Path, kind: str, actor: dict[str, Any], key: str, text: str
) -> None:
    """Fails if an error that a pass without weights can find is raised only on the ranks, or without its key."""
    with refuses(key, text=text):
        check_student(_config(folders / kind, **actor))


@pytest.mark.parametrize(
    ("kind", "actor", "expected"),
    [
        ("qwen3", {}, ("megatron", None, None)),
        ("qwen3", {"fsdp_cpu_offload": True}, ("fsdp2", None, None)),
        ("gemma2", {}, ("fsdp2", None, None)),
        ("opt", {}, ("fsdp2", None, False)),
        ("phimoe", {}, ("fsdp2", False, None)),
        ("falcon", {"fused_lm_head": True}, ("fsdp2", False, True)),
        ("falcon", {"packing": True}, "actor.packing"),
        ("gemma2", {"pp": 2}, "actor.pp"),
    ],
)
def test_what_auto_chooses(folders: Path, qwen3: Path, kind: str, actor: dict[str, Any], expected: Any) -> None:
    """Fails if a user has to find the settings of a model by three refusals, or an explicit value is replaced."""
    config = _config(qwen3 if kind == "qwen3" else folders / kind, strategy="auto", **actor)
    if isinstance(expected, str):
        with refuses(expected):
            chosen(config)
        return
    found = chosen(config)
    assert (found.actor.strategy, found.actor.packing, found.actor.fused_lm_head) == expected
    check_student(found)


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_models_that_read_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Fails if a user has to remove the tower from a folder, or if what it or an engine lacks is found after the start.

    Or if all that is missing is taken for a part of the tower.
    """
    config = _config(make_model_folder(tmp_path, kind), lora=LoraConfig(rank=2))
    assert check_student(config) == VOCAB
    with refuses("model.path"):
        check_student(config.with_values({"actor.strategy": "megatron"}))
    monkeypatch.setattr("teacher_server.engines.folder_check.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="torchvision"):
        check_engines(config, "cpu")
    assert (read_model_folder(tmp_path, "model.path").tensors or {}).keys() == language_model(tensor_shapes(tmp_path))
    lost = "layers.1.mlp.up_proj.weight"
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if not n.endswith(lost)}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=lost):
        check_student(config)
    with pytest.raises(ServerError, match=lost):
        HfEngine(EngineSettings(model=str(tmp_path), max_tokens=8), dtype="float32", device="cpu")


def test_changes_to_logits_that_a_model_does_not_make_are_accepted(qwen3: Path) -> None:
    """Fails if a key of config.json is refused that the model's code does not read."""
    hf = build_on_meta(qwen3, dtype=torch.float32, packing=False)
    hf.config.update({"logits_scaling": 8.0, "final_logit_softcapping": 30.0, "logit_scale": "inv_sqrt_d_model"})
    probe_on_meta(hf, packing=False, fused=True)


@pytest.mark.parametrize(("kind", "is_fused"), [("qwen3_moe", True), ("olmo2", True), ("gemma2", False)])
def test_norms_compute_with_torchs_kernel(folders: Path, kind: str, is_fused: bool) -> None:
    """Fails if a norm takes eight launches on a GPU, or if a norm that computes something else is replaced."""
    hf = build_on_meta(folders / kind, dtype=torch.bfloat16, packing=False)
    norms = [module for module in hf.modules() if type(module).__name__.endswith("RMSNorm")]
    assert norms
    for norm in norms:
        size = norm.weight.shape[0]
        norm.weight = torch.nn.Parameter(torch.linspace(0.5, 2.0, size))
        x = torch.randn(3, size)
        plain = type(norm).forward(norm, x)  # as the model's own code computes it
        with torch.profiler.profile() as profiled:
            found = norm(x)
        torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-5)
        assert ("aten::rms_norm" in {event.key for event in profiled.key_averages()}) == is_fused


def test_a_norm_with_a_gate_computes_with_it(tmp_path: Path) -> None:
    """Fails if the norm of a Mamba 2 layer is replaced by one without a gate: the student cannot start."""
    sizes = {"vocab_size": VOCAB, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    hf = build_on_meta(save_random(tmp_path, "Mamba2", **sizes), dtype=torch.float32, packing=False)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    hf.load_state_dict(own.state_dict(), assign=True)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(LossModel(hf)(tokens, tokens[0]), own(tokens).logits[0], atol=1e-5, rtol=1e-5)


def test_experts_are_found_in_the_files(folders: Path, tmp_path: Path) -> None:
    """Fails if files with one tensor per expert are refused, or accepted with one missing or misshaped."""
    check_student(_config(folders / "mixtral"))
    weights = load_file(folders / "mixtral" / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    for changed, text in (
        ({key: tensor for key, tensor in weights.items() if key != name}, ".experts.*.w3.weight"),
        (
            {key: tensor for key, tensor in weights.items() if ".1.block_sparse_moe.experts." not in key},
            "2 tensors are",
        ),
        ({**weights, name: weights[name][:-1].contiguous()}, name),
        ({**weights, name.replace("w3", "w4"): torch.zeros(2)}, name.replace("w3", "w4")),
    ):
        shutil.copytree(folders / "mixtral", tmp_path, dirs_exist_ok=True)
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with refuses("model.path", text=text):
            check_student(_config(tmp_path))


def test_adapters_that_leave_out_the_experts_are_refused(tmp_path: Path) -> None:
    """Fails if a target that names layers of experts, which get no adapters, is accepted because a dense or a shared
    layer has that name, too, or if such a layer cannot be named.
    """
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "vocab_size": 64}
    shared = save_random(tmp_path / "shared", "Qwen2Moe", shared_expert_intermediate_size=24, **sizes)
    mixed = save_random(tmp_path / "mixed", "Qwen3Moe", mlp_only_layers=[0], **sizes)
    for folder, layer in ((shared, "shared_expert"), (mixed, "mlp")):
        for targets in (LoraConfig().targets, ["q_proj", "down_proj"]):
            with refuses("actor.lora.targets", text=f"{layer}.down_proj"):
                check_student(_config(folder, packing=False, lora=LoraConfig(rank=2, targets=targets)))
        for target in ("q_proj", f"{layer}.down_proj"):
            check_student(_config(folder, packing=False, lora=LoraConfig(rank=2, targets=[target])))


def test_files_without_the_prefix_of_the_backbone(tmp_path: Path) -> None:
    """Fails if names without the backbone's prefix, like those of the first gpt2, are refused or mismatched."""
    make_model_folder(tmp_path, "gpt2")
    weights = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_student(_config(tmp_path))
    hf = build_on_meta(tmp_path, dtype=torch.float32, packing=True)
    with open_tensors(tmp_path) as tensors:
        places = match_files(hf, tmp_path, tensors)
    assert {part.name for place in places.values() for part in place.parts} == bare.keys()
    assert places["transformer.wte.weight"].parts[0].name == "wte.weight"


def test_unsupported_conversions_are_refused(folders: Path) -> None:
    """Fails if a tensor is loaded unchanged although transformers would convert it."""
    hf = build_on_meta(folders / "mixtral", dtype=torch.float32, packing=True)
    transposed = [WeightConverter("mlp.gate.weight", "mlp.gate.weight", [Transpose(0, 1)])]
    before = get_checkpoint_conversion_mapping("mixtral")
    register_checkpoint_conversion_mapping("mixtral", transposed, overwrite=True)
    try:
        with pytest.raises(ModelError):
            file_parts(hf, ["model.layers.0.mlp.gate.weight"], {"model.layers.0.mlp.gate.weight": (3, 32)})
    finally:
        register_checkpoint_conversion_mapping("mixtral", before, overwrite=True)


def test_the_digest_distinguishes_models(qwen3: Path, tmp_path: Path) -> None:
    """Fails if adapters resume with changed base weights or not with a copy of their own, or if a teacher or reference
    on the actor's ranks may change rows of added tokens, or numbers of its config.json.
    """
    shutil.copytree(qwen3, tmp_path / "copy")
    assert weights_digest(tmp_path / "copy") == weights_digest(qwen3)
    config = json.loads((qwen3 / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert weights_digest(tmp_path / "copy") != weights_digest(qwen3)
    large = tmp_path / "large"  # in a larger file, rows of single tokens are between the samples
    large.mkdir()
    (large / "config.json").write_text(json.dumps(config | {"vocab_size": 20000}))
    tensors = {"model.embed_tokens.weight": torch.zeros(20000, 64), "model.norm.weight": torch.ones(64)}
    digests = set()
    for row in (0, 19990, 19999):
        tensors["model.embed_tokens.weight"][row] += 1
        save_file(tensors, large / "model.safetensors", metadata={"format": "pt"})
        digests.add(weights_digest(large))
    assert len(digests) == 3
    moved = {name: tensor * 1.01 for name, tensor in load_file(qwen3 / "model.safetensors").items()}
    save_file(moved, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
    assert weights_digest(tmp_path / "copy") != weights_digest(qwen3)


def test_clipping_scales_down_alone() -> None:
    """Fails if a small gradient is enlarged to actor.optim.clip_grad, or 0 does not switch clipping off."""
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25)
    assert clip_factor(4.0, 0.0) == 1.0


def test_a_broken_folder_is_named(qwen3: Path, tmp_path: Path) -> None:
    """Fails if the driver accepts a folder that the ranks cannot load."""
    settings = json.loads((qwen3 / "config.json").read_text())
    for config_json, text in (
        (settings, "model.safetensors"),
        (settings | {"hidden_act": "no_such_function"}, "no_such_function"),
        ({"model_type": "no_such_model"}, "no_such_model"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config_json))
        with refuses("model.path", text=text):
            check_student(_config(tmp_path))
        shutil.copy(qwen3 / "model.safetensors", tmp_path)


def test_tied_weights_are_allocated_in_host_memory_once(tmp_path: Path) -> None:
    """Fails if host offload moves a tied weight to the device, where fully_shard refuses it: the student cannot start.

    The meta device takes the place of a GPU.
    """
    hf = build_on_meta(make_hf_folder(tmp_path / "tied", "qwen2_tied"), dtype=torch.float32, packing=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(hf, mesh=init_device_mesh("cpu", (1,)))
        allocate(hf, torch.device("cpu"), torch.device("meta"))
    finally:
        dist.destroy_process_group()
    assert {param.device.type for param in hf.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in hf.buffers()} == {"meta"}
    assert hf.get_input_embeddings().weight is hf.get_output_embeddings().weight

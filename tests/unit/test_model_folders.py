"""Refuse model folders, layouts and adapters that a program would read or split differently. Starts no process."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gkd.actor.common.hf_folder import write_folder
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_actor import LoraConfig
from gkd.errors import ConfigError
from gkd.hf.model_folder import check_engines
from gkd.preflight.meta_models import local_teacher
from gkd.preflight.student import check_student
from teacher_server.engines.folder_check import CPU_HEAD_SIZES, check_folder
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
    for kind in ("qwen3", "qwen2_tied", "qwen3_moe"):
        make_hf_folder(root / kind, kind)
    return root


@pytest.fixture
def tied(models: Path, tmp_path: Path) -> Path:
    return shutil.copytree(models / "qwen2_tied", tmp_path / "model")


def _config(folder: Path, strategy: str = "megatron") -> Config:
    lengths = {"data.max_prompt_length": 16, "data.max_response_length": 16}
    return Config().with_values({"model.path": str(folder), "actor.strategy": strategy, **lengths})


def _set(folder: Path, *removed: str, **changes: Any) -> None:
    """Change config.json, after these keys are removed."""
    content = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in content.items() if key not in removed}
    (folder / "config.json").write_text(json.dumps(kept | changes))


def _index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


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
    _index(folder, weight_map)
    (folder / SINGLE).unlink()


def _other_head(folder: Path) -> None:
    _change(folder, lambda t: t.update({HEAD: t[EMBEDDING].clone().index_fill_(0, torch.tensor([1002]), 0.5)}))


def _other_head_of_gemma(folder: Path) -> None:
    """Leave the tie to the model type, as transformers writes it for the types that tie by default."""
    _other_head(folder)
    _set(folder, "tie_word_embeddings", model_type="gemma")


def _merged_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "base"}))
    save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")


def _adapter_only(folder: Path) -> None:
    _merged_adapter(folder)
    (folder / SINGLE).unlink()
    (folder / "config.json").unlink()


def _leftover_quantization(folder: Path) -> None:
    _set(folder, quantization_config={"quant_method": "fp8"})


def _lost_index(folder: Path) -> None:
    _split(folder)
    (folder / INDEX).unlink()


def _old_copy_in_a_shard(folder: Path) -> None:
    _split(folder)
    tensors = load_file(folder / SHARDS[1])
    save_file(tensors | {EMBEDDING: torch.zeros(1003, 32)}, folder / SHARDS[1], metadata={"format": "pt"})


TIE = (HEAD, EMBEDDING, "differ", "set tie_word_embeddings to false")
DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "merged adapter": (
        _merged_adapter,
        ("adapter_config.json and adapter_model.safetensors", "next to full weights", "delete"),
    ),
    "adapter only": (_adapter_only, ("LoRA adapter of base", "merge it into base")),
    "other head": (_other_head, TIE),
    "other head of Gemma": (_other_head_of_gemma, TIE),
    "resized head": (lambda path: _change(path, lambda t: t.update({HEAD: t[EMBEDDING][:-1].clone()})), TIE),
    "only a head": (
        lambda path: _change(path, lambda t: t.update({HEAD: t.pop(EMBEDDING)})),
        (HEAD, "instead of the input embedding", "save_pretrained"),
    ),
    "leftover quantization": (_leftover_quantization, ("full precision", "remove quantization_config")),
    "stale index": (
        lambda path: _index(path, {EMBEDDING: SHARDS[0], HEAD: SHARDS[1]}),
        (INDEX, SHARDS[0], f"delete {INDEX}"),
    ),
    "lost index": (_lost_index, (*SHARDS, f"copy {INDEX}")),
    "old copy in a shard": (_old_copy_in_a_shard, (EMBEDDING, *SHARDS)),
    "lost shard": (lambda path: _index(path, {EMBEDDING: SINGLE, "model.norm.weight": SHARDS[1]}), (SHARDS[1],)),
    "no config": (lambda path: (path / "config.json").unlink(), ("config.json",)),
    "cut config": (lambda path: (path / "config.json").write_text("{"), ("config.json",)),
    "no weights": (lambda path: (path / SINGLE).unlink(), (SINGLE,)),
    "cut weights": (lambda path: (path / SINGLE).write_bytes((path / SINGLE).read_bytes()[:-100]), (SINGLE,)),
    "cut header": (lambda path: (path / SINGLE).write_bytes((path / SINGLE).read_bytes()[:40]), (SINGLE,)),
}


@pytest.mark.parametrize(("damage", "parts"), DAMAGES.values(), ids=DAMAGES)
def test_every_program_refuses_the_folder(tied: Path, damage: Callable[[Path], None], parts: tuple[str, ...]) -> None:
    """Fails if a program serves or trains another model than the next one, or an error does not name the fix."""
    damage(tied)
    for strategy in ("megatron", "fsdp2"):
        with refuses("model.path") as caught:
            check_student(_config(tied, strategy))
        assert all(part in str(caught.value) for part in parts), str(caught.value)
    local = load_config(None, ["teacher.backend=local", f"teacher.path={tied}", "trainer.n_gpus_per_node=1"])
    with refuses("teacher.path") as caught:
        local_teacher(local, "cpu")
    assert all(part in str(caught.value) for part in parts)
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
    _index(tied, {EMBEDDING: SINGLE})
    assert check_folder(tied) == [tied / SINGLE]
    (tied / INDEX).unlink()
    _split(tied)
    assert check_folder(tied) == [tied / shard for shard in SHARDS]
    assert check_student(_config(tied)) == check_student(_config(tied, "fsdp2"))


def _without_prefix(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, folder / SINGLE, {"format": "pt"})


@pytest.mark.parametrize("strategy", ["megatron", "fsdp2"])
def test_a_student_saved_from_its_backbone_is_refused(tied: Path, strategy: str) -> None:
    """Fails if the engines of a run find after a minute that they have no module of these names, or a complete folder
    is called incomplete; or if the fix does not help.
    """
    whole = load_file(tied / SINGLE)
    _without_prefix(tied)
    with refuses("model.path", str(tied)) as caught:
        check_student(_config(tied, strategy))
    assert '"model."' in caught.value.problem and "AutoModelForCausalLM" in caught.value.fix
    AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32).save_pretrained(tied)
    assert check_student(_config(tied, strategy)) and load_file(tied / SINGLE).keys() == whole.keys()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"n_positions": 96}, 96),
        ({"n_ctx": 96, "max_position_embeddings": None}, 96),
        ({"seq_length": 96}, 96),
        ({"max_position_embeddings": 64, "n_positions": 96}, 64),
        ({}, None),
    ],
)
def test_a_server_reads_the_length_of_each_family(tied: Path, change: dict[str, Any], expected: int | None) -> None:
    """Fails if GPT-2, whose key is n_positions, is called a model that is none, or an unknown length is guessed."""
    _set(tied, "max_position_embeddings", **change)
    if expected is not None:
        assert inspect_model_folder(str(tied)).max_tokens == expected
        return
    with pytest.raises(ServerError, match="n_positions"):
        inspect_model_folder(str(tied))


def test_quantized_weights_are_for_servers_only(tied: Path) -> None:
    """Fails if a quantized student gets past the first check, or a quantized teacher is refused by a server."""
    _leftover_quantization(tied)
    _change(tied, lambda t: t.update({"scale": torch.zeros(3, dtype=torch.float8_e4m3fn)}))
    assert check_folder(tied) == [tied / SINGLE]
    with refuses("model.path"):
        check_student(_config(tied))


def test_a_float8_weight_without_its_scale_is_refused(tied: Path) -> None:
    """Fails if one lost scale, without which transformers reads the weight as it is, gives a teacher other scores."""
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)]
    _leftover_quantization(tied)
    scales = {f"{name}_scale_inv": torch.ones(1, 1) for name in names}
    _change(tied, lambda t: t.update({**{name: t[name].to(torch.float8_e4m3fn) for name in names}, **scales}))
    assert check_folder(tied) == [tied / SINGLE]
    _change(tied, lambda t: t.pop(f"{names[1]}_scale_inv"))
    with pytest.raises(ServerError):
        check_folder(tied)


def test_an_export_leaves_out_what_belongs_to_an_adapter(tied: Path, tmp_path: Path) -> None:
    """Fails if transformers looks for an adapter in an export and cannot load it."""
    _merged_adapter(tied)
    write_folder(iter([("a", torch.ones(2, 3))]), [[("a", (2, 3), torch.float32)]], tmp_path / "export", tied)
    names = {file.name for file in (tmp_path / "export").iterdir()}
    assert not [name for name in names if "adapter" in name] and {"config.json", SINGLE} <= names


@pytest.mark.parametrize("eos", [{"generation_config.json": 7}, {"config.json": [7, 3]}, {}])
def test_an_export_ends_responses_as_the_run_did(tied: Path, tmp_path: Path, eos: dict[str, Any]) -> None:
    """Fails if an engine that serves the export generates past rollout.stop_token_ids, or past the model's own end."""
    (tied / "generation_config.json").unlink(missing_ok=True)
    _set(tied, eos_token_id=eos.get("config.json"))
    if "generation_config.json" in eos:
        (tied / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "top_p": 0.9}))
    weight = torch.ones(2, 3)
    write_folder(iter([("a", weight)]), [[("a", (2, 3), torch.float32)]], tmp_path / "export", tied, stop_ids=[5, 7])
    found = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert set(found["eos_token_id"]) == {5, 7, *([3] if "config.json" in eos else [])}
    assert found.get("top_p") == (0.9 if "generation_config.json" in eos else None)


@pytest.mark.parametrize(
    ("change", "on_cpu", "word"),
    [
        ({"head_dim": 16}, False, ""),
        ({"head_dim": 16}, True, "size 16"),
        ({"head_dim": None}, True, "size 8"),  # hidden size 32, 4 heads
        ({"kv_lora_rank": 4, "head_dim": 16}, True, ""),
        ({"text_config": {"head_dim": 48}}, True, "size 48"),
        ({"head_dim": 32, "linear_key_head_dim": 8}, True, "bfloat16"),
        ({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9}, False, "sliding window"),
        ({"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 9}, False, ""),
        ({"layer_types": ["full_attention", "sliding_attention"], "max_window_layers": 1}, False, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"], "model_type": "gemma3"}, False, ""),
        ({"sliding_window": 9, "use_sliding_window": False, "model_type": "llama"}, False, "sliding_window = 9"),
        ({"sliding_window": 9, "model_type": "llama", "layer_types": ["full_attention"] * 2}, False, ""),
        ({"sliding_window": 1 << 20, "model_type": "llama"}, False, ""),
        ({"sliding_window": 9, "model_type": "mistral"}, False, ""),
    ],
)
def test_what_vllm_cannot_compute_is_refused_early(
    models: Path, tmp_path: Path, change: dict[str, Any], on_cpu: bool, word: str
) -> None:
    """Fails if a run starts all its processes for a model that vLLM refuses at the first rollout, or whose rollouts
    have a sliding window that the trainer does not.
    """
    shutil.copy(models / "qwen3" / "config.json", tmp_path)
    _set(tmp_path, **{"layer_types": None, **change})
    config = _config(tmp_path).with_values({"model.dtype": "float32"})
    if not word:
        return check_engines(config, "cpu" if on_cpu else "cuda")
    with pytest.raises(ConfigError, match=word) as caught:
        check_engines(config, "cpu" if on_cpu else "cuda")
    assert caught.value.key == "model.path" and "GPU" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "cohere2", "sliding_window": 40},
        {"rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 40}},
    ],
)
def test_sequences_that_vllm_computes_otherwise_are_refused(
    models: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Fails if the student trains on rollouts of another model as soon as a sequence is long."""
    shutil.copy(models / "qwen3" / "config.json", tmp_path)
    _set(tmp_path, head_dim=32, **change)
    config = _config(tmp_path).with_values({"data.max_prompt_length": 20, "data.max_response_length": 20})
    check_engines(config, "cuda")
    with refuses("data.max_response_length"):
        check_engines(config.with_values({"data.max_response_length": 21}), "cuda")


def test_the_head_sizes_are_those_of_the_installed_vllm() -> None:
    """Fails if another version of vLLM supports other head sizes on the CPU than are refused here."""
    folder = Path(str(find_spec("vllm").origin)).parent  # type: ignore[union-attr]
    source = (folder / "v1/attention/backends/cpu_attn.py").read_text()
    function = source.partition("def get_supported_head_sizes")[2]
    assert tuple(ast.literal_eval(function.partition("return ")[2].partition("]")[0] + "]")) == CPU_HEAD_SIZES


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ({"model_type": "gemma"}, "actor.strategy=fsdp2"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "model.trust_remote_code=true"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "actor.strategy=fsdp2"),
    ],
)
def test_the_fix_is_the_backend_that_takes_the_model(tied: Path, change: dict[str, Any], fix: str) -> None:
    """Fails if the fix is to copy a folder that has nothing missing."""
    _set(tied, **change)
    with pytest.raises(ConfigError, match=f"Fix: .*{fix}"):
        check_student(_config(tied))


def _four_ranks(folder: Path, **actor: object) -> Config:
    """Return settings with 4 actor ranks."""
    return _config(folder).with_values({"trainer.n_gpus_per_node": 4} | {f"actor.{key}": actor[key] for key in actor})


def test_layouts_of_experts(models: Path) -> None:
    """Fails if preflight checks another layout than the one that is built, or accepts an impossible one."""
    for fits in ({}, {"ep": 2}, {"pp": 2, "ep": 2}, {"tp": 2, "ep": 2, "sequence_parallel": True}):
        check_student(_four_ranks(models / "qwen3_moe", **fits))
    for folder, actor, key in (
        ("qwen3_moe", {"ep": 3}, "actor.ep"),  # of four ranks
        ("qwen3_moe", {"ep": 4}, "actor.ep"),  # of six experts
        ("qwen3_moe", {"pp": 2, "ep": 4}, "actor.ep"),
        ("qwen3_moe", {"tp": 2}, "actor.sequence_parallel"),
        ("qwen3", {"ep": 2}, "actor.ep"),
    ):
        with refuses(key):
            check_student(_four_ranks(models / folder, **actor))


def test_adapters(models: Path) -> None:
    """Fails if adapters that a rank would refuse start a run, or layers of experts are left out silently."""
    check_student(_four_ranks(models / "qwen3", tp=2, lora=LoraConfig(rank=2)))
    attention = ["q_proj", "k_proj", "v_proj", "self_attn.o_proj"]
    check_student(_four_ranks(models / "qwen3_moe", lora=LoraConfig(rank=2, targets=attention)))
    for folder, targets in (
        ("qwen3_moe", ["q_proj", "down_proj"]),
        ("qwen3", ["q_proj", "lm_head"]),
        ("qwen3", ["linear_qkv"]),
        ("qwen3", []),
    ):
        with refuses("actor.lora.targets") as caught:
            check_student(_four_ranks(models / folder, lora=LoraConfig(rank=2, targets=targets)))
        assert "q_proj" in caught.value.fix and "linear_qkv" not in caught.value.fix


@pytest.mark.parametrize("strategy", ["megatron", "fsdp2"])
def test_engines_with_experts_get_merged_weights(models: Path, strategy: str) -> None:
    """Fails if an engine is started that computes experts with kernels for which weight syncs were never tested."""
    lora = LoraConfig(rank=2, targets=["q_proj"])
    for folder in ("qwen3_moe", "qwen3"):
        config = _four_ranks(models / folder, lora=lora, strategy=strategy)
        check_student(config)
        with refuses("weight_sync.lora") if folder == "qwen3_moe" else nullcontext():
            check_student(config.with_values({"weight_sync.lora": "adapters"}))


def test_experts_that_the_engines_cannot_split(models: Path, tmp_path: Path) -> None:
    """Fails if a rollout engine is started that cannot split the experts' columns over its ranks."""
    folder = tmp_path / "narrow"
    shutil.copytree(models / "qwen3_moe", folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = (tensors[name][:, :23] if "down" in name else tensors[name][:23]).contiguous()
    save_file(tensors, folder / "model.safetensors")
    config = _four_ranks(folder)
    with refuses("model.path") as caught:
        check_student(config)
    assert all(part in str(caught.value) for part in ("experts.0.gate_proj.weight", "[23, 32]"))
    _set(folder, moe_intermediate_size=23)
    check_student(config)
    with refuses("rollout.tp", text="23"):
        check_student(config.with_values({"rollout.tp": 2}))

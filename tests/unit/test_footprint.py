"""Footprints: parameters of real models, states to the byte, the command, preflight."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.errors import ConfigError, ModelError
from gkd.hf.model_dims import read_dims
from gkd.hf.model_folder import ModelFolder, Tensors, count_params, read_model_folder
from gkd.memory.footprint.estimate import HOST_PARTS, LOGITS_BYTES, STATES, RankFootprint, RunModels, footprint
from gkd.preflight import memory as preflight_memory
from gkd.tools import memory
from tests.refusals import refuses
from tests.unit.test_launch import put_tool

GIB = 1 << 30
GSM8K = Path(__file__).parents[2] / "configs" / "gsm8k_qwen2.5_1.5b.yaml"
# The public config.json of Qwen2.5-1.5B.
QWEN25_15B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
TP2 = ("trainer.n_gpus_per_node=2", "actor.tp=2")
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_experts": 4}


def config_of(*overrides: str) -> Config:
    return load_config(GSM8K, ["actor.max_tokens_per_micro_batch=16384", *overrides])


def folder_of(config_json: dict[str, Any], tensors: Tensors | None = None) -> ModelFolder:
    return ModelFolder(config_json, read_dims(config_json), tensors)


def ranks_of(config: Config, config_json: dict[str, Any] = QWEN25_15B, **more: Any) -> tuple[RankFootprint, ...]:
    """Return the footprints of a student of these sizes; `more` as in `RunModels`, and `gpu_bytes`."""
    gpu_bytes = more.pop("gpu_bytes", None)
    return footprint(config, RunModels(folder_of(config_json), **more), gpu_bytes)


def actor_of(*overrides: str, config_json: dict[str, Any] = QWEN25_15B, **more: Any) -> RankFootprint:
    return ranks_of(config_of(*overrides), config_json, **more)[0]


@pytest.mark.parametrize("kind", ["gpt_neox", "olmo3"])
def test_other_models_are_counted_in_their_files(kind: str) -> None:
    """Fails if a tensor is not counted, or a layer is not recognized by its name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES))
    tensors = {name: tuple(param.shape) for name, param in model.state_dict().items()}
    total, layer, embedding = count_params(tensors)
    assert total == sum(param.numel() for param in model.parameters())
    assert layer == sum(param.numel() for param in model.base_model.layers[0].parameters())
    assert embedding == SIZES["vocab_size"] * SIZES["hidden_size"]
    config_json = json.loads(model.config.to_json_string(use_diff=False))
    found, _ = footprint(config_of("actor.strategy=fsdp2"), RunModels(folder_of(config_json, tensors)))
    assert found.sum_of(STATES) == 16 * total


def test_states_are_what_the_ranks_keep() -> None:
    """Fails if float32 gradients, masters or moments are forgotten, or masters counted where weights are their own."""
    n = 1_543_714_304  # as published
    assert read_dims(QWEN25_15B).n_params == n
    assert actor_of().sum_of(STATES) == (2 + 4 + 12) * n
    assert actor_of("model.dtype=float32").sum_of(STATES) == (4 + 4 + 8) * n
    assert actor_of("actor.strategy=fsdp2").sum_of(STATES) == (4 + 4 + 8) * n
    sharded = actor_of("trainer.n_gpus_per_node=4")
    assert (sharded.parts["weights"], sharded.parts["optimizer"]) == (2 * n, 12 * n // 4)
    assert actor_of("trainer.n_gpus_per_node=4", "actor.strategy=fsdp2").sum_of(STATES) == 16 * n // 4
    offloaded = actor_of("actor.strategy=fsdp2", "actor.fsdp_cpu_offload=true", "trainer.save_every=0")
    # Gradients are pinned one by one, which makes less than twice of them.
    assert offloaded.sum_of(STATES) == 0 and offloaded.sum_of(HOST_PARTS) == (16 + 4) * n
    assert actor_of("trainer.save_every=0", "trainer.keep_best=eval/kl").parts["saved_copy"] == 12 * n


@pytest.mark.parametrize(("overrides", "tp"), [((), 1), (TP2, 2)])
def test_the_states_of_adapters(overrides: tuple[str, ...], tp: int) -> None:
    """Fails if frozen weights are charged for gradients or moments, a factor that TP splits is counted whole, or the
    adapters that an engine holds are not padded to one of vLLM's ranks.
    """
    lora = ("actor.lora.rank=20", "actor.lora.targets=[q_proj,v_proj,down_proj]")
    n = 20 * 28 * ((1536 + 1536 // tp) + (1536 + 256 // tp) + (8960 // tp + 1536))
    found, whole = actor_of(*lora, *overrides), actor_of(*overrides)
    assert found.parts["weights"] - whole.parts["weights"] == 4 * n
    assert (found.parts["gradients"], found.parts["optimizer"], found.parts["saved_copy"]) == (4 * n, 8 * n, 12 * n)
    merged, beside = (
        ranks_of(config_of(*lora, f"weight_sync.lora={content}"))[-1].parts["weights"]
        for content in ("merged", "adapters")
    )
    assert beside - merged == 2 * 32 * 28 * ((1536 + 1536) + (1536 + 256) + (8960 + 1536))


def test_experts_have_no_adapters() -> None:
    """Fails if adapters are counted for expert MLPs, which are not linear layers."""
    shape = {"model_type": "qwen3_moe", **SIZES, **EXPERTS, "head_dim": 8, "mlp_only_layers": [1]}
    overrides = ("actor.strategy=fsdp2", "actor.lora.rank=4", "actor.lora.targets=[mlp.up_proj,q_proj]")
    assert actor_of(*overrides, config_json=shape).parts["gradients"] == 4 * 4 * ((48 + 80) + 3 * (48 + 48))


def test_the_teachers_lm_head_is_counted_where_it_is_kept() -> None:
    """Fails if the 4 V D bytes of teacher.signal hidden are forgotten, or not shared over TP."""
    for overrides, ranks in (((), 1), (TP2, 2)):
        found = actor_of("teacher.signal=hidden", *overrides, teacher_hidden=3584)
        assert found.parts["teacher_head"] == 4 * 151936 * 3584 // ranks


def test_a_local_teacher_is_on_the_actors_ranks() -> None:
    """Fails if a local teacher's shards are in no sum, or its pass is added to a training step's, which it never is."""
    local, total = ["teacher.backend=local", "teacher.path=t"], read_dims(QWEN25_15B).n_params
    plain = actor_of()

    def ranks(*overrides: str) -> RankFootprint:
        return actor_of(*local, *overrides, local_teacher=folder_of(QWEN25_15B))

    hosted, resident = ranks(), ranks("teacher.fsdp_cpu_offload=false")
    averaged = ranks("teacher.update_interval=1", "teacher.update_ema=0.5")
    hosted_bytes = hosted.sum_of(HOST_PARTS) - plain.sum_of(HOST_PARTS)
    assert hosted_bytes == resident.parts["teacher_weights"] == 2 * total
    assert averaged.parts["teacher_shards"] == 4 * total
    follows = ranks("teacher.update_interval=2")
    assert follows.parts["saved_copy"] - plain.parts["saved_copy"] == follows.parts["teacher_shards"]
    assert hosted.total_bytes == plain.total_bytes  # a pass takes less than a training step
    assert resident.total_bytes == plain.total_bytes + resident.parts["teacher_weights"]
    assert hosted.parts["teacher_pass"] > 2 * 151936 * 1536  # the embedding and more


def test_a_local_teachers_chunk_is_the_engines() -> None:
    """Fails if the engines compute more logits at a time than the prediction counts."""
    from teacher_server.engines.signals import CHUNK_BYTES

    assert LOGITS_BYTES == CHUNK_BYTES


def test_the_weight_sync() -> None:
    """Fails if a bucket is thought to be smaller than the tensor in it, or a gathered tensor is forgotten."""
    n, table = read_dims(QWEN25_15B).n_params, 151936 * 1536
    assert actor_of().parts["weight_sync"] == 2 * 2 * table  # one is sent while the next is filled
    assert actor_of("weight_sync.bucket_mib=1024").parts["weight_sync"] == 2048 << 20
    assert actor_of("weight_sync.bucket_mib=2048").parts["weight_sync"] == 2 * n, "more than all weights"
    assert actor_of(*TP2).parts["weight_sync"] == 4 * 2 * table
    assert actor_of("actor.strategy=fsdp2").parts["weight_sync"] == 3 * 2 * table


@pytest.mark.parametrize(
    ("words", "overrides", "model"),
    [
        ("does not divide the model's 28 layers", ("trainer.n_gpus_per_node=3", "actor.pp=3"), QWEN25_15B),
        ("attention heads of a tensor", ("trainer.n_gpus_per_node=8", "actor.cp=8"), QWEN25_15B),
        ("sequence_parallel", TP2, {"model_type": "qwen3_moe", **SIZES, **EXPERTS, "head_dim": 8}),
        ("use_sliding_window", (), {**QWEN25_15B, "use_sliding_window": True}),
        ("12 attention heads", ("rollout.tp=5", "rollout.n_gpus_per_node=5"), QWEN25_15B),
    ],
)
def test_a_split_that_the_run_refuses_has_no_prediction(
    words: str, overrides: tuple[str, ...], model: dict[str, Any]
) -> None:
    """Fails if a table is printed for a model or a split that the actor or the engines refuse."""
    with pytest.raises((ConfigError, ModelError), match=words):
        ranks_of(config_of(*overrides), model)


@pytest.mark.parametrize(
    ("overrides", "boundaries"),
    [
        # One batch has 12 micro-batches. A stage of 7 layers keeps their inputs, what came in and what went out.
        (("trainer.n_gpus_per_node=4", "actor.pp=4"), [4 * 9, 3 * 9, 2 * 9, 1 * 9 + 1]),
        # Chunks of 7 layers: 5 of the first stage are in flight, 3 of the second.
        (("trainer.n_gpus_per_node=2", "actor.pp=2", "actor.vpp=2"), [5 * 9, 3 * 9 + 1]),
        # Of a single micro-batch each stage has one.
        (("trainer.n_gpus_per_node=2", "actor.pp=2", "trainer.global_batch_size=8"), [16 * 0.75, 17 * 0.75]),
    ],
)
def test_micro_batches_under_way(overrides: tuple[str, ...], boundaries: list[float]) -> None:
    """Fails if a pipeline's stage is thought to hold more or fewer micro-batches than 1F1B gives it."""
    found = ranks_of(config_of("actor.recompute=full", *overrides))[:-1]
    assert [part.parts["activations"] / (2 * 1536 * 16384) for part in found] == boundaries


def _folder(path: Path, config_json: str | None) -> Path:
    path.mkdir()
    if config_json is not None:
        (path / "config.json").write_text(config_json)
    return path


@pytest.mark.parametrize("content", [None, "not JSON", "[]"])
def test_a_folder_without_a_config(tmp_path: Path, content: str | None) -> None:
    """Fails if a wrong folder is a traceback instead of an error with its key."""
    with refuses("model.path"):
        read_model_folder(_folder(tmp_path / "model", content), "model.path")


def test_damaged_weight_files(tmp_path: Path) -> None:
    """Fails if the headers of absent, truncated or foreign files end in a traceback."""
    folder = _folder(tmp_path / "model", json.dumps({**QWEN25_15B, "model_type": "olmo3"}))
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        read_model_folder(folder, "model.path")
    for content in (b"", b"\xff" * 64, (20).to_bytes(8, "little") + b'{"a": {"dtype": "F32'):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match=f"{folder}: model.safetensors is damaged"):
            read_model_folder(folder, "model.path")


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    return f"model.path={_folder(tmp_path / 'qwen', json.dumps(QWEN25_15B))}"


def _tool(*arguments: str) -> int:
    return memory.main(["--config", str(GSM8K), *arguments])


def test_the_command(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the exit code or the lines do not show whether the run fits, or the printed command does not fit."""
    assert _tool("--gpu-gib", "80", qwen) == 0
    assert "actor rank 0: peak 51.50 GiB (training step), 64% of the GPU" in capsys.readouterr().out
    larger = (qwen, "data.prompt_key=my question", "actor.max_tokens_per_micro_batch=16384", "actor.layers=torch")
    card = ("--gpu-gib", "80", "--host-gib", "256")
    assert _tool(*card, *larger) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "TOO LARGE actor rank 0 (training step) needs 74.68 GiB, 2.68 GiB more than 90%" in "\n".join(lines)
    words = shlex.split(lines[-1].partition("it fits with: ")[2])
    assert words[:5] == ["python", "-m", "gkd.main_gkd", "--config", str(GSM8K)]
    assert load_config(words[4], words[5:]).data.prompt_key == "my question"
    assert _tool(*card, *words[5:]) == 0
    capsys.readouterr()
    assert _tool("--gpu-gib", "24", "--json", qwen) == 1
    found = json.loads(capsys.readouterr().out)
    assert list(found["ranks"]) == ["actor rank 0", "rollout rank 0"]
    assert found["ranks"]["actor rank 0"]["weights"] == 2 * 1_543_714_304 and len(found["problems"]) == 2
    assert _tool("--gpu-gib", "24", qwen, *found["changes"]) == 0
    assert _tool("--gpu-gib", "24", "--host-gib", "8", qwen, *found["changes"]) == 1
    assert "a host" in capsys.readouterr().out


def test_the_command_counts_the_teacher(qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a head is left out silently, one with more token ids is counted with the student's rows, or the shards
    of a local teacher are left out.
    """
    assert _tool("teacher.signal=hidden", qwen) == 0
    assert "--teacher" in capsys.readouterr().out, "the head that it cannot count"
    path = _folder(tmp_path / "teacher", json.dumps(QWEN25_15B | {"vocab_size": 303872}))
    signal = ("teacher.signal=hidden", f"teacher.tokenizer={path}")
    _tool("--gpu-gib", "80", "--json", "--teacher", str(path), *signal, qwen)
    assert json.loads(capsys.readouterr().out)["ranks"]["actor rank 0"]["teacher_head"] == 4 * 303872 * 1536
    assert _tool(qwen, "teacher.backend=local", f"teacher.path={path}", "--json") == 0
    actor, engine = json.loads(capsys.readouterr().out)["ranks"].values()
    assert "teacher_shards" in actor and "teacher_shards" not in engine


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--gpu-gib", "inf"), "--gpu-gib"), (("--teacher", "nowhere"), "--teacher"), (("actor.tp=0",), "actor.tp")],
)
def test_wrong_arguments_of_the_command(
    qwen: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    """Fails if a wrong setting is a traceback, or exit code 1, which means that it does not fit."""
    assert _tool(qwen, *arguments) == 2
    assert words in capsys.readouterr().err


def list_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: Sequence[tuple[float, float]]) -> None:
    """Put an nvidia-smi on PATH that lists GPUs with this total and free memory in GiB."""
    rows = [
        f"{i}, GPU-{i}, Card, 00000000:{i:02x}:00.0, {total * 1024:.0f}, {free * 1024:.0f}\n"
        for i, (total, free) in enumerate(gpus)
    ]
    put_tool(folder, "nvidia-smi", f"case $1 in *gpu=*) printf '%s' '{''.join(rows)}';; esac")
    monkeypatch.setenv("PATH", f"{folder}/bin", prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_preflight_warns_and_refuses(
    qwen: str,
    tmp_path: Path,
    host_has: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    gkd_log: pytest.LogCaptureFixture,
) -> None:
    """Fails if a run whose states, or whose engine's weights alone, are too large for its GPUs starts, or one that may
    fit is refused.
    """
    list_gpus(tmp_path, monkeypatch, [(24, 24), (40, 40), (80, 80)])
    host_has(256)
    two = [qwen, "rollout.n_gpus_per_node=1", "rollout.max_num_seqs=0"]
    preflight_memory.check_memory(config_of(*two, "cluster.gpus=[1,2]"), "cuda", None)
    assert "actor rank 0 (training step) needs" in gkd_log.text and "40.00 GiB" in gkd_log.text
    (line,) = [line for line in gkd_log.text.splitlines() if line.startswith("it fits with: ")]
    gkd_log.clear()
    preflight_memory.check_memory(config_of(*two, "cluster.gpus=[1,2]", *line.split()[3:]), "cuda", None)
    assert not [record for record in gkd_log.records if record.levelno > logging.INFO], "the overrides that it printed"
    with pytest.raises(ConfigError) as caught:
        preflight_memory.check_memory(config_of(*two, "cluster.gpus=[0,2]"), "cuda", None)
    assert caught.value.key == "trainer.n_gpus_per_node" and "actor.fsdp_cpu_offload=true" in caught.value.fix
    assert "25.88 GiB" in caught.value.problem and "24.00 GiB" in caught.value.problem
    gkd_log.clear()
    host_has(8)
    run = preflight_memory.check_memory(config_of(*two, "cluster.gpus=[2,1]", "actor.recompute=full"), "cuda", None)
    assert run.rollout.max_num_seqs == 500 and "a host" in gkd_log.text
    gkd_log.clear()
    assert preflight_memory.check_memory(config_of(*two), "cpu", None).rollout.max_num_seqs == 128
    assert "actor rank 0" in gkd_log.text
    list_gpus(tmp_path, monkeypatch, [(2, 2), (2, 2)])
    host_has(256)
    host = ("actor.strategy=fsdp2", "actor.fsdp_cpu_offload=true", "rollout.n_gpus_per_node=1", "cluster.gpus=[0,1]")
    with refuses("rollout.tp"):
        preflight_memory.check_memory(config_of(qwen, *host), "cuda", None)


def test_only_gpus_of_the_run_count(
    qwen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gkd_log: pytest.LogCaptureFixture
) -> None:
    """Fails if a valid run is refused because of a small GPU that it does not use."""
    list_gpus(tmp_path, monkeypatch, [(4, 4), (80, 80), (48, 48)])
    for overrides, n_bytes in (
        (["cluster.gpus=[1]"], 80 * GIB),
        (["cluster.gpus=[2,1]"], 48 * GIB),
        (["cluster.ray_address=10.0.0.5:6379", "cluster.gpus=[0]"], None),
    ):
        assert preflight_memory.smallest_gpu(config_of(*overrides).cluster) == n_bytes, overrides
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")  # ids stay nvidia-smi's
    assert preflight_memory.smallest_gpu(config_of("cluster.gpus=[1]").cluster) == 80 * GIB
    preflight_memory.check_memory(config_of(qwen, "cluster.ray_address=10.0.0.5:6379"), "cuda", None)
    assert "weights" in gkd_log.text
    assert not [record for record in gkd_log.records if record.levelno > logging.INFO]

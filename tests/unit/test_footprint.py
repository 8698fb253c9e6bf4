"""Footprints: parameters of real models, the published numbers of Qwen2.5-1.5B, shortages, the command."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.errors import ConfigError, ModelError
from gkd.hf.model_dims import read_dims
from gkd.hf.model_folder import count_params, read_model_folder
from gkd.memory.footprint import check
from gkd.memory.footprint.estimate import footprint
from gkd.memory.footprint.rank import RankFootprint
from gkd.preflight import memory as preflight_memory
from gkd.tools import memory
from tests.refusals import refuses

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
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3, heads of their own size": ("Qwen3", {"head_dim": 16}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"head_dim": 8}),
    "qwen3_moe, a dense layer": ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [1], "head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
}


def _config(*overrides: str) -> Config:
    return load_config(GSM8K, ["actor.max_tokens_per_micro_batch=16384", *overrides])


def _actor(*overrides: str, shape: dict[str, Any] = QWEN25_15B) -> RankFootprint:
    return footprint(_config(*overrides), shape)[0]


def _on_meta(kind: str, settings: dict[str, Any]) -> Any:
    import transformers as tf

    with torch.device("meta"):
        return getattr(tf, f"{kind}ForCausalLM")(getattr(tf, f"{kind}Config")(**{**SIZES, **settings}))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    """Fails if a formula forgets a bias, a norm, a router, or counts shared embeddings twice."""
    model = _on_meta(*MODELS[name])
    config_json = json.loads(model.config.to_json_string(use_diff=False))
    shape = read_dims(config_json)
    assert shape.is_exact
    assert shape.n_params == sum(param.numel() for param in model.parameters())
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert [shape.dense_params(i) + shape.expert_params(i) for i in range(shape.n_layers)] == layers


@pytest.mark.parametrize(("kind", "settings"), [("GPTNeoX", {}), ("Olmo2", {"tie_word_embeddings": False})])
def test_other_models_are_counted_in_their_files(kind: str, settings: dict[str, Any]) -> None:
    """Fails if a tensor is not counted, or a layer is not recognized by its name."""
    model = _on_meta(kind, settings)
    tensors = {name: tuple(param.shape) for name, param in model.state_dict().items()}
    total, layer, embedding = count_params(tensors)
    assert total == sum(param.numel() for param in model.parameters())
    assert layer == sum(param.numel() for param in model.base_model.layers[0].parameters())
    assert embedding == SIZES["vocab_size"] * SIZES["hidden_size"]
    shape = json.loads(model.config.to_json_string(use_diff=False))
    found = footprint(_config("actor.strategy=fsdp2"), shape, tensors=tensors)[0]
    assert found.state_bytes == 16 * total


def test_state_is_what_this_project_keeps() -> None:
    """Fails if float32 gradients, masters or moments are forgotten, or masters counted where weights are their own."""
    n = 1_543_714_304  # as published
    assert read_dims(QWEN25_15B).n_params == n
    assert _actor().state_bytes == (2 + 4 + 12) * n
    assert _actor("model.dtype=float32").state_bytes == (4 + 4 + 8) * n
    assert _actor("actor.strategy=fsdp2").state_bytes == (4 + 4 + 8) * n
    sharded = _actor("trainer.n_gpus_per_node=4")
    assert (sharded.parts["weights"], sharded.parts["optimizer"]) == (2 * n, 12 * n // 4)
    assert _actor("trainer.n_gpus_per_node=4", "actor.strategy=fsdp2").state_bytes == 16 * n // 4
    offloaded = _actor("actor.strategy=fsdp2", "actor.fsdp_cpu_offload=true")
    # Gradients are pinned one by one, which makes less than twice of them.
    assert offloaded.state_bytes == 0 and offloaded.host_bytes == (16 + 4 + 12) * n


def test_the_teachers_lm_head_is_counted_where_it_is_kept() -> None:
    """Fails if the 4 V D bytes of teacher.signal hidden are forgotten, or not shared over TP."""
    for overrides, ranks in (((), 1), (TP2, 2)):
        config = _config("teacher.signal=hidden", *overrides)
        found = footprint(config, QWEN25_15B, teacher_hidden=3584)[0]
        assert found.parts["teacher_head"] == 4 * 151936 * 3584 // ranks


def test_a_local_teacher_is_on_the_actors_ranks() -> None:
    """Fails if a local teacher's shards are in no sum, or its pass is added to a training step's, which it never is."""
    local, total = ["teacher.backend=local", "teacher.path=t"], read_dims(QWEN25_15B).n_params
    plain = _actor()

    def ranks(*overrides: str) -> RankFootprint:
        config = _config(*local, *overrides)
        return footprint(config, QWEN25_15B, local_teacher=(QWEN25_15B, None))[0]

    hosted, resident = ranks(), ranks("teacher.fsdp_cpu_offload=false")
    averaged = ranks("teacher.update_interval=1", "teacher.update_ema=0.5")
    n_ranks = _config().trainer.n_gpus_per_node
    assert hosted.host_bytes - plain.host_bytes == resident.parts["teacher_weights"] == -(-2 * total // n_ranks)
    assert averaged.parts["teacher_shards"] == -(-4 * total // n_ranks)
    follows = ranks("teacher.update_interval=2")
    assert follows.parts["saved_copy"] - plain.parts["saved_copy"] == follows.parts["teacher_shards"]
    assert hosted.total_bytes == plain.total_bytes  # a pass takes less than a training step
    assert resident.total_bytes == plain.total_bytes + resident.parts["teacher_weights"]
    assert hosted.parts["teacher_pass"] > 2 * 151936 * 1536  # the embedding and more


def test_a_local_teachers_chunk_is_the_engines() -> None:
    """Fails if the engines compute more logits at a time than the estimate counts."""
    from gkd.memory.footprint.teacher import LOGITS_BYTES
    from teacher_server.engines.signals import CHUNK_BYTES

    assert LOGITS_BYTES == CHUNK_BYTES


def test_a_shortage_names_the_rank() -> None:
    """Fails if a shortage is missed or invented, or does not name its rank and sizes."""
    config = _config("actor.layers=torch")
    found = footprint(config, QWEN25_15B)
    assert check(found, 86 * GIB, config) == []
    (problem,) = check(found, 80 * GIB, config)  # 75.17 GiB
    assert "actor rank 0" in problem and "80.00 GiB" in problem and "3.17 GiB more" in problem
    assert check(found, 80 * GIB, _config("actor.layers=torch", "memory.margin=0.04")) == []
    problems = check(found, 3 * GIB, config)
    assert any("one sequence of 1536 tokens" in problem for problem in problems)


def test_an_engine_that_leaves_no_room_for_the_weight_sync() -> None:
    """Fails if a cache that takes the whole GPU passes, so that the first weight sync runs out of memory."""
    small = "actor.max_tokens_per_micro_batch=8192"
    config = _config(small, "rollout.gpu_memory_utilization=0.99", "weight_sync.bucket_mib=2048")
    (problem,) = check(footprint(config, QWEN25_15B), 80 * GIB, config)
    assert "buckets, 2.88 GiB" in problem and "rollout.gpu_memory_utilization" in problem


@pytest.mark.parametrize(("key", "n"), [("actor.pp", 3), ("actor.tp", 4)])
def test_a_layout_that_cannot_split_the_model(key: str, n: int) -> None:
    """Fails if a table is printed for a run that cannot start: 28 layers over 3 stages, 2 key heads over 4 ranks."""
    with refuses(key):
        footprint(_config(f"trainer.n_gpus_per_node={n}", f"{key}={n}"), QWEN25_15B)


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
    other = json.dumps({**QWEN25_15B, "model_type": "olmo2"})
    folder = _folder(tmp_path / "model", other)
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
    """Fails if the exit code or the table do not show whether the run fits."""
    assert _tool("--gpu-gib", "80", qwen) == 0
    text = capsys.readouterr().out
    assert all(number in text for number in (" 3.1", " 6.2", " 12.3"))
    assert "it fits: actor rank 0 leaves 36%" in text
    larger = ("actor.max_tokens_per_micro_batch=16384", "actor.layers=torch")
    assert _tool("--gpu-gib", "80", qwen, *larger) == 1
    assert "TOO LARGE actor rank 0 needs 75.17 GiB, 3.17 GiB more" in capsys.readouterr().out
    path = qwen.partition("=")[2]
    assert _tool("--gpu-gib", "80", "--json", "--teacher", path, "teacher.signal=hidden", qwen) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["role"] for rank in found["ranks"]] == ["actor", "rollout", "teacher"]
    assert found["ranks"][0]["parts"]["teacher_head"] == 4 * 151936 * 1536
    assert found["card_bytes"] == 80 * GIB and found["problems"] == []
    assert _tool("--gpu-gib", "80", "teacher.signal=hidden", qwen) == 0
    assert "--teacher" in capsys.readouterr().out, "the head that it cannot count"


def test_the_head_of_a_teacher_with_another_tokenizer(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the LM head of a teacher with more token ids than the student is counted with the student's rows."""
    path = _folder(tmp_path / "teacher", json.dumps(QWEN25_15B | {"vocab_size": 303872}))
    signal = ("teacher.signal=hidden", f"teacher.tokenizer={path}")
    _tool("--gpu-gib", "80", "--json", "--teacher", str(path), *signal, qwen)
    assert json.loads(capsys.readouterr().out)["ranks"][0]["parts"]["teacher_head"] == 4 * 303872 * 1536


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu-gib", "80GB"), "'80GB'"),
        (("--gpu-gib", "inf"), "--gpu-gib"),
        (("model.path=nowhere",), "model.path"),
        (("--teacher", "nowhere"), "--teacher"),
        (("actor.tp=0",), "actor.tp"),
    ],
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
        f"{i}, GPU-{i}, Card, 00000000:{i:02x}:00.0, {total * 1024:.0f}, {free * 1024:.0f}"
        for i, (total, free) in enumerate(gpus)
    ]
    script = folder / "nvidia-smi"
    script.write_text('#!/bin/sh\ncase "$1" in *gpu=*) cat <<END\n' + "\n".join(rows) + "\nEND\n;; esac\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_preflight_warns_and_refuses(
    qwen: str,
    tmp_path: Path,
    host_has: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    gkd_log: pytest.LogCaptureFixture,
) -> None:
    """Fails if a run whose state alone is too large for its GPUs starts, or one that may fit is refused."""
    list_gpus(tmp_path, monkeypatch, [(24, 24), (40, 40), (80, 80)])
    host_has(256)
    two = [qwen, "rollout.n_gpus_per_node=1", "rollout.max_num_seqs=0"]
    preflight_memory.check_memory(_config(*two, "cluster.gpus=[1,2]"), "cuda", None)
    assert "actor rank 0 needs" in gkd_log.text and "40.00 GiB" in gkd_log.text
    (line,) = [line for line in gkd_log.text.splitlines() if line.startswith("  actor.")]
    gkd_log.clear()
    preflight_memory.check_memory(_config(*two, "cluster.gpus=[1,2]", *line.split()), "cuda", None)
    assert not [record for record in gkd_log.records if record.levelno > logging.INFO], "the overrides that it printed"
    with pytest.raises(ConfigError) as caught:
        preflight_memory.check_memory(_config(*two, "cluster.gpus=[0,2]"), "cuda", None)
    assert caught.value.key == "trainer.n_gpus_per_node" and "actor.fsdp_cpu_offload=true" in caught.value.fix
    gkd_log.clear()
    host_has(8)
    run = preflight_memory.check_memory(_config(*two, "cluster.gpus=[2,1]", "actor.recompute=full"), "cuda", None)
    assert run.rollout.max_num_seqs == 500 and "of host memory" in gkd_log.text and "TOO LARGE" in gkd_log.text
    gkd_log.clear()
    assert preflight_memory.check_memory(_config(*two), "cpu", None).rollout.max_num_seqs == 128
    assert "actor rank 0" in gkd_log.text


def test_only_gpus_of_the_run_count(
    qwen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gkd_log: pytest.LogCaptureFixture
) -> None:
    """Fails if a valid run is refused because of a small GPU that it does not use."""
    list_gpus(tmp_path, monkeypatch, [(4, 4), (80, 80), (48, 48)])
    for overrides, n_bytes in (
        (["cluster.gpus=[1]"], 80 * GIB),
        (["cluster.gpus=[2,1]"], 48 * GIB),
        (["cluster.gpus=[1,7]"], None),  # there is no GPU 7
        (["cluster.ray_address=10.0.0.5:6379", "cluster.gpus=[0]"], None),
    ):
        assert preflight_memory.smallest_gpu(_config(*overrides).cluster) == n_bytes, overrides
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")  # ids stay nvidia-smi's
    assert preflight_memory.smallest_gpu(_config("cluster.gpus=[1]").cluster) == 80 * GIB
    preflight_memory.check_memory(_config(qwen, "cluster.ray_address=10.0.0.5:6379"), "cuda", None)
    assert "weights" in gkd_log.text and "10.0.0.5:6379" in gkd_log.text
    assert not [record for record in gkd_log.records if record.levelno > logging.INFO]


def test_the_command_counts_a_local_teacher(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], gkd_log: pytest.LogCaptureFixture
) -> None:
    """Fails if the teacher of the settings is left out, counted as a worker of a server, or by preflight alone."""
    teacher = _folder(tmp_path / "teacher", json.dumps(QWEN25_15B))
    local = [qwen, "teacher.backend=local", f"teacher.path={teacher}"]
    assert _tool(*local, "--json") == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["role"] for rank in ranks] == ["actor", "rollout"]
    assert "teacher_shards" in ranks[0]["parts"] and "teacher_shards" not in ranks[1]["parts"]
    assert _tool(*local, "--teacher", str(teacher)) == 2
    assert "teacher.path" in capsys.readouterr().err
    preflight_memory.check_memory(_config(*local), "cuda", None)
    assert "teacher_shards" in gkd_log.text

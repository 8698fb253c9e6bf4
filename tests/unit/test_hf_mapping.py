"""The HF <-> Megatron table and the reading of HF folders, without a process group."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from safetensors.torch import load_file, save_file

from gkd.actor.megatron.hf_config import HfDims, read_hf_dims
from gkd.actor.megatron.hf_load import load_hf_weights
from gkd.actor.megatron.hf_mapping import expected_hf_tensors, stage_entries
from gkd.actor.megatron.layer_spec import local_name
from gkd.actor.megatron.layout import ParallelLayout
from gkd.actor.megatron.model import torch_dtype, transformer_config
from gkd.errors import ConfigError, ModelError
from tests.dist.megatron_reference import KINDS, VOCAB, make_hf_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One HF folder per kind."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("hf")
    for kind in KINDS:
        make_hf_folder(root / kind, kind)
    return root


def _layouts(tp: int, pp: int) -> list[ParallelLayout]:
    return [ParallelLayout(tp=tp, pp=pp, world_size=tp * pp, rank=rank) for rank in range(tp * pp)]


def _load(folder: Path, dims: HfDims, layout: ParallelLayout) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters, shaped by hand as Megatron shapes them and filled from `folder`."""
    params = {}
    for entry in stage_entries(dims, layout):
        shapes = entry.hf_shapes
        rows = sum(shape[0] for shape in shapes)
        full = [rows, *shapes[0][1:]]
        if "embedding" in entry.param or "output_layer" in entry.param:
            full[0] = layout.padded_vocab_size(dims)
        if entry.layout.partition_dim is not None:
            full[entry.layout.partition_dim] //= layout.tp
        params[entry.param] = torch.nn.Parameter(torch.full(full, torch.nan))
    load_hf_weights(folder, params, dims, layout)
    return params


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_take_then_join_returns_the_bits(folders: Path, kind: str, tp: int, pp: int) -> None:
    """Fails if a rule and its inverse disagree, a tensor is exported twice, or one by no stage."""
    dims = read_hf_dims(folders / kind)
    layouts = _layouts(tp, pp)
    params = [_load(folders / kind, dims, layout) for layout in layouts]
    joined: dict[str, torch.Tensor] = {}
    for stage in range(pp):
        for entry in stage_entries(dims, layouts[stage * tp]):
            shards = [params[stage * tp + tp_rank][entry.param].data for tp_rank in range(tp)]
            tensors = dict(zip(entry.hf_names, entry.layout.join(shards, dims), strict=True))
            if entry.exported:
                assert not tensors.keys() & joined.keys()
                joined |= tensors
    original = load_file(folders / kind / "model.safetensors")
    assert joined.keys() == original.keys()
    assert all(torch.equal(joined[name], original[name]) for name in original)


def test_padded_rows_are_zero(folders: Path) -> None:
    """Fails if the vocabulary row that TP=2 adds to 1003 holds anything that weight decay would not keep at zero."""
    dims = read_hf_dims(folders / "qwen3")
    last = _load(folders / "qwen3", dims, _layouts(2, 1)[1])
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert last[name].shape[0] == (VOCAB + 1) // 2
        assert not last[name][-1].any() and last[name][-2].any()


@pytest.mark.parametrize("kind", KINDS)
def test_expected_tensors_are_those_of_transformers(folders: Path, kind: str) -> None:
    """Fails if the table forgets or invents a tensor, or gets a shape wrong."""
    original = load_file(folders / kind / "model.safetensors")
    expected = expected_hf_tensors(read_hf_dims(folders / kind))
    assert expected == {name: tuple(tensor.shape) for name, tensor in original.items()}


def _broken(folders: Path, tmp_path: Path, change: Any) -> Path:
    """A copy of the tied folder after `change(tensors)`."""
    tensors = load_file(folders / "qwen2_tied" / "model.safetensors")
    change(tensors)
    folder = tmp_path / "broken"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((folders / "qwen2_tied" / "config.json").read_text())
    return folder


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(1)


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, r"missing: model\.layers\.1\.mlp\.up_proj"),
        (_add, r"belong.*model\.layers\.2\.mlp"),
        (_cut, r"model\.norm\.weight has shape \[31\]"),
    ],
)
def test_wrong_tensors_are_named(folders: Path, tmp_path: Path, change: Any, message: str) -> None:
    """Fails if a folder with missing, foreign or mis-shaped tensors loads, or the error does not name them."""
    folder = _broken(folders, tmp_path, change)
    dims = read_hf_dims(folder)
    for layout in _layouts(1, 2):  # every stage notices, also the one that does not hold the tensor
        with pytest.raises(ModelError, match=message):
            _load(folder, dims, layout)


def test_redundant_tensors_are_ignored(folders: Path, tmp_path: Path) -> None:
    """Fails if the LM head that some exporters add to a tied model makes it unloadable."""

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = _broken(folders, tmp_path, add_head)
    assert _load(folder, read_hf_dims(folder), _layouts(1, 1)[0])


def test_corrupt_and_absent_files(folders: Path, tmp_path: Path) -> None:
    """Fails if a truncated file, a wrong index or an empty folder gives anything but a ModelError naming the file."""
    dims = read_hf_dims(folders / "qwen2_tied")
    layout = _layouts(1, 1)[0]
    folder = _broken(folders, tmp_path, lambda tensors: None)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable"):
        _load(folder, dims, layout)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match="model-00001-of-00002"):
        _load(folder, dims, layout)
    index.write_text("[]")
    with pytest.raises(ModelError, match="not a safetensors index"):
        _load(folder, dims, layout)
    index.unlink()
    weights.unlink()
    with pytest.raises(ModelError, match="neither"):
        _load(folder, dims, layout)
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_hf_dims(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2.*qwen3, qwen2, llama"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
    ],
)
def test_unsupported_models_are_refused(folders: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """Fails if a model that Megatron would compute differently is trained without a word."""
    config = json.loads((folders / "qwen2_tied" / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        read_hf_dims(tmp_path)


def test_rope_theta_of_old_and_new_configs(folders: Path, tmp_path: Path) -> None:
    """Fails if theta is read from only one of the two places where configs keep it."""
    config = json.loads((folders / "qwen2_tied" / "config.json").read_text())
    new = read_hf_dims(folders / "qwen2_tied").rope_inv_freq
    config.pop("rope_parameters")
    config["rope_theta"] = 5e4
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_hf_dims(tmp_path).rope_inv_freq == new
    assert new[1] == pytest.approx(5e4 ** (-2 / 8), rel=1e-6)


def test_layout_coordinates_and_errors(folders: Path) -> None:
    """Fails if ranks are placed twice, or an impossible split is not explained with its key and value."""
    layouts = [ParallelLayout(tp=2, pp=3, world_size=12, rank=rank) for rank in range(12)]
    assert layouts[0].dp == 2
    places = {(layout.tp_rank, layout.dp_rank, layout.pp_rank) for layout in layouts}
    assert len(places) == 12
    with pytest.raises(ConfigError, match=r"actor\.tp = 3: actor\.tp \* actor\.pp"):
        ParallelLayout(tp=3, pp=1, world_size=4, rank=0)
    with pytest.raises(ConfigError, match=r"actor\.pp = 0"):
        ParallelLayout(tp=1, pp=0, world_size=4, rank=0)
    dims = read_hf_dims(folders / "qwen3")
    with pytest.raises(ConfigError, match=r"actor\.tp = 4: does not divide the model's 2 key/value heads"):
        ParallelLayout(tp=4, pp=1, world_size=4, rank=0).check_model(dims)
    with pytest.raises(ConfigError, match=r"actor\.pp = 4: does not divide the model's 2 layers"):
        ParallelLayout(tp=1, pp=4, world_size=4, rank=0).check_model(dims)
    with pytest.raises(ConfigError, match=r"actor\.vpp = 2: there is no pipeline"):
        ParallelLayout(tp=1, pp=1, world_size=4, rank=0, vpp=2)
    with pytest.raises(ConfigError, match=r"actor\.vpp = 2: actor\.pp \* actor\.vpp = 2 \* 2 does not divide"):
        ParallelLayout(tp=1, pp=2, world_size=4, rank=0, vpp=2).check_model(dims)


def test_chunks_cover_the_model_once(folders: Path) -> None:
    """Fails if interleaved chunks drop or repeat a layer, or two of a stage's parameters get the same name."""
    dims = replace(read_hf_dims(folders / "qwen2_tied"), n_layers=8)
    layouts = [ParallelLayout(tp=1, pp=2, world_size=2, rank=rank, vpp=2) for rank in range(2)]
    assert [[list(layout.layer_range(dims, chunk)) for chunk in range(2)] for layout in layouts] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]
    stages = [stage_entries(dims, layout) for layout in layouts]
    assert all(len({entry.param for entry in entries}) == len(entries) for entries in stages)
    exported = [name for entries in stages for entry in entries if entry.exported for name in entry.hf_names]
    assert sorted(exported) == sorted(expected_hf_tensors(dims))
    second_copy = [entry for entries in stages for entry in entries if not entry.exported]
    assert [entry.param for entry in second_copy] == ["chunk1.output_layer.weight"]


def test_fused_norms_have_the_names_of_the_table() -> None:
    """Fails if a model of Transformer Engine's layers, whose norms are parts of matrices, could not be filled."""
    renamed = get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map  # Megatron's own: local -> fused
    assert len(renamed) == 2
    for local, fused in renamed.items():
        assert local_name(f"chunk1.decoder.layers.0.{fused}weight") == f"chunk1.decoder.layers.0.{local}weight"
    assert local_name("decoder.layers.0.mlp.linear_fc1.weight") == "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "key"),
    [("some", False, "actor.recompute"), ("full", True, "actor.sequence_parallel")],
)
def test_settings_of_layers_that_cannot_be(folders: Path, recompute: str, sequence_parallel: bool, key: str) -> None:
    """Fails if a misspelt kind of recompute means none, or a sequence is split over one rank."""
    layout = ParallelLayout(tp=1, pp=1, world_size=1, rank=0)
    with pytest.raises(ConfigError) as caught:
        transformer_config(
            read_hf_dims(folders / "qwen3"),
            layout,
            dtype=torch.float32,
            device=torch.device("cpu"),
            recompute=recompute,
            sequence_parallel=sequence_parallel,
        )
    assert caught.value.key == key


def test_training_dtypes() -> None:
    """Fails if a dtype without a training path (float16 needs loss scaling) is accepted."""
    assert torch_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(ConfigError, match=r"model\.dtype = 'float16'"):
        torch_dtype("float16")

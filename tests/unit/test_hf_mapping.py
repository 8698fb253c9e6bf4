"""Test the HF <-> Megatron table and the reading of HF folders, without a process group."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from safetensors.torch import load_file, save_file

from gkd.actor.megatron.hf_mapping import expected_hf_tensors, held_entries, load_hf_weights, stage_entries
from gkd.actor.megatron.layer_spec import local_name
from gkd.actor.megatron.layout import ParallelLayout
from gkd.actor.megatron.model_config import MegatronDims, read_megatron_dims
from gkd.errors import ModelError
from tests.dist.megatron_reference import KINDS, MOE_KINDS, VOCAB, make_hf_folder
from tests.refusals import refuses

ALL_KINDS = (*KINDS, "mistral", *MOE_KINDS)
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make one HF folder per kind."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("hf")
    for kind in ALL_KINDS:
        make_hf_folder(root / kind, kind)
    return root


def _layouts(tp: int, pp: int, ep: int = 1) -> list[ParallelLayout]:
    """Return the layouts of all ranks, with as many data-parallel as expert-parallel ranks."""
    size = tp * pp * ep
    return [ParallelLayout(tp=tp, pp=pp, world_size=size, rank=rank, ep=ep) for rank in range(size)]


def _load(folder: Path, dims: MegatronDims, layout: ParallelLayout) -> dict[str, torch.nn.Parameter]:
    """Return this rank's parameters with Megatron's shapes, filled from `folder`."""
    params = {}
    for entry in held_entries(dims, layout):
        shapes = entry.hf_shapes
        full = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
        if "embedding" in entry.param or "output_layer" in entry.param:
            full[0] = layout.padded_vocab_size(dims)
        if entry.layout.partition_dim is not None and entry.owner is None:
            full[entry.layout.partition_dim] //= layout.tp
        params[entry.param] = torch.nn.Parameter(torch.full(full, torch.nan))
    load_hf_weights(folder, params, dims, layout)
    return params


@pytest.mark.parametrize(
    ("kind", "tp", "pp", "ep"),
    [(kind, tp, pp, 1) for kind in ALL_KINDS for tp, pp in [(1, 1), (2, 2)]]
    + [(kind, tp, pp, ep) for kind in MOE_KINDS for tp, pp, ep in [(1, 1, 6), (1, 2, 2), (2, 1, 3)]],
)
def test_fill_then_join_is_bit_exact(folders: Path, kind: str, tp: int, pp: int, ep: int) -> None:
    """Fails if a rule and its inverse disagree, or a tensor is exported twice or not at all."""
    dims = read_megatron_dims(folders / kind)
    layouts = _layouts(tp, pp, ep)
    params = [_load(folders / kind, dims, layout) for layout in layouts]
    joined: dict[str, torch.Tensor] = {}
    for stage in range(pp):
        first = stage * tp * ep
        for entry in stage_entries(dims, layouts[first]):
            places = range(first, first + tp) if entry.owner is None else [first + entry.owner]
            shards = torch.stack([params[place][entry.param].data for place in places])
            tensors = dict(zip(entry.hf_names, entry.layout.join(shards, dims), strict=True))
            if entry.exported:
                assert not tensors.keys() & joined.keys()
                joined |= tensors
    original = load_file(folders / kind / "model.safetensors")
    assert joined.keys() == original.keys()
    assert all(torch.equal(joined[name], original[name]) for name in original)


def test_padded_rows_are_zero(folders: Path) -> None:
    """Fails if the vocabulary row that TP=2 adds to 1003 is not zero."""
    last = _load(folders / "qwen3", read_megatron_dims(folders / "qwen3"), _layouts(2, 1)[1])
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert last[name].shape[0] == (VOCAB + 1) // 2
        assert not last[name][-1].any() and last[name][-2].any()


def _broken(folders: Path, tmp_path: Path, change: Any, kind: str = "qwen2_tied") -> Path:
    """Return a copy of a folder after `change(tensors)`."""
    tensors = load_file(folders / kind / "model.safetensors")
    change(tensors)
    folder = tmp_path / "broken"
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((folders / kind / "config.json").read_text())
    return folder


def _change_experts(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    tensors[name.replace("3", "6")] = torch.zeros(1)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen2_tied", lambda t: t.update({NORM: t[NORM].to(torch.int8)}), r"model\.norm\.weight.* I8"),
        ("qwen2_tied", lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"model\.layers\.1\.mlp\.up_proj"),
        ("qwen3_moe_mixed", _change_experts, r"experts\.[36]\.down"),
    ],
)
def test_wrong_tensors_are_named(folders: Path, tmp_path: Path, kind: str, change: Any, message: str) -> None:
    """Fails if a folder with missing, unexpected, misshaped or quantized tensors loads, or the error names none."""
    folder = _broken(folders, tmp_path, change, kind)
    dims = read_megatron_dims(folder)
    layouts = _layouts(1, 1, 2) if "moe" in kind else _layouts(1, 2)
    for layout in layouts:  # every rank raises the error, also the one that does not hold the tensor
        with pytest.raises(ModelError, match=message):
            _load(folder, dims, layout)


def test_redundant_tensors_are_ignored(folders: Path, tmp_path: Path) -> None:
    """Fails if a redundant LM head of a tied model, or GLM-4.5's layer of further tokens, prevents loading."""

    for kind, change in (
        ("qwen2_tied", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})),
        ("glm4_moe", lambda t: t.update({"model.layers.2.eh_proj.weight": torch.zeros(32, 64)})),
    ):
        folder = _broken(folders, tmp_path / kind, change, kind)
        assert _load(folder, read_megatron_dims(folder), _layouts(1, 1)[0])


@pytest.mark.parametrize(("tp", "pp", "ep", "dp"), [(1, 2, 2, 4), (2, 1, 3, 3), (4, 1, 2, 2)])
def test_exporting_ranks(tp: int, pp: int, ep: int, dp: int) -> None:
    """Fails if an expert is on no exporting rank, or only part of a TP or EP group exports, which would hang."""
    layouts = [ParallelLayout(tp=tp, pp=pp, world_size=tp * pp * dp, rank=r, ep=ep) for r in range(tp * pp * dp)]
    assert layouts[0].exports
    for stage in range(pp):
        ranks = [layout for layout in layouts if layout.pp_rank == stage]
        groups = [ranks[i : i + size] for size in (tp, ep) for i in range(0, len(ranks), size)]
        assert all(len({layout.exports for layout in group}) == 1 for group in groups)
        assert {layout.ep_rank for layout in ranks if layout.exports} == set(range(ep))


def test_rope_theta_of_old_and_new_configs(folders: Path, tmp_path: Path) -> None:
    """Fails if theta is read from only one of the two places where configs keep it."""
    config = json.loads((folders / "qwen2_tied" / "config.json").read_text())
    new = read_megatron_dims(folders / "qwen2_tied").rope_inv_freq
    config.pop("rope_parameters")
    config["rope_theta"] = 5e4
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_megatron_dims(tmp_path).rope_inv_freq == new
    assert new[1] == pytest.approx(5e4 ** (-2 / 8), rel=1e-6)


def test_layout_coordinates_and_errors(folders: Path) -> None:
    """Fails if two ranks have the same coordinates, or a split that the model cannot have is accepted."""
    layouts = [ParallelLayout(tp=2, pp=3, world_size=12, rank=rank) for rank in range(12)]
    assert layouts[0].dp == 2
    assert len({(layout.tp_rank, layout.dp_rank, layout.pp_rank) for layout in layouts}) == 12
    dims = read_megatron_dims(folders / "qwen3")
    with refuses("actor.vpp", 2):
        ParallelLayout(tp=1, pp=2, world_size=4, rank=0, vpp=2).check_model(dims)


def test_chunks_cover_the_model_once(folders: Path) -> None:
    """Fails if interleaved chunks drop or repeat a layer, or two parameters of a stage have the same name."""
    dims = replace(read_megatron_dims(folders / "qwen2_tied"), n_layers=8)
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
    """Fails if a model with Transformer Engine's layers, which fuse norms with matrices, cannot be filled."""
    renamed = get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map  # Megatron's own: local -> fused
    assert len(renamed) == 2
    for local, fused in renamed.items():
        assert local_name(f"chunk1.decoder.layers.0.{fused}weight") == f"chunk1.decoder.layers.0.{local}weight"
    assert local_name("decoder.layers.0.mlp.linear_fc1.weight") == "decoder.layers.0.mlp.linear_fc1.weight"

"""Test checkpoints, HF folders, bfloat16 and errors of the Megatron student."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.dist.helpers import caught, run_ranks
from tests.dist.megatron_reference import make_hf_folder, make_micro_batches
from tests.dist.resume_cases import (
    DEEP,
    LAYOUTS,
    SAVED_AT,
    Case,
    again,
    load_elsewhere,
    make_student,
    save,
    save_and_resume,
    train,
    whole_state,
)

pytestmark = pytest.mark.dist
# Tied embeddings give pp2 a second copy of the matrix; qwen3 has norms on queries and keys.
QUICK = [
    Case("qwen2_tied", "tp2sp"),
    Case("qwen3", "pp2"),
    Case("qwen2_tied", "dp2", torch.bfloat16),
    Case(DEEP, "pp2vpp2"),
    Case("qwen3", "tp2sp", torch.bfloat16, lora=True),
    Case("qwen2_tied", "cp2"),
]
QUICK_PAIRS = [
    (QUICK[0], "pp2"),
    (QUICK[0], "dp2"),
    (QUICK[1], "tp2"),
    (QUICK[1], "dp2"),
    (QUICK[2], "tp2"),
    (QUICK[2], "pp2"),
    (QUICK[3], "tp2"),
    (QUICK[4], "pp2"),
    (QUICK[1], "cp2"),
    (QUICK[5], "tp2"),
]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of losses in another layout, where sums have another order


def _save(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Save HF folders from two layouts, and cause the errors that need several ranks."""
    from gkd.actor.common.shard_writer import write

    result: dict[str, Any] = {}
    for name in ("tp2", "pp2"):
        student = make_student(root, Case("qwen2_tied", name), rank)
        student.save_hf(root / f"out_{name}", root / "qwen2_tied")
    student.save_hf(root / "out_sharded", root / "qwen2_tied", max_shard_bytes=100_000)
    # From here on `student` is pp2.
    result["exists"] = caught(lambda: student.save_hf(root / "out_pp2", root / "qwen2_tied"))
    result["no_checkpoint"] = caught(lambda: student.load_checkpoint(root / "nothing"))
    result["other_model"] = caught(lambda: student.load_checkpoint(QUICK[1].folder(root)))
    result["adapters"] = caught(lambda: student.load_checkpoint(QUICK[4].folder(root)))
    adapted = make_student(root, Case("qwen2_tied", "pp2", lora=True), rank)
    result["no_adapters"] = caught(lambda: adapted.load_checkpoint(QUICK[0].folder(root)))
    student = make_student(root, Case("qwen2_tied", "pp2"), rank)
    result["other_dtype"] = caught(lambda: student.load_checkpoint(QUICK[2].folder(root)))
    whole = student.snapshot()
    some = [piece for piece in whole.pieces if piece.name != "model.norm.weight"]  # which is on rank 1
    write(root / "lacking", rank, replace(whole, pieces=some))
    torch.distributed.barrier()
    result["lacking"] = caught(lambda: student.load_checkpoint(root / "lacking"))
    # Before the first step there is no optimizer state, and the checkpoint must not require any.
    student = make_student(root, Case("qwen2_tied", "pp2"), rank)
    save(student, root / "fresh")
    other = make_student(root, Case("qwen2_tied", "tp2"), rank)
    other.load_checkpoint(root / "fresh")
    fresh_losses = [stats.loss for stats in train(other, 0, 2)]
    result["fresh_diff"] = _max_diff(
        fresh_losses, [stats.loss for stats in train(make_student(root, Case("qwen2_tied", "tp2"), rank), 0, 2)]
    )
    student = make_student(root, Case("qwen2_tied", "pp2"), rank)
    batches = make_micro_batches(0)
    targets = batches[1].targets
    targets.topk_logprobs[0, 0] = torch.nan
    result["nan_eval"] = caught(lambda: student.evaluate(batches))
    packed = make_micro_batches(0)
    packed[1].position_ids = packed[1].position_ids + 1
    result["packed"] = caught(lambda: student.train_step(packed))
    result["empty"] = caught(lambda: student.evaluate([]))
    from gkd.actor.megatron.layout import ParallelLayout
    from gkd.actor.megatron.student import init_groups

    result["other_groups"] = caught(lambda: init_groups(ParallelLayout(2, 1, 2, rank)))
    return result


def _max_diff(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def _all(rank: int, world_size: int, root: Path) -> tuple[dict[Any, Any], dict[Any, Any], dict[str, Any]]:
    saved = save_and_resume(rank, world_size, root, QUICK)
    return saved, load_elsewhere(rank, world_size, root, QUICK_PAIRS), _save(rank, world_size, root)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return the folder and the results of one spawn that runs all cases of two ranks."""
    root = tmp_path_factory.mktemp("resume")
    for kind in ("qwen3", "qwen2_tied"):
        (make_hf_folder(root / kind, kind) / "tokenizer.json").write_text("{}")
    make_hf_folder(root / DEEP, "qwen2_tied", n_layers=4)
    return root, run_ranks(_all, 2, root, timeout_s=200.0)


def _check_resume(saved: list[dict[Case, dict[str, Any]]]) -> None:
    for results in saved:
        for case, result in results.items():
            assert result["step"] == SAVED_AT, case
            for what in ("loaded_equal", "export_equal", "rng_equal", "stats_equal", "final_equal"):
                assert result[what], (str(case), what)


def _check_moved(root: Path, case: Case, layout: str, saved: list[Any], moved: list[Any]) -> float:
    """Check that loading is bit-exact, in model and checkpoint; return the difference of later losses."""
    wanted = dict(chain.from_iterable(results[case]["saved"].items() for results in saved))
    for results in moved:
        result = results[case, layout]
        assert result["step"] == SAVED_AT
        assert result["loaded"].items() <= wanted.items(), (str(case), layout)
    assert {name for results in moved for name in results[case, layout]["loaded"]} == wanted.keys()
    states = [
        whole_state(folder, root / case.kind, lora=case.lora)
        for folder in (again(root, case, layout), case.folder(root))
    ]
    assert states[0] == states[1]
    diff = _max_diff(moved[0][case, layout]["losses"], saved[0][case]["losses"])
    assert diff <= TOLERANCE[case.dtype], (str(case), layout, diff)
    return diff


def test_resume_is_exact(world: tuple[Path, list[Any]]) -> None:
    """Fails if a resume is not bit-exact: weights, optimizer state, learning rate or a generator.

    Also fails if a step does not wait for the copy of a pending save.
    """
    _check_resume([saved for saved, _, _ in world[1]])


@pytest.mark.parametrize(("case", "layout"), QUICK_PAIRS, ids=str)
def test_resume_in_another_layout(world: tuple[Path, list[Any]], case: Case, layout: str) -> None:
    """Fails if weights or moments are not bit-exact in another layout, or training continues differently."""
    root, ranks = world
    _check_moved(root, case, layout, [saved for saved, _, _ in ranks], [moved for _, moved, _ in ranks])


@pytest.mark.parametrize(("old_tp", "tp"), [(1, 2), (2, 1), (2, 4), (12, 4), (4, 6), (3, 2), (4, 12)])
def test_parts_of_another_tensor_parallel_size(tmp_path: Path, old_tp: int, tp: int) -> None:
    """Fails if a part is assembled from the wrong old parts, for any ratio of sizes and any range of a DP rank.

    Also fails if it reads a part that it does not need: those are not in the checkpoint.
    """
    from gkd.actor.common.host_copies import HostCopies
    from gkd.actor.common.shard_writer import write
    from gkd.actor.common.shards import Piece, ShardReader
    from gkd.actor.megatron.checkpoint import _read_vocab, _resplit, part_shape
    from gkd.actor.megatron.hf_mapping import SplitVocab, stage_entries
    from gkd.actor.megatron.layout import ParallelLayout
    from gkd.actor.megatron.model_config import read_megatron_dims

    make_hf_folder(tmp_path, "qwen2_tied", n_layers=1)
    dims = replace(read_megatron_dims(tmp_path), n_heads=24, n_kv_heads=12, head_dim=2)
    whole = ParallelLayout(tp=1, pp=1, world_size=1, rank=0)
    entries = [entry for entry in stage_entries(dims, whole) if entry.layout.partition_dim is not None]
    assert len({type(entry.layout) for entry in entries}) == 4
    copies, generator = HostCopies(torch.device("cpu")), torch.Generator().manual_seed(0)
    for number, entry in enumerate(entries):
        tensors = [torch.rand(shape, generator=generator) for shape in entry.hf_shapes]

        def part(of: int, rank: int, entry: Any = entry, tensors: Any = tensors) -> torch.Tensor:
            made = torch.empty(part_shape(entry, of))
            entry.layout.fill(made, tensors, dims, of, rank)
            return made.view(-1)

        for rank in range(tp):
            wanted = part(tp, rank)
            if isinstance(entry.layout, SplitVocab):
                size = len(part(old_tp, 0))
                begin, end = rank * len(wanted) // size, min(-(-(rank + 1) * len(wanted) // size), old_tp)
            else:  # the number of blocks is the gcd of both sizes
                n_old, n_new = old_tp // math.gcd(old_tp, tp), tp // math.gcd(old_tp, tp)
                begin = rank // n_new * n_old
                end = begin + n_old
            pieces = [Piece(entry.hf_names[0], "param", old, 0, part(old_tp, old)) for old in range(begin, end)]
            folder = tmp_path / f"{number}_{rank}"
            write(folder, 0, copies.snapshot(pieces, {"world_size": 1}, {}))
            model: Any = SimpleNamespace(dims=dims, layout=ParallelLayout(tp=tp, pp=1, world_size=tp, rank=rank))
            read = _read_vocab if isinstance(entry.layout, SplitVocab) else _resplit
            middle = len(wanted) // 3
            with ShardReader(folder) as reader:
                for start, stop in ((0, middle), (middle, len(wanted))):
                    values = read(reader, "param", entry, model, old_tp, start, stop)
                    assert torch.equal(values, wanted[start:stop]), (entry.param, rank)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["qwen3", "qwen2_tied"])
def test_resume_between_all_pairs_of_layouts(tmp_path: Path, kind: str) -> None:
    """Check the two tests above for all pairs of layouts of one, two and four processes."""
    make_hf_folder(tmp_path / kind, kind, n_layers=4)
    cases = {name: Case(kind, name) for name in LAYOUTS}
    saved, moved = {}, {}
    sizes = sorted({size for size, *_ in LAYOUTS.values()})
    for size in sizes:
        own = [case for name, case in cases.items() if LAYOUTS[name][0] == size]
        results = run_ranks(save_and_resume, size, tmp_path, own, timeout_s=1500.0)
        _check_resume(results)
        saved |= {case: results for case in own}
    for size in sizes:
        pairs = [(case, to) for case in saved for to in LAYOUTS if LAYOUTS[to][0] == size and to != case.layout]
        results = run_ranks(load_elsewhere, size, tmp_path, pairs, timeout_s=1500.0)
        moved |= {pair: results for pair in pairs}
    assert len(moved) == len(LAYOUTS) * (len(LAYOUTS) - 1)
    worst = max(_check_moved(tmp_path, *pair, saved[pair[0]], results) for pair, results in moved.items())
    print(f"{kind}: {len(moved)} pairs, largest loss difference {worst:.1e}")


def test_saved_folder_is_the_model(world: tuple[Path, list[Any]]) -> None:
    """Fails if the folder saved from any layout does not load as the same HF model, with tokenizer and configs."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    root, _ = world
    probe = torch.arange(24).view(2, 12)
    wanted = AutoModelForCausalLM.from_pretrained(root / "qwen2_tied")(probe).logits
    for name in ("out_tp2", "out_pp2", "out_sharded"):
        out = root / name
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(probe).logits, wanted), name
        assert (out / "tokenizer.json").is_file() and (out / "generation_config.json").is_file()
        assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert len(list((root / "out_sharded").glob("*.safetensors"))) > 1
    assert not list(root.glob("*.partial"))


def test_errors(world: tuple[Path, list[Any]]) -> None:
    """Fails if a bad input or another run's checkpoint is taken, or has no clear error. NaN: test_bad_input.py."""
    expected = {
        "exists": ("ModelError", "out_pp2"),
        "no_checkpoint": ("CheckpointError", "nothing"),
        "other_dtype": ("CheckpointError", "dtype = bfloat16"),
        "other_model": ("CheckpointError", "model_type = qwen3"),
        "adapters": ("CheckpointError", "actor.lora.rank"),
        "no_adapters": ("CheckpointError", "actor.lora.rank"),
        "lacking": ("CheckpointError", "model.norm.weight"),
        "nan_eval": ("NumericsError", "nan"),
        "packed": ("DataError", "position_ids"),
        "empty": ("DataError", "no loss token"),
        "other_groups": ("ClusterError", "tp=1 pp=2"),
    }
    for _, _, result in world[1]:
        for case, (kind, text) in expected.items():
            assert result[case][0] == kind and text in result[case][1], (case, result[case])
        assert result["fresh_diff"] <= 1e-5

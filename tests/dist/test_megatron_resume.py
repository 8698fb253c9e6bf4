"""Checkpoints, HF folders, bfloat16 and the errors of the Megatron student. gloo, CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.helpers import run_gloo
from tests.dist.megatron_reference import make_hf_folder, make_micro_batches

# name -> (tp, pp), all of two processes
LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2), "dp2": (1, 1)}


def _student(folder: Path, name: str, rank: int, *, dtype: torch.dtype = torch.float32) -> Any:
    """A student of two processes in the layout called `name`; replaces the Megatron groups of the last one."""
    from megatron.core import parallel_state

    from gkd.actor.megatron.layout import ParallelLayout
    from gkd.actor.megatron.optim import OptimSpec
    from gkd.actor.megatron.student import MegatronStudent
    from gkd.loss.spec import LossSpec

    tp, pp = LAYOUTS[name]
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return MegatronStudent(
        folder,
        ParallelLayout(tp=tp, pp=pp, world_size=2, rank=rank),
        optim=OptimSpec(lr=1e-3, schedule="cosine", warmup_steps=2, total_steps=6),
        loss=LossSpec(),
        dtype=dtype,
        device=torch.device("cpu"),
        seed=3,
    )


def _mine(student: Any, step: int) -> list[Any]:
    batches = make_micro_batches(step)
    return batches if student.layout.dp == 1 else batches[student.layout.dp_rank :: 2]


def _weights(student: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in student.export()}


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _resume(rank: int, world_size: int, root: Path) -> dict[str, dict[str, Any]]:
    """Trains 4 steps with a save after 2, resumes in a new object, and resumes the next layout from it too."""
    results: dict[str, dict[str, Any]] = {}
    previous: str | None = None
    for name in LAYOUTS:
        result: dict[str, Any] = {}
        # bfloat16 in one layout: its float32 main weights are part of what must survive.
        dtype = torch.bfloat16 if name == "dp2" else torch.float32
        path = root / f"ckpt_{name}"
        student = _student(root / "hf", name, rank, dtype=dtype)
        for step in range(2):
            student.train_step(_mine(student, step))
        student.save_checkpoint(path)
        drawn = (random.random(), float(np.random.rand()), float(torch.rand(1)))
        stats = [student.train_step(_mine(student, step)) for step in (2, 3)]
        resumed = _student(root / "hf", name, rank, dtype=dtype)
        resumed.load_checkpoint(path)
        result["step"] = resumed.step
        result["rng_equal"] = drawn == (random.random(), float(np.random.rand()), float(torch.rand(1)))
        again = [resumed.train_step(_mine(resumed, step)) for step in (2, 3)]
        result["stats_equal"] = stats == again
        result["weights_equal"] = _same(_weights(student), _weights(resumed))
        if previous is not None:
            resharded = _student(root / "hf", name, rank)
            resharded.load_checkpoint(root / f"ckpt_{previous}")
            losses = [resharded.train_step(_mine(resharded, step)).loss for step in (2, 3)]
            result["resharded_diff"] = max(abs(a - b) for a, b in zip(losses, results[previous]["losses"], strict=True))
        result["losses"] = [s.loss for s in stats]
        results[name] = result
        previous = name if dtype == torch.float32 else None
    return results


def _save(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Saves HF folders from two layouts and provokes the errors that need a world."""
    from gkd.errors import CheckpointError, ClusterError, DataError, ModelError, NumericsError

    result: dict[str, Any] = {}
    for name in ("tp2", "pp2"):
        student = _student(root / "hf", name, rank)
        student.save_hf(root / f"out_{name}", root / "hf")
    from gkd.actor.megatron.hf_save import save_hf

    save_hf(student.model, root / "out_sharded", root / "hf", max_shard_bytes=100_000)
    # From here on `student` is pp2.
    result["exists"] = _message(ModelError, lambda: student.save_hf(root / "out_pp2", root / "hf"))
    result["no_checkpoint"] = _message(CheckpointError, lambda: student.load_checkpoint(root / "nothing"))
    before = _weights(student)
    batches = make_micro_batches(0)
    targets = batches[1].targets
    assert targets is not None and targets.topk_logprobs is not None
    targets.topk_logprobs[0, 0] = torch.nan
    result["nan"] = _message(NumericsError, lambda: student.train_step(batches))
    result["nan_eval"] = _message(NumericsError, lambda: student.evaluate(batches))
    result["unmoved"] = _same(before, _weights(student)) and student.step == 0
    result["healthy_after_nan"] = student.train_step(make_micro_batches(0)).loss
    packed = make_micro_batches(0)
    packed[1].position_ids = packed[1].position_ids + 1
    result["packed"] = _message(DataError, lambda: student.train_step(packed))
    result["empty"] = _message(DataError, lambda: student.train_step([]))
    from gkd.actor.megatron.groups import init_groups
    from gkd.actor.megatron.layout import ParallelLayout

    result["wrong_world"] = _message(ClusterError, lambda: init_groups(ParallelLayout(1, 1, 4, rank)))
    result["other_groups"] = _message(ClusterError, lambda: init_groups(ParallelLayout(2, 1, 2, rank)))
    # One DP rank without any data must still take part, and change nothing but the division of labour.
    student = _student(root / "hf", "dp2", rank)
    result["idle_rank_loss"] = student.train_step(make_micro_batches(0) if rank == 0 else []).loss
    return result


def _message(kind: type[Exception], action: Any) -> str:
    """What an expected error says; another outcome fails the test that reads it."""
    try:
        action()
    except kind as error:
        return str(error)
    return "no error"


def _both(rank: int, world_size: int, root: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    return _resume(rank, world_size, root), _save(rank, world_size, root)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder of one spawn that runs `_resume` and `_save`, and what its ranks returned."""
    root = tmp_path_factory.mktemp("resume")
    source = make_hf_folder(root / "hf", "qwen2_tied")
    (source / "tokenizer.json").write_text("{}")
    return root, run_gloo(_both, 2, root, timeout_s=200.0)


@pytest.mark.dist
def test_resume(world: tuple[Path, list[Any]]) -> None:
    """Fails if a resumed run differs in one bit, or a checkpoint cannot move to another parallel layout."""
    for results, _ in world[1]:
        for name, result in results.items():
            assert result["step"] == 2, name
            assert result["rng_equal"] and result["stats_equal"] and result["weights_equal"], (name, result)
            assert result.get("resharded_diff", 0.0) <= 1e-5, (name, result)
        assert results["dp2"]["losses"] == pytest.approx(results["pp2"]["losses"], rel=0.02)  # bf16 and fp32
        assert "resharded_diff" in results["pp2"] and "resharded_diff" in results["dp2"]


@pytest.mark.dist
def test_saved_folder_is_the_model(world: tuple[Path, list[Any]]) -> None:
    """Fails if a saved folder does not load as the same HF model, with tokenizer and configs, from any layout."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    root, _ = world
    probe = torch.arange(24).view(2, 12)
    wanted = AutoModelForCausalLM.from_pretrained(root / "hf")(probe).logits
    for name in ("out_tp2", "out_pp2", "out_sharded"):
        out = root / name
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(probe).logits, wanted), name
        assert (out / "tokenizer.json").is_file() and (out / "generation_config.json").is_file()
        assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert len(list((root / "out_sharded").glob("*.safetensors"))) > 1
    assert not list(root.glob("*.partial"))


@pytest.mark.dist
def test_errors(world: tuple[Path, list[Any]]) -> None:
    """Fails if a bad input is trained on, moves the weights, is not explained, or breaks the steps after it."""
    for _, result in world[1]:
        assert "out_pp2" in result["exists"] and "exists already" in result["exists"]
        assert "nothing" in result["no_checkpoint"]
        assert "nan" in result["nan"] and "optimizer has not moved" in result["nan"] and "nan" in result["nan_eval"]
        assert result["unmoved"]
        assert "padded on the right" in result["packed"] and "no loss token" in result["empty"]
        assert "rank" in result["wrong_world"] and "tp=1 pp=2" in result["other_groups"]
        assert result["idle_rank_loss"] == pytest.approx(result["healthy_after_nan"], abs=1e-5)

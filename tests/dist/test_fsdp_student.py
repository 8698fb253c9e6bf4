"""Test what is specific to the FSDP2 student: curves, bfloat16, host memory, LoRA, other architectures.

Two ranks against plain single-process training of the same HF model. Parameters that one rank does not use:
test_vision_student.py. What this does not prove without GPUs: CUDA streams, pinned memory.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gkd.actor.fsdp.optim import threads_per_rank
from gkd.config.schema_actor import LoraConfig
from tests.dist.fsdp_resume_cases import OTHER_WORLD, SAME_WORLD, in_two, resume_in_one, save_in_one
from tests.dist.helpers import caught, group_of_one, run_ranks
from tests.dist.hf_models import IMAGE_KINDS, language_model, make_model_folder
from tests.dist.megatron_reference import (
    VOCAB,
    make_hf_folder,
    make_micro_batches,
    read_model,
    train_bf16_reference,
    train_reference,
)
from tests.dist.peft_reference import LORA, train_peft
from tests.dist.reference_cases import indices_of, measure_reference, plain_logprobs
from tests.dist.resume_cases import SAVED_AT
from tests.dist.student_cases import as_numpy, build_student, grads_of, packed, same_weights, share, weights

pytestmark = pytest.mark.dist
SINGLE, LOST = "model.safetensors", "model.layers.1.mlp.up_proj.weight"
N_CURVE, N_SHORT = 20, 4
BF16_LR = 2e-4
# name -> whether it supports the fused head. The files of the last three differ from the parameters.
ARCHITECTURES = {"gpt2": True, "olmo2": True, "gemma2": True, "mamba": True, "gpt_oss": True}
ARCHITECTURES |= {"gpt_neox": True, "qwen3_moe": True, "mixtral": True}
CONV1D_LORA = LoraConfig(rank=4, alpha=8.0, targets=["c_attn", "c_proj"])


def _measure(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Measure, in a rank, everything that the tests below check."""

    def build(kind: str, **changes: Any) -> Any:
        return build_student("fsdp2", root / kind, rank, world_size, **changes)

    def losses(student: Any, n_steps: int, *, pack: bool = True, period: int = 1000) -> list[float]:
        out = []
        for step in range(n_steps):
            batches = share(make_micro_batches(step % period), rank, world_size)
            out.append(student.train_step([packed(b) for b in batches] if pack else batches).loss)
        return out

    result: dict[str, Any] = {"curves": {}, "architectures": {}}
    for kind in ("qwen3", "qwen2_tied"):
        recompute = "full" if kind == "qwen3" else "none"
        result["curves"][kind] = losses(build(kind, recompute=recompute), N_CURVE)
    result["bf16"] = losses(build("qwen3_bf16", dtype=torch.bfloat16, lr=BF16_LR), N_CURVE, period=4)
    exported = weights(build("qwen3_bf16", dtype=torch.bfloat16))
    result["bf16_round_trip"] = same_weights(exported, load_file(root / "qwen3_bf16" / "model.safetensors"))
    for kind, fused in ARCHITECTURES.items():
        student = build(kind, fused_lm_head=fused)
        round_trip = same_weights(weights(student), load_file(root / kind / "model.safetensors"))
        result["architectures"][kind] = (round_trip, losses(student, N_SHORT))
    student.save_hf(root / "mixtral_saved", root / "mixtral")
    saved = build("mixtral_saved")
    result["saved"] = same_weights(weights(student), weights(saved))
    old, new = load_file(root / "mixtral" / SINGLE), weights(saved)
    result["experts_moved"] = sum(".experts." in name and not torch.equal(t, old[name]) for name, t in new.items())
    result["lora"] = _measure_lora(build, losses, root)
    result["refused"] = [caught(lambda kind=kind: build(kind)) for kind in ("missing", "cut")]
    plain = build("qwen3")
    result["bad_batches"] = _measure_bad_batches(plain, rank)
    result["resume"] = in_two(root, rank)
    result["threads"] = threads_per_rank()
    result["after_error"] = _measure_after_error(plain)
    result["reference"] = measure_reference(rank, root, build)
    return result


def _measure_lora(build: Any, losses: Any, root: Path) -> dict[str, Any]:
    student = build("qwen3", lora=LORA)
    places = student.trained_places()
    first = {name: place.tensor.full_tensor().detach().clone() for name, place in places.items()}
    before = weights(student)
    curve = losses(student, N_SHORT)
    transposed = build("gpt2", lora=CONV1D_LORA)
    conv1d_adapters = {
        name: place.tensor.full_tensor().detach().clone() for name, place in transposed.trained_places().items()
    }
    conv1d = {"adapters": as_numpy(conv1d_adapters), "losses": losses(transposed, N_SHORT)}
    half = build("qwen3_bf16", dtype=torch.bfloat16, lora=LORA, recompute="full")
    unmoved = same_weights(weights(half), load_file(root / "qwen3_bf16" / "model.safetensors"))
    return {
        "adapters": as_numpy(first),
        "conv1d": conv1d | {"merged": as_numpy(weights(transposed))},
        "on others": _resumed_on_others(build, root / "lora_checkpoint"),
        "first_is_base": same_weights(before, load_file(root / "qwen3" / "model.safetensors")),
        "first_bf16_is_base": unmoved,
        "bf16_dtypes": {str(place.tensor.dtype) for place in half.trained_places().values()},
        "bf16_losses": losses(half, N_SHORT),
        "losses": curve,
        "merged": as_numpy(weights(student)),
    }


def _resumed_on_others(build: Any, folder: Path) -> list[tuple[str, str]]:
    """Return the errors if adapters resume with other weights of the same shapes, or with fewer or more targets."""
    import torch.distributed as dist

    from gkd.actor.common.shard_writer import write

    write(folder, dist.get_rank(), build("qwen3", lora=LORA).snapshot())
    dist.barrier()
    fewer, more = (replace(LORA, targets=targets) for targets in (LORA.targets[:1], [*LORA.targets, "up_proj"]))
    others = (("qwen3_other", LORA), ("qwen3", fewer), ("qwen3", more))
    return [caught(lambda one=one: build(one[0], lora=one[1]).load_checkpoint(folder)) for one in others]


def _measure_bad_batches(student: Any, rank: int) -> dict[str, tuple[str, str]]:
    """Return the error of each malformed micro-batch on rank 1, and the step count before and after a good step."""
    good = packed(make_micro_batches(0)[1])
    targets = good.targets
    outside = good.tokens.clone()
    outside[0, 0] = VOCAB
    cases = {
        "rows": replace(good, loss_index=good.loss_index + good.tokens.shape[1]),
        "no table": replace(good, targets=replace(targets, topk_ids=None, topk_logprobs=None)),
        "sampled token": replace(good, targets=replace(targets, sampled_ids=targets.sampled_ids + VOCAB)),
        "token": replace(good, tokens=outside),
        "left padded": replace(make_micro_batches(0)[1], position_ids=make_micro_batches(0)[1].position_ids + 1),
    }
    errors = {
        case: caught(lambda bad=bad: student.train_step([good, bad if rank == 1 else good]))
        for case, bad in cases.items()
    }
    step = student.step
    student.train_step([good])
    errors["after"] = (str(step), str(student.step))
    return errors


def _measure_after_error(student: Any) -> list[bool]:
    """Return whether snapshot, evaluation and step are unchanged after an error inside a forward pass."""

    def fail(table: torch.Tensor) -> None:
        raise RuntimeError("enough")

    batches = [packed(batch) for batch in make_micro_batches(0)]
    usual = student.evaluate(batches).loss
    before = _state(student)
    student.loss.on_rows = fail
    with pytest.raises(RuntimeError, match="enough"):
        student.train_step(batches)
    student.loss.on_rows = None
    same = all(torch.equal(a, b) for a, b in zip(before, _state(student), strict=True))
    return [same, student.evaluate(batches).loss == usual, student.train_step(batches).loss == usual]


def _state(student: Any) -> list[torch.Tensor]:
    snapshot = student.snapshot()
    snapshot.wait()
    return [piece.data.clone() for piece in snapshot.pieces]


def _damage(root: Path) -> None:
    """Make copies of the qwen3 folder with one defect each."""
    tensors = load_file(root / "qwen3" / SINGLE)
    for kind in ("missing", "cut"):
        shutil.copytree(root / "qwen3", root / kind)
    kept = {key: tensor for key, tensor in tensors.items() if key != LOST}
    save_file(kept, root / "missing" / SINGLE, metadata={"format": "pt"})
    (root / "cut" / SINGLE).write_bytes((root / "qwen3" / SINGLE).read_bytes()[:-100])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("fsdp")
    for kind in ("qwen3", "qwen2_tied"):
        make_hf_folder(root / kind, kind)
    make_hf_folder(root / "qwen3_bf16", "qwen3", dtype=torch.bfloat16)
    for kind in ARCHITECTURES:
        make_model_folder(root / kind, kind)
    shutil.copytree(root / "qwen3", root / "qwen3_other")
    other = load_file(root / "qwen3" / "model.safetensors")
    save_file({name: -tensor for name, tensor in other.items()}, root / "qwen3_other" / "model.safetensors")
    _damage(root)
    return root


@pytest.fixture(scope="module")
def saved_in_one(root: Path) -> dict[str, Any]:
    return save_in_one(root)


@pytest.fixture(scope="module")
def ranks(root: Path, saved_in_one: Any) -> list[dict[str, Any]]:
    return run_ranks(_measure, 2, root, timeout_s=280.0)


@pytest.fixture(scope="module")
def resumed_in_one(root: Path, ranks: Any) -> dict[Any, Any]:
    return resume_in_one(root)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2_tied"])
def test_twenty_steps(ranks: Any, root: Path, kind: str) -> None:
    """Fails if errors accumulate: with untied and tied embeddings, packed, with and without recomputation."""
    reference = train_reference(root / kind, N_CURVE)
    for rank in ranks:
        assert rank["curves"][kind] == pytest.approx(reference.losses, abs=1e-5)
    assert max(reference.losses) - min(reference.losses) > 0.1  # the losses change


def test_bfloat16(ranks: Any, root: Path) -> None:
    """Fails if main weights, gradients or optimizer are not float32, or the export is not what was loaded."""
    reference = train_bf16_reference(root / "qwen3_bf16", N_CURVE, n_batches=4, lr=BF16_LR)
    for rank in ranks:
        assert rank["bf16"] == pytest.approx(reference, abs=2e-3)
        assert rank["bf16_round_trip"]
    assert reference[0] - reference[-4] > 0.02  # ten times the tolerance, on the same batch


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_any_architecture(ranks: Any, root: Path, kind: str) -> None:
    """Fails if a feature of such a model is dropped: biases, positions, windows, soft caps."""
    reference = train_reference(root / kind, N_SHORT)
    for rank in ranks:
        round_trip, losses = rank["architectures"][kind]
        assert round_trip
        assert losses == pytest.approx(reference.losses, abs=1e-5)


@pytest.mark.parametrize(("kind", "pack"), [(kind, pack) for kind in IMAGE_KINDS for pack in (False, True)])
def test_a_model_that_reads_images(tmp_path: Path, kind: str, pack: bool) -> None:
    """Fails if loss or gradients on text are not those of the whole model, if anything but the language model is
    trained or sent, or if the export lacks a tensor, renames one or changes a frozen one.
    """
    folder = make_model_folder(tmp_path / kind, kind)
    source, reference = load_file(folder / SINGLE), train_reference(folder, 2)
    trained = language_model(source)
    first, second = ([packed(b) if pack else b for b in make_micro_batches(step)] for step in range(2))
    with group_of_one():
        student = build_student("fsdp2", folder, 0, 1, packing=pack)
        grads = grads_of(student, first)
        assert grads.keys() == weights(student).keys() == trained
        for name, grad in grads.items():
            torch.testing.assert_close(grad.cpu(), reference.grads[name], atol=1e-6, rtol=0.0)
        assert student.train_step(first).loss == pytest.approx(reference.losses[0], abs=1e-6)
        assert student.evaluate(second).loss == pytest.approx(reference.losses[1], abs=1e-5)
        assert len(student._optimizer.state) == len(list(student.model.parameters())) == len(trained)
        student.save_hf(tmp_path / "export", folder)
        exported, held = load_file(tmp_path / "export" / SINGLE), weights(student)
    assert exported.keys() == source.keys()
    assert all(torch.equal(tensor, (held if name in trained else source)[name]) for name, tensor in exported.items())
    read_model(tmp_path / "export")


def test_lora(ranks: Any, root: Path) -> None:
    """Fails if adapters train or merge differently from peft's, or the first export is not the base."""
    lora = ranks[0]["lora"]
    adapters, ours = (
        {name: torch.from_numpy(array) for name, array in lora[key].items()} for key in ("adapters", "merged")
    )
    losses, merged = train_peft(root / "qwen3", LORA, adapters, N_SHORT)
    for rank in ranks:
        assert rank["lora"]["losses"] == pytest.approx(losses, abs=1e-5)
        assert rank["lora"]["first_is_base"] and rank["lora"]["first_bf16_is_base"]
        assert rank["lora"]["bf16_dtypes"] == {"torch.float32"}
        assert rank["lora"]["bf16_losses"] == pytest.approx(losses, abs=2e-2)
    base = load_file(root / "qwen3" / "model.safetensors")
    moved = {name for name, tensor in ours.items() if not torch.equal(tensor, base[name])}
    assert moved == {name for name in base if name.removesuffix(".weight").endswith(tuple(LORA.targets))}
    assert max(float((ours[name] - merged[name]).abs().max()) for name in moved) <= 1e-5
    assert max(float((ours[name] - base[name]).abs().max()) for name in moved) > 1e-4


@pytest.mark.parametrize("pair", SAME_WORLD, ids="-".join)
def test_resume(ranks: Any, pair: tuple[str, str]) -> None:
    """Fails if adapters, or training with shards in host memory, resumed on the device or from it, are not bit-exact.

    Also fails if a step does not wait for the copy of a pending save.
    """
    for rank in ranks:
        saves, resumes, _ = rank["resume"]
        result = resumes[pair]
        assert result.pop("step") == SAVED_AT
        assert result == saves[pair[0]]


@pytest.mark.parametrize("pair", OTHER_WORLD, ids="-".join)
def test_resume_with_another_number_of_ranks(
    ranks: Any, saved_in_one: Any, resumed_in_one: Any, pair: tuple[str, str]
) -> None:
    """Fails if weights, moments or the step differ after a resume with one rank instead of two, or vice versa."""
    saves, _, from_one = ranks[0]["resume"]
    for result, save in ((from_one[pair], saved_in_one[pair[0]]), (resumed_in_one[pair], saves[pair[0]])):
        assert result["step"] == SAVED_AT
        assert result["saved"] == save["saved"]
        assert result["losses"] == pytest.approx(save["losses"], abs=1e-5)


def test_lora_of_transposed_weights(ranks: Any, root: Path) -> None:
    """Fails if adapters of gpt2's [in, out] weights are trained or merged with swapped dimensions."""
    ours = ranks[0]["lora"]["conv1d"]
    adapters = {name: torch.from_numpy(array) for name, array in ours["adapters"].items()}
    losses, merged = train_peft(root / "gpt2", CONV1D_LORA, adapters, N_SHORT)
    assert ours["losses"] == pytest.approx(losses, abs=1e-5)
    base = load_file(root / "gpt2" / "model.safetensors")
    errors = [float((torch.from_numpy(array) - merged[name]).abs().max()) for name, array in ours["merged"].items()]
    moved = [name for name, array in ours["merged"].items() if not torch.equal(torch.from_numpy(array), base[name])]
    assert max(errors) <= 1e-5 and len(moved) == 2 * 3  # c_attn, and c_proj of attention and MLP, in two layers


def test_adapters_of_another_model_are_refused(ranks: Any) -> None:
    """Fails if adapters are resumed with other base weights than in training, or for other layers than saved."""
    for rank in ranks:
        kinds, texts = zip(*rank["lora"]["on others"], strict=True)
        assert set(kinds) == {"CheckpointError"}
        assert "model.path" in texts[0]
        assert "model.layers.0.mlp.down_proj.lora_A.weight" in texts[1]
        assert "model.layers.0.mlp.up_proj.lora_A.weight" in texts[2]


def test_experts_are_saved_as_one_tensor_each(ranks: Any) -> None:
    """Fails if the folder of a trained model, with one tensor per expert, does not hold the trained weights."""
    for rank in ranks:
        assert rank["saved"] and rank["experts_moved"] == 2 * 3 * 3  # w1, w2, w3 of 3 experts in 2 layers


def test_ranks_share_the_cores_of_their_host(ranks: Any) -> None:
    """Fails if host optimizers use one thread each or too many."""
    cores = len(os.sched_getaffinity(0))
    assert all(rank["threads"] == max(1, cores // 2) for rank in ranks)


def test_after_an_error_in_a_forward_pass(ranks: Any) -> None:
    """Fails if parameters stay gathered, so that the next snapshot or step is wrong."""
    assert all(all(rank["after_error"]) for rank in ranks)


def test_damaged_weights_are_refused_on_all_ranks(ranks: Any) -> None:
    """Fails if weights that change after the driver's check are trained on, or the ranks raise different errors."""
    (missing, cut), other = (rank["refused"] for rank in ranks)
    assert [missing, cut] == other and {missing[0], cut[0]} == {"ModelError"}
    assert LOST in missing[1] and SINGLE in cut[1]


def test_a_malformed_micro_batch_on_one_rank(ranks: Any) -> None:
    """Fails if a malformed micro-batch hangs the other rank, is trained on, or leaves parameters gathered."""
    caught = ranks[0]["bad_batches"]
    assert caught == ranks[1]["bad_batches"]
    for case, text in (("rows", "loss_index"), ("no table", "topk"), ("left padded", "position_ids")):
        assert caught[case][0] == "DataError" and text in caught[case][1], (case, caught[case])
    for case in ("token", "sampled token"):
        assert caught[case][0] == "NumericsError" and "vocabulary" in caught[case][1], (case, caught[case])
    assert caught["after"] == ("0", "1")


def test_logprobs_of_the_reference(ranks: Any, root: Path) -> None:
    """Fails if a frozen reference or a student without adapters differs from the folder's model, or mixes up sequences.

    Cases: uneven shares, packed, padded, soft caps.
    """
    for kind, ways in (("qwen3", ("frozen", "base")), ("gemma2", ("gemma2",))):
        expected = plain_logprobs(root / kind)
        for way in ways:
            for rank, result in enumerate(ranks):
                found = result["reference"][way]
                assert [len(row) for row in found] == [len(expected[i]) for i in indices_of(rank)]
                for i, row in zip(indices_of(rank), found, strict=True):
                    assert abs(row - expected[i]).max() <= 1e-5
    base, frozen = (ranks[0]["reference"][way] for way in ("base", "frozen"))
    assert max(abs(a - b).max() for a, b in zip(base, frozen, strict=True)) <= 2e-6
    assert max(result["reference"]["from base"] for result in ranks) <= 1e-6
    assert [result["reference"]["no share"] for result in ranks] == [0, 1]


def test_logprobs_without_adapters_have_no_side_effect(ranks: Any) -> None:
    """Fails if adapters stay disabled afterwards, also after an error, or if the pass changes later steps.

    The adapters must have learned something, so that disabling them makes a difference.
    """
    for result in ranks:
        found = result["reference"]
        assert found["same losses"] and found["again"] and found["again after an error"]
        assert abs(found["learned"]) > 1e-3
        assert found["bad"][0] == "DataError" and "actor rank 1" in found["bad"][1]


def test_the_reference_term_grows_as_the_student_changes(ranks: Any) -> None:
    """Fails if the term is not 0 while the student equals its reference, or the reference changes, too."""
    for result in ranks:
        first, *later = result["reference"]["curve"]
        assert abs(first) <= 1e-6 < min(later) and result["reference"]["stayed"], result["reference"]["curve"]

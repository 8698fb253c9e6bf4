"""The FSDP2 student beyond what both backends promise: curves, bfloat16, host memory, LoRA, other architectures.

Two gloo processes, CPU, against plain single-process training of the same HF model. What this does not prove: NCCL,
CUDA streams, pinned memory.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gkd.errors import GkdError
from tests.dist.fsdp_resume_cases import LORA, OTHER_WORLD, SAME_WORLD, in_two, resume_in_one, save_in_one
from tests.dist.helpers import run_gloo
from tests.dist.megatron_reference import (
    BETAS,
    CLIP,
    EPS,
    LR,
    VOCAB,
    WEIGHT_DECAY,
    dense_bucket_loss_sum,
    make_hf_folder,
    make_micro_batches,
    train_reference,
)
from tests.dist.resume_cases import SAVED_AT
from tests.dist.student_cases import as_numpy, build_student, packed, same_weights, share, weights

N_CURVE, N_SHORT = 20, 4
BF16_LR = 2e-4
ARCHITECTURES = {"gpt2": True, "olmo2": True, "gemma2": False}  # name -> does it take packs and the fused head


def _make_folder(folder: Path, kind: str) -> Path:
    """Models that the Megatron backend does not take; 2 layers, random weights that are nowhere inert."""
    import transformers as tf

    torch.manual_seed(len(kind))
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model: Any
    if kind == "gpt2":  # tied, biases, learned positions, [in, out] weights, dropout in its config
        model = tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, **ids)
        )
    elif kind == "olmo2":
        model = tf.Olmo2ForCausalLM(tf.Olmo2Config(**sizes, **ids, tie_word_embeddings=False))
    else:  # sliding windows, soft caps on scores and logits, scaled embeddings
        config = tf.Gemma2Config(**sizes, **ids, head_dim=8, query_pre_attn_scalar=8, sliding_window=4)
        model = tf.Gemma2ForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(1.0 if param.ndim == 1 else 0.0, 0.15)
    model.save_pretrained(folder)
    return folder


def _train_bf16(folder: Path, n_steps: int) -> list[float]:
    """Losses of a bfloat16 model with float32 main weights and gradients."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    params = list(model.parameters())
    mains = [param.detach().float().requires_grad_() for param in params]
    groups = [
        {"params": [m for m in mains if m.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [m for m in mains if m.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer, losses = torch.optim.AdamW(groups, lr=BF16_LR, betas=BETAS, eps=EPS), []
    for step in range(n_steps):
        batches = make_micro_batches(step % 4)
        n_tokens, total = sum(b.n_loss_tokens for b in batches), 0.0
        optimizer.zero_grad()
        for batch in batches:
            model.zero_grad()
            loss = dense_bucket_loss_sum(model(batch.tokens).logits, batch) / n_tokens
            loss.backward()
            total += float(loss.detach())
            for main, param in zip(mains, params, strict=True):
                main.grad = param.grad.float() if main.grad is None else main.grad + param.grad.float()
        torch.nn.utils.clip_grad_norm_(mains, CLIP)
        optimizer.step()
        with torch.no_grad():
            for main, param in zip(mains, params, strict=True):
                param.copy_(main)
        losses.append(total)
    return losses


def _train_lora(folder: Path, adapters: dict[str, torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and merged weights of peft under torch's AdamW, from the same first adapters."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = PeftConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=LORA.targets)
    model = get_peft_model(base, settings)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    with torch.no_grad():
        for name, param in trained.items():
            param.copy_(adapters[name.removeprefix("base_model.model.").replace(".default", "")])
    optimizer = torch.optim.AdamW(list(trained.values()), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    losses = []
    for step in range(N_SHORT):
        batches = make_micro_batches(step)
        n_tokens = sum(batch.n_loss_tokens for batch in batches)
        loss = torch.stack([dense_bucket_loss_sum(model(b.tokens).logits, b) for b in batches]).sum() / n_tokens
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.merge_and_unload().state_dict()


def _measure(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Runs in a rank: everything that the tests below look at."""

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
        recompute = "full" if kind == "qwen3" else "selective"
        result["curves"][kind] = losses(build(kind, recompute=recompute), N_CURVE)
    result["bf16"] = losses(build("qwen3_bf16", dtype=torch.bfloat16, lr=BF16_LR), N_CURVE, period=4)
    exported = weights(build("qwen3_bf16", dtype=torch.bfloat16))
    result["bf16_round_trip"] = same_weights(exported, load_file(root / "qwen3_bf16" / "model.safetensors"))
    offloaded = build("qwen3", cpu_offload=True)
    offloaded_losses = losses(offloaded, N_SHORT)
    plain = build("qwen3")
    result["offload"] = [offloaded_losses == losses(plain, N_SHORT), same_weights(weights(plain), weights(offloaded))]
    for kind, whole in ARCHITECTURES.items():
        student = build(kind, packing=whole, fused_lm_head=whole)
        round_trip = same_weights(weights(student), load_file(root / kind / "model.safetensors"))
        result["architectures"][kind] = (round_trip, losses(student, N_SHORT, pack=whole))
    result["lora"] = _measure_lora(build, losses, root)
    result["refused"] = _measure_refusals(build, root)
    result["bad_batches"] = _measure_bad_batches(plain, rank)
    result["resume"] = in_two(root, rank)
    return result


def _measure_lora(build: Any, losses: Any, root: Path) -> dict[str, Any]:
    student = build("qwen3", lora=LORA)
    places = student._trained_places()
    first = {name: place.tensor.full_tensor().detach().clone() for name, place in places.items()}
    before = weights(student)
    curve = losses(student, N_SHORT)
    half = build("qwen3_bf16", dtype=torch.bfloat16, lora=LORA, recompute="full")
    unmoved = same_weights(weights(half), load_file(root / "qwen3_bf16" / "model.safetensors"))
    return {
        "adapters": as_numpy(first),
        "first_is_base": same_weights(before, load_file(root / "qwen3" / "model.safetensors")),
        "first_bf16_is_base": unmoved,
        "bf16_dtypes": {str(place.tensor.dtype) for place in half._trained_places().values()},
        "bf16_losses": losses(half, N_SHORT),
        "losses": curve,
        "merged": as_numpy(weights(student)),
    }


def _measure_refusals(build: Any, root: Path) -> dict[str, tuple[str, str]]:
    """What is wrong with a model or a setting, by case: (type, text) of the error."""
    cases: dict[str, dict[str, Any]] = {
        "gemma2 packed": {"kind": "gemma2"},
        "gemma2 fused": {"kind": "gemma2", "packing": False},
        "gemma2 selective": {"kind": "gemma2", "packing": False, "recompute": "selective"},
        "no target": {"kind": "qwen3", "lora": replace(LORA, targets=["q_proj", "c_attn"])},
        "head as target": {"kind": "qwen3", "lora": replace(LORA, targets=["lm_head"])},
        **{kind: {"kind": kind} for kind in ("missing", "unexpected", "shape", "dtype", "cut", "no_config")},
    }
    refused = {}
    for case, changes in cases.items():
        kind = changes.pop("kind")
        try:
            build(kind, **changes)
            refused[case] = ("no error", "")
        except GkdError as error:
            refused[case] = (type(error).__name__, str(error))
    return refused


def _measure_bad_batches(student: Any, rank: int) -> dict[str, tuple[str, str]]:
    """A malformed micro-batch on rank 1 alone, by case; and that a good step follows."""
    good = packed(make_micro_batches(0)[1])
    assert good.cu_seqlens is not None
    outside = good.tokens.clone()
    outside[0, 0] = VOCAB
    cases = {
        "positions": replace(good, position_ids=torch.arange(good.tokens.shape[1])[None]),
        "borders": replace(good, cu_seqlens=good.cu_seqlens[:-1]),
        "empty sequence": replace(good, cu_seqlens=torch.cat([good.cu_seqlens[:1], good.cu_seqlens])),
        "rows": replace(good, loss_index=good.loss_index + good.tokens.shape[1]),
        "targets": replace(good, targets=None),
        "token": replace(good, tokens=outside),
        "left padded": replace(make_micro_batches(0)[1], position_ids=make_micro_batches(0)[1].position_ids + 1),
    }
    caught = {}
    for case, bad in cases.items():
        try:
            student.train_step([good, bad if rank == 1 else good])
            caught[case] = ("no error", "")
        except GkdError as error:
            caught[case] = (type(error).__name__, str(error))
    step = student.step
    student.train_step([good])
    caught["after"] = (str(step), str(student.step))
    return caught


def _damage(root: Path) -> None:
    """Copies of the qwen3 folder with one thing wrong each."""
    tensors = load_file(root / "qwen3" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    damaged = {
        "missing": {key: tensor for key, tensor in tensors.items() if key != name},
        "unexpected": {**tensors, "model.layers.2.mlp.up_proj.weight": torch.zeros(2)},
        "shape": {**tensors, name: tensors[name][:-1].contiguous()},
        "dtype": {**tensors, name: tensors[name].to(torch.int8)},
        "cut": tensors,
        "no_config": tensors,
    }
    for kind, changed in damaged.items():
        shutil.copytree(root / "qwen3", root / kind)
        save_file(changed, root / kind / "model.safetensors", metadata={"format": "pt"})
    weights_file = root / "cut" / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-100])
    (root / "no_config" / "config.json").unlink()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("fsdp")
    for kind in ("qwen3", "qwen2_tied"):
        make_hf_folder(root / kind, kind)
    make_hf_folder(root / "qwen3_bf16", "qwen3", dtype=torch.bfloat16)
    for kind in ARCHITECTURES:
        _make_folder(root / kind, kind)
    _damage(root)
    return root


@pytest.fixture(scope="module")
def saved_in_one(root: Path) -> dict[str, Any]:
    return save_in_one(root)


@pytest.fixture(scope="module")
def ranks(root: Path, saved_in_one: Any) -> list[dict[str, Any]]:
    return run_gloo(_measure, 2, root, timeout_s=280.0)


@pytest.fixture(scope="module")
def resumed_in_one(root: Path, ranks: Any) -> dict[Any, Any]:
    return resume_in_one(root)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["qwen3", "qwen2_tied"])
def test_twenty_steps(ranks: Any, root: Path, kind: str) -> None:
    """Fails if errors add up over steps: with untied and tied embeddings, packed, with and without recomputation."""
    reference = train_reference(root / kind, N_CURVE)
    for rank in ranks:
        assert rank["curves"][kind] == pytest.approx(reference.losses, abs=1e-5)
    assert max(reference.losses) - min(reference.losses) > 0.1  # something was learned or lost on the way


@pytest.mark.dist
def test_bfloat16(ranks: Any, root: Path) -> None:
    """Fails if main weights, gradients or optimizer are not float32, or the export is not what was loaded."""
    reference = _train_bf16(root / "qwen3_bf16", N_CURVE)
    for rank in ranks:
        assert rank["bf16"] == pytest.approx(reference, abs=2e-3)
        assert rank["bf16_round_trip"]
    assert reference[0] - reference[-4] > 0.02  # ten times the tolerance, on the same batch


@pytest.mark.dist
def test_host_memory(ranks: Any) -> None:
    """Fails if shards in host memory train another model, in any bit."""
    assert all(rank["offload"] == [True, True] for rank in ranks)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_any_architecture(ranks: Any, root: Path, kind: str) -> None:
    """Fails if something that only such a model has is lost on the way: biases, positions, windows, soft caps."""
    reference = train_reference(root / kind, N_SHORT)
    for rank in ranks:
        round_trip, losses = rank["architectures"][kind]
        assert round_trip
        assert losses == pytest.approx(reference.losses, abs=1e-5)


@pytest.mark.dist
def test_lora(ranks: Any, root: Path) -> None:
    """Fails if adapters learn otherwise than peft's, are merged otherwise, or the first export is not the base."""
    lora = ranks[0]["lora"]
    adapters, ours = (
        {name: torch.from_numpy(array) for name, array in lora[key].items()} for key in ("adapters", "merged")
    )
    losses, merged = _train_lora(root / "qwen3", adapters)
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


@pytest.mark.dist
@pytest.mark.parametrize("pair", SAME_WORLD, ids="-".join)
def test_resume(ranks: Any, pair: tuple[str, str]) -> None:
    """Fails if a bit of adapters, or of shards that are on the host now and were not then, differs after a resume.

    Also if a step does not wait for the copy that a save has begun.
    """
    for rank in ranks:
        saves, resumes, _ = rank["resume"]
        result = resumes[pair]
        assert result.pop("step") == SAVED_AT
        assert result == saves[pair[0]]


@pytest.mark.dist
@pytest.mark.parametrize("pair", OTHER_WORLD, ids="-".join)
def test_another_number_of_ranks_takes_over(
    ranks: Any, saved_in_one: Any, resumed_in_one: Any, pair: tuple[str, str]
) -> None:
    """Fails if weights lose a bit between one rank and two, or moments or the step: training would go on otherwise."""
    saves, _, from_one = ranks[0]["resume"]
    for result, save in ((from_one[pair], saved_in_one[pair[0]]), (resumed_in_one[pair], saves[pair[0]])):
        assert result["step"] == SAVED_AT
        assert result["saved"] == save["saved"]
        assert result["losses"] == pytest.approx(save["losses"], abs=1e-5)


@pytest.mark.dist
def test_what_is_refused(ranks: Any) -> None:
    """Fails if a model or a setting would train something else without a word, or ranks disagree about it."""
    refused = ranks[0]["refused"]
    assert refused == ranks[1]["refused"]
    name = "model.layers.1.mlp.up_proj.weight"
    for case, kind, texts in (
        ("gemma2 packed", "ConfigError", ("actor.packing", "sliding window", "actor.packing=false")),
        ("gemma2 fused", "ConfigError", ("actor.fused_lm_head", "soft cap")),
        ("gemma2 selective", "ConfigError", ("actor.recompute", "eager")),
        ("no target", "ConfigError", ("actor.lora.targets", "c_attn", "choose among")),
        ("head as target", "ConfigError", ("actor.lora.targets", "lm_head")),
        ("missing", "ModelError", ("1 tensors are missing", name)),
        ("unexpected", "ModelError", ("model.layers.2.mlp.up_proj.weight",)),
        ("shape", "ModelError", (name, "[47, 32]", "[48, 32]")),
        ("dtype", "ModelError", (name, "I8")),
        ("cut", "ModelError", ("model.safetensors", "Copy it again")),
        ("no_config", "ModelError", ("config.json",)),
    ):
        assert refused[case][0] == kind, (case, refused[case])
        assert all(text in refused[case][1] for text in texts), (case, refused[case])


@pytest.mark.dist
def test_a_malformed_micro_batch_on_one_rank(ranks: Any) -> None:
    """Fails if it hangs the other rank, trains on something, or leaves the model half gathered."""
    caught = ranks[0]["bad_batches"]
    assert caught == ranks[1]["bad_batches"]
    for case, text in (
        ("positions", "begin anew"),
        ("borders", "does not ascend"),
        ("empty sequence", "does not ascend"),
        ("rows", "loss_index leaves"),
        ("targets", "targets for 0"),
        ("left padded", "padded on the right"),
    ):
        assert caught[case][0] == "DataError" and text in caught[case][1], (case, caught[case])
    assert caught["token"][0] == "NumericsError"
    assert caught["after"] == (str(N_SHORT), str(N_SHORT + 1))

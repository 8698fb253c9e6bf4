"""Make tiny HF models and train them in a single process, as the reference for the students.

Written independently of `gkd.loss` and `gkd.actor`: dense log-softmax, autograd, torch's AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gkd.types import MicroBatch, Rollout, TokenTargets

VOCAB = 1003  # prime-ish on purpose: neither 2 nor 4 divides it
PAD = 16  # occurs inside sequences, as the end-of-turn token of models that pad with it
TOP_K = 6
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-5, 0.1, 0.5
KINDS = ("qwen3", "qwen2_tied", "llama3_rope", "smollm3", "olmo2", "ministral3", "gemma3_text", "seed_oss")
# Normalized expert weights and experts in every layer; not normalized, and a dense first layer.
MOE_KINDS = ("qwen3_moe", "qwen3_moe_mixed", "qwen2_moe", "glm4_moe", "mixtral")


def _architecture(kind: str, n_layers: int, head_dim: int) -> tuple[str, dict[str, Any]]:
    """Return the beginning of the names of the classes of transformers, and settings of their config."""
    of_layers = ["sliding_attention", "full_attention"] * (n_layers // 2)
    gemma3_rope = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    }
    llama3_rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0}
    llama3_rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 4}
    yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
    no_ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    glm4 = {"routed_scaling_factor": 1.5, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    glm4 |= {"n_shared_experts": 2, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
    qwen2_moe = {"num_experts": 6, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 2}
    qwen2_moe |= {"shared_expert_intermediate_size": 40, "norm_topk_prob": True}
    qwen3_moe = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    untied = {"tie_word_embeddings": False}
    padding = {"pad_token_id": PAD}
    head = {"head_dim": 16}
    gemma3 = {"sliding_window": 5, "layer_types": of_layers, "query_pre_attn_scalar": 7, "rope_parameters": gemma3_rope}
    return {
        "qwen3": ("Qwen3", untied | {"head_dim": head_dim, "rope_theta": 1e6}),
        "qwen2_tied": ("Qwen2", padding | {"tie_word_embeddings": True, "rope_theta": 5e4}),
        "llama3_rope": ("Llama", untied | {"rope_parameters": llama3_rope}),
        "mistral": ("Mistral", untied | head | {"sliding_window": 6}),
        "gemma3_text": ("Gemma3", gemma3 | padding | head),
        "smollm3": ("SmolLM3", no_ids | {"no_rope_layers": [1, 0] * n_layers}),
        "ministral3": ("Ministral3", head | {"rope_parameters": yarn}),
        "seed_oss": ("SeedOss", head | padding),
        "olmo2": ("Olmo2", padding),
        "glm4_moe": ("Glm4Moe", glm4 | head | {"attention_bias": True, "use_qk_norm": True}),
        "qwen2_moe": ("Qwen2Moe", qwen2_moe | untied),
        "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3}),
        "qwen3_moe": ("Qwen3Moe", qwen3_moe | untied | {"norm_topk_prob": True, "mlp_only_layers": []}),
        "qwen3_moe_mixed": ("Qwen3Moe", qwen3_moe | untied | {"norm_topk_prob": False, "mlp_only_layers": [0]}),
    }[kind]


def make_hf_folder(
    folder: Path, kind: str, *, dtype: torch.dtype = torch.float32, n_layers: int = 2, head_dim: int = 16
) -> Path:
    """Save a randomly initialized HF model in `folder`, with random norms and biases so that each has an effect."""
    import transformers as tf

    sizes = {"rms_norm_eps": 1e-6, "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": n_layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 64}
    torch.manual_seed(sum(map(ord, kind)))
    name, settings = _architecture(kind, n_layers, head_dim)
    config = getattr(tf, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    model = getattr(tf, f"{name}ForCausalLM")(config(**sizes, **settings))
    with torch.no_grad():
        for name, param in (*model.named_parameters(), *_corrections(model)):
            if param.ndim == 1:
                param.normal_(1.0 if "norm" in name else 0.0, 0.2)
            else:
                param.normal_(0.0, 0.15)
    model.to(dtype).save_pretrained(folder)
    return folder


def _corrections(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in model.named_buffers() if "e_score_correction_bias" in name]


def make_micro_batches(seed: int, count: int = 4) -> list[MicroBatch]:
    """Return micro-batches of different B, S and N, with teacher mass between 0.3 and 0.9 on the top-k ids."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(count):
        n_sequences, length = 1 + i % 3, 7 + 3 * i
        tokens = torch.randint(0, VOCAB, (n_sequences, length), generator=generator)
        rows = []
        for b in range(n_sequences):
            prompt, end = 2 + b, length - b  # the last b columns are padding
            tokens[b, end:] = 0
            rows += [b * length + t for t in range(prompt - 1, end - 1)]
        loss_index = torch.tensor(rows)
        n_rows = len(rows)
        topk_ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:TOP_K] for _ in range(n_rows)])
        topk_ids[0] = torch.tensor([0, 1, 501, 502, 1001, 1002])  # shard boundaries at TP 2, and the ends
        mass = 0.3 + 0.6 * torch.rand((n_rows, 1), generator=generator)
        shares = torch.rand((n_rows, TOP_K), generator=generator) + 0.05
        probs = mass * shares / shares.sum(dim=-1, keepdim=True)
        batches.append(
            MicroBatch(
                tokens=tokens,
                position_ids=torch.arange(length).expand(n_sequences, length).contiguous(),
                loss_index=loss_index,
                targets=TokenTargets(
                    sampled_ids=tokens.flatten()[loss_index + 1],
                    rollout_logprobs=torch.zeros(n_rows),
                    on_policy=torch.ones(n_rows, dtype=torch.bool),
                    topk_ids=topk_ids,
                    topk_logprobs=probs.log(),
                    tail_mass=1 - probs.sum(dim=-1),
                ),
            )
        )
    return batches


def dense_bucket_loss_sum(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return the sum over loss rows of KL(teacher || student) on K + 1 outcomes, from [B, S, V] logits."""
    targets = batch.targets
    assert targets is not None and targets.topk_ids is not None and targets.topk_logprobs is not None
    log_q = torch.log_softmax(logits.flatten(0, 1)[batch.loss_index].float(), dim=-1)
    picked = torch.gather(log_q, 1, targets.topk_ids)
    p, q = targets.topk_logprobs.exp(), picked.exp()
    p_rest, q_rest = 1 - p.sum(-1), 1 - q.sum(-1)
    return (p * (p.log() - picked)).sum() + (p_rest * (p_rest.log() - q_rest.log())).sum()


def by_file_name(model: Any, value: Callable[[torch.nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """Return copies of `value(parameter)` by the names in the files: transformers fuses experts, files do not."""
    from transformers.core_model_loading import revert_weight_conversion

    params = (*model.named_parameters(), *_corrections(model))
    named = {name: value(param).detach().clone() for name, param in params}
    return dict(revert_weight_conversion(model, named))


@dataclass
class Reference:
    """Results of plain training of one folder."""

    probe: Tensor  # [B, S] tokens
    probe_logits: Tensor  # [B, S, V]
    losses: list[float]  # token means, per step
    grad_norms: list[float]
    grads: dict[str, Tensor]  # of step 0, before clipping
    weights_after_one: dict[str, Tensor]


def read_model(folder: Path, **options: Any) -> Any:
    """Return the model of a folder. All rows of its embedding get gradients, unlike in transformers the padding row."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    auto = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    model = auto.from_pretrained(folder, **options)
    model.get_input_embeddings().padding_idx = None
    return model


@torch.no_grad()
def logprob_rows(model: Any, rollout: Rollout, temperature: float = 1.0, n_vocab: int | None = None) -> Tensor:
    """Return [R, V] logprobs of a model of transformers at each response token, given all tokens before it."""
    tokens = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids])).long()
    logits = model(tokens[None]).logits[0, len(rollout.prompt_ids) - 1 : -1, :n_vocab]
    return (logits / temperature).log_softmax(-1)


def response_logprobs(rows: Tensor, rollout: Rollout) -> np.ndarray:
    """Return [R], those of the response tokens."""
    return rows.gather(-1, torch.from_numpy(rollout.response_ids).long()[:, None])[:, 0].numpy()


def train_reference(folder: Path, n_steps: int, *, n_batches: int | None = None) -> Reference:
    """Make `n_steps` of AdamW on `make_micro_batches(step)`, without weight decay on norms and biases.

    Args:
        n_batches: number of different global batches, used in turn; None: a new one each step.
    """
    model = read_model(folder, dtype=torch.float32, attn_implementation="eager")
    probe = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        probe_logits = model(probe).logits
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    reference = Reference(probe, probe_logits, [], [], {}, {})
    for step in range(n_steps):
        batches = make_micro_batches(step % (n_batches or n_steps))
        n_tokens = sum(batch.n_loss_tokens for batch in batches)
        loss = torch.stack([dense_bucket_loss_sum(model(b.tokens).logits, b) for b in batches]).sum() / n_tokens
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            reference.grads = by_file_name(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        reference.losses.append(float(loss))
        reference.grad_norms.append(float(norm))
        if step == 0:
            reference.weights_after_one = by_file_name(model, lambda p: p)
    return reference


def save_references(
    root: Path, kinds: Iterable[str], n_steps: int, *, n_layers: int = 2, n_batches: int | None = None
) -> Path:
    """Save the model and the reference run of each kind in `root`, as KIND and KIND.pt; return `root`."""
    torch.set_num_threads(1)
    for kind in sorted(set(kinds)):
        make_hf_folder(root / kind, kind, n_layers=n_layers)
        torch.save(train_reference(root / kind, n_steps, n_batches=n_batches), root / f"{kind}.pt")
    return root


def train_bf16_reference(
    folder: Path, n_steps: int, *, n_batches: int, lr: float = LR, keep_masters: bool = True
) -> list[float]:
    """Return the token mean of each step in bfloat16, with float32 main weights and float32 sums of gradients.

    Args:
        n_batches: see `train_reference`.
        keep_masters: False: updates below bfloat16's precision are rounded away.
    """
    model = read_model(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    params = list(model.parameters())
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    groups = [
        {"params": [p for p in masters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in masters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPS)
    losses = []
    for step in range(n_steps):
        batches = make_micro_batches(step % n_batches)
        n_tokens = sum(batch.n_loss_tokens for batch in batches)
        for master in masters:
            master.grad = torch.zeros_like(master)
        loss_sum = 0.0
        for batch in batches:
            loss = dense_bucket_loss_sum(model(batch.tokens).logits, batch)
            grads = torch.autograd.grad(loss, params)
            for master, grad in zip(masters, grads, strict=True):
                assert master.grad is not None
                master.grad += grad.float() / n_tokens
            loss_sum += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
                if not keep_masters:
                    master.copy_(param)
        losses.append(loss_sum / n_tokens)
    return losses

"""Train LoRA adapters with peft in a single process, as the reference for both backends."""

from __future__ import annotations

from pathlib import Path

import torch

from gkd.config.schema_actor import LoraConfig
from tests.dist.megatron_reference import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, dense_bucket_loss_sum, make_micro_batches

LORA = LoraConfig(rank=4, alpha=8.0, targets=["q_proj", "v_proj", "down_proj"])


def train_peft(
    folder: Path, lora: LoraConfig, adapters: dict[str, torch.Tensor], n_steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and merged weights of peft with torch's AdamW, from the same initial adapters."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets)
    model = get_peft_model(base, settings)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    with torch.no_grad():
        for name, param in trained.items():
            param.copy_(adapters[name.removeprefix("base_model.model.").replace(".default", "")])
    optimizer = torch.optim.AdamW(list(trained.values()), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    losses = []
    for step in range(n_steps):
        batches = make_micro_batches(step)
        n_tokens = sum(batch.n_loss_tokens for batch in batches)
        loss = torch.stack([dense_bucket_loss_sum(model(b.tokens).logits, b) for b in batches]).sum() / n_tokens
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.merge_and_unload().state_dict()

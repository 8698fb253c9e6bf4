"""Train a small model from scratch until it reaches a measured accuracy, in plain torch and transformers.

This only makes the models of examples; the loop of distillation is `gkd.trainer`.
Shape letters: B sequences of a batch, S padded sequence length, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from gkd.errors import ModelError

IGNORED = -100  # label that torch's cross entropy ignores
PROGRESS_EVERY_S = 5.0

Parts = Sequence[tuple[list[int], bool]]  # token ids of a sequence in parts, each with whether it is learned
# Inputs of the model; and labels, [B, S] int64, IGNORED where nothing is learned.
Batch = tuple[Mapping[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRecipe:
    """How one of the two models is built, trained and stopped."""

    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    seed: int
    batch_size: int = 32  # sequences per optimizer step
    peak_lr: float = 3e-3
    warmup_steps: int = 30
    # The learning rate stays at its peak until this validation accuracy is measured, then falls over `decay_steps` to
    # `final_lr_share * peak_lr`. Started by accuracy, because a decay that starts too early stops the learning;
    # the required number of steps differs by hundreds between seeds. None means no decay.
    decay_from_accuracy: float | None = None
    decay_steps: int = 120
    final_lr_share: float = 0.05
    # Training stops at the first evaluation with validation accuracy >= stop_accuracy, but not before the end of a
    # requested decay; reaching the limit is an error.
    eval_every: int = 25
    stop_accuracy: float
    step_limit: int
    # The finished model's greedy accuracy on the held-out problems must lie in this band.
    min_accuracy: float
    max_accuracy: float
    # Minimum share of responses that end and are well-formed, at the stop and on the held-out problems.
    min_well_formed: float = 0.9


def build_model(recipe: ModelRecipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a randomly initialized float32 Qwen3 with tied embeddings. Seeds torch's global generator."""
    torch.manual_seed(recipe.seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.n_layers,
            num_attention_heads=recipe.n_heads,
            num_key_value_heads=2,  # grouped-query attention, with one key/value head per rank at TP2
            head_dim=32,  # the smallest that vLLM's CPU attention supports
            max_position_embeddings=256,
            initializer_range=0.06,  # with the default, 0.02, matrices this narrow need twice as many steps
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def train_from_scratch(
    role: str,
    recipe: ModelRecipe,
    tokenizer: PreTrainedTokenizerFast,
    train: Sequence[Parts],
    score: Callable[[Qwen3ForCausalLM], tuple[float, float]],
) -> tuple[Qwen3ForCausalLM, int, float]:
    """Train a new Qwen3 on complete sequences, see `train_model`.

    Returns: the model, the number of steps, its validation accuracy.
    """
    model = build_model(recipe, tokenizer)
    batches = _batches(train, tokenizer.pad_token_id, recipe.batch_size, recipe.seed)
    return model, *train_model(role, recipe, model, batches, lambda: score(model))


def train_model(
    role: str,
    recipe: ModelRecipe,
    model: PreTrainedModel,
    batches: Iterator[Batch],
    score: Callable[[], tuple[float, float]],
) -> tuple[int, float]:
    """Train a model until it reaches the validation accuracy of the recipe.

    Cross entropy of the learned tokens, averaged over the batch; AdamW without decay.

    Args:
        score: returns the validation accuracy of the model, and its share of well-formed responses.

    Returns: the number of steps, the validation accuracy.
    Raises: ModelError if `recipe.step_limit` is reached first.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.peak_lr, betas=(0.9, 0.98), weight_decay=0.0)
    started = last_line = time.monotonic()
    accuracy = 0.0
    decay_start: int | None = None
    for step in range(1, recipe.step_limit + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_lr * lr_share(recipe, step, decay_start)
        inputs, labels = next(batches)
        logits = model(**inputs, use_cache=False).logits  # [B, S, V]
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        if now - last_line > PROGRESS_EVERY_S:
            last_line = now
            print(
                f"{role:>7} | step {step:4d} | loss {loss.item():.3f} | validation accuracy {accuracy:6.1%} "
                f"(stops at {recipe.stop_accuracy:.1%}) | {now - started:3.0f} s",
                flush=True,
            )
        if step % recipe.eval_every == 0:
            accuracy, well_formed = score()
            cooled = recipe.decay_from_accuracy is None or (
                decay_start is not None and step - decay_start >= recipe.decay_steps
            )
            if cooled and accuracy >= recipe.stop_accuracy and well_formed >= recipe.min_well_formed:
                return step, accuracy
            decays = recipe.decay_from_accuracy is not None and accuracy >= recipe.decay_from_accuracy
            if decays and decay_start is None:
                decay_start = step
    raise ModelError(
        f"the {role} reached a validation accuracy of {accuracy:.1%} in {recipe.step_limit} steps; required: "
        f"{recipe.stop_accuracy:.1%}. Fix: raise {role}.step_limit in the recipe, or try another {role}.seed."
    )


def lr_share(recipe: ModelRecipe, step: int, decay_start: int | None) -> float:
    """Return the share of the peak learning rate at a step (from 1): warm-up, plateau, linear decay, minimum.

    Args:
        decay_start: the step after which the decay begins; None before it has started.
    """
    if decay_start is None:
        return min(1.0, step / recipe.warmup_steps)
    return max(recipe.final_lr_share, 1.0 - (step - decay_start) / recipe.decay_steps)


def _batches(train: Sequence[Parts], pad_id: int, batch_size: int, seed: int) -> Iterator[Batch]:
    """Yield shuffled batches endlessly."""
    longest = max(sum(len(ids) for ids, _ in parts) for parts in train)
    tokens, labels = torch.full((len(train), longest), pad_id), torch.full((len(train), longest), IGNORED)
    for row, parts in enumerate(train):
        end = 0
        for ids, is_learned in parts:
            start, end = end, end + len(ids)
            tokens[row, start:end] = torch.tensor(ids)
            if is_learned:
                labels[row, start:end] = tokens[row, start:end]
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(train), generator=generator).split(batch_size):
            yield {"input_ids": tokens[rows]}, labels[rows]

"""Transformers engine for any causal LM folder, on CPU or one GPU.

The backbone runs on the whole right-padded batch, and once on a prompt that several sequences share (`hf_prefix`). The
LM head runs only on the response positions, in chunks of rows (`signals`).

Letters: B sequences, S padded length, H hidden size, C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from teacher_server.engines.base import RowStream, ScoreParams, Scores, TokenSequence
from teacher_server.engines.hf_prefix import SHORTEST_PROMPT, groups_of, rows_of_group, sharing_problem
from teacher_server.engines.signals import score_hidden
from teacher_server.engines.streams import MatrixStream
from teacher_server.errors import ServerError
from teacher_server.wire.protocol import Wire

log = logging.getLogger(__name__)

# Padded tokens of one forward pass on a CPU. Larger passes are not faster there, and all sequences of a pass are padded
# to the longest: with geometric lengths, three quarters of a pass of 8192 tokens are padding.
_CPU_PASS_TOKENS = 512
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HfEngine:
    """Transformers implementation of `Engine`. Raises ServerError if the model cannot be loaded or served.

    Args:
        path: model folder.
        dtype: "float32" | "bfloat16".
        device: "cpu" | "cuda" | "cuda:N".
        max_tokens: longest P + R.
        share_prompts: compute a common prompt once on a CPU, if the model allows it; a GPU is faster without it.
    """

    name = "hf"

    def __init__(self, path: str, *, dtype: str, device: str, max_tokens: int, share_prompts: bool = True) -> None:
        try:
            # sdpa: the memory of attention is linear in S; transformers refuses models without it.
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=_DTYPES[dtype], attn_implementation="sdpa")
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            raise ServerError(f"model folder {path}: transformers cannot load the model: {error}") from error
        self._device = torch.device(device)
        if self._device.type == "cpu":
            use_onednn(model)
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._backbone = self._model.base_model
        self._head = self._model.get_output_embeddings()
        self.device = device
        self.dtype = dtype
        self.max_tokens = max_tokens
        self.vocab_size, self.hidden_size = map(int, self._head.weight.shape)
        self.has_plain_head = type(self._head) is torch.nn.Linear and self._head.bias is None
        self._check_head_alone(path)
        self.prefix_block = self._find_prefix_block() if share_prompts and self._device.type == "cpu" else 0

    def _find_prefix_block(self) -> int:
        problem = sharing_problem(self._backbone, self._model.config, self._device)
        block = 0 if problem else SHORTEST_PROMPT
        shared = f"not shared: {problem}" if problem else f"computed once, if they have more than {block} tokens"
        log.info("hf: prompts that sequences of a batch have in common are %s", shared)
        return block

    def _check_head_alone(self, path: str) -> None:
        """Check that the logits have no NaN, and come from the LM head alone: some models scale or cap them."""
        probe = torch.arange(1, min(9, self.vocab_size), device=self._device)[None]  # [1, 8]
        with torch.inference_mode():
            whole = self._model(input_ids=probe, use_cache=False).logits[0].float()
            alone = self._head(self._hidden(probe)[0]).float()
        if torch.isnan(whole).any():
            raise ServerError(
                f"model folder {path}: the model's logits contain a NaN (dtype {self.dtype}). "
                "Fix: copy the weights again if they have a NaN, or use --dtype float32 if it is an overflow."
            )
        if not torch.allclose(whole, alone, rtol=1e-3, atol=1e-3):
            kind = type(self._model).__name__
            raise ServerError(
                f"model folder {path}: {kind} modifies its logits after the LM head, which engine hf does not support. "
                "Fix: use --engine vllm."
            )

    def _hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._backbone(input_ids=tokens, use_cache=False).last_hidden_state  # [B, S, H]

    @torch.inference_mode()
    def score(self, batch: Sequence[TokenSequence], params: ScoreParams) -> list[Scores]:
        """See `Engine.score`."""
        scores = score_hidden(self._response_rows(batch), batch, self._head, params, self.vocab_size)
        if self._device.type == "cpu":
            # The C library keeps freed activations in pieces that those of another length do not fit into, so the
            # process would grow with each batch.
            ctypes.CDLL(None).malloc_trim(0)
        return scores

    def _response_rows(self, batch: Sequence[TokenSequence]) -> torch.Tensor:
        """Return [N, H] hidden states that predict the response tokens with rows, sequence after sequence."""
        limit = _CPU_PASS_TOKENS if self._device.type == "cpu" else None
        rows: dict[int, torch.Tensor] = {}
        groups, others = groups_of(batch, self.prefix_block)
        for group in groups:
            sequences = [batch[i] for i in group]
            rows |= zip(group, rows_of_group(self._backbone, self._model.config, sequences, self._device), strict=True)
        for group in _passes({i: len(batch[i].token_ids) for i in others}, limit):
            lengths = [batch[i].n_rows for i in group]
            rows |= zip(group, self._rows_of_pass([batch[i] for i in group]).split(lengths), strict=True)
        return torch.cat([rows[i] for i in range(len(batch))])

    def _rows_of_pass(self, batch: Sequence[TokenSequence]) -> torch.Tensor:
        longest = max(len(sequence.token_ids) for sequence in batch)
        tokens = np.zeros((len(batch), longest), np.int64)  # [B, S]
        rows: list[np.ndarray] = []
        for i, sequence in enumerate(batch):
            tokens[i, : len(sequence.token_ids)] = sequence.token_ids
            # The logits at position t predict token t + 1.
            rows.append(i * longest + sequence.prompt_length - 1 + sequence.rows)
        # No attention mask: the model is causal and the padding is on the right, so it affects no real token.
        hidden = self._hidden(torch.from_numpy(tokens).to(self._device))
        return hidden.flatten(0, 1)[torch.from_numpy(np.concatenate(rows)).to(self._device)]

    def lm_head(self, wire: Wire) -> RowStream:
        """See `Engine.lm_head`."""
        return MatrixStream(self._head.weight, wire)


def _passes(lengths: Mapping[int, int], limit: int | None) -> Iterator[list[int]]:
    """Yield the sequence indices of each forward pass: all, or from short to long at most `limit` padded tokens.

    A sequence longer than the limit has a pass of its own.

    Args:
        lengths: index of a sequence -> its tokens.
    """
    group: list[int] = []
    for i in sorted(lengths, key=lengths.__getitem__) if limit else lengths:
        if group and limit and (len(group) + 1) * lengths[i] > limit:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


# Compute the float32 linear layers of a model on a CPU by oneDNN, which torch uses for bfloat16 only.
#
# For float32 torch uses MKL, which is half as fast on AMD processors with AVX-512: 1.9 ms for a row of the LM head (V
# = 152k, H = 512) against 0.95 ms. torch has no switch for it, so this module calls the operator that torch's
# compiler substitutes for a linear layer.


def use_onednn(model: torch.nn.Module) -> int:
    """Replace the forward of every plain float32 linear layer, and return their number; 0 if torch lacks oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return 0
    layers = [
        module for module in model.modules() if type(module) is torch.nn.Linear and module.weight.dtype == torch.float32
    ]
    for layer in layers:
        layer.forward = partial(_linear, layer)  # type: ignore[method-assign]
    return len(layers)


def _linear(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")

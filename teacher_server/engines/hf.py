"""The transformers engine: any causal LM folder, on CPU or one GPU.

The backbone runs on the whole right-padded batch; the LM head only on the response positions, in
row chunks. So of the [T, V] float32 logits, 10 GB for 16k tokens at V = 152k, there is never
more than `LOGITS_CHUNK_BYTES`.

Letters: B sequences, S padded length, H hidden size, N response rows of the batch, V vocabulary,
C rows of a chunk, K top-k entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from teacher_server.engines.base import ScoreParams, TokenSequence, TopK
from teacher_server.errors import ServerError

LOGITS_CHUNK_BYTES = 128 << 20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(device: str, worker_index: int) -> torch.device:
    """auto|cpu|cuda -> a device; workers of one host spread over its GPUs."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ServerError("--device cuda: torch sees no CUDA device. Fix: use --device cpu or auto.")
        return torch.device("cuda", worker_index % torch.cuda.device_count())
    return torch.device(device)


class HfEngine:
    """See `Engine`. Raises ServerError if the folder does not load or its head cannot be run alone."""

    name = "hf"

    def __init__(self, path: str, *, dtype: str, device: torch.device, max_tokens: int) -> None:
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=_DTYPES[dtype])
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ServerError(f"--model {path}: transformers cannot load it: {error}") from error
        self._model = model.to(device).eval().requires_grad_(False)
        self._backbone = self._model.base_model
        self._head = self._model.get_output_embeddings()
        self._device = device
        self.device = str(device)
        self.max_tokens = max_tokens
        self.vocab_size = int(self._head.weight.shape[0])
        self._check_head_alone(path)

    def _check_head_alone(self, path: str) -> None:
        """Some models scale or cap their logits after the head; skipping that would be silently wrong."""
        probe = torch.arange(1, min(9, self.vocab_size), device=self._device)[None]  # [1, 8]
        with torch.inference_mode():
            whole = self._model(input_ids=probe, use_cache=False).logits.float()
            alone = self._head(self._hidden(probe)).float()
        if not torch.allclose(whole, alone, rtol=1e-3, atol=1e-3):
            kind = type(self._model).__name__
            raise ServerError(
                f"--model {path}: {kind} changes its logits after the LM head; engine hf cannot serve it."
            )

    def _hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._backbone(input_ids=tokens, use_cache=False).last_hidden_state  # [B, S, H]

    @torch.inference_mode()
    def score_topk(self, batch: Sequence[TokenSequence], params: ScoreParams) -> list[TopK]:
        """See `Engine.score_topk`."""
        longest = max(len(sequence.token_ids) for sequence in batch)
        tokens = np.zeros((len(batch), longest), np.int64)  # [B, S]
        rows: list[np.ndarray] = []
        for i, sequence in enumerate(batch):
            tokens[i, : len(sequence.token_ids)] = sequence.token_ids
            # The logits at position t predict token t + 1.
            first = i * longest + sequence.prompt_length - 1
            rows.append(np.arange(first, first + sequence.n_response))
        # No attention mask: the model is causal and the padding on the right, so no real token sees it.
        hidden = self._hidden(torch.from_numpy(tokens).to(self._device))
        index = torch.from_numpy(np.concatenate(rows)).to(self._device)
        ids, logprobs = self._topk(hidden.flatten(0, 1)[index], params)  # [N, K] each
        if not np.isfinite(logprobs).all():
            raise ArithmeticError("the model put out a NaN or an infinite logprob")
        bounds = np.cumsum([sequence.n_response for sequence in batch])[:-1]
        return [TopK(*part) for part in zip(np.split(ids, bounds), np.split(logprobs, bounds), strict=True)]

    def _topk(self, hidden: torch.Tensor, params: ScoreParams) -> tuple[np.ndarray, np.ndarray]:
        """[N, H] -> ([N, K] int32, [N, K] float32); log_softmax only where it is kept: topk - logsumexp."""
        n_vocab = params.n_vocab or self.vocab_size
        ids = torch.empty(len(hidden), params.k, dtype=torch.int32, device=self._device)
        logprobs = torch.empty(len(hidden), params.k, dtype=torch.float32, device=self._device)
        n_chunk = max(1, LOGITS_CHUNK_BYTES // (4 * self.vocab_size))
        for start in range(0, len(hidden), n_chunk):
            chunk = slice(start, start + n_chunk)
            logits = self._head(hidden[chunk])[:, :n_vocab].float() / params.temperature  # [C, V]
            values, chunk_ids = logits.topk(params.k, dim=-1)  # [C, K], sorted descending
            # Rounding may leave a certain token at +1e-7.
            logprobs[chunk] = (values - logits.logsumexp(-1, keepdim=True)).clamp_(max=0.0)
            ids[chunk] = chunk_ids.int()
        return ids.cpu().numpy(), logprobs.cpu().numpy()

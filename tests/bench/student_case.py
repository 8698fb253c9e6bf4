"""One measurement of `bench_student`: training steps of several variants, in turns, in a process of their own.

    python -m tests.bench.student_case '{"variants": ["hf", "megatron"], "mix": "even"}'

prints a JSON line. All variants start from the same weights and train on the same sequences and teacher scores, so that
their losses must agree.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gkd.data.batching import make_micro_batches
from gkd.types import MicroBatch, Rollout, TeacherScores, VersionSpan
from teacher_server.wire.table import TopKTable
from tests.bench.command import in_fresh_process

VOCAB, TOPK, LR = 4096, 64, 1e-4
# 5.8 million parameters: small enough that a step takes seconds on a core, large enough that matrices dominate it.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# Classes of transformers -> further settings: windows shorter than most sequences, or three of four layers recurrent.
_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Gemma3": {"sliding_window": 64},
    "Qwen3_5": {**_DELTA, "num_hidden_layers": 4},
}
# name -> ((prompt, response) tokens of each sequence, from a generator)
MIXES: dict[str, Callable[[np.random.Generator], list[tuple[int, int]]]] = {
    "even": lambda rng: [(64, 192)] * 16,
    # Most answers are short and some are very long, as those of a reasoning model.
    "long_tailed": lambda rng: [
        (int(rng.integers(16, 65)), int(np.clip(rng.lognormal(np.log(80), 0.9), 8, 1024))) for _ in range(48)
    ],
}


@dataclass(frozen=True, slots=True)
class Case:
    """`variants`: hf, and <backend>, <backend>:padded, <backend>:budget, <backend>:budget:padded."""

    variants: tuple[str, ...]
    mix: str
    rounds: int = 5
    threads: int = 1
    model: str = "Qwen3"  # of `MODELS`


@dataclass(frozen=True, slots=True)
class Measured:
    """`seconds`: of each variant's steps, by round; the first step of each, which warms up, is left out."""

    seconds: dict[str, list[float]]
    losses: dict[str, float]  # of the first step
    n_tokens: int  # of a step, padding not counted


def measure(case: Case, timeout_s: float = 900.0) -> Measured:
    """Runs the case in a fresh process; raises as `in_fresh_process`."""
    return Measured(
        **in_fresh_process("tests.bench.student_case", asdict(case), threads=case.threads, timeout_s=timeout_s)
    )


def run(case: Case) -> Measured:
    """In this process."""
    torch.set_num_threads(case.threads)
    rollouts, scores = sequences(case.mix)
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as folder, only_rank("cpu"):
        save_model(Path(folder), kind=case.model)
        steps = {variant: _step(variant, Path(folder), rollouts, scores) for variant in case.variants}
        losses = {variant: step() for variant, step in steps.items()}
        seconds: dict[str, list[float]] = {variant: [] for variant in case.variants}
        for _ in range(case.rounds):
            for variant, step in steps.items():
                start = time.perf_counter()
                step()
                seconds[variant].append(time.perf_counter() - start)
    return Measured(seconds, losses, sum(r.n_tokens for r in rollouts))


@contextmanager
def only_rank(device: str) -> Iterator[None]:
    """Make this process the only rank of a group, on "cpu" or "cuda"."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def save_model(
    folder: Path, *, kind: str = "Qwen3", device: str = "cpu", dtype: torch.dtype = torch.float32, **sizes: Any
) -> None:
    """A random model of `SIZES`, or of others, initialized on a device: billions of weights take long on a CPU."""
    import transformers

    config = getattr(transformers, f"{kind}Config" if kind == "Qwen3" else f"{kind}TextConfig")
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForCausalLM")(config(**(SIZES | MODELS[kind] | sizes)))
    model.to(dtype).save_pretrained(folder)


def save_tokenizer(folder: Path, n_words: int) -> None:
    """Write a tokenizer whose words are t2, t3, ...: each id of the models has one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<end>"}  # as words of their own: they are found inside words, too
    words = [*special.values(), *(f"t{i}" for i in range(2, n_words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def sequences(mix: str, vocab: int = VOCAB) -> tuple[list[Rollout], list[TeacherScores]]:
    """Random sequences of the mix's lengths."""
    rng = np.random.default_rng(3)
    return random_sequences(MIXES[mix](rng), rng, vocab, TOPK)


def random_sequences(
    lengths: Iterable[tuple[int, int]], rng: np.random.Generator, vocab: int, topk: int
) -> tuple[list[Rollout], list[TeacherScores]]:
    """Random tokens, and a teacher whose top-k holds 0.8 of the mass. Lengths are of prompt and response."""
    rollouts, scores = [], []
    for i, (n_prompt, n_response) in enumerate(lengths):
        rollouts.append(
            Rollout(
                prompt_id=i,
                sample_index=i,
                prompt_ids=rng.integers(0, vocab, n_prompt, dtype=np.int32),
                response_ids=rng.integers(0, vocab, n_response, dtype=np.int32),
                rollout_logprobs=np.zeros(n_response, np.float32),
                version_spans=(VersionSpan(0, n_response, 0),),
                finish_reason="stop",
            )
        )
        first = rng.integers(0, vocab, (n_response, 1))
        ids = ((first + np.arange(topk) * (vocab // topk)) % vocab).astype(np.int32)
        shares = rng.random((n_response, topk)) + 0.05
        logprobs = np.log(0.8 * shares / shares.sum(1, keepdims=True)).astype(np.float32)
        scores.append(TeacherScores(TopKTable(ids, logprobs, np.full(n_response, 0.2, np.float32))))
    return rollouts, scores


def _step(
    variant: str, folder: Path, rollouts: Sequence[Rollout], scores: Sequence[TeacherScores]
) -> Callable[[], float]:
    """Makes one optimizer step on all sequences and gives its loss."""
    backend, *how = variant.split(":")
    batches = make_micro_batches(
        rollouts,
        scores,
        micro_batch_size=8,
        max_tokens=2048 if "budget" in how else 0,
        packed="padded" not in how and backend != "hf",
    )
    if backend == "hf":
        return PlainStep(folder, list(batches))
    student = make_student(backend, folder, **({"packing": "padded" not in how} if backend == "fsdp2" else {}))
    return lambda: float(student.train_step(batches).loss)


def make_student(
    backend: str, folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", lr: float = LR, **more: Any
) -> Any:
    """A student of one rank; `more`: settings of its backend."""
    from gkd.actor.common.optim_spec import OptimSpec
    from tests.dist.student_cases import build_student

    optim = OptimSpec(lr=lr, weight_decay=0.0, clip_grad=1.0)
    return build_student(backend, folder, 0, 1, optim=optim, dtype=dtype, device=torch.device(device), **more)


class PlainStep:
    """Baseline: the HF model, autograd, torch's AdamW. Its LM head computes the loss rows only, as ours does."""

    def __init__(
        self, folder: Path, batches: list[MicroBatch], dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self._model: Any = model.to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        self._batches, self._device = batches, torch.device(device)

    def __call__(self) -> float:
        total = self.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return total

    def backward(self) -> float:
        """Return the loss, and leave the gradients in the parameters."""
        n_tokens = sum(batch.n_loss_tokens for batch in self._batches)
        self._optimizer.zero_grad()
        total = 0.0
        for batch in self._batches:
            hidden = self._model.model(
                batch.tokens.to(self._device), position_ids=batch.position_ids.to(self._device), use_cache=False
            )
            rows = hidden.last_hidden_state.flatten(0, 1)[batch.loss_index.to(self._device)]
            loss = self._loss(self._model.lm_head(rows).float(), batch) / n_tokens
            loss.backward()
            total += float(loss.detach())
        return total

    def gradients(self) -> dict[str, Tensor]:
        """Return copies of the gradients by the names in the files, after `backward`."""
        from tests.dist.megatron_reference import by_file_name

        return by_file_name(self._model, lambda param: param.grad)

    @torch.no_grad()
    def logprobs(self) -> list[Tensor]:
        """Return [N] float32 for each micro-batch: the logprob of the token after each loss row."""
        found = []
        for batch in self._batches:
            tokens = batch.tokens.to(self._device)
            logits = self._model(tokens, position_ids=batch.position_ids.to(self._device), use_cache=False).logits
            rows = batch.loss_index.to(self._device)
            following = tokens.flatten()[rows + 1]
            found.append(logits.flatten(0, 1)[rows].float().log_softmax(-1).gather(1, following[:, None])[:, 0])
        return found

    def _loss(self, logits: Tensor, batch: MicroBatch) -> Tensor:
        """Forward KL on the top-k and the rest as one outcome."""
        assert batch.targets is not None
        targets = batch.targets.on(self._device)
        assert targets.topk_ids is not None and targets.topk_logprobs is not None and targets.tail_mass is not None
        log_q = logits.log_softmax(dim=-1).gather(1, targets.topk_ids)
        log_p = targets.topk_logprobs
        rest = targets.tail_mass * (targets.tail_mass.log() - (1 - log_q.exp().sum(-1)).log())
        return (log_p.exp() * (log_p - log_q)).sum() + rest.sum()


if __name__ == "__main__":
    print(json.dumps(asdict(run(Case(**json.loads(sys.argv[1]))))))

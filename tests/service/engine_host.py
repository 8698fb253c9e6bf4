"""Helpers of the engine tests: small models for vLLM's kernels, plain references, and a process for vLLM.

vLLM changes the environment and torch's threads of its process, and allows one engine per process, so it
runs in a separate process. Tests call functions of this file through `ask`: `ask("name", ...)` runs
`name(engine, ...)` in the process of the engine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gkd.types import Rollout
from teacher_server.engines import base, signals
from teacher_server.engines.base import Engine, ScoreParams, TokenSequence, Writing, request_problem, stream_rows
from teacher_server.engines.load import EngineSettings, load_engine
from teacher_server.wire.table import TopKTable
from tests.device import kind, on_cuda, patience
from tests.engine_process import EngineProcess
from tests.random_models import save_random
from tests.second_runner import ENVIRONMENT

VOCAB = 4099  # odd, so that tensor parallelism pads it; large enough for a top-8 in two stages
MAX_TOKENS = 400
TIMEOUT_S = 120.0 * patience()
Ask = Callable[..., Any]


def save_engine_model(folder: Path, *, kind: str = "Qwen3", **changes: Any) -> Path:
    """Save a random model of 2 layers with a head size that vLLM supports. Its distributions are peaked."""
    sizes = {"vocab_size": VOCAB, "num_attention_heads": 2, "num_key_value_heads": 1}
    return save_random(folder, kind, **(sizes | {"max_position_embeddings": MAX_TOKENS} | changes))


def engine_settings(model: Path, engine: str, **changes: Any) -> EngineSettings:
    # 128 tokens per forward pass, so that vLLM splits longer sequences.
    settings: dict[str, Any] = {"device": kind(), "dtype": "float32", "max_tokens": MAX_TOKENS, "max_batch_tokens": 128}
    if on_cuda() and engine == "vllm":  # other engines share the card
        settings |= {"gpu_memory_utilization": 0.3, "kv_cache_mib": 64}
    return EngineSettings(model=str(model), engine=engine, **(settings | changes))


def mixed_batch() -> list[TokenSequence]:
    """Return sequences from the minimum to the maximum length, some longer than a forward pass of vLLM, unsorted."""
    rng = np.random.default_rng(1)
    sizes = [(5, 30), (1, 1), (150, 249), (1, 399), (20, 3), (399, 1), (64, 64), (3, 1)]
    return [TokenSequence(rng.integers(0, VOCAB - 99, p + r).astype(np.int32), p) for p, r in sizes]


def masks_of(batch: Sequence[TokenSequence], seed: int = 0) -> list[np.ndarray]:
    """Return an [R] bool mask for each sequence: turns, single tokens, the last token only; all if R = 1."""
    rng, masks = np.random.default_rng(seed), []
    for i, sequence in enumerate(batch):
        at = np.arange(sequence.n_response)
        mask = [at // 7 % 2 == 1, rng.random(len(at)) < 0.5, at == len(at) - 1, at < max(1, len(at) // 3)][i % 4]
        masks.append(mask if mask.any() else np.ones(len(at), bool))
    return masks


def masked(batch: Sequence[TokenSequence], masks: Sequence[np.ndarray]) -> list[TokenSequence]:
    """Return the sequences with rows for some tokens only, and their given ids."""
    return [
        replace(sequence, own=mask, given=None if sequence.given is None else sequence.given[mask])
        for sequence, mask in zip(batch, masks, strict=True)
    ]


def own_rows(scored: Any, mask: np.ndarray) -> Any:
    """Return these rows of a sequence's scores."""
    if not isinstance(scored, TopKTable):
        return scored[mask]
    tables = (scored.ids, scored.logprobs, scored.tail, scored.counts, scored.sampled)
    return TopKTable(*(None if table is None else table[mask] for table in tables))  # type: ignore[arg-type]


def save_biased_model(folder: Path) -> Path:
    """Save a Phi model, whose LM head has a bias."""
    model = save_engine_model(folder, kind="Phi", num_key_value_heads=2)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.bias"] = torch.linspace(-3, 3, len(weights["lm_head.bias"]))
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


def sequences_of(rollouts: Iterable[Rollout]) -> list[TokenSequence]:
    """Return the rollouts with their own prompts."""
    return [TokenSequence(np.concatenate([r.prompt_ids, r.response_ids]), len(r.prompt_ids)) for r in rollouts]


def plain_logits(model: Path, batch: Sequence[TokenSequence], dtype: torch.dtype = torch.float32) -> list[np.ndarray]:
    """Return [R, V] float64 logits of each sequence: plain transformers in `dtype`, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    with torch.inference_mode():
        return [
            plain(input_ids=torch.from_numpy(s.token_ids.astype(np.int64))[None])
            .logits[0, s.prompt_length - 1 : -1]
            .double()
            .numpy()
            for s in batch
        ]


def plain_logprobs(logits: np.ndarray, params: ScoreParams) -> np.ndarray:
    """Return [R, n_vocab] float64 logprobs."""
    cut = logits[:, : params.n_vocab or logits.shape[1]] / params.temperature
    cut = cut - cut.max(-1, keepdims=True)
    return cut - np.log(np.exp(cut).sum(-1, keepdims=True))


# Functions for `ask`: they run in the process of the engine


def facts(engine: Engine) -> dict[str, Any]:
    names = ("name", "device", "dtype", "vocab_size", "hidden_size", "max_tokens", "has_plain_head")
    return {name: getattr(engine, name) for name in names}


def score(
    engine: Engine, batch: list[TokenSequence], params: ScoreParams, step: int = 1000, chunk_bytes: int = 0
) -> list[TopKTable | np.ndarray]:
    """Run `Engine.score`, and read its streams in chunks of `step` rows."""
    usual = dict(signals.CHUNK_BYTES)
    if chunk_bytes:
        signals.CHUNK_BYTES[kind()] = chunk_bytes
    try:
        return [
            scored
            if isinstance(scored, TopKTable | np.ndarray)
            else np.concatenate([rows for _, _, rows in stream_rows(scored, step)])
            for scored in engine.score(batch, params)
        ]
    finally:
        signals.CHUNK_BYTES.update(usual)


def stream_facts(engine: Engine, batch: list[TokenSequence], params: ScoreParams) -> list[tuple[int, int, str]]:
    streams: Any = engine.score(batch, params)
    for stream in streams:
        stream.close()
        stream.close()  # closing twice is allowed
    return [(stream.n_rows, stream.n_cols, stream.dtype) for stream in streams]


def head_rows(engine: Any, batch: list[TokenSequence], params: ScoreParams) -> int:
    """Return the rows that the Transformers engine's LM head computes for a batch."""
    rows: list[int] = []

    def count(module: nn.Module, args: Any) -> None:
        if isinstance(module, nn.Linear) and module.out_features == engine.vocab_size:
            rows.append(len(args[0]))

    hook = register_module_forward_pre_hook(count)
    try:
        score(engine, batch, params)
    finally:
        hook.remove()
    return sum(rows)


def lm_head(engine: Engine, wire: Any) -> np.ndarray:
    return np.concatenate([rows for _, _, rows in stream_rows(engine.lm_head(wire), 500)])


def problem(engine: Engine, sequence: TokenSequence, params: ScoreParams) -> str | None:
    return request_problem(engine, sequence, params)


def score_poisoned(engine: Any, batch: list[TokenSequence], params: ScoreParams) -> str:
    """Return the text of the ArithmeticError of a model with a NaN in its last norm; empty without an error."""

    def set_weight(value: float) -> None:
        if engine.name == "hf":
            engine._backbone.norm.weight.data[3] = value
        else:
            vllm_of(engine).collective_rpc("apply_model", args=(partial(_set_norm, value=value),))

    set_weight(float("nan"))
    try:
        score(engine, batch, params)
    except ArithmeticError as error:
        return str(error)
    finally:
        set_weight(1.0)  # its initial value
    return ""


def _set_norm(model: Any, value: float) -> None:
    model.model.norm.weight.data[3] = value


def pid(engine: Engine) -> int:
    return os.getpid()


def prefix_block(engine: Engine) -> int:
    return base.prefix_block(engine)


def score_counted(
    engine: Any, batch: list[TokenSequence], params: ScoreParams
) -> tuple[list[TopKTable | np.ndarray], int]:
    """Return the scores, and the tokens that the model's forward passes computed for them, padding included."""
    with counted(engine) as passes:
        scores = score(engine, batch, params)
    return scores, sum(passes)


@contextlib.contextmanager
def counted(engine: Any) -> Iterator[list[int]]:
    """Yield a list that gets the tokens of each forward pass, padding included."""
    passes: list[int] = []
    if engine.name == "hf":

        def count(module: nn.Module, args: Any) -> None:
            if isinstance(module, nn.Embedding):
                passes.append(args[0].numel())

        hook = register_module_forward_pre_hook(count)
        try:
            yield passes
        finally:
            hook.remove()
        return
    scheduler = vllm_of(engine).engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        passes.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = counting
    try:
        yield passes
    finally:
        scheduler.schedule = schedule


def fail_in_the_middle(engine: Any, batch: list[TokenSequence], params: ScoreParams) -> str:
    """Score a batch whose first forward pass fails between two layers; return the text of the RuntimeError."""
    vllm_of(engine).collective_rpc("apply_model", args=(_break_last_layer,))
    try:
        score(engine, batch, params)
    except RuntimeError as error:
        return str(error)
    finally:
        vllm_of(engine).collective_rpc("apply_model", args=(_repair_last_layer,))
    return ""


def _break_last_layer(model: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    model.broken = model.model.layers[-1].register_forward_pre_hook(fail)


def _repair_last_layer(model: Any) -> None:
    model.broken.remove()


def vllm_of(engine: Any) -> Any:
    return engine._engine


# Processes of the engines

_loaded: Engine | None = None


def _load(settings: EngineSettings) -> None:
    global _loaded
    _loaded = load_engine(settings)


def answers(engine: Any, prompt: np.ndarray, writing: Writing) -> list[list[int]]:
    """Return the engine's answers to a prompt."""
    *_, last = engine.generate([prompt], [0], writing)
    return [answer.tolist() for answer in last]


def may_share_prompts(engine: Engine, folders: dict[str, str]) -> dict[str, bool]:
    """Return the verdict on model folders, in this process, which has imported vLLM."""
    from vllm import EngineArgs

    from teacher_server.engines.vllm import _may_share_prompts

    return {
        kind: _may_share_prompts(EngineArgs(model=folder, skip_tokenizer_init=True).create_model_config())
        for kind, folder in folders.items()
    }


def runner(engine: Any) -> str:
    """Return the module of the engine's model runner."""
    return type(vllm_of(engine).model_executor.driver_worker.worker.model_runner).__module__


def _call(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return globals()[function](_loaded, *args, **kwargs)


def local(settings: EngineSettings) -> Ask:
    """Load an engine in this process."""
    engine = load_engine(settings)
    return lambda function, *args, **kwargs: globals()[function](engine, *args, **kwargs)


@contextlib.contextmanager
def hosted(
    settings: EngineSettings, *, second_runner: bool = False, enter: Callable[[], None] | None = None
) -> Iterator[Ask]:
    """Load an engine in a separate process, which calls `enter` before; see `tests.second_runner`."""
    with EngineProcess(ENVIRONMENT if second_runner else {}) as process:
        if enter is not None:
            process.call(enter, timeout_s=TIMEOUT_S)
        process.call(_load, settings, timeout_s=TIMEOUT_S)
        yield lambda function, *args, **kwargs: process.call(_call, function, args, kwargs, timeout_s=TIMEOUT_S)

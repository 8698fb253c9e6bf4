"""Sequences with a common prompt: both real engines compute it once, and their scores stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from teacher_server.engines.base import ScoreParams, TokenSequence
from teacher_server.engines.hf import SHORTEST_PROMPT
from teacher_server.wire.table import TopKTable
from tests.service.engine_host import (
    VOCAB,
    Ask,
    engine_settings,
    hosted,
    local,
    masked,
    masks_of,
    own_rows,
    plain_logits,
    plain_logprobs,
    save_engine_model,
)

pytestmark = [pytest.mark.service, pytest.mark.cpu_only("bit-equality in float32, and blocks of 32 tokens")]
BLOCK = 32  # vLLM's on a CPU
TOPK = ScoreParams("topk", k=16, temperature=0.8, n_vocab=VOCAB - 99, with_sampled=True)
SIGNALS = {
    "topk": TOPK,
    "given": replace(TOPK, n_given=3),
    "sampled": ScoreParams("sampled"),
    "hidden": ScoreParams("hidden"),
    "logits": ScoreParams("logits", n_vocab=50),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_engine_model(tmp_path_factory.mktemp("models") / "engine")


SECOND = pytest.param(True, id="second", marks=[pytest.mark.slow, pytest.mark.timeout(1200)])


@pytest.fixture(scope="module", params=[pytest.param(False, id="first"), SECOND])
def second_runner(request: pytest.FixtureRequest) -> bool:
    """Return whether the engines have vLLM's second model runner, which it chooses itself on GPUs."""
    return bool(request.param)


@pytest.fixture(scope="module")
def sharing(model: Path, second_runner: bool) -> Iterator[Ask]:
    with hosted(engine_settings(model, "vllm"), second_runner=second_runner) as ask:
        assert (ask("runner") == "vllm.v1.worker.cpu.model_runner") == second_runner
        yield ask


@pytest.fixture(scope="module")
def plain(model: Path, second_runner: bool) -> Iterator[Ask]:
    with hosted(engine_settings(model, "vllm", share_prompts=False), second_runner=second_runner) as ask:
        yield ask


def siblings(seed: int, n_prompt: int, lengths: list[int], vocab: int = VOCAB - 99) -> list[TokenSequence]:
    """Return responses to one prompt; those after the first one repeat it but for the last token."""
    rng = np.random.default_rng(seed)
    prompt, response = rng.integers(0, vocab, n_prompt), rng.integers(0, vocab, max(lengths))
    batch = []
    for i, length in enumerate(lengths):
        own = response[:length].copy() if i % 2 else rng.integers(0, vocab, length)
        own[-1] = i
        given = np.stack([rng.permutation(vocab)[:3] for _ in own]).astype(np.int32)
        batch.append(TokenSequence(np.concatenate([prompt, own]).astype(np.int32), n_prompt, given))
    return batch


def mixed(*, with_given: bool) -> list[TokenSequence]:
    """Return groups whose prompts end before, at and behind the end of a block, and a sequence without siblings."""
    sizes = {1: [3, 3], 31: [5, 70], 32: [40, 1, 1], 33: [2, 2], 96: [64, 64, 64, 1], 150: [249, 249, 30]}
    batch = [s for seed, (n_prompt, lengths) in enumerate(sizes.items()) for s in siblings(seed, n_prompt, lengths)]
    batch += siblings(99, 64, [10])
    return batch if with_given else [replace(sequence, given=None) for sequence in batch]


def arrays_of(scores: list[TopKTable | np.ndarray]) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    for scored in scores:
        if isinstance(scored, TopKTable):
            assert scored.sampled is not None
            found += [scored.ids, scored.logprobs, scored.tail, scored.sampled]
        else:
            found.append(scored)
    return found


def assert_equal(a: list[TopKTable | np.ndarray], b: list[TopKTable | np.ndarray]) -> None:
    for mine, theirs in zip(arrays_of(a), arrays_of(b), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", SIGNALS)
def test_vllm_scores_are_bit_equal_with_and_without_sharing(sharing: Ask, plain: Ask, name: str) -> None:
    """Fails if a hit of the cache reaches into the response (rows without hidden states), rows are shifted by it, or a
    repeated request, whose tokens are all cached, is scored differently.
    """
    batch, params = mixed(with_given=name == "given"), SIGNALS[name]
    expected = plain("score", batch, params)
    assert_equal(sharing("score", batch, params), expected)
    assert_equal(sharing("score", batch[::-1], params)[::-1], expected)


@pytest.mark.parametrize("name", SIGNALS)
def test_rows_of_own_tokens_are_bit_equal_with_sharing(sharing: Ask, plain: Ask, name: str) -> None:
    """Fails if a hit of the cache reaches into a turn of the student, or the rows behind an observation are shifted."""
    batch, params = mixed(with_given=name == "given"), SIGNALS[name]
    masks = masks_of(batch)
    asked = masked(batch, masks)
    expected = [own_rows(scored, mask) for scored, mask in zip(plain("score", batch, params), masks, strict=True)]
    for ask in (plain, sharing, sharing):
        assert_equal(ask("score", asked, params), expected)


def test_a_cached_observation_is_not_computed_again(sharing: Ask, plain: Ask) -> None:
    """Fails if the cache is used up to the prompt's end only, or up to a row that is needed."""
    (sequence,) = [replace(s, given=None) for s in siblings(13, 128, [96])]
    (asked,) = masked([sequence], [np.arange(96) >= 64])
    scores, first = sharing("score_counted", [asked], TOPK)
    again, second = sharing("score_counted", [asked], TOPK)
    expected = [own_rows(scored, np.arange(96) >= 64) for scored in plain("score", [sequence], TOPK)]
    assert_equal(scores, expected)
    assert_equal(again, expected)
    # The row at position 191 predicts the first own token, so five blocks of 32 tokens come from the cache.
    assert (first, second) == (223, 223 - 5 * BLOCK)


def test_hf_rows_of_own_tokens_are_equal_with_sharing(model: Path) -> None:
    """Fails if the rows of siblings behind an observation are those of other tokens."""
    ask = local(engine_settings(model, "hf"))
    batch = [
        s
        for n_prompt, lengths in {100: [30, 1, 64, 30], 80: [90, 3, 60]}.items()
        for s in siblings(n_prompt, n_prompt, lengths)
    ]
    masks = masks_of(batch)
    for mask in masks:
        mask[-2:] = True  # a stream of one row has another kernel of oneDNN, with other rounding
    for name, params in SIGNALS.items():
        whole = batch if name == "given" else [replace(sequence, given=None) for sequence in batch]
        expected = [own_rows(scored, mask) for scored, mask in zip(ask("score", whole, params), masks, strict=True)]
        assert_equal(ask("score", masked(whole, masks), params), expected)


def test_vllm_computes_a_prompt_once(sharing: Ask, plain: Ask) -> None:
    """Fails if siblings do not find their prompt in the cache, or a repeated request computes more than its response
    and a block.
    """
    assert (sharing("prefix_block"), plain("prefix_block")) == (BLOCK, 0)
    batch = [replace(s, given=None) for s in siblings(7, 128, [32] * 8)]
    scores, first = sharing("score_counted", batch, TOPK)
    again, second = sharing("score_counted", batch, TOPK)
    expected, whole = plain("score_counted", batch, TOPK)
    assert_equal(scores, expected)
    assert_equal(again, expected)
    # Of the prompt's 128 tokens three blocks are cached: its last token predicts the response, so it is computed.
    assert (first, second, whole) == (159 + 7 * (32 + 31), 8 * (32 + 31), 8 * 159)


def test_growing_prompts_are_computed_once(sharing: Ask, plain: Ask) -> None:
    """Fails if a teacher's greedy response, which asks for one token more each time, is computed from its beginning
    with each request, or has other tokens.
    """
    prompt = siblings(11, 100, [1], vocab=VOCAB)[0].token_ids[:100]
    n_computed = {}
    responses = {}
    for name, ask in {"sharing": sharing, "plain": plain}.items():
        tokens, n_computed[name] = prompt.copy(), 0
        for _ in range(40):
            asked = TokenSequence(np.append(tokens, np.int32(0)), len(tokens))
            (scored,), n_tokens = ask("score_counted", [asked], ScoreParams("topk", k=1))
            n_computed[name] += n_tokens
            tokens = np.append(tokens, scored.ids[0, 0])
        responses[name] = tokens[100:].tolist()
    assert responses["sharing"] == responses["plain"]
    assert n_computed["plain"] == sum(range(100, 140))
    assert n_computed["sharing"] <= 100 + 39 * BLOCK < n_computed["plain"] / 3


def test_a_failed_pass_leaves_nothing_in_the_cache(sharing: Ask, plain: Ask) -> None:
    """Fails if blocks that vLLM has listed as cached, but not filled because the pass failed, are read by the next
    request: its scores would be wrong without any error.
    """
    batch = [replace(s, given=None) for s in siblings(12, 100, [20, 20])]
    assert sharing("fail_in_the_middle", batch, TOPK)
    assert_equal(sharing("score", batch, TOPK), plain("score", batch, TOPK))


_SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
KINDS: dict[str, dict[str, Any]] = {"Qwen3": _SMALL | _HEADS, "Mamba": _SMALL, "FalconH1": _SMALL | _HEADS}


def test_vllm_shares_no_prompts_of_models_with_a_recurrent_state(sharing: Ask, tmp_path: Path) -> None:
    """Fails if a model whose state is more than its KV cache starts behind a cached prompt without that state."""
    import transformers

    folders = {}
    for kind, settings in KINDS.items():
        config = getattr(transformers, f"{kind}Config")(architectures=[f"{kind}ForCausalLM"], **settings)
        config.save_pretrained(tmp_path / kind)
        folders[kind] = str(tmp_path / kind)
    assert sharing("may_share_prompts", folders) == {"Qwen3": True, "Mamba": False, "FalconH1": False}


def test_hf_scores_are_as_exact_as_without_sharing(tmp_path: Path) -> None:
    """Fails if rows are shifted, positions start again behind the cached prompt, a shorter response reads the padding
    or the tokens of a longer one, or a response that is split over several passes loses its beginning.
    """
    model = save_engine_model(tmp_path, max_position_embeddings=1024)
    ask = local(engine_settings(model, "hf", max_tokens=1024))
    alone = local(engine_settings(model, "hf", max_tokens=1024, share_prompts=False))
    assert (ask("prefix_block"), alone("prefix_block")) == (SHORTEST_PROMPT, 0)
    sizes = {65: [1, 1], 100: [30, 1, 64, 30], 80: [700, 3, 600], 64: [9, 9], 900: [90, 90, 1]}
    groups = [siblings(n_prompt, n_prompt, lengths) for n_prompt, lengths in sizes.items()]
    batch = [replace(s, given=None) for group in groups for s in group]
    order = np.random.default_rng(0).permutation(len(batch))
    batch = [batch[i] for i in order]
    params = ScoreParams("sampled")
    plain = plain_logits(model, batch, torch.float64)
    expected = [
        np.take_along_axis(plain_logprobs(logits, params), sequence.response[:, None], 1)[:, 0]
        for sequence, logits in zip(batch, plain, strict=True)
    ]

    def error(scores: list[np.ndarray]) -> float:
        return max(float(np.abs(mine - exact).max()) for mine, exact in zip(scores, expected, strict=True))

    scores, n_tokens = ask("score_counted", batch, params)
    whole, n_whole = alone("score_counted", batch, params)
    assert error(whole) < 1e-3
    assert error(scores) <= max(2 * error(whole), 1e-5)
    assert n_tokens < 0.7 * n_whole


def test_hf_computes_a_prompt_once(model: Path) -> None:
    """Fails if siblings compute their prompt again, short prompts cost two small passes, or one sequence is split."""
    ask = local(engine_settings(model, "hf"))
    params = ScoreParams("sampled")
    for n_prompt, lengths, n_tokens in (
        (128, [32] * 8, 128 + 8 * 31),
        (64, [32] * 4, 4 * 96),
        (128, [32], 160),
        (128, [1, 1], 128),
    ):
        batch = siblings(3, n_prompt, lengths)
        assert ask("score_counted", batch, params)[1] == n_tokens


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Mistral", {"sliding_window": 16}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("Qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ],
)
def test_hf_shares_no_prompts_where_a_cache_is_not_the_whole_state(
    tmp_path: Path, kind: str, changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if a model whose cache drops tokens, or whose positions depend on the length of the sequence, is computed
    in two parts, or the log does not say that it is not.
    """
    caplog.set_level("INFO", logger="teacher_server")
    model = save_engine_model(tmp_path, kind=kind, **changes)
    ask = local(engine_settings(model, "hf"))
    assert ask("prefix_block") == 0
    assert sum("not shared" in record.getMessage() for record in caplog.records) == 1
    batch = siblings(5, 128, [32, 32])
    assert ask("score_counted", batch, ScoreParams("sampled"))[1] == 2 * 160

"""Loading an engine: errors, models with a special LM head, and vLLM over two processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from teacher_server.engines import hf
from teacher_server.engines.base import ScoreParams, TokenSequence, Writing
from teacher_server.engines.load import EngineSettings, load_engine
from teacher_server.errors import ServerError
from tests.model_families import save_family
from tests.model_parts import enter_vllm
from tests.processes import is_alive, wait_until
from tests.service.engine_host import (
    Ask,
    engine_settings,
    hosted,
    local,
    mixed_batch,
    plain_logits,
    save_biased_model,
    save_engine_model,
)
from tests.service.test_engine_contract import TOLERANCE, check_topk

pytestmark = pytest.mark.service
BATCH = mixed_batch()


def test_the_share_of_a_gpu_bounds_the_engine_hf(
    torch_sees: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the teacher takes memory of a trainer on the same GPU, because torch caches whatever is free."""
    limits: list[tuple[float, str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch_sees(2)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: limits.append(given))
    monkeypatch.setattr(hf, "HfEngine", lambda settings, dtype, device: (limits[-1], device))
    for device, share in (("cuda:1", 0.25), ("auto", 0.85)):
        settings = EngineSettings(model="m", max_tokens=8, engine="hf", device=device, gpu_memory_utilization=share)
        where = "cuda:0" if device == "auto" else device
        assert load_engine(settings) == ((share, where), where)
    on_cpu = EngineSettings(model="m", max_tokens=8, engine="hf", device="cpu")
    assert load_engine(on_cpu) == ((0.85, "cuda:0"), "cpu") and len(limits) == 2


@pytest.mark.parametrize(
    ("changes", "token"),
    [
        ({"engine": "hff"}, "--engine hff: "),
        ({"engine": "hf", "tensor_parallel_size": 2}, "--tensor-parallel-size 2 "),
        ({"engine": "hf", "kv_cache_mib": 64}, "--kv-cache-mib 64 "),
        ({"device": "tpu"}, "--device tpu: "),
        ({"device": "cuda:99"}, "--device cuda:99: "),
        ({"engine": "no_such_module:load"}, "--engine no_such_module:load: "),
        ({"engine": "tests.service.trivial_engine:no_such"}, "--engine tests.service.trivial_engine:no_such: "),
        ({"engine": "hf"}, "transformers"),
    ],
)
def test_wrong_settings_are_errors_that_contain_the_flag(tmp_path: Path, changes: dict[str, Any], token: str) -> None:
    """Fails if a wrong setting gives a traceback, or is silently replaced by another."""
    settings = EngineSettings(**{"model": str(tmp_path), "max_tokens": 10, "device": "cpu", **changes})
    with pytest.raises(ServerError) as caught:
        load_engine(settings)
    assert token in str(caught.value)


def test_a_missing_vllm_is_an_error_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a host without vllm gives an ImportError, or another engine is used silently."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ServerError, match="--engine vllm: .*--engine hf"):
        load_engine(EngineSettings(model=str(tmp_path), max_tokens=10, engine="vllm", device="cpu"))


@pytest.mark.parametrize(("cap", "spread"), [(1.0, 0.3), (30.0, 0.05)])
def test_a_model_with_soft_caps_is_served_with_them(tmp_path: Path, cap: float, spread: float) -> None:
    """Fails if the cap of logits after the LM head, or that of attention scores, is left out."""
    from transformers import AutoModelForCausalLM

    changes = {"final_logit_softcapping": cap, "attn_logit_softcapping": 0.2, "initializer_range": spread}
    model = save_engine_model(tmp_path, kind="Gemma2", vocab_size=50, **changes)
    engine = load_engine(engine_settings(model, "hf"))
    assert not engine.has_plain_head
    ids = np.arange(1, 30, dtype=np.int32)
    scores = engine.score([TokenSequence(ids, 4)], ScoreParams("sampled"))[0]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    logits = plain(torch.from_numpy(ids).long()[None]).logits[0, 3:-1]
    expected = logits.log_softmax(-1).gather(1, torch.from_numpy(ids[4:]).long()[:, None])[:, 0]
    np.testing.assert_allclose(np.asarray(scores), expected.detach().numpy(), atol=2e-5)


def test_a_model_whose_backbone_is_not_found_is_refused(tmp_path: Path) -> None:
    """Fails if Llama 4, whose head transformers does not separate, ends in a traceback."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = {"hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 2}
    torch.manual_seed(0)
    Llama4ForCausalLM(Llama4TextConfig(vocab_size=50, **sizes, **heads)).save_pretrained(tmp_path)
    with pytest.raises(ServerError):
        load_engine(engine_settings(tmp_path, "hf"))


def test_a_nan_is_not_mistaken_for_a_cap(tmp_path: Path) -> None:
    """Fails if damaged weights are reported as an unsupported model, or served."""
    file = save_engine_model(tmp_path, vocab_size=50) / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"][7] = float("nan")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ServerError):
        load_engine(engine_settings(tmp_path, "hf"))


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_biased_model(tmp_path_factory.mktemp("models") / "phi")


def check_biased(ask: Ask, model: Path) -> None:
    params = ScoreParams("topk", k=8)
    assert not ask("facts")["has_plain_head"]
    assert "LM head" in ask("problem", BATCH[0], ScoreParams("hidden"))
    assert check_topk(ask("score", BATCH[:2], params), plain_logits(model, BATCH[:2]), params) <= TOLERANCE


def test_a_head_with_a_bias_has_no_hidden_signal(biased: Path) -> None:
    """Fails if a client gets hidden states and a matrix whose product is not the logits."""
    check_biased(local(engine_settings(biased, "hf")), biased)


def test_hf_in_bfloat16(tmp_path: Path) -> None:
    """Fails if sums are computed in bfloat16 (an error of 0.4 nats at V = 152k), or bfloat16 rows are converted."""
    model = save_engine_model(tmp_path)
    ask = local(engine_settings(model, "hf", dtype="bfloat16"))
    assert ask("facts")["dtype"] == "bfloat16"
    params = ScoreParams("sampled")
    exact = local(engine_settings(model, "hf"))("score", BATCH[:1], params)[0]
    assert np.abs(ask("score", BATCH[:1], params)[0] - exact).max() < 0.5
    assert ask("score", BATCH[:1], ScoreParams("hidden", wire="fp16"))[0].dtype == np.uint16
    assert ask("stream_facts", BATCH[:1], ScoreParams("logits", wire="fp32"))[0][2] == "float32"


# Further starts of vLLM. Not run in CI.


@pytest.mark.slow
def test_vllm_finds_a_head_with_a_bias(biased: Path) -> None:
    """Fails if the check misses the bias of vLLM's packed head."""
    with hosted(engine_settings(biased, "vllm")) as ask:
        check_biased(ask, biased)


@pytest.mark.slow
def test_vllm_scores_tokens_that_answers_exclude(tmp_path: Path) -> None:
    """Fails if vLLM's Gemma 4 gives tokens that its folder excludes from answers no probability, or writes them."""
    model = save_family(tmp_path, "gemma4", seed=1)
    excluded = list(range(100, 200))
    (model / "generation_config.json").write_text(json.dumps({"suppress_tokens": excluded}))
    settings = {"max_tokens": 64}
    params = ScoreParams("sampled")
    sequence = TokenSequence(np.arange(80, 120, dtype=np.int32), 8)
    expected = local(engine_settings(model, "hf", **settings))("score", [sequence], params)[0]
    with hosted(engine_settings(model, "vllm", **settings), enter=enter_vllm) as ask:
        np.testing.assert_allclose(ask("score", [sequence], params)[0], expected, atol=1e-4)
        writing = Writing(n=8, temperature=1.0, top_p=1.0, max_tokens=40, n_vocab=256, stop_ids=(257,))
        assert not {*excluded} & {
            token for answer in ask("answers", sequence.token_ids[:8], writing) for token in answer
        }


@pytest.mark.slow
def test_vllm_in_bfloat16(tmp_path: Path) -> None:
    """Fails if vLLM's packing, which differs in bfloat16, changes the matrix of the head."""
    model = save_engine_model(tmp_path)
    with hosted(engine_settings(model, "vllm", dtype="bfloat16")) as ask:
        assert (ask("facts")["dtype"], ask("facts")["has_plain_head"]) == ("bfloat16", True)
        head = ask("lm_head", "fp16")
        expected = local(engine_settings(model, "hf", dtype="bfloat16"))("lm_head", "fp32")
        np.testing.assert_array_equal(head, expected)
        exact = local(engine_settings(model, "hf"))("score", BATCH[:1], ScoreParams("sampled"))[0]
        assert np.abs(ask("score", BATCH[:1], ScoreParams("sampled"))[0] - exact).max() < 0.5


@pytest.mark.slow
def test_vllm_without_a_kernel_for_the_model_is_an_error_at_load(tmp_path: Path) -> None:
    """Fails if a worker becomes ready and then fails every request."""
    model = save_engine_model(tmp_path, head_dim=8)
    with pytest.raises(ServerError, match="--engine hf"), hosted(engine_settings(model, "vllm")) as ask:
        ask("facts")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Ask]]:
    model = save_engine_model(tmp_path_factory.mktemp("models") / "two")
    with hosted(engine_settings(model, "vllm", tensor_parallel_size=2)) as ask:
        yield model, ask


@pytest.mark.slow
def test_tensor_parallel_scores_equal_those_of_one_process(two: tuple[Path, Ask]) -> None:
    """Fails if padded vocabulary rows, the gather of the logits or the sharding of the head mixes up columns."""
    model, ask = two
    plain = plain_logits(model, BATCH)
    params = ScoreParams("topk", k=8, n_vocab=4000)
    assert check_topk(ask("score", BATCH, params), plain, params) <= TOLERANCE
    head = ask("lm_head", "fp32")
    np.testing.assert_array_equal(head, local(engine_settings(model, "hf"))("lm_head", "fp32"))
    for hidden, logits in zip(ask("score", BATCH, ScoreParams("hidden"), step=11), plain, strict=True):
        np.testing.assert_allclose(hidden @ head.T, logits, atol=TOLERANCE, rtol=0)
    for rows, logits in zip(ask("score", BATCH, ScoreParams("logits"), step=7), plain, strict=True):
        np.testing.assert_allclose(rows, logits - logits.max(-1, keepdims=True), atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_tensor_parallel_ranks_stay_synchronized_after_a_nan(two: tuple[Path, Ask]) -> None:
    """Fails if the other ranks wait in the LM head after an error on rank 0, so that the next batch hangs."""
    _, ask = two
    for params in (ScoreParams("topk", k=8), ScoreParams("logits")):
        assert ask("score_poisoned", BATCH[:2], params)
    assert np.isfinite(ask("score", BATCH[:2], ScoreParams("sampled"))[0]).all()


@pytest.mark.slow
def test_no_process_outlives_a_killed_engine(tmp_path: Path) -> None:
    """Fails if a crashed worker leaves model copies on the GPUs, so that its successor is out of memory."""
    model = save_engine_model(tmp_path)
    with pytest.raises(EOFError):  # noqa: SIM117
        with hosted(engine_settings(model, "vllm", tensor_parallel_size=2)) as ask:
            engine = psutil.Process(ask("pid"))
            processes = [engine, *engine.children(recursive=True)]
            assert len(processes) >= 3  # the engine and two ranks
            os.kill(engine.pid, signal.SIGKILL)
            wait_until(lambda: not any(is_alive(process.pid) for process in processes), 30.0, "exit of the ranks")
            ask("facts")

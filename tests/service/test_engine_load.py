"""Loading an engine: what it refuses and in which words, models whose head is special, and vLLM over two processes."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from teacher_server.engines.base import ScoreParams
from teacher_server.engines.load import EngineSettings, default_engine, load_engine, resolve_device
from teacher_server.errors import ServerError
from tests.service.engine_host import (
    Ask,
    engine_settings,
    hosted,
    local,
    mixed_batch,
    plain_logits,
    save_engine_model,
)
from tests.service.harness import is_alive, trivial_model, wait_until
from tests.service.test_engine_contract import TOLERANCE, check_topk

pytestmark = pytest.mark.service
BATCH = mixed_batch()


def test_auto_is_hf_on_a_cpu_and_vllm_on_gpus() -> None:
    """Would break if the engine that nobody chose were another than the documented one."""
    assert (default_engine("cpu"), default_engine("cuda:0")) == ("hf", "vllm")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"engine": "hff"}, "--engine hff: no such engine. Fix: use auto or one of hf, vllm, trivial"),
        ({"engine": "hf", "tensor_parallel_size": 2}, "only vllm splits a model. Fix: use --engine vllm"),
        ({"device": "tpu"}, "--device tpu: no such device"),
        ({"device": "cuda:99"}, "--device cuda:99: torch sees"),
        ({"engine": "trivial"}, "config.json gives no vocab_size"),
        ({"engine": "hf"}, "transformers cannot load it"),
    ],
)
def test_refusals_name_the_flag_and_the_fix(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    """Would break if a wrong setting were a traceback, or were quietly replaced by another."""
    settings = EngineSettings(**{"model": str(tmp_path), "max_tokens": 10, "device": "cpu", **changes})
    with pytest.raises(ServerError) as caught:
        load_engine(settings)
    assert text in str(caught.value)


def test_a_missing_vllm_is_said_before_anything_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break if a host without vllm got an ImportError, or the other engine without being asked."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match="vllm is not installed. Fix: .*or use --engine hf"):
        load_engine(EngineSettings(model=str(tmp_path), max_tokens=10, engine="vllm", device="cpu"))


def test_the_trivial_engine_needs_no_weights(tmp_path: Path) -> None:
    """Would break if load tests had to make a model."""
    engine = load_engine(EngineSettings(model=str(trivial_model(tmp_path, 777)), max_tokens=50, engine="trivial"))
    assert (engine.name, engine.vocab_size, engine.max_tokens) == ("trivial", 777, 50)


def test_auto_takes_the_device_that_is_here() -> None:
    """Would break if `auto` named a device that torch cannot use."""
    import torch

    assert resolve_device("auto") == ("cuda:0" if torch.cuda.is_available() else "cpu")


def test_a_model_that_caps_its_logits_is_refused_by_hf(tmp_path: Path) -> None:
    """Would break if the head alone were used for a model that caps its logits after it: wrong without a sign."""
    model = save_engine_model(tmp_path, kind="Gemma2", final_logit_softcapping=1.0, vocab_size=50)
    with pytest.raises(ServerError, match="changes its logits.*Fix: use --engine vllm"):
        load_engine(engine_settings(model, "hf"))


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Phi, whose LM head has a bias."""
    import torch
    from safetensors.torch import load_file, save_file

    model = save_engine_model(tmp_path_factory.mktemp("models") / "phi", kind="Phi", num_key_value_heads=2)
    file = model / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.bias"] = torch.linspace(-3, 3, len(weights["lm_head.bias"]))
    save_file(weights, file, {"format": "pt"})
    return model


def check_biased(ask: Ask, model: Path) -> None:
    params = ScoreParams("topk", k=8)
    assert not ask("facts")["has_plain_head"]
    assert "more than a matrix" in ask("problem", BATCH[0], ScoreParams("hidden"))
    assert check_topk(ask("score", BATCH[:2], params), plain_logits(model, BATCH[:2]), params) <= TOLERANCE


def test_a_head_with_a_bias_has_no_hidden_signal(biased: Path) -> None:
    """Would break if a client were given hidden states and a matrix that do not make the logits."""
    check_biased(local(engine_settings(biased, "hf")), biased)


def test_hf_in_bfloat16(tmp_path: Path) -> None:
    """Would break if statistics were taken in bfloat16 (off by 0.4 nats at V = 152k), or its rows were converted."""
    model = save_engine_model(tmp_path)
    ask = local(engine_settings(model, "hf", dtype="bfloat16"))
    assert ask("facts")["dtype"] == "bfloat16"
    params = ScoreParams("sampled")
    exact = local(engine_settings(model, "hf"))("score", BATCH[:1], params)[0]
    assert np.abs(ask("score", BATCH[:1], params)[0] - exact).max() < 0.5
    assert ask("score", BATCH[:1], ScoreParams("hidden", wire="fp16"))[0].dtype == np.uint16
    assert ask("stream_facts", BATCH[:1], ScoreParams("logits", wire="fp32"))[0][2] == "float32"


# vLLM again and again: by hand


@pytest.mark.slow
def test_vllm_finds_a_head_with_a_bias(biased: Path) -> None:
    """Would break if vLLM's packed head hid its bias from the check."""
    with hosted(engine_settings(biased, "vllm")) as ask:
        check_biased(ask, biased)


@pytest.mark.slow
def test_vllm_in_bfloat16(tmp_path: Path) -> None:
    """Would break if the head's true matrix were lost to packing, which is another in bfloat16."""
    model = save_engine_model(tmp_path)
    with hosted(engine_settings(model, "vllm", dtype="bfloat16")) as ask:
        assert (ask("facts")["dtype"], ask("facts")["has_plain_head"]) == ("bfloat16", True)
        head = ask("lm_head", "fp16")
        expected = local(engine_settings(model, "hf", dtype="bfloat16"))("lm_head", "fp32")
        np.testing.assert_array_equal(head, expected)
        exact = local(engine_settings(model, "hf"))("score", BATCH[:1], ScoreParams("sampled"))[0]
        assert np.abs(ask("score", BATCH[:1], ScoreParams("sampled"))[0] - exact).max() < 0.5


@pytest.mark.slow
def test_vllm_says_what_it_has_no_kernel_for(tmp_path: Path) -> None:
    """Would break if a worker were ready and then failed every request."""
    model = save_engine_model(tmp_path, head_dim=8)
    with pytest.raises(ServerError, match="vllm cannot load it"), hosted(engine_settings(model, "vllm")) as ask:
        ask("facts")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Ask]]:
    model = save_engine_model(tmp_path_factory.mktemp("models") / "two")
    with hosted(engine_settings(model, "vllm", tensor_parallel_size=2)) as ask:
        yield model, ask


@pytest.mark.slow
def test_tensor_parallel_scores_are_those_of_one_process(two: tuple[Path, Ask]) -> None:
    """Would break if padded vocabulary rows, the gather of the logits or the split of the head mixed up columns."""
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
def test_a_nan_leaves_tensor_parallel_ranks_in_step(two: tuple[Path, Ask]) -> None:
    """Would break if an error on rank 0 left the others waiting in the LM head: the next batch would hang."""
    _, ask = two
    for params in (ScoreParams("topk", k=8), ScoreParams("logits")):
        assert "NaN" in ask("score_poisoned", BATCH[:2], params)
    assert np.isfinite(ask("score", BATCH[:2], ScoreParams("sampled"))[0]).all()


@pytest.mark.slow
def test_no_process_outlives_a_killed_engine(tmp_path: Path) -> None:
    """Would break if a crashed worker left model copies on the GPUs, so that its successor had no memory."""
    model = save_engine_model(tmp_path)
    with pytest.raises(Exception, match="terminated abruptly"):  # noqa: SIM117
        with hosted(engine_settings(model, "vllm", tensor_parallel_size=2)) as ask:
            engine = psutil.Process(ask("pid"))
            family = [engine, *engine.children(recursive=True)]
            assert len(family) >= 3  # itself and two ranks
            os.kill(engine.pid, signal.SIGKILL)
            wait_until(lambda: not any(is_alive(process.pid) for process in family), 5.0, "the end of the ranks")
            ask("facts")

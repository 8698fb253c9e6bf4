"""One real vLLM engine that gets adapters alone: digests, logprobs against peft, sequences in flight, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.types import Prompt, Rollout
from tests.e2e.conftest import VOCAB, Lab
from tests.engine_process import EngineProcess

pytestmark = pytest.mark.e2e

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]  # k_proj and up_proj have no adapter
RANK, ALPHA, TEMPERATURE = 4, 6.0, 0.7


def _probe(student: Path, tp: int) -> dict[str, Any]:
    """Run in a child process: vLLM allows one engine per process."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from gkd.actor.common.lora import scaled_factors
    from gkd.config.schema_actor import LoraConfig
    from gkd.config.schema_rollout import RolloutConfig
    from gkd.rollout.messages import Sampling
    from gkd.rollout.vllm.engine import RolloutEngine
    from gkd.weight_sync.buckets import differing
    from tests.dist.helpers import caught
    from tests.dist.megatron_reference import logprob_rows, response_logprobs
    from tests.e2e.weight_sender import WeightSender

    config = RolloutConfig(kv_cache_mib=32, max_num_seqs=8, tp=tp)
    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=TARGETS)
    engine = RolloutEngine(
        str(student), config, dtype="float32", max_model_len=40, device="cpu", eos_ids=[VOCAB - 1], lora=lora
    )
    base = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    model = get_peft_model(base, PeftConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS))
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(3)
    sender, sampling = WeightSender(engine, tp), Sampling(1, TEMPERATURE, 1.0, 12, seed=11)
    prompts = [Prompt(i, rng.integers(2, VOCAB - 1, 3 + i).astype(np.int32)) for i in range(4)]

    def change(factor: float = 1.0) -> dict[str, torch.Tensor]:
        """Draw new adapters times a factor, and return what the engine must get."""
        with torch.no_grad():
            trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
            for param in trained.values():
                param.copy_(factor * 0.05 * torch.randn(param.shape, generator=generator))
        named = ((name.removeprefix("base_model.model.").replace(".default", ""), p) for name, p in trained.items())
        return {name: tensor.detach() for name, tensor in scaled_factors(named, ALPHA / RANK)}

    def logprobs(rollout: Rollout) -> np.ndarray:
        return response_logprobs(logprob_rows(model, rollout, TEMPERATURE), rollout)

    result: dict[str, Any] = {}
    sent, result["base bytes"] = sender.push(load_file(student / "model.safetensors"), 0, adapters=False)
    sender.push(change(0.0), 0, adapters=True)
    with model.disable_adapter():
        result["before"] = [(r.rollout_logprobs, logprobs(r)) for r in engine.generate(prompts, sampling)]
    digests, result["bytes"] = sender.push(change(), 1, adapters=True)
    result["differing"] = differing(sent | digests, engine.digests())
    result["n"] = len(digests)
    engine.add("in flight", prompts, sampling, range(len(prompts)))
    for _ in range(5):
        engine.step()
    old = {name: param.detach().clone() for name, param in model.named_parameters() if param.requires_grad}
    digests, _ = sender.push(change(), 2, adapters=True)
    result["differing later"] = differing(sent | digests, engine.digests())
    while engine.n_running:
        engine.step()
    finished = engine.pop_finished("in flight")
    new = [logprobs(rollout) for rollout in finished]
    model.load_state_dict(old, strict=False)
    result["in flight"] = [(r, logprobs(r), after) for r, after in zip(finished, new, strict=True)]
    result["version"] = engine.policy_version
    factors = change()
    partner = dict(list(factors.items())[:-1])
    result["incomplete"] = caught(lambda: sender.push(partner, 3, adapters=True))
    elsewhere = {name.replace("q_proj", "k_proj").replace("mlp", "nothing"): t for name, t in factors.items()}
    result["elsewhere"] = caught(lambda: sender.push(elsewhere, 3, adapters=True))
    result["version"] = engine.policy_version
    result["level 2"] = caught(lambda: engine.sleep(level=2))
    return result


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one worker", "two workers"])
def probe(request: pytest.FixtureRequest, lab: Lab) -> dict[str, Any]:
    with EngineProcess() as process:
        found: dict[str, Any] = process.call(_probe, lab.student, request.param)
    return found


def test_engines_compute_with_the_adapters_alone(probe: dict[str, Any]) -> None:
    """Fails if an engine computes with other adapters or weights than were sent, or digests do not cover both."""
    assert probe["differing"] == probe["differing later"] == []
    assert probe["n"] == 2 * len(TARGETS) * 2  # two factors of each layer in two blocks
    assert probe["bytes"] < 0.02 * probe["base bytes"]
    for found, expected in probe["before"]:
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_sequences_in_flight_get_new_adapters(probe: dict[str, Any]) -> None:
    """Fails if a sequence continues with old adapters or old keys and values, or its version spans are wrong."""
    for rollout, old, new in probe["in flight"]:
        first, second = rollout.version_spans
        assert (first.policy_version, second.policy_version) == (1, 2)
        n = first.stop
        assert 0 < n < len(rollout.response_ids)
        np.testing.assert_allclose(rollout.rollout_logprobs[:n], old[:n], atol=1e-4)
        np.testing.assert_allclose(rollout.rollout_logprobs[n:], new[n:], atol=1e-4)
        assert np.abs(old - new).max() > 1e-2


def test_adapters_that_do_not_fit_are_refused(probe: dict[str, Any]) -> None:
    """Fails if an engine generates with half an adapter, or drops one for a layer that it cannot adapt."""
    assert {probe[case][0] for case in ("incomplete", "elsewhere")} == {"WeightSyncError"}
    assert probe["version"] == 2, "a failed sync must not advance the version"


def test_a_sleep_that_discards_the_base_is_refused(probe: dict[str, Any]) -> None:
    """Fails if an engine drops weights that no later sync sends again: it could never generate again."""
    kind, text = probe["level 2"]
    assert kind == "ClusterError" and "weight_sync.lora" in text and "level 1" in text

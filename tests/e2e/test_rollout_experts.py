"""Weight sync of a mixture-of-experts model in one real vLLM engine: loading, generation, digests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gkd.types import Prompt
from tests.engine_process import EngineProcess
from tests.random_models import save_random

pytestmark = pytest.mark.e2e
VOCAB, EOS, N_EXPERTS = 211, 1, 4


def save_experts(folder: Path, seed: int, **changes: Any) -> None:
    sizes = {"vocab_size": VOCAB, "num_experts": N_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    ids = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": 0}
    layers = {"norm_topk_prob": True, "mlp_only_layers": [0]}
    save_random(folder, "Qwen3Moe", seed=seed, **(sizes | ids | layers | changes))


def _probe(old: Path, new: Path) -> dict[str, Any]:
    """Run in a child process: an engine built from `old` receives the weights of `new`."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from gkd.config.schema_rollout import RolloutConfig
    from gkd.rollout.messages import Sampling
    from gkd.rollout.vllm.engine import RolloutEngine
    from tests.dist.helpers import caught
    from tests.dist.megatron_reference import logprob_rows, response_logprobs
    from tests.e2e.weight_sender import WeightSender

    config = RolloutConfig(kv_cache_mib=32, max_num_seqs=8)
    engine = RolloutEngine(str(old), config, dtype="float32", max_model_len=32, device="cpu", eos_ids=[EOS])
    tensors = load_file(new / "model.safetensors")
    partial = {name: t for name, t in tensors.items() if "experts.2.up_proj" not in name}

    sender = WeightSender(engine)
    result: dict[str, Any] = {"incomplete": caught(lambda: sender.push(partial, 1, bucket_bytes=1 << 16))}
    result["sent"], _ = sender.push(tensors, 1, bucket_bytes=1 << 16)
    result["held"] = engine.digests()

    rng = np.random.default_rng(5)
    prompts = [Prompt(i, rng.integers(2, VOCAB, 4 + i).astype(np.int32)) for i in range(4)]
    rollouts = sorted(engine.generate(prompts, Sampling(1, 1.0, 1.0, 12, seed=3)), key=lambda r: r.sample_index)
    result["logprobs"] = [rollout.rollout_logprobs for rollout in rollouts]
    for name, folder in (("new", new), ("old", old)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        result[name] = [response_logprobs(logprob_rows(model, rollout), rollout) for rollout in rollouts]
    return result


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("experts")
    for seed, name in enumerate(("old", "new")):
        save_experts(root / name, seed)
    with EngineProcess() as process:
        found: dict[str, Any] = process.call(_probe, root / "old", root / "new")
    return found


def test_the_engine_holds_the_experts_that_were_sent(probe: dict[str, Any]) -> None:
    """Fails if an expert's matrix is loaded to the wrong slot, or is read back under another name."""
    assert sum(".experts." in name for name in probe["sent"]) == 3 * N_EXPERTS
    assert probe["held"] == probe["sent"]


def test_the_engine_samples_with_the_experts_that_were_sent(probe: dict[str, Any]) -> None:
    """Fails if the engine keeps using its initial experts, or routes differently from Hugging Face."""
    for got, new, old in zip(probe["logprobs"], probe["new"], probe["old"], strict=True):
        np.testing.assert_allclose(got, new, atol=1e-3)
        assert np.abs(got - old).max() > 0.1


def test_a_missing_expert_is_named(probe: dict[str, Any]) -> None:
    """Fails if a sync without one expert's matrix succeeds: vLLM reports one parameter for all experts."""
    kind, text = probe["incomplete"]
    assert kind == "WeightSyncError" and "model.layers.1.mlp.experts.2.up_proj.weight" in text

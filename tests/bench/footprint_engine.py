"""A process of `bench_footprint`: one vLLM engine, how much memory it takes while its cache fills.

python -m tests.bench.footprint_engine MODEL DEVICE N_PROMPTS KV_CACHE_MIB    prints a JSON line
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from gkd.config.schema_rollout import RolloutConfig
from gkd.types import Prompt
from tests.bench.footprint_memory import Meter


def main(model: str, device: str, n_prompts: int, kv_cache_mib: int) -> dict[str, int]:
    """Bytes after the engine is up, and at the peak until its last answer."""
    import vllm.v1.engine.llm_engine  # noqa: F401  (before the base: what an engine imports is not its memory)
    from vllm import LLM  # noqa: F401

    import gkd.rollout.vllm.weights  # noqa: F401
    from gkd.rollout.messages import Sampling
    from gkd.rollout.vllm.engine import RolloutEngine

    torch.set_num_threads(1)
    meter = Meter(torch.device(device))
    config = RolloutConfig(kv_cache_mib=kv_cache_mib, max_num_seqs=n_prompts)
    engine = RolloutEngine(model, config, dtype="float32", max_model_len=480, device=device, eos_ids=[])
    state = meter.now()
    meter.forget_peak()
    rng = np.random.default_rng(3)
    prompts = [Prompt(i, rng.integers(2, 32000, 448).astype(np.int32)) for i in range(n_prompts)]
    answers = list(engine.generate(prompts, Sampling(1, 1.0, 1.0, 32, seed=1)))
    return {"state": state, "peak": meter.peak(), "n_tokens": sum(answer.n_tokens for answer in answers)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))))

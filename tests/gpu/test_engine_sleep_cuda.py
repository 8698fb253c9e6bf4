"""Sleep mode of a vLLM engine on CUDA. Not run in CI: pytest -m gpu tests/gpu

Does not cover several GPUs, or another process that allocates the released memory.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.types import Prompt
from tests.bench.student_case import save_model
from tests.device import on_stand_in, patience

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB, EOS = 32_000, 1
MIB = 1 << 20
N_CYCLES, N_TOKENS = (2, 8) if on_stand_in() else (10, 40)  # stand-in cards compute on the CPU


def _probe(student: Path, eager: bool) -> dict[str, Any]:
    """Run in a child process: vLLM allows one engine per process."""
    from safetensors.torch import load_file

    from gkd.config.schema_rollout import RolloutConfig
    from gkd.errors import GkdError
    from gkd.rollout.messages import Sampling
    from gkd.rollout.vllm.engine import RolloutEngine
    from tests.e2e.weight_sender import WeightSender

    config = RolloutConfig(gpu_memory_utilization=0.3, max_num_seqs=8, enforce_eager=eager)
    engine = RolloutEngine(
        str(student), config, dtype="bfloat16", max_model_len=256, device="cuda", eos_ids=[EOS], enable_sleep_mode=True
    )
    rng = np.random.default_rng(3)
    prompts = [Prompt(i, rng.integers(2, VOCAB, 20 + i).astype(np.int32)) for i in range(4)]

    def responses() -> list[tuple[bytes, bytes]]:
        sampling = Sampling(1, 0.0, 1.0, N_TOKENS, seed=0)
        rollouts = sorted(engine.generate(prompts, sampling), key=lambda r: r.sample_index)
        return [(r.response_ids.tobytes(), r.rollout_logprobs.tobytes()) for r in rollouts]

    def memory() -> dict[str, int]:
        return {**engine.memory_bytes(), "free": torch.cuda.mem_get_info()[0]}

    # Over gloo: NCCL does not support two members on one GPU.
    tensors = load_file(student / "model.safetensors")
    sender = WeightSender(engine)

    def push(version: int) -> None:
        sender.push(tensors, version, bucket_bytes=16 << 20)

    responses()  # warm-up: compilation and allocations of the first use
    result: dict[str, Any] = {"responses": [responses()], "awake": [memory()], "asleep": [], "refused": []}
    for _ in range(N_CYCLES):
        engine.sleep(1)
        engine.sleep(1)
        result["asleep"].append(memory())
        engine.wake_up()
        engine.wake_up()
        result["awake"].append(memory())
    result["responses"].append(responses())

    for version in (1, 2):
        engine.sleep(2)
        result["asleep"].append(memory())
        engine.wake_up(["weights"])
        result["weights back"] = memory()
        push(version)
        engine.wake_up(["kv_cache"])
        result["responses"].append(responses())
        result["awake"].append(memory())

    for part in ("kv_cache", "weights"):
        engine.sleep(1, [part])
        result[f"{part} alone"] = memory()
        try:
            responses()
        except GkdError as error:
            result["refused"].append(str(error))
        engine.wake_up([part])
        result["responses"].append(responses())
    # The engine's folder is removed before torch's objects: NCCL's monitor would wait for the store's file in it.
    torch.distributed.destroy_process_group()
    return result


GRAPHS = pytest.param(False, id="graphs", marks=pytest.mark.real_card("CUDA graphs"))


@pytest.fixture(scope="module", params=[pytest.param(True, id="eager"), GRAPHS])
def probe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    student = tmp_path_factory.mktemp("student")
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 1024, "intermediate_size": 3072}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    sizes |= {"max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": 0}
    save_model(student, dtype=torch.bfloat16, initializer_range=0.1, **sizes)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_probe, student, request.param).result(timeout=280 * patience())


def test_sleep_does_not_change_the_responses(probe: dict[str, Any]) -> None:
    """Fails if weights, buffers or captured graphs change in sleep, or a sync does not restore discarded weights."""
    assert len(probe["responses"]) == 6
    assert all(responses == probe["responses"][0] for responses in probe["responses"])
    assert len(probe["refused"]) == 2 and all("asleep" in message for message in probe["refused"])


def test_released_memory_is_free_on_the_device(probe: dict[str, Any]) -> None:
    """Fails if the device gains less free memory than the engine reports as released, or a cycle leaks memory."""
    awake = probe["awake"][0]
    assert awake["weights"] > 100 * MIB and awake["kv_cache"] > 1024 * MIB
    for held in probe["awake"]:
        assert (held["weights"], held["kv_cache"]) == (awake["weights"], awake["kv_cache"])
        assert held["free"] >= awake["free"] - 64 * MIB
    for held in probe["asleep"]:
        assert held["weights"] == held["kv_cache"] == 0
        assert held["free"] - awake["free"] > 0.98 * (awake["weights"] + awake["kv_cache"])
    assert abs(probe["asleep"][0]["free"] - probe["asleep"][N_CYCLES - 1]["free"]) < 16 * MIB
    assert (probe["weights back"]["weights"], probe["weights back"]["kv_cache"]) == (awake["weights"], 0)
    for part, other in (("weights", "kv_cache"), ("kv_cache", "weights")):
        assert (probe[f"{part} alone"][part], probe[f"{part} alone"][other]) == (0, awake[other])

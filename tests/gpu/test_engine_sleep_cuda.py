"""A vLLM engine on a CUDA device that gives its memory away. Run by hand where there is one: pytest -m gpu tests/gpu

What this does not prove: several GPUs, and another process that uses the memory meanwhile.
"""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.cluster.assignment import free_port
from gkd.types import Prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB, EOS = 32_000, 1
MIB = 1 << 20
N_CYCLES = 10


def _save(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _probe(student: Path, port: int, eager: bool) -> dict[str, Any]:
    """Runs in a process of its own, because an engine is one a process."""
    from safetensors.torch import load_file

    from gkd.config.schema import RolloutConfig
    from gkd.errors import GkdError
    from gkd.rollout.engine import RolloutEngine
    from gkd.rollout.sampling import Sampling
    from gkd.weight_sync.buckets import TensorSpec, plan_buckets
    from gkd.weight_sync.transfer import GroupSpec, TransferGroup, send

    config = RolloutConfig(gpu_memory_utilization=0.3, max_num_seqs=8, enforce_eager=eager)
    engine = RolloutEngine(
        str(student), config, dtype="bfloat16", max_model_len=256, device="cuda", eos_ids=[EOS], enable_sleep_mode=True
    )
    rng = np.random.default_rng(3)
    prompts = [Prompt(i, rng.integers(2, VOCAB, 20 + i).astype(np.int32)) for i in range(4)]

    def answers() -> list[tuple[bytes, bytes]]:
        rollouts = sorted(engine.generate(prompts, Sampling(1, 0.0, 1.0, 40, seed=0)), key=lambda r: r.sample_index)
        return [(r.response_ids.tobytes(), r.rollout_logprobs.tobytes()) for r in rollouts]

    def look() -> dict[str, int]:
        return {**engine.memory_bytes(), "free": torch.cuda.mem_get_info()[0]}

    # Over gloo, because NCCL takes no two members on one GPU.
    tensors = load_file(student / "model.safetensors")
    specs = [TensorSpec(name, tuple(t.shape), "bfloat16") for name, t in tensors.items()]
    buckets = plan_buckets(specs, 16 << 20)
    joined: list[TransferGroup] = []

    def spec(rank: int) -> GroupSpec:
        return GroupSpec("gloo", "127.0.0.1", port, rank, 2, 60.0)

    thread = threading.Thread(target=lambda: joined.append(TransferGroup(spec(0), torch.device("cpu"))))
    thread.start()
    engine.join_groups([spec(1)])
    thread.join()

    def push(version: int) -> None:
        thread = threading.Thread(target=lambda: send(joined[0], buckets, iter(tensors.items()), with_digests=False))
        thread.start()
        engine.receive([buckets], version)
        thread.join()

    answers()  # what the first use compiles and allocates
    result: dict[str, Any] = {"answers": [answers()], "awake": [look()], "asleep": [], "refused": []}
    for _ in range(N_CYCLES):
        engine.sleep(1)
        engine.sleep(1)
        result["asleep"].append(look())
        engine.wake_up()
        engine.wake_up()
        result["awake"].append(look())
    result["answers"].append(answers())

    for version in (1, 2):
        engine.sleep(2)
        result["asleep"].append(look())
        engine.wake_up(["weights"])
        result["weights back"] = look()
        push(version)
        engine.wake_up(["kv_cache"])
        result["answers"].append(answers())
        result["awake"].append(look())

    for part in ("kv_cache", "weights"):
        engine.sleep(1, [part])
        result[f"{part} alone"] = look()
        try:
            answers()
        except GkdError as error:
            result["refused"].append(str(error))
        engine.wake_up([part])
        result["answers"].append(answers())
    return result


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def probe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    student = tmp_path_factory.mktemp("student")
    _save(student)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_probe, student, free_port("127.0.0.1"), request.param).result(timeout=280)


def test_it_writes_as_if_it_had_never_slept(probe: dict[str, Any]) -> None:
    """Fails if weights, buffers or captured graphs do not survive sleep, or a sync does not bring dropped ones back."""
    assert len(probe["answers"]) == 6
    assert all(answers == probe["answers"][0] for answers in probe["answers"])
    assert len(probe["refused"]) == 2 and all("asleep" in message for message in probe["refused"])


def test_the_device_gets_the_memory(probe: dict[str, Any]) -> None:
    """Fails if the device has less to give than the engine says it gave away, or a cycle leaves something behind."""
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

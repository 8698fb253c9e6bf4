"""Real vLLM engines that give their memory away and take it back: what they write afterwards, and what is left behind.

On CPU. What this does not prove: vLLM's own sleep mode, which CUDA uses (tests/gpu/test_engine_sleep_cuda.py).
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gkd.cluster.assignment import free_port
from gkd.rollout.engine_start import CPU_ENV
from gkd.types import Prompt
from tests.e2e.conftest import EOS, VOCAB, Lab
from tests.e2e.test_rollout_experts import VOCAB as EXPERTS_VOCAB
from tests.e2e.test_rollout_experts import _save as save_experts

pytestmark = pytest.mark.e2e
MIB = 1 << 20
KV_CACHE_MIB = 64
N_CYCLES = 30


def _nans_and_buffers(worker: Any) -> tuple[bool, dict[str, str]]:
    """Are all parameters NaN? And the digests of the buffers."""
    from gkd.weight_sync.buckets import digest

    model = worker.model_runner.get_model()
    nan = all(bool(parameter.isnan().all()) for parameter in model.parameters())
    return nan, {name: digest(buffer) for name, buffer in model.named_buffers()}


def _written_cache(worker: Any) -> int:
    """Bytes of the KV cache that are not zero."""
    import torch

    storage = worker.model_runner.kv_caches[0].untyped_storage()
    return int(torch.empty(0, dtype=torch.uint8).set_(storage).count_nonzero())


def _probe(student: Path, vocab: int, port: int) -> dict[str, Any]:
    """Runs in a process of its own, because an engine is one a process."""
    import resource

    import psutil
    import torch
    from safetensors.torch import load_file

    from gkd.config.schema import RolloutConfig
    from gkd.errors import GkdError
    from gkd.rollout.engine import RolloutEngine
    from gkd.rollout.sampling import Sampling
    from gkd.weight_sync.buckets import TensorSpec, digest, plan_buckets
    from gkd.weight_sync.transfer import GroupSpec, TransferGroup, send

    config = RolloutConfig(cpu_kv_cache_mib=KV_CACHE_MIB, max_num_seqs=8)
    engine = RolloutEngine(
        str(student), config, dtype="float32", max_model_len=32, device="cpu", eos_ids=[EOS], can_sleep=True
    )
    rng = np.random.default_rng(3)
    prompts = [Prompt(i, rng.integers(2, vocab, 3 + i).astype(np.int32)) for i in range(4)]
    samplings = (Sampling(1, 0.0, 1.0, 10, seed=0), Sampling(2, 0.7, 1.0, 10, seed=11))

    def answers() -> list[tuple[bytes, bytes]]:
        """Tokens and logprobs, to the bit: greedy, then sampled."""
        rollouts = [sorted(engine.generate(prompts, s), key=lambda r: r.sample_index) for s in samplings]
        return [(r.response_ids.tobytes(), r.rollout_logprobs.tobytes()) for part in rollouts for r in part]

    old = load_file(student / "model.safetensors")
    torch.manual_seed(7)
    new = {name: tensor * (1 + 0.1 * torch.randn_like(tensor)) for name, tensor in old.items()}
    part = dict(list(new.items())[:-1])

    def plan(tensors: dict[str, torch.Tensor]) -> Any:
        return plan_buckets([TensorSpec(name, tuple(t.shape), "float32") for name, t in tensors.items()], 1 << 20)

    def spec(rank: int) -> GroupSpec:
        return GroupSpec("gloo", "127.0.0.1", port, rank, 2, 60.0)

    joined: list[TransferGroup] = []
    thread = threading.Thread(target=lambda: joined.append(TransferGroup(spec(0), torch.device("cpu"))))
    thread.start()
    engine.join_groups([spec(1)])
    thread.join()

    def push(tensors: dict[str, torch.Tensor], version: int) -> None:
        thread = threading.Thread(
            target=lambda: send(joined[0], plan(tensors), iter(tensors.items()), with_digests=False)
        )
        thread.start()
        try:
            engine.receive([plan(tensors)], version)
        finally:
            thread.join()

    def refusal(call: Callable[[], Any]) -> str:
        try:
            call()
        except GkdError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def probed(what: Callable[[Any], Any]) -> Any:
        return engine.llm.collective_rpc(what)[0]

    result: dict[str, Any] = {"old": [answers()], "new": [], "awake": [engine.memory_bytes()], "refused": {}}
    refused = result["refused"]
    result["cache_before"] = probed(_written_cache)

    # The host keeps the weights. Everything twice.
    for _ in range(2):
        engine.sleep(1)
        engine.sleep(2)  # asleep already: nothing more is dropped
        result.setdefault("asleep", []).append(engine.memory_bytes())
        refused["generate"] = refusal(answers)
        refused["receive"] = refusal(lambda: engine.receive([plan(old)], 9))
        refused["digests"] = refusal(engine.digests)
        engine.wake_up()
        engine.wake_up()
        result.setdefault("cache_after", []).append(probed(_written_cache))
        result["awake"].append(engine.memory_bytes())
        result["old"].append(answers())

    # One part alone; then the other, too.
    for first, second in (("kv_cache", "weights"), ("weights", "kv_cache")):
        engine.sleep(1, [first])
        result[f"{first} alone"] = engine.memory_bytes()
        refused[f"generate without {first}"] = refusal(answers)
        engine.sleep(1, [second])
        result["asleep"].append(engine.memory_bytes())
        engine.wake_up([first])
        result[f"{first} back"] = engine.memory_bytes()
        engine.wake_up([second])
        result["old"].append(answers())

    # Nobody keeps the weights. Twice, in the order of a sync on a shared device.
    push(new, 1)
    result["new"].append(answers())
    push(old, 2)
    result["old"].append(answers())
    _, buffers = probed(_nans_and_buffers)
    for version in (3, 5):
        engine.sleep(2)
        result["asleep"].append(engine.memory_bytes())
        engine.wake_up(["weights"])
        result.setdefault("dropped", []).append(probed(_nans_and_buffers) == (True, buffers))
        refused["digests of nothing"] = refusal(engine.digests)
        refused["part of a sync"] = refusal(lambda: push(part, 99))
        push(new, version)
        refused["generate without kv_cache"] = refusal(answers)
        engine.wake_up(["kv_cache"])
        result["new"].append(answers())
        result["new digests"] = engine.digests()
        engine.sleep(2)
        engine.wake_up()
        refused["generate of nothing"] = refusal(answers)
        refused["part of a sync"] = refusal(lambda: push(part, 99))
        refused["generate after a part"] = refusal(answers)
        push(old, version + 1)
        result["old"].append(answers())
        result["awake"].append(engine.memory_bytes())
    result["sent digests"] = {name: digest(tensor) for name, tensor in new.items()}
    result["version"] = engine.policy_version

    # While it writes; and what it cannot do at all.
    engine.add("owner", prompts, samplings[1], range(len(prompts)))
    engine.step()
    refused["running"] = refusal(lambda: engine.sleep(1))
    result["still running"] = engine.n_running
    engine.drop("owner")
    refused["level"] = refusal(lambda: engine.sleep(3))
    refused["tag"] = refusal(lambda: engine.sleep(1, ["optimizer"]))
    refused["wake tag"] = refusal(lambda: engine.wake_up(["optimizer"]))
    result["awake"].append(engine.memory_bytes())

    result["rss"] = []
    for _ in range(N_CYCLES):
        engine.sleep(1)
        asleep = (sum(engine.memory_bytes().values()), psutil.Process().memory_info().rss)
        engine.wake_up()
        result["rss"].append((*asleep, psutil.Process().memory_info().rss))
        result["awake"].append(engine.memory_bytes())
    result["old"].append(answers())

    # The host's copy goes, too.
    engine.sleep(2)
    result["rss without copy"] = psutil.Process().memory_info().rss
    engine.wake_up()
    push(old, 7)

    # There is no memory to come back to; then there is. (Last: glibc's
    # allocator then goes on in another arena, of which it gives less back.)
    engine.sleep(1)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + KV_CACHE_MIB * MIB // 2, limits[1]))
    try:
        engine.wake_up()
        result["no memory"] = ""
    except RuntimeError as error:
        result["no memory"] = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    refused["generate after no memory"] = refusal(answers)
    engine.wake_up()
    result["old"].append(answers())
    result["weights"] = sum(t.nbytes for t in old.values())
    return result


@pytest.fixture(scope="module", params=["dense", pytest.param("experts", marks=pytest.mark.slow)])
def probe(request: pytest.FixtureRequest, lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    student, vocab = lab.student, VOCAB
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**CPU_ENV, "VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1"}.items():
            patch.setenv(key, value)
        if request.param == "experts":
            student, vocab = tmp_path_factory.mktemp("experts"), EXPERTS_VOCAB
            save_experts(student, 0)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_probe, student, vocab, free_port("127.0.0.1")).result(timeout=200)


def test_it_writes_as_if_it_had_never_slept(probe: dict[str, Any]) -> None:
    """Fails if a weight, a buffer or a sampling state is another one after sleep, at either level, or if anything
    computes with memory that was given away."""
    assert probe["old"][0] != probe["new"][0]
    for name, n in (("old", 10), ("new", 3)):
        assert len(probe[name]) == n
        assert all(answers == probe[name][0] for answers in probe[name]), name
    assert probe["new digests"] == probe["sent digests"]
    assert probe["version"] == 6


def test_the_memory_goes_and_comes_back_to_the_byte(probe: dict[str, Any]) -> None:
    """Fails if something of the engine stays behind while it sleeps, or takes more on every return."""
    awake = probe["awake"][0]
    # Buffers and padding make the difference; the KV cache is whole blocks of what was asked for.
    assert 0 <= awake["weights"] - probe["weights"] < 0.2 * MIB
    assert KV_CACHE_MIB * MIB - MIB < awake["kv_cache"] <= KV_CACHE_MIB * MIB
    assert len(probe["awake"]) == 6 + N_CYCLES and all(held == awake for held in probe["awake"])
    assert probe["asleep"] == [{"weights": 0, "kv_cache": 0}] * 6
    for part, other in (("weights", "kv_cache"), ("kv_cache", "weights")):
        assert probe[f"{part} alone"] == {**awake, part: 0} == probe[f"{other} back"]


def test_the_system_gets_the_memory(probe: dict[str, Any]) -> None:
    """Fails if the allocator keeps what the engine gave away, 30 cycles leave anything behind, or level 2 keeps the
    host's copy of the weights."""
    held = sum(probe["awake"][0].values())
    for left, asleep, awake in probe["rss"]:
        assert left == 0
        assert awake - asleep == pytest.approx(held, rel=0.05)
    assert abs(probe["rss"][-1][1] - probe["rss"][1][1]) < MIB
    assert probe["rss"][-1][1] - probe["rss without copy"] > probe["weights"] - MIB


def test_a_dropped_weight_is_no_number_and_a_new_cache_is_empty(probe: dict[str, Any]) -> None:
    """Fails if level 2 keeps weights (so that a sync which leaves one out would not show), or loses a buffer, or if a
    cache comes back with something in it."""
    assert probe["dropped"] == [True, True]
    assert probe["cache_before"] > 0 and probe["cache_after"] == [0, 0]


def test_what_an_engine_without_its_memory_cannot_do(probe: dict[str, Any]) -> None:
    """Fails if an engine writes or shows garbage, takes weights that have no place, or sleeps while it writes."""
    refused: dict[str, str] = probe["refused"]
    assert "write: weights and kv_cache asleep. Fix: call wake_up(['weights', 'kv_cache']) first" in refused["generate"]
    assert "write: kv_cache asleep" in refused["generate without kv_cache"]
    assert "write: weights asleep" in refused["generate without weights"]
    assert "receive weights: weights asleep" in refused["receive"]
    assert "show its weights: weights asleep" in refused["digests"]
    for name in ("digests of nothing", "generate of nothing", "generate after a part"):
        assert "dropped its weights" in refused[name] and "receive a version" in refused[name]
    assert "8 sequences are being written" in refused["running"] and probe["still running"] == 8
    assert "sleep level 3" in refused["level"]
    assert "no part 'optimizer'" in refused["tag"] and "weights, kv_cache" in refused["wake tag"]
    assert refused.pop("part of a sync").startswith("WeightSyncError")
    assert "memory" in probe["no memory"] and "asleep" in refused["generate after no memory"]
    assert all(message.startswith("ClusterError: ") for message in refused.values())


def _probe_two_workers(student: Path) -> dict[str, Any]:
    from gkd.config.schema import RolloutConfig
    from gkd.rollout.engine import RolloutEngine
    from gkd.rollout.sampling import Sampling

    config = RolloutConfig(cpu_kv_cache_mib=KV_CACHE_MIB, max_num_seqs=8, tp=2)
    engine = RolloutEngine(
        str(student), config, dtype="float32", max_model_len=32, device="cpu", eos_ids=[EOS], can_sleep=True
    )
    rng = np.random.default_rng(3)
    prompts = [Prompt(i, rng.integers(2, VOCAB, 3 + i).astype(np.int32)) for i in range(4)]

    def answers() -> list[tuple[bytes, bytes]]:
        rollouts = sorted(engine.generate(prompts, Sampling(2, 0.7, 1.0, 10, seed=11)), key=lambda r: r.sample_index)
        return [(r.response_ids.tobytes(), r.rollout_logprobs.tobytes()) for r in rollouts]

    result: dict[str, Any] = {"before": answers(), "awake": engine.memory_bytes()}
    engine.sleep(1)
    result["asleep"] = engine.memory_bytes()
    engine.wake_up()
    return result | {"after": answers(), "awake again": engine.memory_bytes()}


@pytest.mark.slow
def test_an_engine_of_two_workers(lab: Lab) -> None:
    """Fails if one of an engine's workers keeps its memory or its share is not counted."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**CPU_ENV, "VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1"}.items():
            patch.setenv(key, value)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            result = pool.submit(_probe_two_workers, lab.student).result(timeout=200)
    assert result["before"] == result["after"]
    assert result["asleep"] == {"weights": 0, "kv_cache": 0}
    assert result["awake"] == result["awake again"]
    assert result["awake"]["kv_cache"] > 2 * (KV_CACHE_MIB - 1) * MIB

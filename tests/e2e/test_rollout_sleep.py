"""Sleep mode of real vLLM engines on CPU: generated tokens afterwards, released memory, refused calls.

Does not cover vLLM's own sleep mode, which CUDA uses: see tests/gpu/test_engine_sleep_cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gkd.errors import WeightSyncError
from gkd.types import Prompt
from tests.e2e.conftest import EOS, VOCAB, Lab
from tests.e2e.test_rollout_experts import VOCAB as EXPERTS_VOCAB
from tests.e2e.test_rollout_experts import save_experts
from tests.engine_process import EngineProcess

pytestmark = pytest.mark.e2e
MIB = 1 << 20
KV_CACHE_MIB = 64
N_CYCLES = 30


def _nans_and_buffers(worker: Any) -> tuple[bool, dict[str, str]]:
    """Return whether all parameters are NaN, and the digests of the buffers."""
    from gkd.weight_sync.buckets import digest

    model = worker.model_runner.get_model()
    nan = all(bool(parameter.isnan().all()) for parameter in model.parameters())
    return nan, {name: digest(buffer) for name, buffer in model.named_buffers()}


def _nonzero_cache(worker: Any) -> int:
    """Return the number of nonzero bytes of the KV cache."""
    import torch

    storage = worker.model_runner.kv_caches[0].untyped_storage()
    return int(torch.empty(0, dtype=torch.uint8).set_(storage).count_nonzero())


def _engine(student: Path, vocab: int, tp: int = 1) -> tuple[Any, list[Prompt]]:
    """Return an engine that can sleep, and prompts for it."""
    from gkd.config.schema_rollout import RolloutConfig
    from gkd.rollout.vllm.engine import RolloutEngine

    config = RolloutConfig(kv_cache_mib=KV_CACHE_MIB, max_num_seqs=8, tp=tp)
    place = {"dtype": "float32", "max_model_len": 32, "device": "cpu", "eos_ids": [EOS]}
    engine = RolloutEngine(str(student), config, **place, enable_sleep_mode=True)
    rng = np.random.default_rng(3)
    return engine, [Prompt(i, rng.integers(2, vocab, 3 + i).astype(np.int32)) for i in range(4)]


def _responses(engine: Any, prompts: list[Prompt], *samplings: Any) -> list[tuple[bytes, bytes]]:
    """Return tokens and logprobs as bytes, sampling by sampling."""
    rollouts = [sorted(engine.generate(prompts, s), key=lambda r: r.sample_index) for s in samplings]
    return [(r.response_ids.tobytes(), r.rollout_logprobs.tobytes()) for part in rollouts for r in part]


def _probe(student: Path, vocab: int) -> dict[str, Any]:
    """Run in a child process: vLLM allows one engine per process."""
    import resource

    import psutil
    import torch
    from safetensors.torch import load_file

    from gkd.rollout.messages import Sampling
    from gkd.weight_sync.buckets import digest
    from tests.dist.helpers import caught
    from tests.e2e.weight_sender import WeightSender

    engine, prompts = _engine(student, vocab)
    samplings = (Sampling(1, 0.0, 1.0, 10, seed=0), Sampling(2, 0.7, 1.0, 10, seed=11))  # greedy, then sampled
    responses = partial(_responses, engine, prompts, *samplings)
    old = load_file(student / "model.safetensors")
    torch.manual_seed(7)
    new = {name: tensor * (1 + 0.1 * torch.randn_like(tensor)) for name, tensor in old.items()}
    part = dict(list(new.items())[:-1])

    sender = WeightSender(engine)
    push = sender.push

    def error_of(call: Callable[[], Any]) -> str:
        return ": ".join(caught(call))

    def on_worker(function: Callable[[Any], Any]) -> Any:
        return engine.llm.collective_rpc(function)[0]

    result: dict[str, Any] = {"old": [responses()], "new": [], "awake": [engine.memory_bytes()], "refused": {}}
    refused = result["refused"]
    result["cache_before"] = on_worker(_nonzero_cache)

    # Level 1, twice.
    for _ in range(2):
        engine.sleep(1)
        engine.sleep(2)  # already asleep: no effect
        result.setdefault("asleep", []).append(engine.memory_bytes())
        refused["generate"] = error_of(responses)
        refused["receive"] = error_of(lambda: engine.receive([], 9))
        refused["digests"] = error_of(engine.digests)
        engine.wake_up()
        engine.wake_up()
        result.setdefault("cache_after", []).append(on_worker(_nonzero_cache))
        result["awake"].append(engine.memory_bytes())
        result["old"].append(responses())

    # One tag after the other.
    for first, second in (("kv_cache", "weights"), ("weights", "kv_cache")):
        engine.sleep(1, [first])
        result[f"{first} alone"] = engine.memory_bytes()
        refused[f"generate without {first}"] = error_of(responses)
        engine.sleep(1, [second])
        result["asleep"].append(engine.memory_bytes())
        engine.wake_up([first])
        result[f"{first} back"] = engine.memory_bytes()
        engine.wake_up([second])
        result["old"].append(responses())

    # Level 2, twice, in the order of a weight sync on a shared GPU.
    push(new, 1)
    result["new"].append(responses())
    push(old, 2)
    result["old"].append(responses())
    _, buffers = on_worker(_nans_and_buffers)
    for version in (3, 5):
        engine.sleep(2)
        result["asleep"].append(engine.memory_bytes())
        engine.wake_up(["weights"])
        result.setdefault("dropped", []).append(on_worker(_nans_and_buffers) == (True, buffers))
        refused["digests when discarded"] = error_of(engine.digests)
        refused["part of a sync"] = error_of(lambda: push(part, 99))
        push(new, version)
        refused["generate without kv_cache"] = error_of(responses)
        engine.wake_up(["kv_cache"])
        result["new"].append(responses())
        result["new digests"] = engine.digests()
        engine.sleep(2)
        engine.wake_up()
        refused["generate when discarded"] = error_of(responses)
        refused["part of a sync"] = error_of(lambda: push(part, 99))
        refused["generate after a part"] = error_of(responses)
        push(old, version + 1)
        result["old"].append(responses())
        result["awake"].append(engine.memory_bytes())
    result["sent digests"] = {name: digest(tensor) for name, tensor in new.items()}
    result["version"] = engine.policy_version

    # While sequences are unfinished; invalid arguments.
    engine.add("owner", prompts, samplings[1], range(len(prompts)))
    engine.step()
    refused["running"] = error_of(lambda: engine.sleep(1))
    result["still running"] = engine.n_running
    engine.abort("owner")
    refused["level"] = error_of(lambda: engine.sleep(3))
    result["awake"].append(engine.memory_bytes())

    result["rss"] = []
    for _ in range(N_CYCLES):
        engine.sleep(1)
        asleep = (sum(engine.memory_bytes().values()), psutil.Process().memory_info().rss)
        engine.wake_up()
        result["rss"].append((*asleep, psutil.Process().memory_info().rss))
        result["awake"].append(engine.memory_bytes())
    result["old"].append(responses())

    # Level 2 frees the host copy, too.
    engine.sleep(2)
    result["rss without copy"] = psutil.Process().memory_info().rss
    engine.wake_up()
    push(old, 7)

    # wake_up fails for lack of memory, then succeeds. (Last, because glibc then continues in another arena, of which it
    # returns less memory to the system.)
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
    refused["generate after no memory"] = error_of(responses)
    engine.wake_up()
    result["old"].append(responses())
    result["weights"] = sum(t.nbytes for t in old.values())
    return result


@pytest.fixture(scope="module", params=["dense", pytest.param("experts", marks=pytest.mark.slow)])
def probe(request: pytest.FixtureRequest, lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    student, vocab = lab.student, VOCAB
    if request.param == "experts":
        student, vocab = tmp_path_factory.mktemp("experts"), EXPERTS_VOCAB
        save_experts(student, 0)
    with EngineProcess() as process:
        found: dict[str, Any] = process.call(_probe, student, vocab)
    return found


def test_sleep_does_not_change_the_responses(probe: dict[str, Any]) -> None:
    """Fails if weights, buffers or sampling states differ after sleep at either level, or released memory is used."""
    assert probe["old"][0] != probe["new"][0]
    for name, n in (("old", 10), ("new", 3)):
        assert len(probe[name]) == n
        assert all(responses == probe[name][0] for responses in probe[name]), name
    assert probe["new digests"] == probe["sent digests"]
    assert probe["version"] == 6


def test_memory_is_released_and_restored_exactly(probe: dict[str, Any]) -> None:
    """Fails if a sleeping engine holds memory, or holds more after each wake-up."""
    awake = probe["awake"][0]
    # Buffers and padding account for the difference; the KV cache consists of whole blocks.
    assert 0 <= awake["weights"] - probe["weights"] < 0.2 * MIB
    assert KV_CACHE_MIB * MIB - MIB < awake["kv_cache"] <= KV_CACHE_MIB * MIB
    assert len(probe["awake"]) == 6 + N_CYCLES and all(held == awake for held in probe["awake"])
    assert probe["asleep"] == [{"weights": 0, "kv_cache": 0}] * 6
    for part, other in (("weights", "kv_cache"), ("kv_cache", "weights")):
        assert probe[f"{part} alone"] == {**awake, part: 0} == probe[f"{other} back"]


def test_memory_is_returned_to_the_system(probe: dict[str, Any]) -> None:
    """Fails if the allocator keeps released memory, 30 cycles leak memory, or level 2 keeps the host copy."""
    held = sum(probe["awake"][0].values())
    for left, asleep, awake in probe["rss"]:
        assert left == 0
        assert awake - asleep == pytest.approx(held, rel=0.05)
    assert probe["rss"][-1][1] - probe["rss"][1][1] < MIB  # a busy machine may take pages back
    assert probe["rss"][-1][1] - probe["rss without copy"] > probe["weights"] - MIB


def test_discarded_weights_are_nan_and_a_restored_cache_is_zero(probe: dict[str, Any]) -> None:
    """Fails if level 2 keeps weights (an incomplete sync would go unnoticed) or loses a buffer, or a restored cache is
    not zeroed."""
    assert probe["dropped"] == [True, True]
    assert probe["cache_before"] > 0 and probe["cache_after"] == [0, 0]


def test_calls_that_a_sleeping_engine_refuses(probe: dict[str, Any]) -> None:
    """Fails if an engine uses uninitialized memory, receives weights while asleep, or sleeps with unfinished work."""
    refused: dict[str, str] = probe["refused"]
    assert "generate: weights and kv_cache asleep" in refused["generate"]
    assert "generate: kv_cache asleep" in refused["generate without kv_cache"]
    assert "generate: weights asleep" in refused["generate without weights"]
    assert "weights: weights asleep" in refused["receive"]
    assert "digests: weights asleep" in refused["digests"]
    for name in ("digests when discarded", "generate when discarded", "generate after a part"):
        assert "sleep(level=2)" in refused[name]
    assert "8 sequences" in refused["running"] and probe["still running"] == 8
    assert "sleep level 3" in refused["level"]
    assert refused.pop("part of a sync").startswith("WeightSyncError")
    assert "memory" in probe["no memory"] and "asleep" in refused["generate after no memory"]
    assert all(message.startswith("ClusterError: ") for message in refused.values())


def _probe_two_workers(student: Path) -> dict[str, Any]:
    from gkd.rollout.messages import Sampling
    from gkd.weight_sync.group import GroupSpec

    engine, prompts = _engine(student, VOCAB, tp=2)
    responses = partial(_responses, engine, prompts, Sampling(2, 0.7, 1.0, 10, seed=11))
    result: dict[str, Any] = {"before": responses(), "awake": engine.memory_bytes()}
    engine.sleep(1)
    result["asleep"] = engine.memory_bytes()
    engine.wake_up()
    alone = GroupSpec("gloo", "127.0.0.1", 1, 1, 3, 2.0, 2.0)
    with pytest.raises(WeightSyncError):  # both workers fail
        engine.join_groups([alone])
    return result | {"after": responses(), "awake again": engine.memory_bytes()}


@pytest.mark.slow
def test_an_engine_of_two_workers(lab: Lab) -> None:
    """Fails if one of two workers keeps its memory, its share is not counted, or their errors break later calls."""
    with EngineProcess() as process:
        result = process.call(_probe_two_workers, lab.student)
    assert result["before"] == result["after"]
    assert result["asleep"] == {"weights": 0, "kv_cache": 0}
    assert result["awake"] == result["awake again"]
    assert result["awake"]["kv_cache"] > 2 * (KV_CACHE_MIB - 1) * MIB

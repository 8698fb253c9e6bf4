"""One real vLLM engine: samples, logprobs, and errors for prompts and weights that do not fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gkd.types import Prompt, Rollout
from tests.dist import fake_card
from tests.e2e.conftest import EOS, VOCAB, Lab
from tests.engine_process import EngineProcess
from tests.second_runner import ENVIRONMENT, N_VOCAB, small_student

pytestmark = pytest.mark.e2e
N_PROMPTS, N_SAMPLES = 6, 2
N_TOP = 25  # more than vLLM allows by default
CUT = {"top_k": 3, "min_p": 0.6}  # settings that leave out tokens
N_LISTED = 5  # of the teacher's most probable tokens


def _prompts(n_vocab: int) -> list[Prompt]:
    rng = np.random.default_rng(3)
    return [Prompt(i, rng.integers(2, n_vocab, 3 + 5 * i).astype(np.int32)) for i in range(N_PROMPTS)]


def _probe(student: Path, n_vocab: int) -> dict[Any, Any]:
    """Run in a child process: vLLM allows one engine per process."""
    import torch
    import vllm
    from transformers import AutoModelForCausalLM
    from vllm.config import CacheConfig
    from vllm.usage.usage_lib import is_usage_stats_enabled
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.utils import request_memory

    from gkd.config.schema_rollout import RolloutConfig
    from gkd.rollout.messages import Sampling
    from gkd.rollout.vllm.engine import RolloutEngine
    from gkd.rollout.vllm.sampling import Request, read_logprobs, vllm_params
    from gkd.rollout.vllm.self_scoring import prompt_logprobs
    from gkd.weight_sync.buckets import differing
    from teacher_server.engines.vllm_process import gpu_memory_arguments
    from tests.dist.helpers import caught
    from tests.dist.megatron_reference import logprob_rows, response_logprobs
    from tests.e2e.weight_sender import WeightSender

    topk_topp_sampler.HAS_TRITON = False  # Triton's interpreter cannot run this kernel of the second runner
    # With blocks of 32 tokens, sequences cross a border of KV blocks while they decode.
    vllm.LLM = partial(vllm.LLM, block_size=32)
    config = RolloutConfig(kv_cache_mib=32, max_num_seqs=8)
    engine = RolloutEngine(str(student), config, dtype="float32", max_model_len=40, device="cpu", eos_ids=[EOS])
    prompts = _prompts(n_vocab)
    sampling = Sampling(N_SAMPLES, 0.7, 1.0, 10, seed=11)

    def generated(how: Sampling) -> list[Rollout]:
        return sorted(engine.generate(prompts, how), key=lambda r: r.sample_index)

    together = generated(sampling)
    alone = list(engine.generate([prompts[4]], sampling, prompt_indices=[4]))
    result: dict[str, Any] = {"together": together, "alone": alone, "reports_usage": is_usage_stats_enabled()}
    result["second_runner"] = engine.llm.llm_engine.vllm_config.use_v2_model_runner
    # Memory that vLLM would request of a shared GPU of 80 GiB with 8 free.
    card: Any = SimpleNamespace(total_memory=80 << 30, free_memory=8 << 30, device_="cuda:0")
    result["requested"] = request_memory(card, CacheConfig(**gpu_memory_arguments(0.85, 1 << 30)))
    try:
        request_memory(card, CacheConfig(**gpu_memory_arguments(0.85, None)))
    except ValueError:
        result["share_is_refused"] = True
    # Sequences with and without top ids in the same passes, of which some start later than others.
    engine.add("top", prompts[:2], replace(sampling, n_top_ids=N_TOP), range(2))
    engine.step()
    engine.add("plain", prompts[2:], sampling, range(2, N_PROMPTS))
    while engine.n_running:
        engine.step()
    mixed = [*engine.pop_finished("top"), *engine.pop_finished("plain")]
    result["mixed"] = sorted(mixed, key=lambda r: r.sample_index)

    result["cut"] = {name: generated(replace(sampling, **{name: value})) for name, value in CUT.items()}

    first_prompt, n_rows = prompts[0].token_ids.tolist(), engine.llm.model_config.get_vocab_size()
    params = vllm_params(Request("", prompts[0], 0, sampling, 0), [], range(n_rows // 2, n_rows))
    (answer,) = engine.llm.generate({"prompt_token_ids": first_prompt}, params, use_tqdm=False)
    (response,) = answer.outputs
    result["masked"] = list(response.token_ids), read_logprobs(response.logprobs, 0)[0]

    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    tokens_a_pass, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, 40
    result["small_passes"] = generated(sampling)
    scheduler.max_num_scheduled_tokens = tokens_a_pass
    engine.add("stopped", prompts, sampling, range(N_PROMPTS))
    for _ in range(3):
        engine.step()
    engine.abort("stopped")

    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    rows = [logprob_rows(model, rollout, sampling.temperature) for rollout in together]
    result["expected_logprobs"] = [response_logprobs(*each) for each in zip(rows, together, strict=True)]
    result["rows"] = [each.numpy() for each in rows]
    result["largest"] = [each.topk(N_TOP).values.numpy() for each in rows]
    result["cut_logprobs"] = {name: [] for name in CUT}
    for name, value in CUT.items():
        for rollout in result["cut"][name]:
            whole = logprob_rows(model, rollout, sampling.temperature)
            ranked = whole.sort(-1, descending=True).values
            limit = ranked[:, :1] + np.log(value) if name == "min_p" else ranked[:, value - 1, None]
            among = whole.masked_fill(whole < limit, -torch.inf).log_softmax(-1)
            result["cut_logprobs"][name].append(response_logprobs(among, rollout))

    with torch.no_grad():
        tokens = torch.tensor([*first_prompt, *result["masked"][0]])
        kept = model(tokens[None]).logits[0, len(first_prompt) - 1 : -1, : n_rows // 2] / sampling.temperature
        result["unmasked"] = kept.log_softmax(-1).gather(-1, tokens[len(first_prompt) :, None])[:, 0].numpy()
    other = [replace(rollout, prompt_ids=rollout.prompt_ids[::-1].copy()) for rollout in together]
    result["scored"] = prompt_logprobs(engine.llm, other, N_LISTED, engine.request_options)
    own = [np.arange(len(rollout.response_ids)) % 3 == i % 2 for i, rollout in enumerate(other)]
    result["own"] = own = [mask if mask.any() else np.ones(len(mask), bool) for mask in own]
    trajectories = [replace(rollout, own=mask) for rollout, mask in zip(other, own, strict=True)]
    result["scored_own"] = prompt_logprobs(engine.llm, trajectories, N_LISTED, engine.request_options)
    result["sampled_alone"] = prompt_logprobs(engine.llm, other[3:4], 0, engine.request_options)
    result["after_scoring"] = generated(sampling)
    result["expected_scores"] = []
    for rollout in other:
        logprobs, own_ids = logprob_rows(model, rollout), torch.from_numpy(rollout.response_ids).long()[:, None]
        ids = torch.cat([own_ids, logprobs.topk(N_LISTED).indices], dim=1)
        result["expected_scores"].append((ids.numpy(), logprobs.gather(-1, ids).numpy()))

    def message(call: Any) -> str:
        return ": ".join(caught(call))

    too_long = Prompt(99, np.full(50, 5, np.int32))
    unmarked = [replace(rollout, own=np.zeros(len(rollout.response_ids), bool)) for rollout in other[3:4]]
    result["unmarked"] = message(lambda: prompt_logprobs(engine.llm, [other[0], *unmarked], 0, engine.request_options))
    result["too_long"] = message(lambda: list(engine.generate([too_long], sampling)))
    result["after_refusal"] = len(list(engine.generate(prompts[:1], sampling)))

    fake_card.install()

    def push(tensors: dict[str, torch.Tensor], version: int, transport: str) -> dict[str, str]:
        """Sync weights over a new group; return the digests of what was sent."""
        return WeightSender(engine, transport=transport).push(tensors, version, bucket_bytes=1 << 18)[0]

    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    part = dict(list(tensors.items())[:-1])
    result["missing"] = list(tensors)[-1]
    result["incomplete"] = message(lambda: push(part, 1, "gloo"))
    result["version_after"] = engine.policy_version
    result["refused"] = message(lambda: list(engine.generate(prompts[:1], sampling)))
    sent = push({name: tensor * 1.5 for name, tensor in tensors.items()}, 0, "ipc")
    result["differing"] = differing(sent, engine.digests())
    result["after_sync"] = len(list(engine.generate(prompts[:1], sampling)))
    return result


SECOND = pytest.param("second", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["first", SECOND])
def probe(lab: Lab, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what an engine with vLLM's first or second model runner did; vLLM chooses the second one on GPUs."""
    is_second = request.param == "second"
    case = (small_student(tmp_path_factory.mktemp("small")), N_VOCAB) if is_second else (lab.student, VOCAB)
    with EngineProcess(ENVIRONMENT if is_second else {}) as process:
        found: dict[str, Any] = process.call(_probe, *case, timeout_s=600)
    assert found["second_runner"] is is_second
    return found


def test_every_sample_is_whole(probe: dict[str, Any]) -> None:
    """Fails if samples are missing, misnumbered, or continue after the end of the sequence."""
    together: list[Rollout] = probe["together"]
    assert [r.sample_index for r in together] == list(range(N_PROMPTS * N_SAMPLES))
    for rollout in together:
        assert rollout.prompt_id == rollout.sample_index // N_SAMPLES
        ended = rollout.response_ids[-1] == EOS
        assert (rollout.finish_reason == "stop") == ended and (ended or len(rollout.response_ids) == 10)
        assert EOS not in rollout.response_ids[:-1]


def test_the_engine_reports_no_usage_statistics(probe: dict[str, Any]) -> None:
    """Fails if vLLM calls its makers' server from the user's cluster."""
    assert probe["reports_usage"] is False


def test_an_engine_with_a_cache_of_a_given_size_starts_on_a_shared_gpu(probe: dict[str, Any]) -> None:
    """Fails if vLLM requires more free memory than such an engine needs, or the pinned vLLM refuses the arguments."""
    assert 0 < probe["requested"] < 1 << 30 and probe["share_is_refused"]


def test_logprobs_are_those_of_the_sampling_distribution(probe: dict[str, Any]) -> None:
    """Fails if rollout_logprobs are of another temperature, token or position."""
    for rollout, expected in zip(probe["together"], probe["expected_logprobs"], strict=True):
        np.testing.assert_allclose(rollout.rollout_logprobs, expected, atol=1e-3)


@pytest.mark.parametrize("name", CUT)
def test_logprobs_of_a_truncated_distribution_are_those_among_its_tokens(probe: dict[str, Any], name: str) -> None:
    """Fails if top_k or min_p has no effect, or the importance terms divide by a probability of all tokens."""
    found, expected = probe["cut"][name], probe["cut_logprobs"][name]
    for rollout, logprobs in zip(found, expected, strict=True):
        np.testing.assert_allclose(rollout.rollout_logprobs, logprobs, atol=1e-3)
    assert any(
        a.response_ids.tolist() != b.response_ids.tolist() for a, b in zip(found, probe["together"], strict=True)
    )


def test_masked_ids_are_not_sampled_and_count_nothing(probe: dict[str, Any]) -> None:
    """Fails if ids that a teacher does not have are generated, or the logprobs are those of a softmax with them."""
    tokens, logprobs = probe["masked"]
    assert len(tokens) == 10 and max(tokens) < probe["rows"][0].shape[1] // 2
    np.testing.assert_allclose(logprobs, probe["unmasked"], atol=1e-3)


def test_top_ids_are_those_of_the_position_and_change_nothing_else(probe: dict[str, Any]) -> None:
    """Fails if top ids include the sampled token as an extra, are of another position or sequence, or change it."""
    for i, (plain, mixed) in enumerate(zip(probe["together"], probe["mixed"], strict=True)):
        assert plain.response_ids.tolist() == mixed.response_ids.tolist()
        np.testing.assert_allclose(plain.rollout_logprobs, mixed.rollout_logprobs, atol=1e-5)
        if mixed.prompt_id >= 2:
            assert mixed.top_ids is None
            continue
        assert mixed.top_ids.shape == (len(mixed.response_ids), N_TOP) and mixed.top_ids.dtype == np.int32
        assert all(len(set(row)) == N_TOP for row in mixed.top_ids)
        values = np.take_along_axis(probe["rows"][i], mixed.top_ids.astype(np.int64), 1)
        np.testing.assert_allclose(values, probe["largest"][i], atol=1e-3)


def test_scores_of_the_engine_are_those_of_its_model(probe: dict[str, Any]) -> None:
    """Fails if the engine as the teacher scores another position, prompt or temperature, or leaves requests behind."""
    for (ids, logprobs), (expected_ids, expected) in zip(probe["scored"], probe["expected_scores"], strict=True):
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    (ids, logprobs), (all_ids, all_logprobs) = probe["sampled_alone"][0], probe["scored"][3]
    np.testing.assert_array_equal(ids, all_ids[:, :1])
    np.testing.assert_allclose(logprobs, all_logprobs[:, :1], atol=1e-5)
    for mask, scored, whole in zip(probe["own"], probe["scored_own"], probe["scored"], strict=True):
        for table, rows in zip(scored, whole, strict=True):
            np.testing.assert_array_equal(table, rows[mask], "rows of the own tokens only")
    assert sum(mask.sum() for mask in probe["own"]) < sum(map(len, probe["own"])) / 2
    for before, after in zip(probe["together"], probe["after_scoring"], strict=True):
        np.testing.assert_array_equal(before.response_ids, after.response_ids)


def test_a_sample_does_not_depend_on_concurrent_sequences(probe: dict[str, Any]) -> None:
    """Fails if a sample depends on the number of engines or on the other sequences in the batch."""
    together, alone = probe["together"], sorted(probe["alone"], key=lambda r: r.sample_index)
    same = [r for r in together if r.prompt_id == 4]
    assert [r.sample_index for r in alone] == [8, 9]
    assert [r.response_ids.tolist() for r in alone] == [r.response_ids.tolist() for r in same]
    assert same[0].response_ids.tolist() != same[1].response_ids.tolist()


def test_prompts_that_do_not_fit_into_a_pass_wait(probe: dict[str, Any]) -> None:
    """Fails if a pass computes a part of a prompt: vLLM then rewinds a random generator, which the CPU cannot do."""
    assert [r.response_ids.tolist() for r in probe["small_passes"]] == [
        r.response_ids.tolist() for r in probe["together"]
    ]


def test_bad_prompts_and_incomplete_weights_are_typed_errors(probe: dict[str, Any]) -> None:
    """Fails if a refused prompt blocks the engine, or an incomplete weight sync succeeds."""
    assert probe["too_long"].startswith("DataError") and "prompt 99" in probe["too_long"]
    assert probe["after_refusal"] == N_SAMPLES
    assert probe["unmarked"].startswith("TeacherError: prompt ") and "own" in probe["unmarked"]
    assert probe["incomplete"].startswith("WeightSyncError") and probe["missing"] in probe["incomplete"]
    assert probe["version_after"] == 0, "a failed sync must not advance the version"


def test_a_failed_sync_can_be_repeated(probe: dict[str, Any]) -> None:
    """Fails if an engine generates with a mixture of two versions, or has other weights after a complete sync."""
    assert probe["refused"].startswith("ClusterError")
    assert probe["differing"] == []
    assert probe["after_sync"] == N_SAMPLES

"""Trajectories in one real engine: tokens, logprobs, observations, faults of environments, new weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gkd.types import FINISH_REASONS, Rollout
from tests.device import kind, on_cuda, on_stand_in, patience
from tests.e2e.turn_environments import FAULTS
from tests.engine_process import EngineProcess

pytestmark = pytest.mark.e2e
N_PROMPTS, N_SAMPLES, MAX_TURNS, MAX_TOKENS = 6, 2, 3, 160
# gpu_proof runs this file on a GPU, where products may round their factors to 10 bits, as in test_stream_engine.
CLOSE = 2e-2 if on_cuda() else 1e-4


def _probe(models: Path) -> dict[str, Any]:
    """Run in a child process: vLLM allows one engine per process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from examples.tools.products import read_jsonl
    from gkd.config.schema_rollout import RolloutConfig
    from gkd.config.schema_sections import DataConfig
    from gkd.data.chat_delta import ChatDelta
    from gkd.data.prompts import RowReader, load_prompts
    from gkd.environment.pool import Environments
    from gkd.environment.worker import Start
    from gkd.rollout.messages import Sampling
    from gkd.rollout.vllm.engine import RolloutEngine
    from gkd.rollout.vllm.turns import Turns
    from gkd.user_code import search_path
    from tests.dist.megatron_reference import logprob_rows, response_logprobs

    tokenizer = AutoTokenizer.from_pretrained(models / "student")
    end, result = tokenizer.eos_token_id, dict[str, Any]()
    files = [str(models / "train.jsonl")]
    prompts, _ = load_prompts(files, "data.train_files", RowReader(DataConfig(), tokenizer), keep_rows=True)
    answers = [int(problem.answer) for problem in read_jsonl(models / "train.jsonl")]
    delta = ChatDelta(tokenizer, {}, [end], setting=("rollout.environment", "x"))

    def turns(name: str, timeout_s: float = 20.0) -> Turns:
        environments = Environments(Start(f"tests.e2e.turn_environments:{name}", search_path()), 1, timeout_s)
        environments.wait_ready(60.0)
        return Turns(environments, delta)

    config = RolloutConfig(kv_cache_mib=1024 if on_cuda() else 32, max_num_seqs=8, enforce_eager=on_stand_in())
    engine = RolloutEngine(
        str(models / "student"), config, dtype="float32", max_model_len=192, device=kind(), eos_ids=[end]
    )
    sampling = Sampling(N_SAMPLES, 1.0, 1.0, MAX_TOKENS, seed=11, n_top_ids=4, max_turns=MAX_TURNS)

    def generated(with_turns: Turns | None, chosen: Any = prompts[:N_PROMPTS]) -> list[Rollout]:
        engine._turns = with_turns
        try:
            return sorted(engine.generate(chosen, sampling), key=lambda r: r.sample_index)
        finally:
            if with_turns is not None:
                with_turns.close()

    result["single"] = generated(None)
    result["first"], result["again"] = generated(turns("Echo")), generated(turns("Slow"))

    # Each fault twice; their trajectories share a process with healthy ones.
    kinds = np.array(answers) % len(FAULTS)
    chosen = [prompts[i] for fault in range(len(FAULTS)) for i in np.flatnonzero(kinds == fault)[:2]]
    result["faulty"] = generated(turns("Faulty", 2.0), chosen)
    result["left"] = engine.n_running, engine.n_generating

    model = AutoModelForCausalLM.from_pretrained(models / "student", dtype=torch.float32)
    rows = [logprob_rows(model, rollout) for rollout in result["first"]]
    result["logprobs"] = [response_logprobs(each, rollout) for each, rollout in zip(rows, result["first"], strict=True)]
    result["best"] = [each.topk(4).indices.numpy() for each in rows]
    result["texts"] = [tokenizer.decode(rollout.response_ids) for rollout in result["first"]]

    # New weights while a trajectory waits for its environment, and while another is generated.
    engine._turns = waiting = turns("Slow")
    engine.add("stream", prompts[:N_PROMPTS], sampling, range(N_PROMPTS))
    for version in range(1, 2000):
        if not engine.n_running:
            break
        engine.step()
        if version % 5 == 0:
            engine.policy_version = _pushed(engine, version)
    result["pushed"] = engine.pop_finished("stream")
    engine.add("dropped", prompts[:2], sampling, range(2))
    while not len(waiting):
        engine.step()
    engine.abort("dropped")
    result["after_abort"] = engine.n_running
    waiting.close()
    return result


def _pushed(engine: Any, version: int) -> int:
    """Let the engine load the weights that it has as a new version, as `receive` does after a transfer."""
    requests = engine.llm.llm_engine.engine_core.engine_core.scheduler.requests
    for request in engine._running.values():
        request.record_span(request.n_tokens + requests[request.engine_id].num_output_tokens, engine.policy_version)
    return version


@pytest.fixture(scope="module")
def probe(acting_models: Path) -> dict[str, Any]:
    with EngineProcess() as process:
        found: dict[str, Any] = process.call(_probe, acting_models, timeout_s=240 * patience())
    return found


def test_own_tokens_have_the_logprobs_of_one_pass_over_the_trajectory(probe: dict[str, Any]) -> None:
    """Fails if a turn is generated from another context than the trajectory that is trained on."""
    assert max(rollout.n_turns for rollout in probe["first"]) == MAX_TURNS
    for rollout, logprobs, best in zip(probe["first"], probe["logprobs"], probe["best"], strict=True):
        own = np.ones(len(rollout.response_ids), bool) if rollout.own is None else rollout.own
        assert np.abs(logprobs[own] - rollout.rollout_logprobs).max() < CLOSE
        assert rollout.top_ids.shape == (rollout.n_own, 4)
        assert (rollout.top_ids[:, 0] == best[own][:, 0]).mean() > 0.95  # ties may have another order
        assert rollout.version_spans[0].start == 0 and rollout.version_spans[-1].stop == len(rollout.response_ids)


def test_the_first_turn_is_that_of_a_run_without_an_environment(probe: dict[str, Any]) -> None:
    """Fails if an environment changes the seed or the prompt of the first turn."""
    for single, rollout in zip(probe["single"], probe["first"], strict=True):
        n = len(single.response_ids) if rollout.own is None else int((~rollout.own).argmax())
        assert np.array_equal(single.response_ids[:n], rollout.response_ids[:n])
        assert single.own is None and single.messages is None


def test_tokens_do_not_depend_on_the_time_of_the_environment(probe: dict[str, Any]) -> None:
    """Fails if a trajectory depends on when its observations arrive."""
    for one, other in zip(probe["first"], probe["again"], strict=True):
        assert np.array_equal(one.response_ids, other.response_ids) and one.finish_reason == other.finish_reason


def test_observations_stand_between_the_turns_as_the_template_writes_them(probe: dict[str, Any]) -> None:
    """Fails if an observation is cut, counted as the student's own, or written in another form."""
    reasons = Counter(rollout.finish_reason for rollout in probe["first"])
    assert set(reasons) <= set(FINISH_REASONS[:3]) and reasons["environment"]
    for rollout, text in zip(probe["first"], probe["texts"], strict=True):
        messages = json.loads(rollout.messages)
        assert [m["role"] for m in messages] == ["assistant", "tool"] * (rollout.n_turns - 1) + ["assistant"]
        if rollout.finish_reason == "environment":
            parts = [m["content"] for m in messages]
            written = parts[0] + "".join(
                f"<|end|><|tool|>{tool}<|end|><|assistant|>{turn}"
                for tool, turn in zip(parts[1::2], parts[2::2], strict=True)
            )
            assert text == f"{written}<|end|>" and rollout.reward == MAX_TURNS == rollout.n_turns


def test_faults_end_their_own_trajectories_only(probe: dict[str, Any]) -> None:
    """Fails if an environment that raises, hangs, dies or returns nonsense ends the run, or costs another one."""
    found = [probe["faulty"][2 * N_SAMPLES * i : 2 * N_SAMPLES * (i + 1)] for i in range(len(FAULTS))]
    for fault, rollouts in zip(FAULTS, found, strict=True):
        for rollout in rollouts:
            assert rollout.n_own >= 1 and len(rollout.rollout_logprobs) == rollout.n_own
            if fault and rollout.finish_reason != "length":
                assert rollout.finish_reason == "environment_error" and rollout.own is None, fault
    assert probe["left"] == (0, 0) and len(probe["faulty"]) == 2 * N_SAMPLES * len(FAULTS)


def test_versions_cover_turns_and_observations(probe: dict[str, Any]) -> None:
    """Fails if tokens of a turn count as of other weights, or spans have gaps over observations."""
    assert len(probe["pushed"]) == N_PROMPTS * N_SAMPLES
    assert any(rollout.version_span > 0 for rollout in probe["pushed"])
    for rollout in probe["pushed"]:
        spans = rollout.version_spans
        assert spans[0].start == 0 and spans[-1].stop == len(rollout.response_ids)
        assert all(
            a.stop == b.start and a.policy_version < b.policy_version for a, b in zip(spans, spans[1:], strict=False)
        )


def test_aborted_trajectories_leave_nothing(probe: dict[str, Any]) -> None:
    """Fails if an engine waits for ever for an environment of a closed stream."""
    assert probe["after_abort"] == 0

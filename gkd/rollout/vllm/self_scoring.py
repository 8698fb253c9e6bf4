"""Score rollouts with the engine that generated them, as the teacher: `teacher.backend: rollout`.

The scores are vLLM's logprobs of a prompt: the teacher's prompt and the response, with one token to generate, which is
discarded. vLLM computes them at temperature 1, for the whole prompt, and without its prefix cache. The weights are
the engine's current ones: under `trainer.scheduler: sync` the ones that generated the rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gkd.data.score_checks import check_own
from gkd.errors import ClusterError, TeacherError
from gkd.rollout.vllm.engine import RolloutEngine
from gkd.types import Rollout, TeacherScores
from teacher_server.vision.vllm_input import image_input
from teacher_server.wire.protocol import Signal
from teacher_server.wire.table import TopKTable


def self_scores(
    engine: RolloutEngine, rollouts: Sequence[Rollout], signals: Sequence[Signal], topk: int
) -> list[TeacherScores]:
    """Return the scores of sequences by an engine that generates nothing: of `topk` ids for the signal of that name.

    Raises:
        ClusterError: the engine is generating.
        TeacherError: it refused a sequence.
    """
    if engine.n_running:
        raise ClusterError(f"the rollout engine cannot score: {engine.n_running} sequences are unfinished")
    n_top = topk if "topk" in signals else 0
    tables = prompt_logprobs(engine.llm, [rollout.for_teacher() for rollout in rollouts], n_top, engine.request_options)
    return [_teacher_scores(*table, with_sampled="sampled" in signals) for table in tables]


def prompt_logprobs(
    llm: Any, rollouts: Sequence[Rollout], n_top: int, options: dict[str, Any]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each own token its id and logprob, and then the same of the `n_top` most probable tokens.

    Args:
        llm: vLLM's `LLM` without requests.
        options: of each request.

    Returns:
        ([M, 1 + n_top] int32, [M, 1 + n_top] float32 nats) of each rollout.

    Raises:
        TeacherError: the engine refuses a sequence, or `own` marks none of its tokens.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=n_top,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine = llm.llm_engine
    results = dict[str, tuple[np.ndarray, np.ndarray]]()
    by_name: dict[str, Rollout] = {}  # the requests that were added
    try:
        for i, rollout in enumerate(rollouts):
            check_own(rollout, f"prompt {rollout.prompt_id}")
            tokens = np.concatenate([rollout.prompt_ids, rollout.response_ids]).tolist()
            prompt: Any = {"type": "token", "prompt_token_ids": tokens}
            try:
                prompt = image_input(engine.renderer, tokens, rollout.images) if rollout.images else prompt
                engine.add_request(f"score {i}", prompt, params.clone(), **options)
            except (ValueError, VLLMValidationError) as error:
                raise TeacherError(f"the rollout engine cannot score prompt {rollout.prompt_id}: {error}") from error
            by_name[f"score {i}"] = rollout
        while len(results) < len(rollouts):
            for output in engine.step():
                if output.finished:
                    flat = output.prompt_logprobs  # nothing for the first token
                    shape = (len(output.prompt_token_ids) - 1, 1 + n_top)
                    rollout = by_name[output.request_id]
                    last = slice(shape[0] - len(rollout.response_ids), None)
                    ids = np.array(flat.token_ids, np.int32).reshape(shape)[last]
                    logprobs = np.array(flat.logprobs, np.float32).reshape(shape)[last]
                    is_own = rollout.own
                    results[output.request_id] = (ids, logprobs) if is_own is None else (ids[is_own], logprobs[is_own])
    finally:  # a step failed: leave no request in the engine
        if left := [name for name in by_name if name not in results]:
            engine.abort_request(left)
    return [results[name] for name in by_name]


def _teacher_scores(ids: np.ndarray, logprobs: np.ndarray, *, with_sampled: bool) -> TeacherScores:
    sampled = np.ascontiguousarray(logprobs[:, 0]) if with_sampled else None
    if ids.shape[1] == 1:
        return TeacherScores(sampled_logprobs=sampled)
    return TeacherScores(TopKTable.without_tail(ids[:, 1:], logprobs[:, 1:]), sampled)

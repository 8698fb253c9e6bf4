"""Greedy responses of a teacher server, for its accuracy at the start of a run.

The server does not generate, so each token is the most probable one of a scoring request. A response of R tokens costs
R requests, each with a pass over prompt and response so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from gkd.config.schema import Config, Route
from gkd.data.answers import greedy_sample
from gkd.data.chunks import dataset_rollouts
from gkd.data.prompts import load_tokenizer
from gkd.hf.hub import with_local_copies
from gkd.log import get_logger
from gkd.scoring.teacher.info import TeacherInfo
from gkd.scoring.teacher.teacher import Teacher, open_teacher
from gkd.scoring.teacher.window import grouped, window_of_group
from gkd.spans import driver
from gkd.types import Prompt, Rollout, Sample

log = get_logger("teacher")

_OWN_PROMPTS, _OWN_TOKENS = 8, 64  # numbers of answers that are scored again, and of their tokens
_MIN_OWN_LOGPROB = -1.0  # nats a token


def greedy_samples(
    config: Config,
    routes: Sequence[Route],
    teachers: Sequence[TeacherInfo],
    n_vocab: int,
    eos_ids: Sequence[int],
    prompts: Sequence[Prompt],
) -> list[Sample]:
    """Return the greedy response of each prompt's teacher, after the teacher's own prompt if it has one; blocks.

    Args:
        routes: of the run.
        teachers: by route.
        n_vocab: ids below it are generated, as in training.
        eos_ids: a response ends with the first of these, inclusive.

    Raises:
        TeacherError, TeacherUnavailable: see `gkd.scoring.teacher.teacher.Teacher`.
    """
    windows = [window_of_group(route.teacher, info, 1) for route, info in zip(routes, teachers, strict=True)]
    with ExitStack() as stack:
        clients = [
            open_teacher(
                route.teacher,
                k=1,
                n_vocab=n_vocab,
                n_in_flight=window.n_in_flight,
                fingerprint=info.fingerprint,
                probe=info.probe,
            )
            for route, info, window in zip(routes, teachers, windows, strict=True)
        ]
        for client in clients:
            stack.callback(client.close)
        most = config.data.max_response_length
        sizes = [w.n_per_request for w in windows]
        responses = _decode(clients, sizes, prompts, frozenset(eos_ids), most)
        tell_own_logprob(own_logprob(clients, sizes, prompts, responses))
    answered = [
        replace(prompt, response_ids=np.array(response, np.int32))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    model = with_local_copies(config, ("model.path",), weights=False).model
    tokenizer = load_tokenizer(model.path, "model.path", trust_remote_code=model.trust_remote_code)
    return [
        greedy_sample(tokenizer, response, prompt.answer or "", config.eval.answer_marker)
        for prompt, response in zip(prompts, dataset_rollouts(answered, eos_ids), strict=True)
    ]


def _decode(
    clients: Sequence[Teacher],
    n_per_request: Sequence[int],
    prompts: Sequence[Prompt],
    eos_ids: frozenset[int],
    max_tokens: int,
) -> list[list[int]]:
    """Return the most probable tokens of each prompt, up to an end token; all prompts advance together."""
    responses: list[list[int]] = [[] for _ in prompts]
    unfinished = list(range(len(prompts)))
    with driver.doing("greedy responses of the teacher", max_tokens):
        for position in range(max_tokens):
            contexts = [_context(prompts[i], responses[i]) for i in unfinished]
            groups = grouped(contexts, n_per_request)
            futures = [
                clients[contexts[group[0]].route].submit([contexts[i] for i in group], ("topk",)) for group in groups
            ]
            for group, future in zip(groups, futures, strict=True):
                for i, scores in zip(group, future.result(), strict=True):
                    assert scores.topk is not None  # it was requested
                    responses[unfinished[i]].append(int(scores.topk.topk_ids[0, 0]))
            unfinished = [i for i in unfinished if responses[i][-1] not in eos_ids]
            driver.done(position + 1)
            if not unfinished:
                break
    return responses


def own_logprob(
    clients: Sequence[Teacher], n_per_request: Sequence[int], prompts: Sequence[Prompt], responses: Sequence[list[int]]
) -> float:
    """Return the teacher's mean logprob of its own answers, nats a token, scored as responses of the student are."""
    answered = [
        _context(prompt, (), response[:_OWN_TOKENS])
        for prompt, response in zip(prompts[:_OWN_PROMPTS], responses, strict=False)
    ]
    groups = grouped(answered, n_per_request)
    futures = [clients[answered[each[0]].route].submit([answered[i] for i in each], ("sampled",)) for each in groups]
    tables = [scores.sampled_logprobs for future in futures for scores in future.result()]
    return float(np.concatenate([table for table in tables if table is not None]).mean())


def tell_own_logprob(mean: float) -> None:
    """Log the line; as a warning if a teacher hardly believes its own answers."""
    line = f"the teacher's logprob of its own greedy answers: {mean:.2f} nats a token"
    if mean < _MIN_OWN_LOGPROB:
        fix = "compare the teacher's chat template and token ids with the student's (teacher.prompt_template)"
        log.warning("%s, below %g: %s", line, _MIN_OWN_LOGPROB, fix)
    else:
        log.info("%s", line)


def _context(prompt: Prompt, response: Sequence[int], scored: Sequence[int] = (0,)) -> Rollout:
    """Return prompt and response so far as a prompt, and what to score as the response.

    Args:
        scored: by default any token: its row predicts the next token.
    """
    own = prompt.token_ids if prompt.teacher_ids is None else prompt.teacher_ids
    context = np.concatenate([own, np.array(response, np.int32)])
    ids, logprobs = np.array(scored, np.int32), np.zeros(len(scored), np.float32)
    return Rollout(prompt.prompt_id, 0, context, ids, logprobs, (), "length", on_policy=False, route=prompt.route)

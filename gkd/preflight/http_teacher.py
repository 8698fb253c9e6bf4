"""Probe an HTTP teacher before the start, because nothing else tells what it serves: ids, rows, mass, tokenizer.

A teacher server describes itself; a vLLM or SGLang server tells the id of its model and the length of its context. So
each probe scores tokens whose scores must have a certain form. Each probed server takes a second or two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from gkd.config.schema import Config, Route
from gkd.errors import ConfigError, TeacherError, TeacherRefusal, TeacherUnavailable
from gkd.log import get_logger
from gkd.preflight.teacher import as_rollout
from gkd.run.open import SAME_PROBE, largest_difference
from gkd.scoring.teacher.http_client import IN_FLIGHT, HttpTeacher
from gkd.scoring.teacher.info import Probe, TeacherInfo
from gkd.types import Prompt

log = get_logger("preflight")

_N_IDS = 16  # tokens of the probe that teacher.json records
_N_TEXTS = 32
_TEXT_TOKENS = 64
_BETTER = 2.0  # nats per token by which texts must score better than other ids
# Limits of the difference of a sequence's logprobs, nats.
_REPEATABLE = 0.05  # without a warning
_ONE_MODEL = 2.0  # at all
_BUDGET_S = 10.0


def probed(
    config: Config, route: Route, info: TeacherInfo, tokenizer: Any, prompts: Sequence[Prompt], n_vocab: int
) -> TeacherInfo:
    """Probe each server of an HTTP teacher; return its description with the probe of the first.

    Args:
        tokenizer: of the teacher: the student's, or the one of teacher.tokenizer.
        prompts: whose first texts the teacher must find probable.
        n_vocab: ids of the tokenizer.

    Raises:
        ConfigError: a probe failed, or the servers of teacher.url differ.
        TeacherUnavailable: a server does not reply.
    """
    probes: list[Probe] = []
    for url in route.teacher.url:
        start_s = time.monotonic()
        one = replace(route, teacher=replace(route.teacher, url=[url]))
        with HttpTeacher(
            one.teacher,
            k=config.teacher.topk,
            n_vocab=n_vocab,
            n_in_flight=route.teacher.max_in_flight or IN_FLIGHT,
            fingerprint=info.fingerprint,
            outage_budget_s=min(_BUDGET_S, route.teacher.outage_budget_s),
        ) as teacher:
            probes.append(_Probe(config, one, teacher, tokenizer).run(prompts))
        log.info("probed the teacher %s at %s in %.1f s", info.model_name, url, time.monotonic() - start_s)
        if (moved := largest_difference(probes[0].logprobs, probes[-1].logprobs)) > SAME_PROBE:
            problem = f"its logprobs differ from those of {route.teacher.url[0]} by up to {moved:.3g} nats."
            raise ConfigError(route.key("url"), url, problem, "name servers of the same model.")
    return replace(info, probe=probes[0]._replace(noise=max(probe.noise for probe in probes)))


class _Probe:
    """The probes of one server."""

    def __init__(self, config: Config, route: Route, teacher: HttpTeacher, tokenizer: Any) -> None:
        self._config = config
        self._route = route
        self._teacher = teacher
        self._tokenizer = tokenizer
        added = set(tokenizer.get_added_vocab().values())
        self._ids = np.array(sorted(set(tokenizer.get_vocab().values()) - added), np.int32)

    def run(self, prompts: Sequence[Prompt]) -> Probe:
        """Return the tokens that are recorded, and their logprobs. Raises ConfigError, TeacherUnavailable."""
        ids = np.random.default_rng(0).choice(self._ids, _N_IDS)
        ids[_N_IDS // 2] = self._ids[-1]  # a teacher without the last token refuses it
        (alone,) = self._sampled([ids], "it does not score the token ids that it is sent")
        if "topk" in self._config.derived.signals:
            self._check_lists(ids, alone)
        noise = self._check_repeats(ids, alone)
        self._check_tokenizer(prompts)
        return Probe(tuple(ids.tolist()), tuple(round(float(value), 6) for value in alone), noise)

    def _check_lists(self, ids: np.ndarray, alone: np.ndarray) -> None:
        """Check K, and that lists and single logprobs are of the same rows."""
        with self._refused("its lists are unusable"):
            try:
                (scores,) = self._teacher.submit([as_rollout(ids)], ("topk", "sampled")).result()
            except TeacherRefusal as error:
                fix = f"start vLLM with --max-logprobs {self._config.teacher.topk}, or use less; its default is 20."
                raise self._config.error("teacher.topk", f"{error}.", fix) from error
        self._check_rows(scores.sampled_logprobs, alone, "with and without lists")
        if n := self._config.derived.n_student_ids:
            assert scores.topk is not None
            with_ids = replace(as_rollout(ids), top_ids=np.ascontiguousarray(scores.topk.ids[:, -n:]))
            fix = "start vLLM with --enable-scale-out and VLLM_USE_V2_MODEL_RUNNER=1, or use teacher."
            with self._refused("the teacher cannot score given ids", "distill.support", fix):
                (chosen,) = self._teacher.submit([with_ids], ("topk",)).result()
            assert chosen.topk is not None
            self._check_rows(chosen.topk.logprobs, scores.topk.logprobs, "of given and of listed ids")

    def _check_rows(self, some: np.ndarray | None, compared: np.ndarray, which: str) -> None:
        assert some is not None
        if (moved := float(np.abs(some - compared).max())) > _REPEATABLE:
            raise self._wrong(f"logprobs {which} differ by up to {moved:.3g} nats: they are of different rows")

    def _check_repeats(self, ids: np.ndarray, alone: np.ndarray) -> float:
        """Score the sequence again, three times alone and four times among others; return the largest difference."""
        rolled = [np.roll(ids, shift) for shift in range(1, 9)]
        problem = "it cannot score several sequences at a time"
        again = [self._sampled([ids], problem)[0] for _ in range(3)]
        again += self._sampled([*rolled[:4], *[ids] * 4, *rolled[4:]], problem)[4:8]
        moved = max(float(np.abs(logprobs - alone).max()) for logprobs in again)
        log.info("the teacher's logprobs of a repeated sequence differ by up to %.2g nats", moved)
        if moved > _ONE_MODEL:
            which = "a load balancer has servers of different models, or the scores are random"
            raise self._wrong(f"logprobs of the same sequence differ by up to {moved:.3g} nats: {which}")
        if moved > _REPEATABLE:
            log.warning(
                "%s: logprobs of the same sequence differ by up to %.3g nats between requests: its kernels depend on "
                "the batch, or its prefix cache is faulty",
                self._route.label,
                moved,
            )
        return moved

    def _check_tokenizer(self, prompts: Sequence[Prompt]) -> None:
        """Compare texts with the server's tokenizer if it has an endpoint for it, and their scores with other ids'."""
        texts = [(p.token_ids if p.teacher_ids is None else p.teacher_ids)[:_TEXT_TOKENS] for p in prompts[:_N_TEXTS]]
        texts = [ids for ids in texts if len(ids) > 1]
        agrees = self._same_tokens(texts)
        if not texts:
            return
        after = dict(zip(self._ids.tolist(), np.roll(self._ids, -1).tolist(), strict=True))
        shifted = [np.array([after.get(i, i) for i in ids.tolist()], np.int32) for ids in texts]
        scores = self._sampled([*texts, *shifted], "it cannot score the prompts")
        true_mean, other = (float(np.concatenate(part).mean()) for part in (scores[: len(texts)], scores[len(texts) :]))
        if true_mean >= other + _BETTER:
            return
        problem = (
            f"texts score {true_mean:.2f} nats a token and the same ids shifted by one {other:.2f}, so it has another "
            "tokenizer, or does not know such texts"
        )
        if not agrees:
            raise self._wrong(problem)
        log.warning("%s: %s", self._route.label, problem)

    def _same_tokens(self, texts: Sequence[np.ndarray]) -> bool:
        """Return whether the server turns texts into the tokenizer's ids; False: unknown. Raises ConfigError."""
        for ids in texts:
            text = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            theirs = self._teacher.tokenize(text)
            if theirs is None:
                return False
            if theirs != self._tokenizer.encode(text, add_special_tokens=False):
                whose = "the one of teacher.tokenizer" if self._config.teacher.tokenizer else "the student's"
                raise self._wrong(f"its tokenizer differs from {whose}: it splits {text[:80]!r} otherwise")
        return bool(texts)

    def _sampled(self, sequences: Sequence[np.ndarray], problem: str) -> list[np.ndarray]:
        """Return the logprobs of each sequence's tokens from the second one on, [n - 1] float32."""
        with self._refused(problem):
            scores = self._teacher.submit([as_rollout(ids) for ids in sequences], ("sampled",)).result()
        return [score.sampled_logprobs for score in scores if score.sampled_logprobs is not None]

    @contextmanager
    def _refused(self, problem: str, key: str = "", fix: str = "") -> Iterator[None]:
        """Raise ConfigError if the server refuses a request of the block or answers it wrongly."""
        try:
            yield
        except TeacherUnavailable:
            raise
        except TeacherError as error:
            if not key:
                raise self._wrong(f"{problem}: {error}") from error
            raise self._config.error(key, f"{problem}: {error}.", fix) from error

    def _wrong(self, problem: str) -> ConfigError:
        url = self._route.teacher.url[0]
        return ConfigError(self._route.key("url"), url, f"{problem}.", "name a server of a teacher that fits.")

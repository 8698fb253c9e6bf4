"""Client of a vLLM or SGLang server, a `gkd.scoring.teacher.teacher.Teacher`.

    HttpTeacher -> http_forms    JSON of one sequence, and the checks of the replies
                -> outage        when to give up; pings of /health are the heartbeats

One thread runs an event loop. A sequence is one request, and n_in_flight of them are at the servers. A request that
fails for a reason that may pass is sent again, to the next server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar, Unpack

import aiohttp
import msgspec
import numpy as np

from gkd.config.schema_teacher import TeacherConfig
from gkd.data.score_checks import check_own
from gkd.errors import ConfigError, TeacherError, TeacherRefusal, TeacherUnavailable
from gkd.scoring.teacher.http_forms import Asked, answer_of, answer_request, model_of, request_of, scores_of, tokens_of
from gkd.scoring.teacher.info import Probe, TeacherArgs, TeacherInfo
from gkd.types import Rollout, TeacherHealth, TeacherScores
from teacher_server.client.generate import AnswerSettings, NamedPrompt
from teacher_server.client.outage import OutageClock
from teacher_server.wire.protocol import MAX_ID, Signal

IN_FLIGHT = 32  # sequences, without teacher.max_in_flight: these servers announce no number
_TICK_S = 0.2
_PING_S = 1.0
_CONNECT_S = 2.0
_CLOSE_S = 5.0
_RETRY_S = 0.05
_LONGEST_RETRY_S = 2.0
_PASSING = frozenset({0, 408, 425, 429, 500, 502, 503, 504})  # 0: no reply
_MOST_FAILURES = 5  # replies 500 to a request before it fails; a server that ends sends some, too
_SHOWN = 300  # characters of a server's error
# Nats by which logprobs of the probe may move: they are not alone at the server, and kernels may depend on the batch.
_SAME = 0.05
_MARGIN = 4.0
T = TypeVar("T")


class HttpTeacher:
    """A teacher at the servers `teacher.url`, which have the same model and take turns. Thread-safe.

    Methods and futures raise TeacherUnavailable if no server replied, or none returned scores, within the budgets; the
    client remains usable. They raise another TeacherError if a request was refused, a reply is malformed, or the client
    is closed.

    Args:
        probe: is repeated at a server before the first request to it after a failure, or after a time without
            requests. If the logprobs have moved, other weights have the name: TeacherError.

    Raises:
        ConfigError: the variable of teacher.api_key_env is not set here.
    """

    def __init__(self, teacher: TeacherConfig, *, probe: Probe | None = None, **args: Unpack[TeacherArgs]) -> None:
        self._teacher = teacher
        self._k = args["k"]
        self._n_vocab = args["n_vocab"] or MAX_ID + 1
        self._model = args.get("fingerprint", "")  # id of the model, sent with each request; empty asks the server
        self._probe = probe
        self._urls = [url.rstrip("/") for url in teacher.url]
        self._next_url = itertools.cycle(self._urls)
        self._next_ping = itertools.cycle(self._urls)
        self._api_key = _api_key(teacher.api_key_env)
        budget_s = args.get("outage_budget_s") or teacher.outage_budget_s
        self._clock = OutageClock(outage_budget_s=budget_s, stall_budget_s=budget_s + teacher.request_timeout_s)
        self._trouble = ""  # last failure, for the error text
        self._closed = False
        # The attributes below are used only by the thread of the loop.
        self._pending: set[asyncio.Future[Any]] = set()
        self._gone: asyncio.Future[TeacherError] | None = None  # the error that ends all pending requests
        self._window = asyncio.Semaphore(args["n_in_flight"])
        self._unproved = set(self._urls)  # servers whose weights may be others than those of the probe
        self._proving: dict[str, asyncio.Task[tuple[int, bytes]]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"teacher {self._urls[0]}", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    def __enter__(self) -> HttpTeacher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Any thread

    def info(self) -> TeacherInfo:
        """See `Teacher.info`. The fingerprint is the model's id; a server has no digest of its weights.

        Raises:
            TeacherRefusal: code `bad_request`: the server has several models, and teacher.name is none of them.
        """
        read = partial(model_of, name=self._teacher.name)
        self._model, longest = self._start(self._request("its models", "GET", "/v1/models", b"", read)).result()
        return TeacherInfo(
            teacher=self._teacher.name,
            model_name=self._model,
            model_path=self._urls[0],
            fingerprint=self._model,
            vocab_size=0,
            hidden_size=0,
            tokenizer_fingerprint="",
            max_tokens=(longest or sys.maxsize) - 1,  # one token is generated
            n_workers=len(self._urls),
            n_streams=self._teacher.max_in_flight or IN_FLIGHT,
            engine=self._teacher.dialect,
            device="",
            dtype="",
            is_server=False,
        )

    def submit(
        self, rollouts: Sequence[Rollout], signals: Sequence[Signal], *, mass: float = 0.0
    ) -> Future[list[TeacherScores]]:
        """See `Teacher.submit`; signals topk and sampled. `mass` is not supported."""
        assert not mass and not {"hidden", "logits"} & set(signals), "the settings are checked"
        if not self._model:
            self.info()
        asked = []
        for rollout in rollouts:
            name = f"prompt {rollout.prompt_id}, sample {rollout.sample_index}"
            sent = rollout.for_teacher()
            check_own(sent, name)
            tokens = [*sent.prompt_ids.tolist(), *sent.response_ids.tolist()]
            topk = "topk" in signals
            top_ids = sent.top_ids if topk else None
            k = self._k if topk else 0
            asked.append(Asked(name, tokens, len(sent.prompt_ids), k, "sampled" in signals, top_ids, sent.own))
        return self._start(self._each([partial(self._score_one, one) for one in asked]))

    def generate(self, prompts: Sequence[NamedPrompt], settings: AnswerSettings) -> Future[list[np.ndarray]]:
        """See `Teacher.generate`. Each answer is a request; SGLang uses its seed only if it runs deterministically."""
        if not self._model:
            self.info()
        answers = [(prompt, sample) for prompt in prompts for sample in range(settings.n)]
        return self._start(self._each([partial(self._answer_one, *answer, settings) for answer in answers]))

    def lm_head(self) -> np.ndarray:
        """Raise TeacherError: an HTTP server does not send its weights."""
        raise TeacherError(f"teacher {self._urls[0]}: an HTTP server does not send its LM head")

    def tokenize(self, text: str) -> list[int] | None:
        """Return the server's token ids of a text, without special tokens; None: it has no /tokenize. Blocks."""
        body = msgspec.json.encode({"model": self._model, "prompt": text, "add_special_tokens": False})
        try:
            return self._start(self._request("a text", "POST", "/tokenize", body, tokens_of)).result()
        except TeacherRefusal:
            return None

    def health(self) -> TeacherHealth:
        """See `Teacher.health`; a server does not say how many requests wait."""
        n_pending = len(self._pending)
        silent_s = self._clock.silent_s if n_pending else 0.0
        return TeacherHealth(silent_s, self._clock.outage_budget_s, n_pending, len(self._urls), 0)

    def close(self) -> None:
        """See `Teacher.close`."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise TeacherError(f"teacher {self._urls[0]}: the client is closed")
        return asyncio.run_coroutine_threadsafe(self._watched(work), self._loop)

    # The thread of the loop

    async def _open(self) -> None:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        limits = aiohttp.ClientTimeout(total=self._teacher.request_timeout_s, sock_connect=_CONNECT_S)
        self._session = aiohttp.ClientSession(
            headers=headers, timeout=limits, connector=aiohttp.TCPConnector(limit=0), trust_env=False
        )

    async def _shut(self) -> None:
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(TeacherError(f"teacher {self._urls[0]}: the client is closed"))
        for task in self._proving.values():
            task.cancel()
        while self._pending:
            await asyncio.sleep(0)
        await self._session.close()

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a request, or raise what ends all of them."""
        task = asyncio.ensure_future(work)
        if self._gone is None or not self._pending:
            self._clock.restart()
            self._unproved = set(self._urls)
            self._gone = self._loop.create_future()
            self._watch = asyncio.ensure_future(self._listen(self._gone))
        gone = self._gone
        self._pending.add(task)
        try:
            ends: set[asyncio.Future[Any]] = {task, gone}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise type(gone.result())(str(gone.result()))  # an exception per request: each gets a traceback
            return task.result()
        finally:
            task.cancel()
            self._pending.discard(task)
            if not self._pending:
                self._watch.cancel()

    async def _listen(self, gone: asyncio.Future[TeacherError]) -> None:
        """Ping while requests are pending, and end them when a budget is spent."""
        clock = self._clock
        next_s = 0.0
        interval_s = min(_PING_S, clock.outage_budget_s / 4)
        ping: asyncio.Future[None] | None = None
        try:
            while not (problem := clock.problem()) and not gone.done():
                if clock.now_s >= next_s and (ping is None or ping.done()):
                    next_s = clock.now_s + interval_s
                    ping = asyncio.ensure_future(self._ping())
                await asyncio.sleep(_TICK_S)
                clock.tick()
        finally:
            if ping is not None:
                ping.cancel()
        if not gone.done():
            gone.set_result(self._unavailable(problem))

    async def _ping(self) -> None:
        url = next(self._next_ping)
        try:
            async with self._session.get(f"{url}/health", allow_redirects=False) as reply:
                if reply.status < 500:
                    self._clock.heard()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._trouble = f"{url}: {_cause(error)}"

    def _unavailable(self, problem: str) -> TeacherUnavailable:
        trouble = f" Last error: {self._trouble}." if self._trouble else ""
        return TeacherUnavailable(
            f"teacher {', '.join(self._urls)}: {problem} (last reply: {self._clock.last_heard}); pending: "
            f"{len(self._pending)} requests.{trouble} Fix: "
            "start the server, or raise teacher.request_timeout_s if sequences take longer"
        )

    async def _each(self, requests: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
        tasks = [asyncio.ensure_future(request()) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _score_one(self, asked: Asked) -> TeacherScores:
        async with self._window:
            path, body = request_of(self._teacher.dialect, self._model, asked)
            read = partial(scores_of, self._teacher.dialect, asked=asked, n_vocab=self._n_vocab)
            return await self._request(asked.name, "POST", path, body, read)

    async def _answer_one(self, prompt: NamedPrompt, sample: int, settings: AnswerSettings) -> np.ndarray:
        async with self._window:
            dialect = self._teacher.dialect
            path, body = answer_request(dialect, self._model, prompt.ids.tolist(), prompt.seed + sample, settings)
            read = partial(answer_of, dialect, how=settings)
            return await self._request(f"{prompt.name}, answer {sample}", "POST", path, body, read)

    async def _request(self, name: str, method: str, path: str, body: bytes, read: Callable[[bytes], T]) -> T:
        """Send a request until it is answered or refused."""
        n_failures = 0
        for attempt in itertools.count():
            url = next(self._next_url)
            status, content = await self._prove(url)
            if status == 200:
                status, content = await self._exchange(method, url + path, body)
            if 0 < status < 500:
                self._clock.heard()
            if status == 200:
                try:
                    result = read(content)
                except (ValueError, RecursionError) as error:
                    raise TeacherRefusal(f"{name}: {url}{path}: {error}", "bad_request") from error
                self._clock.progressed()
                return result
            self._unproved.add(url)
            n_failures += status == 500
            if status not in _PASSING or n_failures > _MOST_FAILURES:
                raise TeacherRefusal(f"{name}: {url}{path}: {self._refusal(status, content)}", f"http {status}")
            if status:
                self._trouble = f"{url}{path}: {self._refusal(status, content)}"
            delay_s = min(_RETRY_S * 2 ** min(attempt, 10), _LONGEST_RETRY_S)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
        raise AssertionError

    async def _prove(self, url: str) -> tuple[int, bytes]:
        """Repeat the probe at a server that may have other weights now; return status and body of its reply."""
        while self._probe is not None and (url in self._unproved or url in self._proving):
            if url not in self._proving:
                self._proving[url] = asyncio.ensure_future(self._compare(url, self._probe))
            status, content = await asyncio.shield(self._proving[url])
            if status != 200:
                return status, content
        return 200, b""

    async def _compare(self, url: str, probe: Probe) -> tuple[int, bytes]:
        self._unproved.discard(url)  # a failure from now on adds it again
        is_same = False
        asked = Asked("the probe of the start", list(probe.token_ids), 1, 0, with_sampled=True)
        path, body = request_of(self._teacher.dialect, self._model, asked)
        try:
            status, content = await self._exchange("POST", url + path, body)
            if status == 200:
                logprobs = scores_of(self._teacher.dialect, content, asked, self._n_vocab).sampled_logprobs
                assert logprobs is not None, "they were requested"
                moved = float(np.abs(logprobs - probe.logprobs).max())
                most = max(_SAME, _MARGIN * probe.noise)
                if moved > most:
                    problem = f"other weights than at the start: logprobs of its probe moved by {moved:.3g} nats"
                    fix = "serve the old model again, and resume the run"
                    raise TeacherError(f"teacher {url}: {problem}, above {most:.3g}. Fix: {fix}")
                is_same = True
        finally:
            if not is_same:
                self._unproved.add(url)
            del self._proving[url]  # not in a callback: `_prove` may run before it
        return status, content

    async def _exchange(self, method: str, url: str, body: bytes) -> tuple[int, bytes]:
        """Return status and body of a reply; status 0: there is none, or it is incomplete."""
        try:
            async with self._session.request(method, url, data=body or None, allow_redirects=False) as reply:
                return reply.status, await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._trouble = f"{url}: {_cause(error)}"
            return 0, b""

    def _refusal(self, status: int, content: bytes) -> str:
        text = " ".join(content.decode(errors="replace").split())
        if self._api_key:  # some servers repeat it
            text = text.replace(self._api_key, "(key)")
        return f"HTTP {status}: {text[:_SHOWN]}"


def _cause(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _api_key(variable: str) -> str:
    """Return the key in an environment variable, "" without one. Raises ConfigError."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not (key and key.isascii() and key.isprintable()):
        problem = f"this environment variable holds no key on {socket.gethostname()}."
        raise ConfigError("teacher.api_key_env", variable, problem, "set it where the run and Ray's nodes start.")
    return key

"""The HTTP application: routes, token, size limits, and one way from a request to its answer or refusal."""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from teacher_server.http import sglang, vllm
from teacher_server.http.link import BrokerLink
from teacher_server.http.question import Dialect, Refusal
from teacher_server.http.teachers import Teachers
from teacher_server.wire.payload import as_message, unpack_topk
from teacher_server.wire.protocol import ProtocolError

log = logging.getLogger(__name__)

MAX_BODY = 64 << 20
MEDIA_TYPE = "application/x-gkt"  # Such answers are in the wire format, 5 bytes an entry.
_DIALECTS = {
    "/v1/completions": vllm.COMPLETIONS,
    "/inference/v1/generate": vllm.GENERATE,
    "/generate": sglang.GENERATE,
}
_ALIVE = ("/health", "/health/", "/health_generate")  # vLLM, TRL, SGLang
_PATHS = (*_DIALECTS, "/v1/models", "/health")
T = TypeVar("T")


class App:
    """Answer requests with the scores of the teachers behind `link`.

    Args:
        token: what each request except /health has to send as `Authorization: Bearer TOKEN`; empty: nothing.
    """

    def __init__(self, link: BrokerLink, token: str) -> None:
        self._link = link
        self._token = token
        self._teachers = Teachers(link)

    def routes(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                *(Route(path, self._score, methods=["POST"]) for path in _DIALECTS),
                Route("/v1/models", self._models),
                *(Route(path, self._health) for path in _ALIVE),
            ],
            exception_handlers={HTTPException: _no_such_path, Exception: _no_such_path},
        )

    async def _score(self, request: Request) -> Response:
        dialect = _DIALECTS[request.url.path]
        try:
            self._check_token(request)
            return await _unless_gone(request, self._answer(request, await _body(request), dialect))
        except Refusal as error:
            return _refused(dialect, error.status, str(error))
        except (msgspec.DecodeError, ProtocolError) as error:
            return _refused(dialect, 400, f"{error}. Fix: send the fields that docs/teacher_server.md lists.")

    async def _answer(self, request: Request, body: bytes, dialect: Dialect) -> Response:
        question = await asyncio.to_thread(dialect.read, body)  # seconds for 64 MiB
        teacher = await self._teachers.find(question.model)
        if MEDIA_TYPE in request.headers.get("accept", ""):
            answers = await self._teachers.score_all(teacher, question.wanted, "fp16")
            return Response(b"".join(as_message(*answer) for answer in answers), media_type=MEDIA_TYPE)
        answers = await self._teachers.score_all(teacher, question.wanted, "fp32")
        scores = [unpack_topk(*answer) for answer in answers]
        return StreamingResponse(question.write(scores, teacher.name), media_type="application/json")

    async def _models(self, request: Request) -> Response:
        try:
            self._check_token(request)
            known_teachers = await self._teachers.known()
        except Refusal as error:
            return _refused(vllm.COMPLETIONS, error.status, str(error))
        models = [
            {
                "id": teacher.name,
                "object": "model",
                "owned_by": "teacher_server",
                "root": teacher.model_path,
                "max_model_len": n,
            }
            for teacher, n in known_teachers
        ]
        return _json({"object": "list", "data": models})

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._link.is_alive else 503)

    def _check_token(self, request: Request) -> None:
        sent = request.headers.get("authorization", "")
        if self._token and not hmac.compare_digest(sent.encode(), f"Bearer {self._token}".encode()):
            what = "another token" if sent else "no token"
            raise Refusal(
                401, f"Authorization: {what}. Fix: send `Authorization: Bearer TOKEN` with the server's token."
            )


async def _body(request: Request) -> bytes:
    """Return the body. Raises Refusal above MAX_BODY: after the end, because clients read no answer while they send."""
    body = bytearray()
    n_bytes = 0
    async for part in request.stream():
        n_bytes += len(part)
        if n_bytes <= MAX_BODY:
            body += part
    if n_bytes > MAX_BODY:
        raise Refusal(413, f"a body of {n_bytes} bytes: more than {MAX_BODY}. Fix: send fewer sequences in a request.")
    return bytes(body)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. It is cancelled if the client disconnects; then Refusal is raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refusal(499, "the client has closed the connection.")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _refused(dialect: Dialect, status: int, text: str) -> Response:
    log.log(logging.ERROR if status >= 500 else logging.INFO, "refused with status %d: %s", status, text)
    return _json(dialect.error(status, text), status)


async def _no_such_path(request: Request, error: Exception) -> Response:
    """Answer a path or method that is not served, or an error of this server, which is logged with its traceback."""
    where = f"{request.method} {request.url.path}"
    if isinstance(error, HTTPException):
        text = f"{where}: not served. Fix: use one of {', '.join(_PATHS)}."
        return _json(vllm.error(error.status_code, text), error.status_code)
    return _json(vllm.error(500, f"{where}: {type(error).__name__}. Fix: see the log of this server."), 500)


_FINISH_S = 3.0  # after a signal, requests in flight have this long; then they are refused
_CLOSE_S = 5  # after a signal, connections that clients do not read are closed after this time


class _Server(uvicorn.Server):
    """uvicorn's server. It calls `on_ready` when it accepts connections, and refuses requests that delay its exit."""

    def __init__(self, config: uvicorn.Config, link: BrokerLink, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._link = link
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("stopping")
        asyncio.get_running_loop().call_later(_FINISH_S, self._link.refuse_all, "this server is shutting down.")
        await super().shutdown(sockets)


def run(listener: socket.socket, link: BrokerLink, token: str, on_ready: Callable[[], None]) -> None:
    """Serve HTTP on a bound TCP socket until SIGTERM or SIGINT, and return at most about `_CLOSE_S` later."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signal again when it has stopped
    asyncio.run(_serve(listener, link, token, on_ready))


async def _serve(listener: socket.socket, link: BrokerLink, token: str, on_ready: Callable[[], None]) -> None:
    async with link:
        config = uvicorn.Config(
            App(link, token).routes(),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_S,
        )
        await _Server(config, link, on_ready).serve([listener])

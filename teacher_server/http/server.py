"""Run the application with uvicorn until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable

import uvicorn

from teacher_server.http.app import App
from teacher_server.http.link import BrokerLink

log = logging.getLogger(__name__)

_FINISH_S = 3.0  # after a signal, requests in flight have this long; then they are refused
_CLOSE_S = 5  # after a signal, connections that clients do not read are closed after this time


class _Server(uvicorn.Server):
    """uvicorn's server. It calls `on_ready` when it accepts connections, and refuses requests that delay its exit."""

    def __init__(self, config: uvicorn.Config, link: BrokerLink, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._link, self._on_ready = link, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("stopping")
        asyncio.get_running_loop().call_later(_FINISH_S, self._link.refuse_all, "this server is shutting down.")
        await super().shutdown(sockets)


def run(listener: socket.socket, link: BrokerLink, token: str, on_ready: Callable[[], None]) -> None:
    """Serve HTTP until SIGTERM or SIGINT, and return at most about `_CLOSE_S` later.

    Args:
        listener: bound TCP socket.
        token: see `App`.
    """
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

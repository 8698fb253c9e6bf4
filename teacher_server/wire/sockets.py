"""Common options of all sockets: limits, heartbeats, and errors instead of silently dropped messages."""

from __future__ import annotations

import errno
from typing import Any

import zmq

from teacher_server.errors import ServerError
from teacher_server.wire.protocol import MAX_FRAME_BYTES

HANDSHAKE_S = 5.0  # a peer that does not finish its handshake in this time is disconnected
# A black-holed TCP connection gives no error; ZMTP heartbeats detect it and reconnect.
_BEAT_MS, _BEAT_TIMEOUT_MS = 500, 2000
# Replies queued for a client that does not read. Further replies are dropped, and the client sends its requests again.
CLIENT_BACKLOG = 4096


def set_common_options(socket: zmq.Socket[Any]) -> None:
    """Set frame limit, heartbeats and handshake limit. Call it before bind or connect."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _BEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.LINGER, 0)


def make_router(context: zmq.Context[zmq.Socket[bytes]], *, backlog: int) -> zmq.Socket[bytes]:
    """Create a ROUTER for peers that set their own identities.

    Args:
        backlog: messages queued for a peer that does not read; 0 = no limit (bounded otherwise).
    """
    socket = context.socket(zmq.ROUTER)
    set_common_options(socket)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects keeps its identity
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a disconnected peer raises an error
    socket.setsockopt(zmq.SNDHWM, backlog)
    return socket


def bind(socket: zmq.Socket[bytes], endpoint: str, flag: str) -> int:
    """Bind, and return the TCP port (0 for other transports). Raises ServerError that names `flag`."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        fix = "stop the process that uses it, or choose another" if error.errno == zmq.EADDRINUSE else "change"
        if error.errno in (zmq.EADDRNOTAVAIL, errno.ENODEV):
            flag = "--host: not an address of this machine"
        raise ServerError(f"cannot listen on {endpoint}: {error.strerror}. Fix: {fix} {flag}.") from error
    port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return int(port) if endpoint.startswith("tcp:") else 0

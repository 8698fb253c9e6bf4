"""Ask a broker from an event loop, and turn the client's errors into refusals with an HTTP status."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from teacher_server.client.client import Advice, Client
from teacher_server.client.connection import Connection
from teacher_server.client.outage import OutageClock
from teacher_server.client.requests import Request, ScoreCall
from teacher_server.errors import TeacherError, TeacherRefusal, TeacherUnavailable
from teacher_server.http.question import Refusal
from teacher_server.wire.keys import PeerKeys
from teacher_server.wire.protocol import Buffer, ScoreReply, ServerMessage

LIMIT_S = 600.0  # limit of a request, with all its resends
RESEND_S = 20.0
_SILENT_S = 4.0
_NO_LIMIT = 1 << 30  # `Teachers` has a window
# Final errors -> status and fix. After other errors the request is sent again.
_FINAL = {
    "bad_request": (400, "change the request; /v1/models has the longest sequence"),
    "engine": (500, "see the log of the teacher server"),
    "worker_lost": (503, "see the log of the teacher server"),
}


class RelayCall(ScoreCall):
    """Request scores; the result is the reply and its frames, whose values the client of this server checks."""

    def accept(self, reply: ServerMessage, frames: list[Buffer], now_s: float) -> tuple[ScoreReply, list[Buffer]]:
        return self.check(reply), frames


class BrokerLink:
    """Client of a broker, as an async context manager. Use it from one event loop.

    If the broker is silent for `_SILENT_S`, all requests are refused with status 503. Arguments as of `Connection`.
    """

    def __init__(self, endpoint: str, keys: PeerKeys | None) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self._closed = ""

    async def __aenter__(self) -> BrokerLink:
        clock = OutageClock(outage_budget_s=_SILENT_S, stall_budget_s=math.inf)
        self._client = Client(
            Connection(self.endpoint, clock, self._keys),
            Advice("gkd teacher", "--keys"),
            n_in_flight=_NO_LIMIT,
            max_waiting=_NO_LIMIT,
            fingerprint=None,  # the broker may have several teachers
            beats_when_idle=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.refuse_all("this server is shutting down")

    @property
    def epoch(self) -> bytes:
        """Return the id of the broker's process; empty before its first heartbeat."""
        return self._client.connection.epoch

    @property
    def is_alive(self) -> bool:
        """Return whether the broker has answered one of the last heartbeats."""
        return self._client.silent_s < _SILENT_S and not self._closed

    def refuse_all(self, reason: str) -> None:
        """Refuse the requests in flight and all later ones with status 503."""
        self._closed = self._closed or reason
        self._client.close()

    async def ask(self, request: Request) -> Any:
        """Return the result of a request. A cancelled call cancels the request at the broker.

        Raises:
            Refusal: the broker refuses the request, is silent, or has not answered within `LIMIT_S`.
        """
        if not self.is_alive:
            raise Refusal(503, self._closed or self._gone())
        try:
            async with asyncio.timeout(LIMIT_S):
                return await asyncio.wrap_future(self._client.submit(request))
        except TimeoutError as error:
            text = f"no scores from {self.endpoint} within {LIMIT_S:g} s. Fix: see `gkd teacher status`."
            raise Refusal(503, text) from error
        except TeacherUnavailable as error:
            raise Refusal(503, self._gone()) from error
        except TeacherRefusal as error:
            status, fix = _FINAL[error.code]
            raise Refusal(status, f"the teacher server: {error.text}. Fix: {fix}.") from error
        except TeacherError as error:
            if self._closed:
                raise Refusal(503, self._closed) from error
            raise Refusal(502, f"{error}. Fix: see the log of the teacher server.") from error

    def _gone(self) -> str:
        return (
            f"no message from the teacher server {self.endpoint} for {_SILENT_S:g} s. Fix: start it again (gkd "
            "teacher); requests are accepted when it is back."
        )

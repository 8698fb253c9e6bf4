"""A TCP proxy that simulates a bad network: forward, hold all data, or reset connections."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

_CHUNK_BYTES = 1 << 16


class Proxy:
    """127.0.0.1:`port` -> 127.0.0.1:`target`, in a thread, from construction to `close`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def hold(self) -> None:
        """Stop forwarding without closing connections, as a black-holed network does."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def release(self) -> None:
        """Undo `hold`, and forward the held data."""
        self._loop.call_soon_threadsafe(self._open.set)

    def cut(self) -> None:
        """Reset every connection. New connections are accepted."""
        self._loop.call_soon_threadsafe(self._abort)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self.release()
        self.cut()
        self._call(asyncio.sleep(0.05))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)

    def _abort(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            target = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the server restarts: the peer sees a closed connection and reconnects
            writer.close()
            self._writers.discard(writer)
            return
        self._writers.add(target[1])
        await asyncio.gather(self._pump(reader, target[1]), self._pump(target[0], writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # after a reset the other direction ends by itself
            while data := await reader.read(_CHUNK_BYTES):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
        self._writers.discard(writer)

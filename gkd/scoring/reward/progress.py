"""Memory that a worker process shares with its parent: which call is running, and since when."""

from __future__ import annotations

import mmap
import os
import struct
import time

_CALL, _BEGAN_S = struct.Struct("<q"), struct.Struct("<d")
_N_BYTES = _CALL.size + _BEGAN_S.size


class Progress:
    """Both processes read and write it, without messages.

    Args:
        fd: memory that the parent has made; None makes it.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("gkd_progress") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, _N_BYTES)
        self._memory = mmap.mmap(self.fd, _N_BYTES)

    def begin(self, call: int) -> None:
        """Note that a call begins. The time first: a reader in between never takes the new call for a slow one."""
        _BEGAN_S.pack_into(self._memory, _CALL.size, time.monotonic())
        _CALL.pack_into(self._memory, 0, call)

    @property
    def call(self) -> int:
        """The call that `begin` noted last."""
        return int(_CALL.unpack_from(self._memory)[0])

    @property
    def age_s(self) -> float:
        """Seconds since it began, on the host's clock."""
        return float(time.monotonic() - _BEGAN_S.unpack_from(self._memory, _CALL.size)[0])

    def close(self) -> None:
        """Release the memory in this process. Idempotent."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.fd)

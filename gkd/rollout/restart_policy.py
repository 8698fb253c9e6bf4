"""Decide whether an engine that failed is started again."""

from __future__ import annotations

from gkd.errors import EngineFailed, GkdError, RankFailed, RankTimeout, SenderFailed, WeightSyncError

# A new process may do better; other errors (settings, memory) would come again.
_RECOVERABLE = (RankFailed, RankTimeout, WeightSyncError)


def fatal_error(engine: str, cause: GkdError, n_restarts: int, max_restarts: int) -> GkdError | None:
    """Return the error that ends the run; None: the engine may be started again.

    Args:
        engine: its name with host and GPU.
        cause: of this failure.
        n_restarts: of this engine so far, also in vain.
        max_restarts: rollout.max_restarts.
    """
    if not isinstance(cause, _RECOVERABLE) or isinstance(cause, SenderFailed):
        return cause
    if n_restarts < max_restarts:
        return None
    return EngineFailed(
        f"{engine} failed {n_restarts + 1} times (rollout.max_restarts = {max_restarts}); the last time: {cause}. "
        "Fix: correct this error or, if the hardware is the cause, take it out of the rollout pool, and resume"
    )

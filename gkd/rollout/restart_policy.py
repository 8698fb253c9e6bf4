"""Decide whether an engine that failed is started again."""

from __future__ import annotations

from gkd.errors import EngineFailed, GkdError, RankFailed, RankTimeout, SenderFailed, WeightSyncError

# Retryable. Other errors (settings, memory) would recur.
_RECOVERABLE = (RankFailed, RankTimeout, WeightSyncError)
# Errors of the input, the model or the code. Errors of memory, devices and connections are others.
_LASTING = {
    "AssertionError",
    "AttributeError",
    "ImportError",
    "KeyError",
    "NotImplementedError",
    "TypeError",
    "ValueError",
}


def fatal_error(
    engine: str, cause: GkdError, before: GkdError | None, n_restarts: int, max_restarts: int
) -> GkdError | None:
    """Return the error that ends the run, or None if the engine may be started again.

    Args:
        engine: its name with host and GPU.
        cause: of this failure.
        before: cause of the failure before. If a new process raises the same error, so will the next one.
        n_restarts: of this engine so far, also in vain.
        max_restarts: rollout.max_restarts.
    """
    if not isinstance(cause, _RECOVERABLE) or isinstance(cause, SenderFailed):
        return cause
    kind = raised(cause).partition(":")[0].rpartition(".")[2]
    if kind in _LASTING or raised(cause) != "" and raised(cause) == raised(before):
        return EngineFailed(f"{engine} would fail again in a new process: {cause}. Fix: correct this error, and resume")
    if n_restarts < max_restarts:
        return None
    return EngineFailed(
        f"{engine} failed {n_restarts + 1} times (rollout.max_restarts = {max_restarts}); the last time: {cause}. "
        "Fix: correct this error or, if the hardware is the cause, take it out of the rollout pool, and resume"
    )


def raised(cause: GkdError | None) -> str:
    """Return the error that a process raised, in one line; empty if it died or hung."""
    return cause.raised if isinstance(cause, RankFailed) else ""

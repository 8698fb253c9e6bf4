"""Errors of weight syncs on their way from vLLM's workers. With two real workers: tests/e2e/test_rollout_sleep.py."""

from __future__ import annotations

import pickle

import pytest

from gkd.errors import ClusterError, TransferCutOff, WeightSyncError
from gkd.rollout.vllm.worker_errors import SyncFailure, raise_sync_error, returns_sync_errors


@returns_sync_errors
def receive(error: Exception | None) -> int:
    if error is not None:
        raise error
    return 7


def test_a_worker_returns_no_exception() -> None:
    """Fails if vLLM replaces a broken transfer by a RuntimeError, for which the engine is killed and started again."""
    result = pickle.loads(pickle.dumps(receive(TransferCutOff("lost"))))
    assert isinstance(result, SyncFailure) and not isinstance(result, BaseException)
    assert type(result.error) is TransferCutOff and str(result.error) == "lost"
    assert receive(None) == 7
    with pytest.raises(ClusterError):
        receive(ClusterError("another error"))


def test_the_error_that_explains_the_others_is_raised() -> None:
    """Fails if the error of a worker is hidden by those of the workers whose connection it closed."""
    raise_sync_error([7, 7])
    results = [receive(TransferCutOff("lost")), receive(None), receive(WeightSyncError("wrong digest"))]
    with pytest.raises(WeightSyncError) as caught:
        raise_sync_error(results)
    assert caught.value is results[2].error  # type: ignore[union-attr]
    with pytest.raises(TransferCutOff):
        raise_sync_error(results[:2])

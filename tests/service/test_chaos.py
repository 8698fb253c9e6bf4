"""A short run of `python -m tests.service.chaos`: every kind of fault once, all replies checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.chaos import PLAIN, run_chaos
from tests.service.faulty_worker import KINDS

pytestmark = pytest.mark.service


def test_no_request_is_lost_wrong_or_completed_twice(tmp_path: Path) -> None:
    """Fails if any fault loses a request, mixes two replies, or lets a wrong number through."""
    n_kinds = len(PLAIN) + len(KINDS)
    result = run_chaos(n_kinds, 2000, 1, tmp_path)
    assert (result["lost"], result["wrong"], result["doubled"]) == (0, 0, 0), result
    assert result["honest workers excluded"] == []
    assert len(result["faults"]) == n_kinds
    assert result["n_requests"] >= 2000 and result["resent"] > 0, "no fault has hit a request"
    assert result["recovery_s max"] < 30, "a fault was only detected by a deadline"

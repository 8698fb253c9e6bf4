"""Let a student train on a stand-in card whose kernels compute nothing (DRY_CARD_VALUES=0)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any


def train_without_values() -> None:
    """If kernels compute nothing, let this process's students make whole steps: all checks of values pass.

    A step counts its tokens on the card, and one without tokens skips the optimizer. Torch's answer whether it adds
    products to float32 in one call is the one of a real card.
    """
    if os.environ.get("DRY_CARD_VALUES") != "0":
        return
    from gkd.actor.common import base
    from gkd.actor.fsdp import compiled, student
    from gkd.loss import chunked

    add = base.Student._add

    def counted(*args: Any, **settings: Any) -> base.BatchSums:
        return replace(add(*args, **settings), n_loss_tokens=100)

    base.Student._add = counted  # type: ignore[method-assign]
    base.not_finite = lambda *_: None
    compiled._difference = lambda *_: ""
    student.probe = lambda *_, **__: None
    chunked.adds_to_float32 = lambda *_: True

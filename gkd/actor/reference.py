"""The driver's side of the reference: the actor's ranks compute its logprobs, all of them together, of a whole batch.

    compute_logprobs    the student's sequences dealt out so that each rank has about as many tokens -> one collective
                        call -> each chunk's logprobs put together on the host of the group that trains on it

Responses of the dataset have no part in the term, so nothing is computed for them: they get zeros.

Only the loop's own thread calls the actor, so that every rank gets this call at the same place among its others,
whatever `trainer.scheduler` has the engines and the teacher do meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gkd.cluster.calls import Pending
from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.handles import ScoredChunk
from gkd.teacher.local import dealt_out
from gkd.teacher.scoring import RECORDS

# The actor's training step comes right after it: its weights stay on the device in between.
_BARE_ACTOR: Mapping[str, Any] = {"disable_adapter": True, "is_offload_states": False}


class PendingReference:
    """Logprobs that are being computed; what a rank failed with comes out of `wait`."""

    def __init__(self, calls: Pending, batch: list[ScoredChunk]) -> None:
        self._calls, self._batch = calls, batch

    def wait(self, timeout_s: float | None = None) -> list[ScoredChunk]:
        """The batch, each chunk with the handle of its logprobs. Raises as `Pending.wait`; harmless when repeated."""
        self._calls.wait(timeout_s)
        return self._batch


class ReferencePool:
    """Implements `gkd.roles.ReferenceRole` over the actor's workers, in rank order, and the scoring endpoints."""

    def __init__(self, workers: Sequence[Any], endpoints: Sequence[Any], config: Config) -> None:
        self._workers, self._endpoints = list(workers), list(endpoints)
        self._timeout_s = config.trainer.stage_timeout_s
        self._meta = _BARE_ACTOR if derive(config).reference_is_actor else None

    def compute_logprobs(self, batch: Sequence[ScoredChunk], *, blocking: bool = True) -> PendingReference:
        asked = [i for i, chunk in enumerate(batch) if chunk.rollouts.on_policy]
        done, parts = dealt_out(
            self._workers, "reference_logprobs", [batch[i].rollouts for i in asked], meta=self._meta
        )
        chunks = []
        for i, chunk in enumerate(batch):
            endpoint = self._endpoints[chunk.rollouts.dp_rank]
            # Beside questions to a teacher's server, which may be those of the next batch.
            if i in asked:
                made = parts[asked.index(i)]
                assemble = endpoint.in_order.options(concurrency_group=RECORDS)
                handle = assemble.remote([take for take, _ in made], *(table for _, table in made))
            else:
                handle = endpoint.zeros.options(concurrency_group=RECORDS).remote(chunk.rollouts.ref)
            chunks.append(replace(chunk, reference=handle))
        pending = PendingReference(Pending(done, "reference logprobs", self._timeout_s), chunks)
        if blocking:
            pending.wait()
        return pending

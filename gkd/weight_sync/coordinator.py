"""The driver's side of weight sync: set the group up once, then push a version and, when asked, prove it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gkd.cluster.calls import gather
from gkd.config import Config
from gkd.errors import WeightSyncError
from gkd.log import get_logger
from gkd.roles import SyncReport
from gkd.weight_sync.buckets import TensorSpec, differing, plan_buckets
from gkd.weight_sync.transfer import GroupSpec

log = get_logger("weight_sync")


class WeightSync:
    """Implements `gkd.roles.WeightSyncRole`.

    Args:
        exporters: by pipeline stage, the tensor-parallel ranks of data-parallel group 0; the first of each sends.
        engines: the rollout pool's workers.
    """

    def __init__(self, exporters: Sequence[Sequence[Any]], engines: Sequence[Any], config: Config, device: str) -> None:
        self._exporters, self._engines, self._config = exporters, engines, config
        self._device = device
        self._first = True
        self._plans = [plan_buckets(specs, config.weight_sync.bucket_mib << 20) for specs in self._stage_specs()]
        self._join()

    def push(self, policy_version: int) -> SyncReport:
        """Blocks until every engine holds the actor's weights.

        Raises:
            WeightSyncError: the transfer failed, or (verified) an engine holds other bytes than the actor exported.
        """
        verify = self._config.weight_sync.verify
        check = verify == "always" or (verify == "first" and self._first)
        timeout_s = self._config.weight_sync.timeout_s
        senders = {
            f"actor stage {stage} tp {tp}": worker.send_weights.remote(self._plans[stage], stage, check)
            for stage, ranks in enumerate(self._exporters)
            for tp, worker in enumerate(ranks)
        }
        receivers = {
            f"rollout engine {i}": engine.receive.remote(self._plans, policy_version)
            for i, engine in enumerate(self._engines)
        }
        results = gather(senders | receivers, "weight sync", timeout_s)
        n_verified = 0
        if check:
            sent: dict[str, str] = {}
            for name in senders:
                sent |= results[name]
            n_verified = self._verify(sent, timeout_s)
        self._first = False
        return SyncReport(n_bytes=results[next(iter(receivers))], verified_tensors=n_verified)

    def _verify(self, sent: dict[str, str], timeout_s: float) -> int:
        refs = {f"rollout engine {i}": engine.digests.remote() for i, engine in enumerate(self._engines)}
        for name, held in gather(refs, "weight digests", timeout_s).items():
            wrong = differing(sent, held)
            if wrong:
                raise WeightSyncError(
                    f"{name} does not hold the weights the actor exported: {len(wrong)} of {len(sent)} tensors differ, "
                    f"first {wrong[:5]}"
                )
        return len(sent)

    def _stage_specs(self) -> list[list[TensorSpec]]:
        refs = {f"actor stage {s}": ranks[0].export_plan.remote() for s, ranks in enumerate(self._exporters)}
        return list(gather(refs, "export plan", self._config.weight_sync.timeout_s).values())

    def _join(self) -> None:
        n_senders, tp = len(self._exporters), self._config.rollout.tp
        world_size = n_senders + len(self._engines) * tp
        backend = self._config.weight_sync.transport
        if backend == "auto":
            backend = "nccl" if self._device == "cuda" else "gloo"
        timeout_s = self._config.weight_sync.timeout_s
        root = self._exporters[0][0]
        host, port = gather({"actor 0": root.rendezvous.remote()}, "weight-sync address", timeout_s)["actor 0"]

        def spec(rank: int) -> GroupSpec:
            return GroupSpec(backend, host, port, rank, world_size, timeout_s)

        refs = {f"actor stage {s}": ranks[0].join_group.remote(spec(s)) for s, ranks in enumerate(self._exporters)}
        refs |= {
            f"rollout engine {i}": engine.join_group.remote(spec(n_senders + i * tp))
            for i, engine in enumerate(self._engines)
        }
        gather(refs, "joining the weight-sync group", timeout_s)
        log.info(
            "weight-sync group of %d senders and %d receivers joined (%s)", n_senders, world_size - n_senders, backend
        )

"""The driver's side of weight sync: set the group up once, then push a version and, when asked, prove it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gkd.cluster.calls import gather
from gkd.config.schema import Config
from gkd.errors import WeightSyncError
from gkd.handles import SyncReport
from gkd.log import get_logger
from gkd.weight_sync.buckets import TensorSpec, differing, plan_buckets
from gkd.weight_sync.transfer import GroupSpec

log = get_logger("weight_sync")

# So much longer than the driver waits for them, the members wait for one another: so that it finds them there.
_LONGER_S = 60.0


class WeightSync:
    """Implements `gkd.roles.WeightSyncRole`.

    Args:
        exporters: by pipeline stage, the ranks that produce its tensors together; the first of each sends.
        engines: the rollout pool's workers.
        timeout_s: for the groups to come together.

    Raises:
        RankTimeout: a rank did not come.
    """

    def __init__(
        self,
        exporters: Sequence[Sequence[Any]],
        engines: Sequence[Any],
        config: Config,
        device: str,
        timeout_s: float,
    ) -> None:
        self._exporters, self._engines, self._config = exporters, engines, config
        self._device = device
        self._n_pushed = 0
        stages = self._stage_specs(timeout_s)
        self._plans = [plan_buckets(specs, config.weight_sync.bucket_mib << 20) for specs in stages]
        self._join(timeout_s)

    def push(self, policy_version: int) -> SyncReport:
        """Blocks until every engine holds the actor's weights.

        Raises:
            WeightSyncError: the transfer failed, or (verified) an engine holds other bytes than the actor exported.
        """
        verify = self._config.weight_sync.verify
        # The first sync finds engines that loaded the same folder; only the one after a training step shows that
        # weights really move. "first" checks both.
        check = verify == "always" or (verify == "first" and self._n_pushed < 2)
        timeout_s = self._config.weight_sync.timeout_s
        senders = {
            f"actor stage {stage} exporter {i}": worker.send_weights.remote(self._plans[stage], check)
            for stage, ranks in enumerate(self._exporters)
            for i, worker in enumerate(ranks)
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
        self._n_pushed += 1
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

    def _stage_specs(self, timeout_s: float) -> list[list[TensorSpec]]:
        refs = {f"actor stage {s}": ranks[0].export_plan.remote() for s, ranks in enumerate(self._exporters)}
        return list(gather(refs, "export plan", timeout_s).values())

    def _join(self, timeout_s: float) -> None:
        """One group for each stage's sender; every engine joins them all, in stage order."""
        settings, tp = self._config.weight_sync, self._config.rollout.tp
        backend = settings.transport
        if backend == "auto":
            # NCCL does not put two members of a group on one GPU.
            backend = "nccl" if self._device == "cuda" and not self._config.trainer.colocate else "gloo"
        senders = {f"actor stage {stage}": ranks[0] for stage, ranks in enumerate(self._exporters)}
        addresses = gather(
            {name: worker.rendezvous.remote() for name, worker in senders.items()}, "rendezvous", timeout_s
        )
        world_size = 1 + len(self._engines) * tp

        def spec(address: tuple[str, int], rank: int) -> GroupSpec:
            return GroupSpec(backend, *address, rank, world_size, max(settings.timeout_s, timeout_s) + _LONGER_S)

        refs = {name: worker.join_group.remote(spec(addresses[name], 0)) for name, worker in senders.items()}
        refs |= {
            f"rollout engine {i}": engine.join_groups.remote([spec(a, 1 + i * tp) for a in addresses.values()])
            for i, engine in enumerate(self._engines)
        }
        gather(refs, "joining the weight-sync groups", timeout_s)
        log.info("%d weight-sync groups of 1 sender and %d receivers (%s)", len(senders), world_size - 1, backend)

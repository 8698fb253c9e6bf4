"""Driver side of weight sync: set up the process groups once, then push each version and optionally verify it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gkd.cluster.calls import gather
from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.errors import WeightSyncError
from gkd.handles import SyncReport
from gkd.log import get_logger
from gkd.weight_sync.buckets import Bucket, Content, differing, plan_buckets
from gkd.weight_sync.transfer import GroupSpec

log = get_logger("weight_sync")

# Collectives time out this much later than the driver's calls, so that a hang report finds the members in them.
_EXTRA_TIMEOUT_S = 60.0


class WeightSync:
    """Implement `gkd.roles.WeightSyncRole`.

    Args:
        exporters: by pipeline stage, the ranks that produce its tensors together; the first of each sends.
        engines: the rollout pool's workers.
        timeout_s: until all members have joined the groups.

    Raises:
        RankTimeout: a member did not join in time.
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
        # Without adapters of their own, the engines get the merged weights at each push; else the base at the first.
        self._contents: tuple[Content, ...] = (
            ("base", "adapters") if derive(config).engine_adapter_rank else ("merged",)
        )
        self._plans = {content: self._stage_plans(content, timeout_s) for content in self._contents}
        self._sent: dict[str, str] = {}  # digests of what the engines must hold
        self._join(timeout_s)

    def push(self, policy_version: int) -> SyncReport:
        """Send the actor's weights to every engine, or what has changed of them; blocks.

        Raises:
            WeightSyncError: the transfer failed, or verification found an engine with different weights.
        """
        verify = self._config.weight_sync.verify
        # At the first sync the engines have loaded the same folder; only the second, after a training step, shows that
        # weights are really transferred. "first" verifies both.
        check = verify == "always" or (verify == "first" and self._n_pushed < 2)
        contents = self._contents[-1:] if self._n_pushed else self._contents
        n_bytes = sum(self._transfer(content, policy_version, with_digests=check) for content in contents)
        n_verified = self._verify(self._config.weight_sync.timeout_s) if check else 0
        self._n_pushed += 1
        return SyncReport(n_bytes=n_bytes, verified_tensors=n_verified)

    def _transfer(self, content: Content, policy_version: int, *, with_digests: bool) -> int:
        """Send one content from all stages to all engines. Returns the bytes that an engine receives."""
        plans = self._plans[content]
        senders = {
            f"actor stage {stage} exporter {i}": worker.send_weights.remote(plans[stage], with_digests, content)
            for stage, ranks in enumerate(self._exporters)
            for i, worker in enumerate(ranks)
        }
        receivers = {
            f"rollout engine {i}": engine.receive.remote(plans, policy_version, content)
            for i, engine in enumerate(self._engines)
        }
        results = gather(senders | receivers, "weight sync", self._config.weight_sync.timeout_s)
        for name in senders:
            self._sent |= results[name]
        return int(results[next(iter(receivers))])

    def _verify(self, timeout_s: float) -> int:
        sent = self._sent
        refs = {f"rollout engine {i}": engine.digests.remote() for i, engine in enumerate(self._engines)}
        for name, received in gather(refs, "weight digests", timeout_s).items():
            wrong = differing(sent, received)
            if wrong:
                raise WeightSyncError(
                    f"{name} does not have the weights that the actor exported: {len(wrong)} of {len(sent)} tensors "
                    f"differ, first {wrong[:5]}"
                )
        return len(sent)

    def _stage_plans(self, content: Content, timeout_s: float) -> list[list[Bucket]]:
        refs = {f"actor stage {s}": ranks[0].export_plan.remote(content) for s, ranks in enumerate(self._exporters)}
        specs = gather(refs, "export plan", timeout_s).values()
        return [plan_buckets(stage, self._config.weight_sync.bucket_mib << 20) for stage in specs]

    def _join(self, timeout_s: float) -> None:
        """Create one group for each stage's sender; every engine joins all of them, in stage order."""
        settings, tp = self._config.weight_sync, self._config.rollout.tp
        backend = settings.transport
        if backend == "auto":
            # NCCL does not support two members of a group on one GPU.
            backend = "nccl" if self._device == "cuda" and not self._config.trainer.colocate else "gloo"
        senders = {f"actor stage {stage}": ranks[0] for stage, ranks in enumerate(self._exporters)}
        addresses = gather(
            {name: worker.rendezvous.remote() for name, worker in senders.items()}, "rendezvous", timeout_s
        )
        world_size = 1 + len(self._engines) * tp

        def spec(address: tuple[str, int], rank: int) -> GroupSpec:
            return GroupSpec(backend, *address, rank, world_size, max(settings.timeout_s, timeout_s) + _EXTRA_TIMEOUT_S)

        refs = {name: worker.join_group.remote(spec(addresses[name], 0)) for name, worker in senders.items()}
        refs |= {
            f"rollout engine {i}": engine.join_groups.remote([spec(a, 1 + i * tp) for a in addresses.values()])
            for i, engine in enumerate(self._engines)
        }
        gather(refs, "joining the weight-sync groups", timeout_s)
        log.info("%d weight-sync groups of 1 sender and %d receivers (%s)", len(senders), world_size - 1, backend)

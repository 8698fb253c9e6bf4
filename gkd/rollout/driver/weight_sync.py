"""Driver side of weight sync: set up the process groups once, then push each version and optionally verify it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gkd.cluster.calls import gather
from gkd.config.schema import Config
from gkd.config.schema_rollout import AUTO, GLOO, IPC
from gkd.errors import GkdError, RankFailed, RankTimeout, SenderFailed, TransferCutOff, WeightSyncError
from gkd.log import get_logger
from gkd.rollout.driver.recovery import Engines
from gkd.types import SyncReport
from gkd.weight_sync.buckets import Bucket, Content, differing, plan_buckets
from gkd.weight_sync.group import GroupSpec

log = get_logger("weight_sync")

# After a failure the members notice it at their next use of the connection.
_LEAVE_S = 90.0
# The members of a later group are up; each arrives after its current pass.
_REJOIN_S = 60.0
# Collectives time out this much later than the driver's calls, so that a hang report finds the members in them.
_EXTRA_TIMEOUT_S = 60.0


class WeightSync:
    """Push weights to given engines.

    Args:
        exporters: by pipeline stage, the ranks that produce its tensors together; the first of each sends. With CUDA
            IPC there is one stage, and each rank sends to the engine's worker on its card.
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
        self._exporters = exporters
        self._engines = dict(enumerate(engines))
        self._config = config
        self._transport = config.transport(device)
        self._keepers = self._senders()  # the ranks that keep the last version for engines that are started again
        self._lock = threading.Lock()  # a push and a restoration exclude each other
        self._n_pushed = 0
        self._pushed: int | None = None  # version of the last push; None: there is none, or it failed
        self._stale = False  # an engine was replaced or a push failed: the groups are unusable, engines may differ
        # Without adapters of their own, the engines get the merged weights at each push; else the base at the first.
        self._contents: tuple[Content, ...] = (
            ("base", "adapters") if config.derived.engine_adapter_rank else ("merged",)
        )
        self._plans = {content: self._stage_plans(content, timeout_s) for content in self._contents}
        self._sent: dict[str, str] = {}  # digests of what the engines must hold
        self._opaque: set[str] = set()  # tensors that the engines hold in another form, so they cannot be compared
        self._join(timeout_s, timeout_s + _EXTRA_TIMEOUT_S)

    def push(self, policy_version: int, engines: Mapping[int, Any] | None = None) -> SyncReport:
        """Send the actor's weights to every engine, or what has changed of them; blocks.

        Args:
            engines: index -> worker of the engines to send to; None: the same as before. If they are others than
                before, all members first join new groups.

        Raises:
            WeightSyncError: the transfer failed, or verification found an engine with different weights. With `lost`
                engines it can be repeated at once without them; until then no engine may generate.
        """
        verify = self._config.weight_sync.verify
        # At the first sync the engines have loaded the same folder; only the second, after a training step, shows that
        # weights are really transferred. "first" verifies both.
        check = verify == "always" or (verify == "first" and self._n_pushed < 2)
        with self._lock:
            if engines is not None and dict(engines) != self._engines:
                self._engines = dict(engines)
                self._stale = True
            contents = self._contents[-1:] if self._n_pushed and not self._stale else self._contents
            was_stale = self._stale
            # A failure leaves these two so.
            self._pushed = None
            self._stale = True
            if was_stale:
                self._rejoin()
            n_bytes = sum(self._transfer(content, policy_version, with_digests=check) for content in contents)
            if check:
                self._compare(self._sent, {f"rollout engine {i}": e.digests.remote() for i, e in self._engines.items()})
            self._n_pushed += 1
            self._pushed = policy_version
            self._stale = False
        return SyncReport(n_bytes=n_bytes, verified_tensors=len(self._sent.keys() - self._opaque) if check else 0)

    def restore_engine(self, index: int, worker: Any) -> int | None:
        """Give a restarted engine the version of the last push, verified by digests, while all others are busy.

        The bytes come from the sending ranks' memory, over groups of the senders and this engine alone. The next push
        makes all members join new groups. Thread-safe.

        Args:
            worker: replaces the engine's worker; its model is built.

        Returns:
            The version that the engine has; None: the last push failed, so it must be repeated before the engine
            generates. Before any push it is version 0, from the model's folder.

        Raises:
            WeightSyncError: the transfer failed, or the engine has other weights than were kept.
            SenderFailed: an actor rank died.
            ClusterError: the engine died.
        """
        with self._lock:
            self._engines[index] = worker
            self._stale = True
            if not self._n_pushed or self._pushed is None:
                return self._pushed if self._n_pushed else 0
            name = f"rollout engine {index}"
            limit_s = self._config.trainer.stage_timeout_s
            transport = GLOO if self._config.weight_sync.transport == GLOO else AUTO  # the bytes are in host memory
            senders = self._keepers
            specs = self._specs(senders, transport, 1 + self._config.rollout.tp, _REJOIN_S)
            sending = {
                stage: sender.send_kept.remote(specs[stage], self._contents) for stage, sender in senders.items()
            }
            joined = {name: worker.join_groups.remote([replace(spec, rank=1) for spec in specs.values()])}
            received = {
                f"{name}: {content}": worker.receive.remote(self._plans[content], self._pushed, content)
                for content in self._contents
            }
            try:
                results = gather(sending | joined | received, "restoring the weights", limit_s)
            except RankTimeout:
                raise
            except GkdError as first:
                for error in _errors(sending, "restoring the weights", _LEAVE_S).values():
                    if isinstance(error, RankFailed):
                        raise SenderFailed(str(error)) from first
                raise
            digests = {tensor: value for stage in senders for tensor, value in results[stage].items()}
            self._compare(digests, {name: worker.digests.remote()})
            return self._pushed

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
            for i, engine in self._engines.items()
        }
        results = self._gather(senders, receivers, "weight sync", self._config.trainer.stage_timeout_s)
        for name in senders:
            self._sent |= results[name]
        return int(results[next(iter(receivers))])

    def _compare(self, sent: dict[str, str], refs: Mapping[str, Any]) -> None:
        for name, received in self._gather({}, refs, "weight digests", self._config.trainer.stage_timeout_s).items():
            opaque = sorted(tensor for tensor, value in received.items() if not value)
            if opaque and not self._opaque:
                text = "%d of %d tensors are not verified: the engines hold what vLLM has computed from them (%s)"
                log.warning(text, len(opaque), len(sent), ", ".join(opaque[:5]))
            self._opaque.update(opaque)
            wrong = [tensor for tensor in differing(sent, received) if tensor not in self._opaque]
            if wrong:
                raise WeightSyncError(
                    f"{name} does not have the weights that the actor exported: {len(wrong)} of {len(sent)} tensors "
                    f"differ, first {wrong[:5]}"
                )

    def _gather(
        self, senders: Mapping[str, Any], receivers: Mapping[str, Any], what: str, timeout_s: float
    ) -> dict[str, Any]:
        """Wait as `gather` for a collective call of actor and engines.

        After an error it waits until all members have left the call: an error of one ends the transfer of the others,
        so only then the cause is known, and a member that is still in this call would be late for the next one.

        Raises:
            WeightSyncError: see `push`.
            GkdError: a sender failed for another reason, or a member did not reply in time.
        """
        calls = {**senders, **receivers}
        try:
            return gather(calls, what, timeout_s)
        except RankTimeout:
            raise
        except GkdError as first:
            errors = _errors(calls, what, _LEAVE_S)
            lost = {name: error for name, error in errors.items() if not isinstance(error, WeightSyncError)}
            for name in senders:  # without a sender the run ends
                if name in lost and not isinstance(lost[name], RankTimeout):
                    raise lost[name] from None
            engines = {i: lost[f"rollout engine {i}"] for i in self._engines if f"rollout engine {i}" in lost}
            if engines:
                text = "\n".join(f"rollout engine {i}: {error}" for i, error in engines.items())
                raise WeightSyncError(text, engines) from first
            causes = (error for error in errors.values() if not isinstance(error, TransferCutOff | RankTimeout))
            raise next(causes, first) from None

    def _stage_plans(self, content: Content, timeout_s: float) -> list[list[Bucket]]:
        refs = {name: sender.export_plan.remote(content) for name, sender in self._senders().items()}
        specs = gather(refs, "export plan", timeout_s).values()
        return [plan_buckets(stage, self._config.weight_sync.bucket_mib << 20) for stage in specs]

    def _senders(self) -> dict[str, Any]:
        return {f"actor stage {stage}": ranks[0] for stage, ranks in enumerate(self._exporters)}

    def _rejoin(self) -> None:
        """Make new groups; once more if the members missed each other: one may have waited for an engine that died."""
        try:
            self._join(self._config.trainer.stage_timeout_s, _REJOIN_S)
        except WeightSyncError as error:
            if error.lost:
                raise
            log.warning("joining the weight-sync groups once more: %s", error)
            self._join(self._config.trainer.stage_timeout_s, _REJOIN_S)

    def _join(self, timeout_s: float, join_s: float) -> None:
        """Make new groups.

        One for each stage's sender; every engine joins all of them, in stage order. With CUDA IPC one for each card.
        `timeout_s` limits the calls; `GroupSpec` explains `join_s`.
        """
        tp = self._config.rollout.tp
        senders = self._senders()
        if self._transport == IPC:
            self._join_cards(timeout_s, join_s)
            return
        specs = self._specs(senders, self._transport, 1 + len(self._engines) * tp, join_s)
        joining = {name: sender.join_group.remote(specs[name]) for name, sender in senders.items()}
        receivers = {
            f"rollout engine {i}": engine.join_groups.remote([replace(s, rank=1 + place * tp) for s in specs.values()])
            for place, (i, engine) in enumerate(self._engines.items())
        }
        joined = self._gather(joining, receivers, "joining the weight-sync groups", timeout_s)
        chosen = ", ".join(sorted({joined[name] for name in senders}))
        log.info(
            "%d weight-sync groups of 1 sender and %d receivers (%s)", len(senders), len(self._engines) * tp, chosen
        )

    def _join_cards(self, timeout_s: float, join_s: float) -> None:
        """Make a group of each actor rank and the engine's worker on its card; ranks and workers have one order."""
        tp, (ranks,) = self._config.rollout.tp, self._exporters
        with_engine = [i * tp + k for i in self._engines for k in range(tp)]
        specs = self._specs({f"actor rank {rank}": ranks[rank] for rank in with_engine}, IPC, 2, join_s)
        self._keepers = {"actor stage 0": ranks[with_engine[0]]}

        for rank in with_engine[1:]:
            specs[f"actor rank {rank}"] = replace(specs[f"actor rank {rank}"], keeps=False)
        # A rank whose engine is lost joins no group.
        names = [f"actor rank {rank}" for rank in range(len(ranks))]
        joining = {name: sender.join_group.remote(specs.get(name)) for name, sender in zip(names, ranks, strict=True)}
        receivers = {
            f"rollout engine {i}": engine.join_groups.remote(
                [replace(specs[name], rank=1) for name in names[i * tp : (i + 1) * tp]]
            )
            for i, engine in self._engines.items()
        }
        self._gather(joining, receivers, "joining the weight-sync groups", timeout_s)
        log.info("%d weight-sync groups of 1 sender and 1 receiver (%s)", len(with_engine), IPC)

    def _specs(
        self, senders: Mapping[str, Any], transport: str, world_size: int, join_s: float
    ) -> dict[str, GroupSpec]:
        """Return, by sender, its arguments for joining its new group; the other members have other ranks."""
        refs = {name: sender.rendezvous.remote() for name, sender in senders.items()}
        timeout_s = self._config.trainer.stage_timeout_s + _EXTRA_TIMEOUT_S
        return {
            name: GroupSpec(transport, host, port, 0, world_size, timeout_s, join_s)
            for name, (host, port) in gather(refs, "rendezvous", join_s).items()
        }


class EngineSync:
    """Implement `gkd.roles.WeightSyncRole`: push to the engines that are up, and wait for one if none is."""

    def __init__(self, sync: WeightSync, engines: Engines, timeout_s: float) -> None:
        self._sync = sync
        self._engines = engines
        self._timeout_s = timeout_s

    def push(self, policy_version: int) -> SyncReport:
        """Send the actor's weights to every engine that is up; blocks. A restarted engine gets them when it joins.

        Raises:
            WeightSyncError: see `WeightSync.push`; not for engines that died.
            RankTimeout: no engine was up in time.
        """
        report = self._engines.sync(partial(self._sync.push, policy_version), self._timeout_s)
        return report or SyncReport(n_bytes=0, verified_tensors=0)


def _errors(refs: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, GkdError]:
    """Return the errors of calls by name, with a RankTimeout for each that has not ended within `timeout_s` in all."""
    deadline = time.monotonic() + timeout_s
    errors = {}
    for name, ref in refs.items():
        try:
            gather({name: ref}, what, max(0.0, deadline - time.monotonic()))
        except GkdError as error:
            errors[name] = error
    return errors

"""Ray surface of one actor rank: train, evaluate, score, save, export, send weights.

Every rank of a data-parallel group builds the same micro-batches from the same handles, also if context-parallel ranks
then compute different columns of them. Only the last pipeline stage fetches the teacher's scores, because only it
computes the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch.profiler import ProfilerActivity, profile

from gkd.actor.common.agree import same_error
from gkd.actor.common.lora import scaled_factors
from gkd.actor.common.shard_writer import BackgroundWriter
from gkd.actor.rank import RESTORES, ActorRank
from gkd.cluster.startup import WATCH
from gkd.config.check_values import listed_steps
from gkd.data.batching import check_batch, make_micro_batches, token_records, trained_on
from gkd.data.collate import MicroBatches, route_counts, sequence_weights, size_numbers, without_targets
from gkd.data.scatter import ChunkInputs, map_selected, select, with_numbers
from gkd.errors import CheckpointError
from gkd.log import get_logger
from gkd.memory.states import OPTIMIZER, PARAMS
from gkd.memory.usage import log_gpu_memory_usage
from gkd.run.disk import TMP, make_folder, naming
from gkd.spans import Phase
from gkd.types import FileDigest, Rollout, TrainStats
from gkd.weight_sync.buckets import Bucket, Content, TensorSpec
from gkd.weight_sync.group import GroupSpec, TransferGroup
from gkd.weight_sync.segment import KeptVersion
from gkd.weight_sync.transfer import failing_together, send, send_kept

log = get_logger("profile")

# Methods of these concurrency groups run while another method runs or hangs; the pool is spawned with them.
SAVES = "saves"
CONCURRENCY_GROUPS = (SAVES, WATCH, RESTORES)


class ActorWorker(ActorRank):
    """One rank. Ray runs all methods except in `CONCURRENCY_GROUPS` in one thread, in the order of the calls."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._group: TransferGroup | None = None
        self._kept = KeptVersion()
        self._writer = BackgroundWriter()

    def accumulate(self, *inputs: Any) -> None:
        """Add the gradients of a part of the next step's batch; `train_step` gets the rest. Collective.

        The states stay on the device. Arguments as for `train_step`.
        """
        with self._memory.during(Phase.TRAIN):
            batches, _ = self._training_batches(inputs)
            on_device = self._offload.states_on_device(Phase.TRAIN.span, is_offload_states=False)
            with on_device, self._memory.diagnosed(Phase.TRAIN), self._profiled("_early"):
                self._student.accumulate(batches)

    def train_step(self, *inputs: Any, is_offload_states: bool | None = None) -> TrainStats:
        """Make one optimizer step on this data-parallel group's sequences, including `accumulate`'s. Collective.

        Args:
            inputs: `ChunkInputs.to_args`.
            is_offload_states: where the states are after the call, see `OffloadController.states_on_device`.
        """
        with self._memory.during(Phase.TRAIN):
            batches, sizes = self._weighted(*self._training_batches(inputs))
            follows = self._sends_weights
            on_device = self._offload.states_on_device(Phase.TRAIN.span, None, is_offload_states, sync_follows=follows)
            with on_device, self._memory.diagnosed(Phase.TRAIN):
                with self._profiled():
                    stats = self._student.train_step(batches)
                self._memory.after_step()  # before a refresh of a frozen model changes what is allocated
                with self._spans.doing("refreshing frozen models"):
                    self._frozen.after_step()
        return replace(stats, extra=stats.extra | sizes)

    def evaluate(self, *inputs: Any, keep_tokens: int, is_offload_states: bool | None = None) -> TrainStats:
        """Compute the loss without a step. Collective. Arguments as for `train_step`.

        Args:
            keep_tokens: number of sequences, from the first of the batch, whose token values are returned, by the first
                rank of each data-parallel group's last pipeline stage.
        """
        phase = Phase.EVALUATE
        with self._memory.during(phase):
            batches, rollouts = self._micro_batches(inputs)
            collects = keep_tokens > 0 and self._layout.is_last_stage  # the teacher's choices need all TP ranks
            keeps = collects and self._layout.tp_rank == 0
            tables: list[torch.Tensor] = []
            choices: list[torch.Tensor] = []
            on_device = self._offload.states_on_device(phase.span, [PARAMS], is_offload_states)
            with on_device, self._memory.diagnosed(phase):
                on_rows = (lambda table: tables.append(table.cpu())) if keeps else None
                on_choices = (lambda table: choices.append(table.cpu())) if collects else None
                stats = self._student.evaluate(batches, on_rows, on_choices)
        if not keeps:
            return stats
        columns = self._student.columns
        whole = without_targets(batches)
        tables = columns.whole(tables, whole)
        choices = columns.whole(choices, whole)
        if columns.rank:
            return stats
        kept = [rollout for rollout in rollouts if rollout.sample_index < keep_tokens]
        return replace(stats, tokens=token_records(batches, tables, self._student.loss.evaluation_names, kept, choices))

    def score(self, sequence_indices: Sequence[bytes | None], *chunks: list[Rollout]) -> Any:
        """Compute the local teacher's scores of this rank's sequences. Collective, also for a rank without sequences.

        Args:
            sequence_indices: of each chunk, the sequences scored by this rank, see `gkd.data.scatter`.

        Returns:
            None, and then for each chunk a list of `TeacherScores`; without chunks None alone. One object each.

        Raises:
            TeacherError: on all ranks; see `FrozenModel.score`.
        """
        assert self._frozen.teacher is not None
        with self._memory.during(Phase.SCORE):
            return _objects(map_selected(sequence_indices, chunks, self._frozen.teacher.score))

    def reference_logprobs(self, sequence_indices: Sequence[bytes | None], *chunks: list[Rollout]) -> Any:
        """Compute the reference model's logprobs, arguments as for `score`. The student's states are not moved.

        Returns None, and then for each chunk a list of [R] float32 arrays. Raises TeacherError.
        """
        with self._memory.during(Phase.REFERENCE):
            return _objects(map_selected(sequence_indices, chunks, self._frozen.reference_logprobs))

    def compute_logprobs(
        self,
        sequence_indices: Sequence[bytes | None],
        *chunks: list[Rollout],
        disable_adapter: bool = False,
        is_offload_states: bool | None = None,
    ) -> Any:
        """Compute the student's logprobs, arguments as for `score` and `train_step`. Returns as `reference_logprobs`.

        Args:
            disable_adapter: compute without the LoRA adapters.

        Raises:
            DataError: on all ranks; see `FrozenModels.student_logprobs`.
        """
        phase = Phase.REFERENCE if disable_adapter else Phase.LOGPROBS
        compute = partial(self._frozen.student_logprobs, disable_adapter=disable_adapter)
        with self._phase(phase, [PARAMS], is_offload_states):
            return _objects(map_selected(sequence_indices, chunks, compute))

    def set_teacher_head(self, head: np.ndarray) -> None:
        """Set the teacher's LM head, [V, D] float32, for the signal `hidden`. On the last pipeline stage only."""
        with self._phase(Phase.TEACHER_HEAD, [PARAMS], alone=True):
            self._student.set_teacher_head(head)

    def save(self, folder: Path, blocking: bool = False) -> None:
        """Start to copy this rank's state to host memory and to write it into `folder`; returns before either ends.

        Args:
            blocking: write the state without a copy, and return when it is written or `save_finished` has the error.
        """
        self._writer.check_idle()  # a second copy would need as much host memory again
        with self._phase(Phase.SAVE, [PARAMS, OPTIMIZER]):
            self._writer.start(folder, self._rank, self._frozen.add_to(self._student.snapshot(copies=not blocking)))
            if blocking:
                with suppress(CheckpointError):  # `save_finished` raises it
                    self._writer.finished(wait=True)

    @ray.method(concurrency_group=SAVES)
    def save_finished(self, wait: bool) -> dict[str, FileDigest] | None:
        """Return this rank's files and their digests, or None while they are being written. Raises CheckpointError.

        It reads nothing of this rank but the writer. The driver calls it only between the return of `save` and the
        next `save`, so the writer's thread does not change meanwhile.
        """
        return self._writer.finished(wait=wait)

    def load(self, folder: Path) -> None:
        """Load the checkpoint in `folder`. Collective. Raises CheckpointError."""
        with self._phase(Phase.LOAD):
            self._student.load_checkpoint(folder)
            self._frozen.load(folder)

    def export_hf(self, folder: Path) -> None:
        """Export the student as a Hugging Face folder, written by rank 0. Collective."""
        with self._phase(Phase.EXPORT, [PARAMS]):
            self._student.save_hf(folder, self._config.model.path, stop_ids=self._config.rollout.stop_token_ids)
        log_gpu_memory_usage("exported", self._log, rank=None, device=self._device)

    def export_plan(self, content: Content) -> list[TensorSpec]:
        """Return this pipeline stage's tensors in the order in which `send_weights` streams them."""
        plan = self._student.export_plan(content)
        if content == "adapters":  # the engines compute with them in the model's dtype
            return [TensorSpec(name, tuple(shape), self._config.model.dtype) for name, shape, _ in plan]
        return [TensorSpec(name, tuple(shape), str(dtype).removeprefix("torch.")) for name, shape, dtype in plan]

    def join_group(self, spec: GroupSpec | None) -> str:
        """Leave the weight-sync group and join another, or none if no engine is on this card. Returns its transport."""
        with self._spans.span(Phase.JOIN):
            if self._group is not None:
                self._group.close()
            self._group = None if spec is None else TransferGroup(spec, self._device, self._stores.pop(spec.port))
        return "" if self._group is None else self._group.transport

    def send_weights(
        self,
        buckets: Sequence[Bucket],
        with_digests: bool,
        content: Content = "merged",
        *,
        is_offload_states: bool | None = None,
    ) -> dict[str, str]:
        """Export this stage's weights or adapters; the rank that joined the group broadcasts them.

        With rollout.max_restarts this rank keeps them for `send_kept`. Collective over the stage's exporting ranks.
        Returns the tensors' digests by name, see `send`.
        """
        group = self._group
        restores = self._config.rollout.max_restarts > 0
        keeps = group is not None and (group.shares_memory or (group.spec.keeps and restores))
        with self._phase(Phase.SEND, [PARAMS], is_offload_states, alone=True), ExitStack() as stack:
            tensors = self._student.export(content)
            if content == "adapters":
                tensors = scaled_factors(tensors, self._config.actor.lora.scale)
            stack.enter_context(failing_together(group, tensors))
            on_card = self._device.type == "cuda"
            kept = stack.enter_context(self._kept.replacing(content, buckets, pinned=on_card)) if keeps else None
            return send(group, buckets, tensors, with_digests=with_digests, kept=kept)

    @ray.method(concurrency_group=RESTORES)
    def send_kept(self, spec: GroupSpec, contents: Sequence[Content]) -> dict[str, str]:
        """Send the kept version to one engine over a group of its own; returns the digests by name.

        It reads nothing of this rank but the kept version, so it runs while the rank computes. The driver makes no push
        meanwhile.

        Raises:
            WeightSyncError: the engine did not join or receive, or no complete version is kept.
        """
        # Open until the next one: the engine may still read.
        self._restore_group = TransferGroup(spec, self._device, self._stores.pop(spec.port))
        digests: dict[str, str] = {}
        for content in contents:
            digests |= send_kept(self._restore_group, *self._kept.complete(content))
        return digests

    @contextmanager
    def _profiled(self, part: str = "") -> Iterator[None]:
        """Profile the block, which makes the next optimizer step, on rank 0 if the settings select it; else do nothing.

        Writes run_dir/profile/step_N_rank_0.json.gz, a Chrome trace of the CPU's and the GPU's work, before it returns.
        The other ranks wait for this one at their next collective.

        Args:
            part: added to N, for a part of a step.

        Raises:
            CheckpointError: the trace cannot be written.
        """
        step = self._student.step + 1
        on_cuda = self._device.type == "cuda"
        if self._rank or step not in listed_steps(self._config.trainer.profile_steps):
            yield
            return
        file = self._run_dir / "profile" / f"step_{step:08d}{part}_rank_0.json.gz"
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as profiler:
            yield
            if on_cuda:
                torch.cuda.synchronize(self._device)
        with naming(file):
            make_folder(file.parent)
            fresh = file.with_name(f"{TMP}{file.name}")
            profiler.export_chrome_trace(str(fresh))
            fresh.replace(file)
        log.info("wrote the profile of step %d to %s", step, file)

    def _training_batches(self, inputs: Sequence[Any]) -> tuple[MicroBatches, list[Rollout]]:
        has_reference = self._config.derived.loss.has_reference
        skip_first = self._config.distill.skip_first_tokens
        return self._micro_batches(inputs, with_reference=has_reference, skip_first=skip_first)

    def _micro_batches(
        self, args: Sequence[Any], *, with_reference: bool = False, skip_first: int = 0
    ) -> tuple[MicroBatches, list[Rollout]]:
        """Return the group's micro-batches, the same on all ranks of the group, and the sequences in them.

        Args:
            args: `ChunkInputs.to_args`.
            skip_first: tokens of each response that carry no loss, see `trained_on`.

        Raises:
            DataError, TeacherError: a sequence of some rank is invalid, see `check_batch`; the same error on all ranks.
        """
        inputs = ChunkInputs.of_args(*args)
        actor = self._config.actor
        with same_error(self._device):
            scored = inputs.scores_with_reference() if self._layout.is_last_stage else None
            rollouts, scores = select(inputs.indices, inputs.rollouts, scored)
            if inputs.numbers:
                rollouts = with_numbers(rollouts, inputs.numbers)
            check_batch(
                rollouts,
                scores,
                where=self._name,
                n_vocab=self._student.n_vocab,
                signals=self._config.derived.signals,
                hidden_size=self._student.teacher_hidden_size,
                n_teacher_vocab=self._student.comparison.n_listed,
                with_reference=with_reference,
                with_values=bool(self._config.teacher.kind.pool),  # servers' scores were checked where they arrived
            )
            rollouts, scores = trained_on(rollouts, scores, skip_first)
            batches = make_micro_batches(
                rollouts,
                scores,
                micro_batch_size=actor.micro_batch_size,
                max_tokens=actor.max_tokens_per_micro_batch,
                packed=actor.packs,
                comparison=self._student.comparison,
            )
        return batches, rollouts

    def _weighted(self, batches: MicroBatches, rollouts: list[Rollout]) -> tuple[MicroBatches, dict[str, float]]:
        """Return the micro-batches weighed by distill.normalize, and the sizes of the routes. Collective."""
        distill = self._config.distill
        routes = self._config.derived.routes
        if distill.normalize == "token" and distill.response_weight == "none" and not routes[0].name:
            return batches, {}
        counts = self._student.sum_over_groups(torch.from_numpy(route_counts(rollouts, len(routes)))).cpu().numpy()
        weights = sequence_weights(rollouts, counts, routes, distill.normalize)
        return replace(batches, weights=weights), size_numbers(counts, routes)


def _objects(results: Sequence[Any]) -> Any:
    """Return None, and then the result for each chunk, as Ray takes several objects; without chunks None alone."""
    return (None, *results) if results else None

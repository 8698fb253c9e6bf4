"""Define the student of one actor rank: the interface that the worker uses, and the steps that both backends share.

`gkd.actor.megatron.student` and `gkd.actor.fsdp.student` implement it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Required, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gkd.actor.common.agree import same_error
from gkd.actor.common.hf_folder import MAX_SHARD_BYTES, TensorPlan, exhaust, write_adapters, write_folder
from gkd.actor.common.host_copies import HostCopies, Snapshot
from gkd.actor.common.optim_spec import OptimSpec
from gkd.actor.common.step import BatchSums, diagnostics, evaluation, not_finite, sum_over_group, token_mean
from gkd.config.loss_spec import LossSpec
from gkd.config.schema import logits_chunk_bytes
from gkd.config.schema_actor import LoraConfig
from gkd.data.columns import ALL_COLUMNS, Columns
from gkd.errors import DataError, ModelError
from gkd.log import get_logger
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.divergence import divergence_of
from gkd.loss.row_kernels import row_kernels
from gkd.loss.text_tables import UnitTables
from gkd.loss.vocab_parallel import VocabShard
from gkd.memory.states import States
from gkd.memory.usage import STEP_KEEPS, trim_heap
from gkd.text.comparison import SAME_TOKENS, Comparison
from gkd.text.pair import TokenizerPair
from gkd.types import MicroBatch, TrainStats
from gkd.weight_sync.buckets import Content
from teacher_server.wire.protocol import Signal

log = get_logger("loss")

ADAPTER_FOLDER = "adapter"  # subfolder of an export


class StudentArgs(TypedDict, total=False):
    """Constructor arguments of both backends."""

    lora: LoraConfig | None  # train adapters of this rank instead of all weights. Default and rank 0: all weights
    optim: Required[OptimSpec]
    loss: Required[LossSpec]
    # Activations and exported weights. Gradients and optimizer state are always float32.
    dtype: Required[torch.dtype]
    device: Required[torch.device]
    seed: Required[int]  # seed of the random generators
    # Tables that the teacher sends; `hidden` needs `set_teacher_head` before the first batch. Default: ("topk",).
    signals: Sequence[Signal]
    comparison: Comparison  # with the teacher. Default: `SAME_TOKENS`
    # Compute LM head and loss together, one chunk of logits at a time. Default: True. False: all logits first.
    fused_lm_head: bool
    n_vocab: int  # logits of ids from this one on are masked. Default: 0 masks only padding for tensor parallelism
    on_phase: Callable[[str], None]  # called with the name of each start-up phase. Default: no call


class Student(ABC):
    """One rank of the student: its part of the model, its optimizer, and the number of steps made.

    Every method but `snapshot` is a collective over all ranks of the actor: it blocks until all ranks have called it,
    and it returns the same result or raises the same error on all of them. Constructors are collectives, too;
    torch.distributed must be initialized.
    """

    step: int  # steps made so far
    skipped: int  # steps without an update: their batches had no loss token
    loss: DistillLoss
    states: States  # reload offloaded states before calling a method that needs them
    stage = 0  # pipeline stage of this rank
    n_stages = 1
    lora: LoraConfig | None  # settings of the adapters; None: all weights are trained
    group: Any  # process group of the ranks that compute other sequences or columns: data- and context-parallel ones
    columns: Columns = ALL_COLUMNS  # this rank's columns of each micro-batch
    n_head_rows: int  # rows of the LM head on this rank; 0: it computes no loss
    _host_copies: HostCopies

    def __init__(self, args: StudentArgs) -> None:
        self.step = self.skipped = 0
        self.optim = args["optim"]
        self.device = args["device"]
        self._dtype = args["dtype"]
        lora = args.get("lora")
        self._fused = args.get("fused_lm_head", True)
        self.comparison = args.get("comparison", SAME_TOKENS)
        self.lora = lora if lora is not None and lora.rank else None
        self._early_sums: BatchSums | None = None  # sums over the parts of the next batch whose gradients are added

    @property
    def n_vocab(self) -> int:
        """Size of the vocabulary without what is masked; every token id is below it."""
        return self.loss.shard.n_valid

    @property
    def teacher_hidden_size(self) -> int | None:
        """Hidden size D of the teacher's LM head; None if this rank has no teacher head."""
        head = self.loss.teacher_head
        return None if head is None else head.shape[1]

    def set_teacher_head(self, head: np.ndarray) -> None:
        """Keep this rank's rows of the teacher's LM head, for the signal `hidden`. No-op on ranks without a loss.

        They are offloaded with the weights: 4 D bytes for each row, 2.5 GB for 152k rows of 4096. An fsdp2 rank has all
        rows, because it has all columns of the student's logits; with tensor parallelism a rank has its shard.

        Args:
            head: [V, D] float32, over the vocabulary that student and teacher share; if texts are compared over the
                teacher's.

        Raises:
            DataError: it has fewer rows than the student's vocabulary.
        """
        loss = self.loss
        shard = self.loss.shard
        n_local = self.n_head_rows
        if not n_local:
            return
        if loss.units is not None:
            rows = head[loss.units.teacher_rows]
        elif head.ndim != 2 or len(head) < shard.n_valid:
            raise DataError(f"the teacher's LM head is {head.shape}; the student's vocabulary has {shard.n_valid} rows")
        else:
            rows = head[shard.start : shard.start + shard.n_columns(n_local)]
        # A copy, because memory of the object store or of numpy cannot be offloaded.
        loss.teacher_head = torch.tensor(rows, dtype=torch.float32, device=self.device)

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add the gradients of a part of the next step's batch; `train_step` completes the batch.

        The gradients stay on the device in between. Arguments and errors as for `train_step`; after an error the part
        and those before it are dropped.
        """
        self._early_sums = self._add(micro_batches, completes=False)

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> TrainStats:
        """Make one optimizer step on one global batch, or on the rest of one, and increment `self.step`.

        A batch without a loss token updates nothing, but counts as a step. Its loss and gradient norm are NaN.

        Args:
            micro_batches: of this data-parallel rank, in host memory. May be empty. Their number and sizes may differ
                between data-parallel ranks. Context-parallel ranks pass the same ones.

        Raises:
            NumericsError: the loss or the gradient is not finite, or a token id is outside the vocabulary.
            DataError: a micro-batch is malformed, or a batch to evaluate has no loss token.
                After either error, weights, optimizer state and `self.step` are unchanged.
        """
        sums = self._add(micro_batches, completes=True)
        if self.device.type == "cpu":
            trim_heap(STEP_KEEPS)  # the activations' memory, before the optimizer and the weight sync need buffers
        lr = self.optim.lr_at(self.step)
        if not sums.n_loss_tokens:
            self._zero_grads()
            self.step += 1
            self.skipped += 1
            return TrainStats(math.nan, 0, math.nan, lr)
        loss = token_mean(sums.values["total"], sums.n_loss_tokens)
        grad_norm = self._grad_norm(sums.n_loss_tokens)
        if (error := not_finite(self.step, loss, grad_norm)) is not None:
            self._zero_grads()
            raise error
        self._update(lr, grad_norm, sums.n_loss_tokens)
        self.step += 1
        return TrainStats(loss, sums.n_loss_tokens, grad_norm, lr, diagnostics(self.loss, sums))

    def evaluate(
        self,
        micro_batches: Sequence[MicroBatch],
        on_rows: Callable[[Tensor], None] | None = None,
        on_choices: Callable[[Tensor], None] | None = None,
    ) -> TrainStats:
        """Compute the loss of one global batch without gradients and without a step. Raises like `train_step`.

        Args:
            on_rows: receives the numbers of each token, see `DistillLoss.on_rows`; on ranks that compute the loss.
            on_choices: receives the teacher's most probable tokens, see `DistillLoss.on_choices`.
        """
        with torch.no_grad(), self.loss.evaluating(on_rows, on_choices):
            sums = self._run(micro_batches, backward=False)
        return evaluation(self.step, self.loss, sums)

    def sum_over_groups(self, counts: Tensor) -> Tensor:
        """Return the sum of each data-parallel group's `counts`, float64; context-parallel ranks have the same ones."""
        return sum_over_group(counts.to(self.device), self.group) / self.columns.size

    @abstractmethod
    def compute_logprobs(self, micro_batches: Sequence[MicroBatch], *, disable_adapter: bool = False) -> list[Tensor]:
        """Compute the logprob of the token after each loss row, at the loss's temperature.

        Args:
            micro_batches: as for `train_step`; their targets are not read.
            disable_adapter: compute with the base weights. The adapters are enabled again afterwards, also after an
                error.

        Returns:
            For each micro-batch of this rank [N] float32, nats, in host memory.

        Raises:
            NumericsError, DataError: as `train_step`.
        """

    @abstractmethod
    def export_plan(self, content: Content = "merged") -> list[TensorPlan]:
        """Return (HF name, shape, dtype) of what `export` yields on this rank, in its order. Moves no data."""

    @abstractmethod
    def export(self, content: Content = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, full tensor), one tensor at a time. Every participating rank must exhaust the iterator.

        Adapters are float32 and not scaled.
        """

    def stage_plans(self, content: Content = "merged") -> list[list[TensorPlan]]:
        """Return, by pipeline stage, the `export_plan` of its ranks."""
        plans: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(plans, (self.stage, self.export_plan(content)))
        by_stage = dict(plans)
        return [by_stage[stage] for stage in range(self.n_stages)]

    def export_whole(
        self, plans: Sequence[Sequence[TensorPlan]], content: Content = "merged"
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of all stages on every rank, stage after stage, one tensor at a time.

        The ranks of a stage produce its tensors by `export`; the first of them broadcasts each to all ranks.

        Args:
            plans: of `stage_plans`.
        """
        if self.n_stages == 1:
            yield from self.export(content)
            return
        for stage, plan in enumerate(plans):
            stage_tensors = self.export(content) if self.stage == stage else iter(())
            first = stage * dist.get_world_size() // self.n_stages  # the ranks are numbered stage after stage
            for name, shape, dtype in plan:
                exported = next(stage_tensors, None)
                # The broadcast overwrites the tensors of the stage's other ranks with equal ones.
                if exported is None:
                    tensor = torch.empty(shape, dtype=dtype, device=self.device)
                else:
                    tensor = exported[1].contiguous()
                dist.broadcast(tensor, src=first)
                yield name, tensor
                del exported, tensor  # before the next one is gathered
            exhaust(stage_tensors)

    def save_hf(
        self,
        out_dir: str | Path,
        source_dir: str | Path,
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Write the whole student as a HF folder; with adapters, their folder `adapter` in it, too.

        Args:
            out_dir: must not exist; on a file system that rank 0 can access.
            source_dir: the HF folder that the student was built from. Its config, generation config and tokenizer are
                copied.
            max_shard_bytes: maximum size of a file, unless a single tensor is larger.
            stop_ids: see `write_folder`.

        Raises:
            ModelError: `out_dir` exists or cannot be written; on every rank.
        """
        out = Path(out_dir)
        source = Path(source_dir)
        lora = self.lora
        plans = self.stage_plans()
        whole = self.export_whole(plans)
        self._write(whole, out, lambda tensors: write_folder(tensors, plans, out, source, max_shard_bytes, stop_ids))
        if lora is not None:
            factors = self.stage_plans("adapters")
            plan = list(chain(*factors))
            folder = out / ADAPTER_FOLDER
            whole = self.export_whole(factors, "adapters")
            self._write(whole, out, lambda tensors: write_adapters(tensors, plan, folder, lora, str(source)))

    def _write(
        self, tensors: Iterator[tuple[str, Tensor]], out: Path, write: Callable[[Iterator[tuple[str, Tensor]]], None]
    ) -> None:
        """Call `write` on rank 0. Raises ModelError on every rank."""
        problem: Exception | None = None
        if dist.get_rank() == 0:
            try:
                write(tensors)
            except Exception as error:  # raised below, on all ranks
                problem = error
        exhaust(tensors)  # after an error on rank 0 the other ranks still wait in the gathers
        with same_error(self.device):
            if problem is not None:
                what = f"{type(problem).__name__}: {problem}"
                raise ModelError(f"the student cannot be saved to {out}: {what}") from problem

    @abstractmethod
    def snapshot(self, *, copies: bool = True) -> Snapshot:
        """Start to copy this rank's state for an exact resume to host memory. Not a collective.

        The next optimizer step waits until the copy has finished.

        Args:
            copies: False: the snapshot has the live states. Nothing may change them before its release.
        """

    @abstractmethod
    def load_checkpoint(self, folder: str | Path) -> None:
        """Continue from the snapshots of all ranks in `folder`.

        With the same parallel layout the resume is bit-exact. With another one the states are resharded.

        Raises:
            CheckpointError: there is none, or it is damaged or belongs to another student. The student cannot be used
                afterwards.
        """

    def _add(self, micro_batches: Sequence[MicroBatch], *, completes: bool) -> BatchSums:
        """Add the gradients of a part; return the sums over the parts of its batch so far."""
        before = self._early_sums
        self._early_sums = None
        if before is None:
            self._zero_grads()
        self.loss.spec = self.loss.spec.at(self.step)
        sums = self._run(micro_batches, backward=True, completes=completes)
        return sums if before is None else before.plus(sums)

    @abstractmethod
    def _run(self, micro_batches: Sequence[MicroBatch], *, backward: bool, completes: bool = True) -> BatchSums:
        """Run the forward pass and, with `backward`, the backward pass of one global batch or of a part of it.

        Args:
            completes: no other part of the batch follows.
        """

    @abstractmethod
    def _zero_grads(self) -> None: ...

    @abstractmethod
    def _grad_norm(self, n_loss_tokens: int) -> float:
        """Return the global norm of the token-mean gradient, before clipping."""

    @abstractmethod
    def _update(self, lr: float, grad_norm: float, n_loss_tokens: int) -> None:
        """Clip the gradients, wait for `_host_copies`, and update weights and optimizer state."""


def build_loss(args: StudentArgs, shard: VocabShard, columns: Columns, n_head_rows: int) -> DistillLoss:
    """Return the loss of a student whose rank has the logits of `shard`, of the loss rows in its columns.

    Raises ConfigError: this host does not have a loss, or triton for a GPU.
    """
    shard = replace(shard, n_valid=args.get("n_vocab") or shard.n_valid)
    for term in args["loss"].divergences:
        divergence_of(term.name)  # a function that this host does not have is an error here, not in the first step
    device = args["device"]
    kernels = row_kernels(device)
    log.info("loss kernels: %s", kernels.name)
    comparison = args.get("comparison")
    units = None
    if isinstance(comparison, TokenizerPair) and n_head_rows:
        units = UnitTables(comparison, shard=shard, n_local=n_head_rows, device=device)
    return DistillLoss(
        args["loss"],
        tuple(args.get("signals", ("topk",))),
        shard,
        kernels,
        chunk_bytes=logits_chunk_bytes(on_cpu=device.type == "cpu"),
        units=units,
        columns=columns,
    )

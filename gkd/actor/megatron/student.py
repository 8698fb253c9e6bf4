"""The student as one object per rank: train_step, evaluate, export, save, resume.

Road of one batch: everything between `MicroBatch` and the next policy version. Every method is a
collective over all ranks of the actor, and all ranks get the same answer, or the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from gkd.actor.common.base import no_phase
from gkd.actor.common.host_copies import HostCopies, Snapshot
from gkd.actor.common.optim_spec import OptimSpec
from gkd.actor.common.step import BatchSums, diagnostics, evaluation, not_finite, teacher_head_rows
from gkd.actor.megatron import checkpoint
from gkd.actor.megatron.cpu_shim import install_cpu_shim
from gkd.actor.megatron.groups import init_groups, probe_groups
from gkd.actor.megatron.hf_export import export_plan, iter_hf_tensors
from gkd.actor.megatron.hf_save import save_hf
from gkd.actor.megatron.layout import ParallelLayout
from gkd.actor.megatron.model import build_model
from gkd.actor.megatron.optim import build_optimizer, clip_and_step, prepare_grads, set_lr
from gkd.actor.megatron.pipeline import run_batch, run_logits
from gkd.config.loss_spec import LossSpec
from gkd.handles import TrainStats
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.reduce import token_mean
from gkd.loss.row_kernels import row_kernels
from gkd.loss.vocab_parallel import VocabShard
from gkd.memory.states import GRADS, OPTIMIZER, PARAMS, States, optimizer_tensors
from gkd.types import MicroBatch
from teacher_server.wire.protocol import Signal


class MegatronStudent:
    """One rank of the student model, its optimizer and its position in the run."""

    def __init__(
        self,
        model_path: str | Path,
        layout: ParallelLayout,
        *,
        optim: OptimSpec,
        loss: LossSpec,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        signals: Sequence[Signal] = ("topk",),
        fused_lm_head: bool = True,
        logits_chunk_mib: int = 128,
        loss_kernel: str = "auto",
        recompute: str = "none",
        sequence_parallel: bool = False,
        collective_timeout_s: float = 1800.0,
        on_phase: Callable[[str], None] = no_phase,
    ) -> None:
        """Builds the model from a HF folder. torch.distributed must be initialised; blocks for all ranks.

        Args:
            layout: this rank's place in the actor's world.
            dtype: of weights and activations; gradients and optimizer state are float32.
            seed: of torch and of Megatron's RNG tracker.
            signals: what the teacher gives; `hidden` needs `set_teacher_head` before the first batch.
            fused_lm_head: LM head and loss together, `logits_chunk_mib` of logits at a time; else all of a micro-batch.
            loss_kernel: see `gkd.loss.row_kernels.row_kernels`.
            recompute, sequence_parallel: see `build_model`.
            collective_timeout_s: a collective of Megatron's groups that takes longer ends the process.
            on_phase: is told what comes next.

        Raises:
            ModelError, ConfigError, ClusterError: see `build_model` and `init_groups`.
        """
        self.layout, self.optim, self.device, self._fused = layout, optim, device, fused_lm_head
        self.step = 0  # optimizer steps made so far
        install_cpu_shim()
        on_phase("making Megatron's groups")
        groups = init_groups(layout, collective_timeout_s)
        probe_groups(groups, device, on_phase)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self.model = build_model(
            model_path,
            layout,
            groups,
            dtype=dtype,
            device=device,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
            on_phase=on_phase,
        )
        on_phase("making the optimizer")
        config = self.model.config
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        self._ddps = [DistributedDataParallel(config, ddp_config, chunk) for chunk in self.model.chunks]
        self.loss = DistillLoss(
            loss,
            tuple(signals),
            VocabShard(self.model.vocab_start, self.model.dims.vocab_size, groups.tp if layout.tp > 1 else None),
            row_kernels(loss_kernel, device),
            chunk_bytes=logits_chunk_mib << 20,
        )
        no_sync = [ddp.no_sync for ddp in self._ddps]
        config.no_sync_func = no_sync if layout.vpp > 1 else no_sync[0]
        config.finalize_model_grads_func = finalize_model_grads
        self._optimizer = build_optimizer(self._ddps, optim, dtype=dtype)
        self._host_copies = HostCopies(device)
        self.states = States(device, self._live_states, before=self._host_copies.settle)

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> TrainStats:
        """One optimizer step on one global batch; `self.step` grows by one.

        Args:
            micro_batches: of this DP rank; see `run_batch`.

        Raises:
            NumericsError: loss or gradient is not finite. Nothing has moved: neither weights, nor
                optimizer state, nor `self.step`.
            DataError: no loss token in the global batch, or a malformed micro-batch.
        """
        sums = self._forward_backward(micro_batches)
        loss = token_mean(sums.values["total"], sums.n_loss_tokens)
        grad_norm = prepare_grads(self._optimizer)
        if (error := not_finite(self.step, loss, grad_norm)) is not None:
            self._zero_grads()
            raise error
        lr = self.optim.lr_at(self.step)
        set_lr(self._optimizer, self.optim, lr)
        self._host_copies.settle()
        clip_and_step(self._optimizer, clip_grad=self.optim.clip_grad, grad_norm=grad_norm)
        self.step += 1
        return TrainStats(loss, sums.n_loss_tokens, grad_norm, lr, diagnostics(self.loss, sums))

    def evaluate(
        self, micro_batches: Sequence[MicroBatch], on_rows: Callable[[Tensor], None] | None = None
    ) -> TrainStats:
        """The loss of one global batch, without gradients or a step. Raises as `train_step` does.

        Args:
            on_rows: gets the numbers of each token, see `DistillLoss.on_rows`; last stage only.
        """
        with self.loss.evaluating(on_rows):
            sums = run_batch(self._ddps, self.model, micro_batches, self.loss, fused=self._fused, forward_only=True)
        return evaluation(self.step, self.loss, sums)

    def set_teacher_head(self, head: np.ndarray) -> None:
        """Takes this rank's rows of the teacher's LM head, for the signal `hidden`. Does nothing off the last stage.

        Args:
            head: [V, D] float32, over the vocabulary that student and teacher share.

        Raises:
            DataError: it has fewer rows than the student's vocabulary.
        """
        if not self.layout.is_last_stage:
            return
        self.loss.teacher_head = teacher_head_rows(head, self.loss, len(self.model.lm_head), self.device)

    @property
    def teacher_hidden_size(self) -> int | None:
        """D of the teacher's LM head, where there is one here."""
        head = self.loss.teacher_head
        return None if head is None else head.shape[1]

    @property
    def n_vocab(self) -> int:
        """Token ids are below it."""
        return self.model.dims.vocab_size

    def export_plan(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """(HF name, shape, dtype) of what `export` yields, in its order; moves no data."""
        return export_plan(self.model)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """This stage's weights as full HF tensors; see `iter_hf_tensors`."""
        return iter_hf_tensors(self.model)

    def save_hf(self, out_dir: str | Path, source_dir: str | Path) -> None:
        """Writes the whole student as a HF folder; see `gkd.actor.megatron.hf_save.save_hf`."""
        save_hf(self.model, out_dir, source_dir)

    def snapshot(self) -> Snapshot:
        """This rank's share of what an exact resume needs. No collective; the next step waits for the copy."""
        return checkpoint.snapshot(self._host_copies, self.model, self._optimizer, step=self.step)

    def load_checkpoint(self, folder: str | Path) -> None:
        """Continues from a checkpoint: in the same layout bit by bit, in another one resharded.

        Raises:
            CheckpointError: see `gkd.actor.megatron.checkpoint.load`.
        """
        self._host_copies.settle()
        self.step = checkpoint.load(folder, self.model, self._optimizer)

    def forward_logits(self, tokens: Tensor) -> Tensor | None:
        """[B, S] tokens -> [B, S, V] float32 logits on the last stage, None elsewhere. For tests."""
        return run_logits(self._ddps, self.model, tokens)

    def grads_by_hf_name(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """This stage's gradients of one global batch, full float32 tensors by HF name; makes no step. For diagnosis."""
        self._forward_backward(micro_batches, force_all_reduce=True)
        grads = {name: grad.clone() for name, grad in iter_hf_tensors(self.model, value=lambda p: p.main_grad)}  # type: ignore[attr-defined]
        self._zero_grads()
        return grads

    def _forward_backward(self, micro_batches: Sequence[MicroBatch], *, force_all_reduce: bool = False) -> BatchSums:
        self._zero_grads()
        return run_batch(
            self._ddps,
            self.model,
            micro_batches,
            self.loss,
            fused=self._fused,
            forward_only=False,
            force_all_reduce=force_all_reduce,
        )

    def _live_states(self) -> dict[str, list[Tensor]]:
        """All that lasts from one step to the next; a float32 model's weights are the optimizer's as well."""
        buffers = [b for ddp in self._ddps for b in [*ddp.buffers, *ddp.expert_parallel_buffers]]
        moved = {PARAMS: [param.data for chunk in self.model.chunks for param in chunk.parameters()]}
        moved[GRADS] = [buffer.grad_data for buffer in buffers]
        moved[OPTIMIZER] = []
        if self.loss.teacher_head is not None:
            moved[PARAMS].append(self.loss.teacher_head)
        for part in self._optimizer.chained_optimizers:
            inner = part.optimizer
            if inner is None:  # this rank's range is padding alone
                continue
            mains = [param for group in inner.param_groups for param in group["params"]]
            moved[GRADS] += [param.grad for param in mains if param.grad is not None]
            moved[OPTIMIZER] += [*(param.data for param in mains), *optimizer_tensors(inner)]
        return moved

    def _zero_grads(self) -> None:
        for ddp in self._ddps:
            ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

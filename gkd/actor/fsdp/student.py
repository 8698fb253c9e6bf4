"""The student as one object per rank, on torch's fully_shard: train_step, evaluate, export, save, resume.

Road of one batch: everything between `MicroBatch` and the next policy version. Every rank of the world is a
data-parallel one. Every method is a collective over all of them, and all get the same answer, or the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gkd.actor.common.agree import same_error
from gkd.actor.common.base import no_phase
from gkd.actor.common.host_copies import HostCopies, Snapshot
from gkd.actor.common.optim_spec import OptimSpec
from gkd.actor.common.step import (
    BatchSums,
    check_before,
    diagnostics,
    empty_micro_batch,
    evaluation,
    not_finite,
    teacher_head_rows,
    token_counts,
)
from gkd.actor.fsdp import checkpoint
from gkd.actor.fsdp.attention import Pack
from gkd.actor.fsdp.lora import add_adapters, disabled_adapters, init_adapters
from gkd.actor.fsdp.model import build_on_meta, layer_list, reset, reshard, shard
from gkd.actor.fsdp.optim import (
    build_adamw,
    clip_factor,
    global_grad_norm,
    host_threads,
    local_grads,
    scale_grads,
    threads_per_rank,
)
from gkd.actor.fsdp.probe import probe
from gkd.actor.fsdp.weights import Place, full_tensor, load_weights, match_files
from gkd.config.loss_spec import LossSpec
from gkd.config.schema import LoraConfig
from gkd.data.collate import bare
from gkd.errors import DataError, ModelError
from gkd.handles import TrainStats
from gkd.hf.files import open_tensors, weights_digest
from gkd.hf.folder import TensorPlan, exhaust, write_folder
from gkd.log import get_logger
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.reduce import sum_over_group, token_mean
from gkd.loss.row_kernels import row_kernels
from gkd.loss.sampled_logprobs import logprobs_of_hidden, logprobs_of_logits
from gkd.loss.vocab_parallel import VocabShard
from gkd.memory.states import GRADS, OPTIMIZER, PARAMS, States, optimizer_tensors
from gkd.types import MicroBatch
from teacher_server.wire.protocol import Signal

log = get_logger("actor.fsdp")


class FsdpStudent:
    """One rank of the student model, its optimizer and its position in the run."""

    def __init__(
        self,
        model_path: str | Path,
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
        packing: bool = True,
        cpu_offload: bool = False,
        lora: LoraConfig | None = None,
        trust_remote_code: bool = False,
        on_phase: Callable[[str], None] = no_phase,
    ) -> None:
        """Builds the model from a HF folder. torch.distributed must be initialised; blocks for all ranks.

        Args:
            dtype: of activations and of what is exported. Trained weights, gradients and optimizer state are float32.
            seed: of the adapters' first values.
            signals: what the teacher gives; `hidden` needs `set_teacher_head` before the first batch.
            fused_lm_head: LM head and loss together, `logits_chunk_mib` of logits at a time; else all of a micro-batch.
            loss_kernel: see `gkd.loss.row_kernels.row_kernels`.
            recompute: none | full: a second forward pass of each layer for the memory of its activations.
            packing: take packed micro-batches; padded ones are taken either way.
            cpu_offload: keep shards, gradients and optimizer state in host memory.
            lora: train adapters of this rank instead of all weights; None or rank 0: all weights.
            on_phase: is told what comes next.

        Raises:
            ModelError: the folder is broken or not a causal language model.
            ConfigError: the model does not bear packing, the fused LM head or these adapters.
        """
        self.optim, self.device = optim, device
        self.step = 0  # optimizer steps made so far
        self._packing, self._fused, self._dtype = packing, fused_lm_head, dtype
        folder, adapted = Path(model_path), lora is not None and lora.rank > 0
        on_phase("building the model")
        with same_error(device):
            # Trained weights are float32, so that small updates are not rounded away; frozen ones need not be.
            hf = build_on_meta(
                folder,
                dtype=dtype if adapted else torch.float32,
                packing=packing,
                trust_remote_code=trust_remote_code,
            )
            with open_tensors(folder) as tensors:
                self._places = match_files(hf, folder, tensors)
            self._adapters = add_adapters(hf, lora, self._places) if adapted and lora is not None else {}
            self._base_digest = weights_digest(folder) if adapted else ""
            n_layers = len(layer_list(hf))
        self._n_vocab: int = hf.config.get_text_config().vocab_size
        self.model = shard(hf, device=device, dtype=dtype, recompute=recompute == "full", offload=cpu_offload)
        on_phase("loading weights")
        with same_error(device):
            load_weights(folder, self._places)
        init_adapters(self._adapters, seed)
        on_phase("trying a forward pass")
        probe(self.model, n_layers=n_layers, packing=packing, fused=fused_lm_head, device=device)
        on_phase("making the optimizer")
        self._trained = [param for param in self.model.parameters() if param.requires_grad]
        self._optimizer = build_adamw(self._trained, optim)
        self._n_threads = threads_per_rank() if cpu_offload and device.type == "cuda" else torch.get_num_threads()
        self.loss = DistillLoss(
            loss,
            tuple(signals),
            VocabShard(0, self._n_vocab, None),
            row_kernels(loss_kernel, device),
            chunk_bytes=logits_chunk_mib << 20,
        )
        self._host_copies = HostCopies(torch.device("cpu") if cpu_offload else device)
        self._on_host = cpu_offload
        self.states = States(device, self._live_states, before=self._host_copies.settle)
        n_trained = sum(param.numel() for param in self._trained)
        log.info(
            "%s: %d layers, %d trained parameters over %d ranks",
            hf.config.model_type,
            n_layers,
            n_trained,
            dist.get_world_size(),
        )

    @property
    def n_vocab(self) -> int:
        """Token ids are below it."""
        return self._n_vocab

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> TrainStats:
        """One optimizer step on one global batch; `self.step` grows by one.

        Args:
            micro_batches: of this rank, in host memory; may be empty, and differ in number and size between ranks.

        Raises:
            NumericsError: loss or gradient is not finite. Nothing has moved: neither weights, nor
                optimizer state, nor `self.step`.
                Or a token id is not in the vocabulary; then, too, before anything moved.
            DataError: no loss token in the global batch, or a malformed micro-batch.
        """
        self._optimizer.zero_grad()
        sums = self._run(micro_batches, backward=True)
        loss = token_mean(sums.values["total"], sums.n_loss_tokens)
        grad_norm = global_grad_norm(self._trained, self.device) / sums.n_loss_tokens
        if (error := not_finite(self.step, loss, grad_norm)) is not None:
            self._optimizer.zero_grad()
            raise error
        lr = self.optim.lr_at(self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        with host_threads(self._n_threads):
            scale_grads(self._trained, clip_factor(grad_norm, self.optim.clip_grad) / sums.n_loss_tokens)
            self._host_copies.settle()
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return TrainStats(loss, sums.n_loss_tokens, grad_norm, lr, diagnostics(self.loss, sums))

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Sequence[MicroBatch], on_rows: Callable[[Tensor], None] | None = None
    ) -> TrainStats:
        """The loss of one global batch, without gradients or a step. Raises as `train_step` does.

        Args:
            on_rows: gets the numbers of each token, see `DistillLoss.on_rows`.
        """
        with self.loss.evaluating(on_rows):
            sums = self._run(micro_batches, backward=False)
        return evaluation(self.step, self.loss, sums)

    @torch.no_grad()
    def compute_logprobs(self, micro_batches: Sequence[MicroBatch], *, disable_adapter: bool = False) -> list[Tensor]:
        """What the student says of the tokens that follow the loss rows, at the loss's temperature.

        Args:
            micro_batches: of this rank; may be empty, and differ in number and size between ranks. No targets are read.
            disable_adapter: as if there were no adapters, that is, what the folder it was built from says. They are
                there again afterwards, also after an error.

        Returns:
            Of each micro-batch [N] float32, nats, in host memory.

        Raises:
            NumericsError, DataError: see `train_step`.
        """
        with same_error(self.device, count=len(micro_batches)) as agreement:
            for batch in bare(micro_batches):
                self._check(batch, micro_batches, needs_scores=False)
                if batch.n_loss_tokens and int(batch.loss_index.max()) + 1 >= batch.tokens.numel():
                    raise DataError("a loss row at the end of its micro-batch, where no token follows")
        found = []
        try:
            with disabled_adapters(self.model) if disable_adapter else nullcontext():
                for i in range(agreement.largest):
                    batch = micro_batches[i] if i < len(micro_batches) else empty_micro_batch()
                    logprobs = self._logprobs(batch)
                    found += [logprobs.float().cpu()] if i < len(micro_batches) else []
        except BaseException:
            reset(self.model)
            raise
        reshard(self.model)
        return found

    def set_teacher_head(self, head: np.ndarray) -> None:
        """Takes the teacher's LM head, for the signal `hidden`.

        Args:
            head: [V, D] float32, over the vocabulary that student and teacher share.

        Raises:
            DataError: it has fewer rows than the student's vocabulary.
        """
        self.loss.teacher_head = teacher_head_rows(head, self.loss, self._n_vocab, self.device)

    @property
    def teacher_hidden_size(self) -> int | None:
        """D of the teacher's LM head, where there is one."""
        head = self.loss.teacher_head
        return None if head is None else head.shape[1]

    def export_plan(self) -> list[TensorPlan]:
        """(HF name, shape, dtype) of what `export` yields, in its order; moves no data."""
        return [
            (part.name, part.shape, self._export_dtype(place.tensor))
            for place in self._places.values()
            for part in place.parts
        ]

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The whole student as full tensors, adapters added to the weights they belong to, named as in its files.

        Collective over the world: every rank must run the iterator to its end. One weight is gathered at a time; all
        experts of a layer may be one.
        """
        for name, place in self._places.items():
            tensor = full_tensor(place.tensor, self.device, self._export_dtype(place.tensor))
            adapter = self._adapters.get(name)
            whole = tensor if adapter is None else adapter.merged(tensor)
            for part in place.parts:
                yield part.name, part.cut_from(whole)

    def save_hf(self, out_dir: str | Path, source_dir: str | Path) -> None:
        """Writes weights, and config, generation config and tokenizer as in `source_dir`. Collective, blocks.

        Raises:
            ModelError: `out_dir` exists or cannot be written; on every rank.
        """
        tensors, problem = self.export(), None
        if dist.get_rank() == 0:
            try:
                write_folder(tensors, [self.export_plan()], Path(out_dir), Path(source_dir))
            except Exception as error:  # raised below, on all ranks
                problem = error
        exhaust(tensors)  # after an error the other ranks still gather, and must not be left waiting
        with same_error(self.device):
            if problem is not None:
                what = f"{type(problem).__name__}: {problem}"
                raise ModelError(f"the student cannot be saved to {out_dir}: {what}") from problem

    def snapshot(self) -> Snapshot:
        """This rank's share of what an exact resume needs. No collective; the next step waits for the copy."""
        reshard(self.model)  # gathered parameters are copies, and no pieces
        meta = self._meta() | {"step": self.step}
        return checkpoint.snapshot(self._host_copies, self._trained_places(), self._optimizer, meta)

    def load_checkpoint(self, folder: str | Path) -> None:
        """Continues from a checkpoint: with as many ranks as before bit by bit, with others cut anew.

        Raises:
            CheckpointError: see `gkd.actor.fsdp.checkpoint.load`.
        """
        self._host_copies.settle()
        places, meta = self._trained_places(), self._meta()
        self.step = checkpoint.load(folder, places, self._optimizer, meta, rank=dist.get_rank(), device=self.device)

    def grads_by_hf_name(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """Gradients of one global batch, full float32 tensors named as in the files; makes no step. For diagnosis."""
        self._optimizer.zero_grad()
        sums = self._run(micro_batches, backward=True)
        scale_grads(self._trained, 1.0 / sums.n_loss_tokens)
        grads: dict[str, Tensor] = {}
        for place in self._places.values():
            if (grad := place.tensor.grad) is not None:
                whole = full_tensor(grad, self.device)
                grads |= {part.name: part.cut_from(whole) for part in place.parts}
        self._optimizer.zero_grad()
        return grads

    def _run(self, micro_batches: Sequence[MicroBatch], *, backward: bool) -> BatchSums:
        """Forward, with `backward` also backward, over the global batch; gradients are sums over its loss tokens."""
        with same_error(self.device, count=len(micro_batches)) as agreement:
            for batch in bare(micro_batches):
                self._check(batch, micro_batches)
        totals = torch.zeros(2 + len(self.loss.report_names), dtype=torch.float64, device=self.device)
        try:
            # Every rank joins every gather and reduction, so one with fewer micro-batches runs some without loss.
            for i in range(max(1, agreement.largest)):
                batch = micro_batches[i] if i < len(micro_batches) else empty_micro_batch()
                loss_sum, values = self._forward(batch)
                totals += values
                if backward:
                    loss_sum.backward()
        except BaseException:
            reset(self.model)
            self._optimizer.zero_grad()
            raise
        reshard(self.model)  # a forward pass without a backward leaves parameters gathered
        n_tokens, n_on_policy, *sums = sum_over_group(totals, dist.group.WORLD).tolist()
        return BatchSums(round(n_tokens), round(n_on_policy), dict(zip(self.loss.report_names, sums, strict=True)))

    def _check(self, batch: MicroBatch, micro_batches: Sequence[MicroBatch], *, needs_scores: bool = True) -> None:
        """Args: batch: of `bare(micro_batches)`. Raises DataError, NumericsError: see `check_before`."""
        check_before(self.loss, batch, micro_batches, needs_scores=needs_scores)
        if batch.cu_seqlens is not None and not self._packing:
            raise DataError("the student was built with actor.packing=false and got a packed micro-batch")

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The sum of a micro-batch's losses, and [2 + n] float64: its token counts and the loss's sums."""
        targets = batch.targets
        assert targets is not None  # checked
        loss_sum, values = self._on(batch, targets=targets, loss=self.loss, fused=self._fused)
        return loss_sum, torch.cat([token_counts(batch, targets, self.device), values])

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        """[N] of the token after each of the micro-batch's loss rows."""
        ids = batch.tokens.flatten()[batch.loss_index + 1].to(self.device)
        if self._fused:
            found: Tensor = self._on(batch, use=partial(logprobs_of_hidden, self.loss, ids=ids))
            return found
        return logprobs_of_logits(self.loss, self._on(batch), ids)

    def _on(self, batch: MicroBatch, **what: Any) -> Any:
        """The model on a micro-batch; `what` as of `LossModel.forward`."""
        pack, positions = None, None
        if batch.cu_seqlens is not None:
            longest = int(batch.cu_seqlens.diff().max())
            pack = Pack(batch.cu_seqlens.to(self.device), longest)
            positions = batch.position_ids.to(self.device)
        tokens, rows = batch.tokens.to(self.device), batch.loss_index.to(self.device)
        return self.model(tokens, rows, position_ids=positions, pack=pack, **what)

    def _trained_places(self) -> dict[str, Place]:
        """What the optimizer updates, by the name it has in a checkpoint."""
        if not self._adapters:
            return {name: place for name, place in self._places.items() if place.tensor.requires_grad}
        trained: dict[str, Place] = {}
        for name, adapter in self._adapters.items():
            stem = name.removesuffix(".weight")
            trained |= {f"{stem}.lora_A.weight": adapter.a, f"{stem}.lora_B.weight": adapter.b}
        return trained

    def _meta(self) -> dict[str, Any]:
        scale = next((adapter.scale for adapter in self._adapters.values()), 0.0)
        return checkpoint.student_meta(
            self._trained_places(),
            dtype=self._dtype,
            scale=scale,
            base=self._base_digest,
            world_size=dist.get_world_size(),
            device=self.device,
        )

    def _live_states(self) -> dict[str, list[Tensor]]:
        """All that lasts from one step to the next; with cpu_offload it is in host memory and stays there."""
        head = [] if self.loss.teacher_head is None else [self.loss.teacher_head]
        if self._on_host:
            return {PARAMS: head}
        params = [param.data for param in self.model.parameters()]
        return {
            PARAMS: [*params, *head],
            GRADS: local_grads(self._trained),
            OPTIMIZER: optimizer_tensors(self._optimizer),
        }

    def _export_dtype(self, tensor: Tensor) -> torch.dtype:
        """Weights leave in the model's dtype, buffers as they are."""
        return self._dtype if isinstance(tensor, torch.nn.Parameter) else tensor.dtype

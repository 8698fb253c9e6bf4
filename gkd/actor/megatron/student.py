"""Train the student with Megatron-core; one object per rank.

Inputs are micro-batches; outputs are step statistics, exported weights and checkpoint snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from gkd.actor.common.agree import distinct_groups, probe_group
from gkd.actor.common.base import Student, StudentArgs, build_loss
from gkd.actor.common.hf_folder import TensorPlan
from gkd.actor.common.host_copies import HostCopies, Snapshot
from gkd.actor.common.optim_spec import clip_factor
from gkd.actor.common.step import BatchSums
from gkd.actor.megatron import checkpoint
from gkd.actor.megatron.cpu_shim import install_cpu_shim
from gkd.actor.megatron.hf_export import export_plan, iter_hf_tensors
from gkd.actor.megatron.layout import ParallelLayout
from gkd.actor.megatron.lora import disabled_adapters
from gkd.actor.megatron.model import build_model
from gkd.actor.megatron.optim import VectorGrads, build_optimizer
from gkd.actor.megatron.pipeline import run_batch, run_logprobs
from gkd.errors import ClusterError
from gkd.hf.model_folder import weights_digest
from gkd.loss.vocab_parallel import VocabShard
from gkd.memory.states import GRADS, OPTIMIZER, PARAMS, States, optimizer_tensors
from gkd.types import MicroBatch
from gkd.weight_sync.buckets import Content


class MegatronStudent(Student):
    """See `Student`. `export` and `export_plan` cover the tensors of this rank's pipeline stage."""

    def __init__(
        self,
        model_path: str | Path,
        layout: ParallelLayout,
        *,
        layers: str = "auto",
        overlap_grad_reduce: bool = False,
        recompute: str = "none",
        sequence_parallel: bool = False,
        collective_timeout_s: float = 1800.0,
        **args: Unpack[StudentArgs],
    ) -> None:
        """Build the model from a HF folder. Collective; blocks.

        Args:
            layout: this rank's position in the actor's world.
            layers, recompute, sequence_parallel: see `build_model`.
            overlap_grad_reduce: reduce gradients during the last backward pass instead of after it. Ignored with
                experts, of which one without tokens has no gradient to reduce, and with several chunks.
            collective_timeout_s: timeout of a collective of Megatron's groups; the process ends when it expires.
            args: see `StudentArgs`. `seed` is for torch's generators, Megatron's RNG tracker and the adapters.

        Raises:
            ModelError, ConfigError, ClusterError: see `build_model` and `init_groups`.
        """
        super().__init__(args)
        self.layout = layout
        self.stage = layout.pp_rank
        self.n_stages = layout.pp
        on_phase = args.get("on_phase", lambda phase: None)
        seed = args["seed"]
        dtype = args["dtype"]
        device = args["device"]
        adapted = self.lora is not None
        install_cpu_shim()
        on_phase("creating Megatron's process groups")
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
            layers=layers,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
            lora=self.lora,
            seed=seed,
            on_phase=on_phase,
        )
        self.group = groups.dp_cp
        self.columns = self.model.columns
        self.n_head_rows = len(self.model.lm_head) if layout.is_last_stage else 0
        self._base_digest = weights_digest(Path(model_path)) if adapted else ""
        on_phase("creating the optimizer")
        config = self.model.config
        overlap_grad_reduce = overlap_grad_reduce and layout.vpp == 1 and self.model.dims.moe is None
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap_grad_reduce
        )
        self._ddps = [DistributedDataParallel(config, ddp_config, chunk) for chunk in self.model.chunks]
        # See `cpu_shim`. An overlapped reduction waits for autograd's gradient, and whether it overlaps must not change
        # the order of a sum.
        for name, param in self.model.named_params():
            if "word_embeddings" in name and layout.world_size == 1 and hasattr(param, "main_grad"):
                param.adds_gradient_in_place = True  # type: ignore[attr-defined]
        self._vector_grads = VectorGrads(() if overlap_grad_reduce else self.model.named_params())
        tp_group = groups.tp if layout.tp > 1 else None
        dims = self.model.dims
        vocab_start = layout.tp_rank * (layout.padded_vocab_size(dims) // layout.tp)
        shard = VocabShard(vocab_start, dims.vocab_size, tp_group)
        self.loss = build_loss(args, shard, self.columns, self.n_head_rows)
        no_sync = [ddp.no_sync for ddp in self._ddps]
        config.no_sync_func = no_sync if layout.vpp > 1 else no_sync[0]
        config.finalize_model_grads_func = self._finalize_grads
        self._n_tokens = torch.zeros((), dtype=torch.int, device=device)  # tokens of the batch so far
        self._completes = True
        self._optimizer = build_optimizer(self._ddps, self.optim, dtype=torch.float32 if adapted else dtype)
        self._host_copies = HostCopies(device)
        self.states = States(device, self.live_states, before=self._host_copies.settle)

    def compute_logprobs(self, micro_batches: Sequence[MicroBatch], *, disable_adapter: bool = False) -> list[Tensor]:
        """See `Student.compute_logprobs`; for `micro_batches` see `run_batch`."""
        with disabled_adapters(self.model.chunks) if disable_adapter else nullcontext():
            return run_logprobs(self._ddps, self.model, micro_batches, self.loss, fused=self._fused)

    def export_plan(self, content: Content = "merged") -> list[TensorPlan]:
        return export_plan(self.model, content)

    def export(self, content: Content = "merged") -> Iterator[tuple[str, Tensor]]:
        return iter_hf_tensors(self.model, content)

    def snapshot(self, *, copies: bool = True) -> Snapshot:
        meta = self._meta() | {"step": self.step, "skipped": self.skipped}
        pieces = checkpoint.pieces(self.model, self._optimizer)
        return self._host_copies.snapshot(pieces, meta, checkpoint.generators(), copies=copies)

    def load_checkpoint(self, folder: str | Path) -> None:
        self._host_copies.settle()
        self.step, self.skipped = checkpoint.load(folder, self.model, self._optimizer, self._meta())

    def _meta(self) -> dict[str, Any]:
        return checkpoint.student_meta(self.model, dtype=self._dtype, base=self._base_digest)

    def _run(self, micro_batches: Sequence[MicroBatch], *, backward: bool, completes: bool = True) -> BatchSums:
        self._completes = completes
        with nullcontext() if completes else self._no_reduction():
            return run_batch(
                self._ddps, self.model, micro_batches, self.loss, fused=self._fused, forward_only=not backward
            )

    @contextmanager
    def _no_reduction(self) -> Iterator[None]:
        """Leave the gradients of the block on each rank, including the last backward pass's."""
        config = self.model.config
        no_sync = config.no_sync_func
        config.no_sync_func = nullcontext
        try:
            with ExitStack() as stack:
                for ddp in self._ddps:
                    stack.enter_context(ddp.no_sync())
                yield
        finally:
            config.no_sync_func = no_sync

    def _finalize_grads(self, chunks: list[torch.nn.Module], n_tokens: Tensor, *args: Any, **options: Any) -> None:
        """Reduce the gradients of a complete batch, and divide them by its number of loss tokens.

        Args:
            n_tokens: of the last part, on this rank; 0 but on the last pipeline stage.
        """
        self._vector_grads.add()
        self._n_tokens = self._n_tokens + n_tokens
        if self._completes:
            finalize_model_grads(chunks, self._n_tokens, *args, **options)

    def _zero_grads(self) -> None:
        self._n_tokens = torch.zeros_like(self._n_tokens)
        self._vector_grads.add()  # otherwise those of a failed batch would be added later
        for ddp in self._ddps:
            ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _grad_norm(self, n_loss_tokens: int) -> float:
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())  # `finalize_model_grads` has divided by the number of tokens

    def _update(self, lr: float, grad_norm: float, n_loss_tokens: int) -> None:
        for group in self._optimizer.param_groups:  # the multiplier of the weight decay is 0 for norms and biases
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self.optim.weight_decay * group["wd_mult"]
        self._host_copies.settle()
        factor = clip_factor(grad_norm, self.optim.clip_grad)
        params = [param for part in self._optimizer.chained_optimizers for param in part.get_parameters()]
        grads = [param.grad for param in params if param.grad is not None]
        if factor < 1 and grads:  # none if a rank's range is only padding
            torch._foreach_mul_(grads, factor)
        self._optimizer.step_with_ready_grads()

    def live_states(self) -> dict[str, list[Tensor]]:
        """Return the tensors that persist between steps, by kind.

        A float32 model shares its weights with the optimizer, so these are listed twice.
        """
        buffers = [b for ddp in self._ddps for b in [*ddp.buffers, *ddp.expert_parallel_buffers]]
        states = {PARAMS: [param.data for chunk in self.model.chunks for param in chunk.parameters()]}
        states[GRADS] = [buffer.grad_data for buffer in buffers]
        states[OPTIMIZER] = []
        if self.loss.teacher_head is not None:
            states[PARAMS].append(self.loss.teacher_head)
        for part in self._optimizer.chained_optimizers:
            inner = part.optimizer
            if inner is None:  # this rank's range is padding only
                continue
            mains = [param for group in inner.param_groups for param in group["params"]]
            states[GRADS] += [param.grad for param in mains if param.grad is not None]
            states[OPTIMIZER] += [*(param.data for param in mains), *optimizer_tensors(inner)]
        return states


# Groups that a training step uses. Megatron creates more, which connect on first use.
_USED = ("tp", "cp", "pp", "dp", "dp_cp", "mp", "embd", "ep", "expt_dp", "tp_ep", "tp_ep_pp", "intra_dist_opt")


def init_groups(layout: ParallelLayout, timeout_s: float = 1800.0) -> ProcessGroupCollection:
    """Build Megatron's process groups over torch.distributed's world, once per process. Collective.

    Args:
        timeout_s: of a collective; rounded up to minutes.

    Returns:
        Megatron's bundle of groups: `tp`, `pp`, `dp`, `mp`, `embd` and more.

    Raises:
        ClusterError: Megatron is already initialized with other sizes.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
            # Gloo groups are used only by Megatron's own checkpoints.
            create_gloo_process_groups=False,
        )
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    )
    dims = (layout.tp, layout.pp, layout.vpp, layout.ep, layout.cp)
    if sizes != dims:
        built, wanted = (" ".join(map("{}={}".format, ("tp", "pp", "vpp", "ep", "cp"), axes)) for axes in (sizes, dims))
        raise ClusterError(
            f"Megatron's groups of this process have {built}, the layout has {wanted}. "
            "Fix: start a new process; groups are global to a process."
        )
    return ProcessGroupCollection.use_mpu_process_groups()


def probe_groups(groups: ProcessGroupCollection, device: torch.device, on_phase: Callable[[str], None]) -> None:
    """Run one small collective over each group of this rank that a step uses. Collective.

    Args:
        on_phase: called with the name of each group before its probe.

    Raises:
        ClusterError: see `probe_group`.
    """
    used_groups = {name: getattr(groups, name) for name in _USED}
    mine = {name: group for name, group in used_groups.items() if isinstance(group, dist.ProcessGroup)}
    for name, group in distinct_groups(mine).items():
        on_phase(f"probing group {name} of ranks {dist.get_process_group_ranks(group)}")
        probe_group(name, group, device)

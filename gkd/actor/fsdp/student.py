"""Train the student with torch's fully_shard; one object per rank. All ranks of the world share its states.

Inputs are micro-batches; outputs are step statistics, exported weights and checkpoint snapshots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from gkd.actor.common.agree import probe_group, same_error
from gkd.actor.common.base import Student, StudentArgs, build_loss
from gkd.actor.common.hf_folder import Readers, TensorPlan
from gkd.actor.common.host_copies import HostCopies, Snapshot
from gkd.actor.common.lora import merge
from gkd.actor.common.optim_spec import clip_factor
from gkd.actor.common.shards import KINDS, Piece, ShardReader, check_same_student, restore_rng, rng_state
from gkd.actor.common.step import BatchSums
from gkd.actor.fsdp.attention import check_columns
from gkd.actor.fsdp.compiled import compile_layers
from gkd.actor.fsdp.lora import add_adapters, disabled_adapters, init_adapters
from gkd.actor.fsdp.model import build_on_meta, freeze_vision, frozen_vision, layer_list, reshard, shard
from gkd.actor.fsdp.optim import build_adamw, global_grad_norm, host_threads, local_grads, scale_grads, threads_per_rank
from gkd.actor.fsdp.passes import run_batch, run_logprobs
from gkd.actor.fsdp.probe import probe
from gkd.actor.fsdp.weights import FilePart, Place, flat_rows, full_tensor, load_weights, match_files
from gkd.config.schema import Config
from gkd.config.schema_sections import Vision
from gkd.data.columns import Columns
from gkd.hf.model_folder import open_tensors, weights_digest
from gkd.log import get_logger
from gkd.loss.vocab_parallel import VocabShard
from gkd.memory.states import GRADS, OPTIMIZER, PARAMS, States, optimizer_tensors
from gkd.types import MicroBatch
from gkd.weight_sync.buckets import Content
from teacher_server.vision.processor import ImageProcessor

log = get_logger("actor.fsdp")


class FsdpStudent(Student):
    """See `Student`. Every rank exports the whole model, and every rank computes the loss."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        recompute: str = "none",
        compiles: str = "off",
        packing: bool = True,
        cp: int = 1,
        cpu_offload: bool = False,
        collective_timeout_s: float = 1800.0,
        trust_remote_code: bool = False,
        vision: Vision = "none",
        **args: Unpack[StudentArgs],
    ) -> None:
        """Build the model from a HF folder. Collective; blocks.

        Args:
            recompute: none | full. full: keep only the inputs of each layer and repeat its forward pass in the backward
                pass.
            compiles: auto | on | off: compile the layers, see the key actor.compile.
            packing: accept packed micro-batches. Padded ones are accepted in either case.
            cp: neighboring ranks that share each micro-batch; above 1 it needs `packing`.
            cpu_offload: keep shards, gradients and optimizer state in host memory.
            collective_timeout_s: timeout of a collective of the group of `cp` ranks.
            vision: what to do with the vision tower of a model for sequences with images.
            args: see `StudentArgs`. Trained weights are float32. `seed` initializes the adapters.

        Raises:
            ModelError: the folder is damaged or does not hold a causal language model.
            ConfigError: the model does not support packing, the fused LM head or these adapters.
            ClusterError: see `probe_group`.
        """
        super().__init__(args)
        on_phase = args.get("on_phase", lambda phase: None)
        dtype = args["dtype"]
        device = args["device"]
        folder = Path(model_path)
        adapted = self.lora is not None
        on_phase("building the model")
        with same_error(device):
            # Trained weights are float32, so that small updates are not rounded away. Frozen weights need not be.
            hf = build_on_meta(
                folder,
                dtype=dtype if adapted else torch.float32,
                packing=packing,
                trust_remote_code=trust_remote_code,
                images=vision != "none",
            )
            check_columns(hf, cp)
            freeze_vision(hf, vision, dtype)
            reader = ImageProcessor(str(folder)) if vision != "none" else None
            with open_tensors(folder) as tensors:
                self._places = match_files(hf, folder, tensors)
            self._adapters = {} if self.lora is None else add_adapters(hf, self.lora, self._places)
            self._base_digest = weights_digest(folder) if adapted or vision == "frozen" else ""
            n_layers = len(layer_list(hf))
        self.group = dist.group.WORLD
        self.n_head_rows = int(hf.config.get_text_config().vocab_size)
        self.model = shard(hf, device=device, dtype=dtype, recompute=recompute == "full", offload=cpu_offload)
        self.model.image_processor = reader
        self.model.fused = self._fused
        self.model.packing = packing
        if cp > 1:
            group, _ = dist.new_subgroups(cp, timeout=timedelta(seconds=collective_timeout_s))
            on_phase(f"probing group cp of ranks {dist.get_process_group_ranks(group)}")
            probe_group("cp", group, device)
            self.model.columns = self.columns = Columns(group)
        on_phase("loading weights")
        with same_error(device):
            load_weights(folder, self._places)
        frozen = frozen_vision(hf)  # exports copy it from the folder
        self._places = {name: place for name, place in self._places.items() if name not in frozen}
        init_adapters(self._adapters, args["seed"])
        on_phase("probing a forward pass")
        probe(self.model, packing=packing, fused=self._fused, device=device)
        if compiles == "on" or (compiles == "auto" and device.type == "cuda"):
            on_phase("compiling the layers")
            compile_layers(self.model, must=compiles == "on", packing=packing, dtype=dtype, device=device)
        on_phase("creating the optimizer")
        self._trained = [param for param in self.model.parameters() if param.requires_grad]
        self._optimizer = build_adamw(self._trained, self.optim)
        self._n_threads = threads_per_rank() if cpu_offload and device.type == "cuda" else torch.get_num_threads()
        self.loss = build_loss(args, VocabShard(0, self.n_head_rows, None), self.columns, self.n_head_rows)
        self._host_copies = HostCopies(torch.device("cpu") if cpu_offload else device)
        self._on_host = cpu_offload
        self.states = States(device, self.live_states, before=self._host_copies.settle)
        n_trained = sum(param.numel() for param in self._trained)
        text = "%s: %d layers, %d trained parameters over %d ranks"
        log.info(text, hf.config.model_type, n_layers, n_trained, dist.get_world_size())

    def compute_logprobs(self, micro_batches: Sequence[MicroBatch], *, disable_adapter: bool = False) -> list[Tensor]:
        """See `Student.compute_logprobs`."""
        with disabled_adapters(self.model) if disable_adapter else nullcontext():
            return run_logprobs(self.model, micro_batches, self.loss, self.device)

    def export_plan(self, content: Content = "merged") -> list[TensorPlan]:
        if content == "adapters":
            return [(name, place.shape, torch.float32) for name, place in self._adapter_places().items()]
        return [
            (part.name, part.shape, self._export_dtype(place.tensor))
            for place in self._places.values()
            for part in place.parts
        ]

    def export(self, content: Content = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield weights under the names of the model's files, or adapters; see `Student.export`.

        One parameter is gathered at a time. All experts of a layer may be one parameter.
        """
        if content == "adapters":
            for name, place in self._adapter_places().items():
                yield name, full_tensor(place.tensor, self.device)
            return
        for name, place in self._places.items():
            tensor = full_tensor(place.tensor, self.device, self._export_dtype(place.tensor))
            adapter = self._adapters.get(name) if content == "merged" else None
            whole = tensor if adapter is None else adapter.merged(tensor)
            for part in place.parts:
                yield part.name, part.cut_from(whole)

    def snapshot(self, *, copies: bool = True) -> Snapshot:
        reshard(self.model)  # gathered parameters are copies; the checkpoint holds shards
        meta = self._meta() | {"step": self.step, "skipped": self.skipped}
        pieces = [Piece(name, kind, 0, start, states[kind]) for name, start, states in self._owned() for kind in KINDS]
        return self._host_copies.snapshot(pieces, meta, rng_state(), copies=copies)

    def load_checkpoint(self, folder: str | Path) -> None:
        self._host_copies.settle()
        meta = self._meta()
        step = skipped = 0
        with same_error(self.device), ShardReader(folder) as reader:
            settings = ("strategy", "dtype", "lora_scale", "base")
            check_same_student(folder, reader.meta, meta, settings=settings, model="shapes")
            step = int(reader.meta["step"])
            skipped = int(reader.meta.get("skipped", 0))
            with torch.no_grad():
                for name, start, tensors in self._owned():
                    for kind, tensor in tensors.items():
                        tensor.copy_(reader.read(name, kind, 0, start, start + tensor.numel()))
            for place in self.trained_places().values():
                self._optimizer.state[place.tensor]["step"].fill_(step - skipped)
            if reader.meta["world_size"] == meta["world_size"] and reader.meta["device"] == meta["device"]:
                restore_rng(reader.rng(dist.get_rank()), folder)
        self.step = step
        self.skipped = skipped

    def _run(self, micro_batches: Sequence[MicroBatch], *, backward: bool, completes: bool = True) -> BatchSums:
        del completes  # each part's gradients are reduced, and divided in the step
        try:
            return run_batch(self.model, micro_batches, self.loss, self.device, backward=backward)
        except BaseException:
            self._zero_grads()
            raise

    def _zero_grads(self) -> None:
        self._optimizer.zero_grad()

    def _grad_norm(self, n_loss_tokens: int) -> float:
        return global_grad_norm(self._trained, self.device) / n_loss_tokens

    def _update(self, lr: float, grad_norm: float, n_loss_tokens: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        with host_threads(self._n_threads):
            scale_grads(self._trained, clip_factor(grad_norm, self.optim.clip_grad) / n_loss_tokens)
            self._host_copies.settle()
            self._optimizer.step()
        self._zero_grads()

    def trained_places(self) -> dict[str, Place]:
        """Return the tensors that the optimizer updates, by their names in a checkpoint."""
        if not self._adapters:
            return {name: place for name, place in self._places.items() if place.tensor.requires_grad}
        return self._adapter_places()

    def _owned(self) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
        """Yield (name, offset in the flattened parameter, live [n] float32 tensors by kind) of this rank's shards.

        fully_shard gives each rank some rows of every parameter. Flattened, they are one range of the parameter. These
        ranges and the moments' ranges are the pieces of `gkd.actor.common.shards`. Frozen weights are not saved; a
        resume reads them from the model's folder.
        """
        for name, place in self.trained_places().items():
            param = place.tensor
            assert isinstance(param, DTensor)
            state = self._optimizer.state[param]
            if not state:  # before the first step; AdamW starts with the same values
                state["step"] = torch.zeros((), device=param.to_local().device)
                state |= {kind: torch.zeros_like(param, requires_grad=False) for kind in KINDS[1:]}
            tensors = {"param": param, **{kind: state[kind] for kind in KINDS[1:]}}
            flat = {kind: flat_rows(tensor) for kind, tensor in tensors.items()}
            yield name, flat["param"][0], {kind: elements for kind, (_, elements) in flat.items()}

    def _adapter_places(self) -> dict[str, Place]:
        trained: dict[str, Place] = {}
        for name, adapter in self._adapters.items():
            stem = name.removesuffix(".weight")
            trained |= {f"{stem}.lora_A.weight": adapter.a, f"{stem}.lora_B.weight": adapter.b}
        return trained

    def _meta(self) -> dict[str, Any]:
        """Return what must match on load, and what decides whether generators are restored; JSON data."""
        return {
            "strategy": "fsdp2",
            "dtype": str(self._dtype).removeprefix("torch."),
            "lora_scale": next((adapter.scale for adapter in self._adapters.values()), 0.0),
            "base": self._base_digest,  # digest of the frozen weights, which are not saved; empty without any
            "shapes": {name: list(place.shape) for name, place in self.trained_places().items()},
            "world_size": dist.get_world_size(),
            "device": self.device.type,
        }

    def live_states(self) -> dict[str, list[Tensor]]:
        """Return the tensors that persist between steps, by kind; with `cpu_offload` only those on the device."""
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
        """Return the model's dtype for a weight and the tensor's own dtype for a buffer."""
        return self._dtype if isinstance(tensor, torch.nn.Parameter) else tensor.dtype


def readers(saved: ShardReader, config: Config, base: Path, held: Mapping[str, Any]) -> tuple[Readers, Readers]:
    """Return what reads the weights that `FsdpStudent.export` yields, and the adapters. `held`: tensors of `base`.

    Raises ModelError, CheckpointError: `base`, the folder that the student was built from, is of another model.
    """
    shapes: dict[str, list[int]] = saved.meta["shapes"]
    scale = saved.meta["lora_scale"]
    dtype = getattr(torch, saved.meta["dtype"])
    built = dtype if scale else torch.float32
    vision = config.derived.vision
    code = config.model.trust_remote_code
    hf = build_on_meta(base, dtype=built, packing=False, trust_remote_code=code, images=vision != "none")
    freeze_vision(hf, vision, dtype)
    frozen = frozen_vision(hf)
    places = match_files(hf, base, held)
    trained = {name: list(place.shape) for name, place in places.items() if place.tensor.requires_grad}
    meta = {"base": weights_digest(base) if saved.meta["base"] else "", "shapes": shapes if scale else trained}
    check_same_student(saved.folder, saved.meta, meta, settings=(), model="shapes")

    @lru_cache(maxsize=2)  # a parameter may be several tensors, an adapter is two
    def param(name: str) -> Tensor:
        return saved.read(name, "param", 0, 0, prod(shapes[name])).view(shapes[name])

    def weight(name: str, place: Place, part: FilePart, dtype: torch.dtype) -> Tensor:
        if name in shapes:
            return part.cut_from(param(name)).to(dtype)
        tensor: Tensor = held[part.name].get_tensor(part.name).to(dtype)
        a, b = (f"{name.removesuffix('.weight')}.lora_{factor}.weight" for factor in "AB")
        is_conv = isinstance(place.module, Conv1D)
        return merge(tensor, param(a), param(b), scale, transposed=is_conv) if a in shapes else tensor

    weights: Readers = {}
    for name, place in places.items():
        to = dtype if isinstance(place.tensor, torch.nn.Parameter) else place.tensor.dtype
        for part in place.parts if name not in frozen else ():
            weights[part.name, part.shape, to] = partial(weight, name, place, part, to)
    factors = shapes if scale else {}
    return weights, {(name, tuple(shape), torch.float32): partial(param, name) for name, shape in factors.items()}

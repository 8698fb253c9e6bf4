"""One rank of a frozen Hugging Face model under torch's fully_shard: a teacher or a reference on the actor's ranks.

It computes the same as the teacher server's engines, with their code for everything after the backbone. Every rank
holds a shard of each layer, with `cpu_offload` in host memory; a layer is gathered only while it runs. So the model
needs device memory for one layer, or two while the next one is prefetched, the LM head, and a chunk of logits. No
states have to be moved around a call, and the allocator always sees the same few sizes.

It requires only torch.distributed: the default group is the actor's world, whichever backend the student has.

Letters: N rows of a micro-batch, H hidden size, V rows of the LM head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gkd.actor.common.agree import same_error
from gkd.actor.common.hf_folder import DTYPES, TensorPlan
from gkd.actor.common.host_copies import HostCopies, Snapshot
from gkd.actor.common.shards import Piece, ShardReader
from gkd.actor.common.step import empty_micro_batch
from gkd.actor.fsdp.model import (
    build_on_meta,
    freeze_vision,
    frozen_vision,
    layer_list,
    passes_of,
    reshard,
    shard,
    shard_records,
)
from gkd.actor.fsdp.optim import host_threads, threads_per_rank
from gkd.actor.fsdp.passes import forward
from gkd.actor.fsdp.probe import probe
from gkd.actor.fsdp.weights import blend_part, flat_rows, full_tensor, load_weights, local_rows, match_files
from gkd.config.schema_sections import Vision
from gkd.data.batching import make_micro_batches
from gkd.data.score_checks import check_own, check_top_ids
from gkd.errors import CheckpointError, ConfigError, ModelError, TeacherError
from gkd.hf.model_folder import open_tensors, some_names
from gkd.log import get_logger
from gkd.loss.chunked import capped
from gkd.types import MicroBatch, Rollout
from teacher_server.engines.base import RowStream, ScoreParams, TokenSequence, request_problem, stream_rows
from teacher_server.engines.signals import CHUNK_BYTES, score_hidden
from teacher_server.vision.processor import ImageProcessor
from teacher_server.wire.table import TopKTable

log = get_logger("frozen")

# Type by signal: topk: TopKTable; sampled: [M] float32; logits: [M, n_vocab], hidden: [M, H], float32 or float16.
Table = TopKTable | np.ndarray


@contextmanager
def head_refusal(key: str, folder: Path) -> Iterator[None]:
    """Rewrite the probe's error about actor.fused_lm_head, a setting that frozen models do not have."""
    try:
        yield
    except ConfigError as error:
        if error.key != "actor.fused_lm_head":
            raise
        problem = "the LM head is applied to a few rows at a time, and this model changes its logits after the LM head."
        adapters = "train adapters (actor.lora.rank above 0): the bare actor is the reference."
        fixes = {
            "teacher.path": "use a teacher server: teacher.backend=zmq, with --engine vllm.",
            "reference.path": f"use another model; or remove it and {adapters}",
        }
        fix = fixes.get(key, f"this student cannot be its own frozen reference; {adapters}")
        raise ConfigError(key, str(folder), problem, fix) from error


class FrozenModel:
    """A frozen model. Its methods are collectives over all ranks of the world, which all raise the same error."""

    def __init__(
        self,
        path: str | Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        key: str,
        cpu_offload: bool = True,
        packing: bool = True,
        max_batch_tokens: int = 16384,
        float32_weights: bool = False,
        trust_remote_code: bool = False,
        vision: Vision = "none",
    ) -> None:
        """Build the model from a Hugging Face folder. Collective; torch.distributed must be initialized.

        Args:
            dtype: of activations, and of the weights in computations.
            key: of the setting that names the folder, for errors: teacher.path for a teacher, another for a reference.
            cpu_offload: keep this rank's shards in host memory, pinned if the device is a GPU.
            packing: concatenate sequences; else each is padded to the longest of its micro-batch.
            max_batch_tokens: of a micro-batch, padding included; a longer sequence is a micro-batch of its own.
            float32_weights: keep the shards in float32, so that the small updates of `refresh` are not rounded away.
            vision: what the student does with its vision tower.

        Raises:
            ModelError: the folder is damaged or not a causal language model.
            ConfigError: the model does not support packing, or changes its logits after the LM head.
        """
        self.device = device
        self._n_threads = threads_per_rank() if cpu_offload and device.type == "cuda" else torch.get_num_threads()
        self.role = "teacher" if key == "teacher.path" else "reference"
        self._name = f"the {'local teacher' if self.role == 'teacher' else 'reference'} ({key}={path})"
        self._host_copies = HostCopies(torch.device("cpu") if cpu_offload else device)
        self._packing = packing
        self._max_batch_tokens = max_batch_tokens
        folder = Path(path)
        with same_error(device):
            hf = build_on_meta(
                folder,
                dtype=torch.float32 if float32_weights else dtype,
                packing=packing,
                trust_remote_code=trust_remote_code,
                images=vision != "none",
            )
            freeze_vision(hf, vision, dtype)
            self.image_processor = ImageProcessor(str(folder)) if vision != "none" else None
            hf.requires_grad_(False)
            with open_tensors(folder) as tensors:
                self.places = match_files(hf, folder, tensors)
            layers = layer_list(hf)
        head: Any = hf.get_output_embeddings()
        self.vocab_size = len(head.weight)
        # The same limit as in the teacher server.
        self.max_tokens: int = getattr(hf.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        self.has_plain_head = head.cap is None and head.bias is None  # the probe refuses other changes
        self.model = shard(hf, device=device, dtype=dtype, recompute=False, offload=cpu_offload)
        self.model.image_processor = self.image_processor
        if cpu_offload and device.type == "cuda" and dist.get_world_size() == 1:
            NextLayer(list(layers), device)
        with same_error(device):
            load_weights(folder, self.places)
        frozen = frozen_vision(hf)  # the student does not train it, so `refresh` gets nothing of it
        self.places = {name: place for name, place in self.places.items() if name not in frozen}
        with head_refusal(key, folder):
            probe(self.model, packing=packing, fused=True, device=device)
        log.info("%s: %d layers, frozen, over all ranks", hf.config.model_type, len(layers))

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout], params: Sequence[ScoreParams]) -> list[list[Table]]:
        """Return the same tables as the teacher server, in one forward pass per sequence. Collective.

        Args:
            rollouts: of this rank; may be empty, and differ in number and length between ranks.
            params: one for each table; the same on all ranks.

        Returns:
            For each sequence its tables, in the order of `params`.

        Raises:
            TeacherError: names the sequence: it has no prompt or no response, the parameters are not valid for it, or
                the model's output has a NaN or an infinity. The next call is not affected.
        """
        numbered = [replace(rollout, sample_index=i) for i, rollout in enumerate(rollouts)]
        batches = make_micro_batches(
            numbered, None, micro_batch_size=1, max_tokens=self._max_batch_tokens, packed=self._packing
        )
        with same_error(self.device, count=len(batches)) as agreement:
            for rollout in rollouts:
                self._check(rollout, params)
        tables: list[list[Table]] = [[] for _ in rollouts]
        problem: TeacherError | None = None
        # Every rank must join every all-gather, so one with fewer micro-batches runs empty ones.
        with passes_of(self.model):
            for i in range(agreement.largest):
                batch = batches[i] if i < len(batches) else empty_micro_batch()
                indices = [index for index, _ in batch.samples]
                by_params, fault = self._run(batch, [_sequence(rollouts[index]) for index in indices], params)
                if fault is not None:
                    where = self._where(rollouts[indices[0]])
                    problem = problem or TeacherError(f"{where}, or another one of its micro-batch: {fault}")
                    continue
                for of_params in by_params:
                    for index, table in zip(indices, of_params, strict=True):
                        tables[index].append(table)
        with same_error(self.device):
            if problem is not None:
                raise problem
        return tables

    def lm_head(self) -> np.ndarray:
        """Return the LM head, [V, H] float32, on every rank: the logits are hidden states @ lm_head.T."""
        reshard(self.model)
        head = full_tensor(self.model.head.weight, self.device, torch.float32)
        return np.array(head.cpu().numpy())  # a copy, because with one rank it is the weight itself

    def refresh(self, tensors: Iterator[tuple[str, Tensor]], ema: float = 0.0) -> None:
        """Set the weights to ema * weights + (1 - ema) * tensors, in place and in float32 arithmetic.

        Args:
            tensors: (name in the files, whole tensor), each once, in the same order on every rank; for example
                `Student.export()`.
            ema: 0: copy the tensors.

        Raises:
            ModelError: a tensor has a different shape, occurs twice, is unknown or missing. The tensors before it have
                been blended, so the model cannot be used afterwards.
        """
        reshard(self.model)  # gathered layers are copies and would keep the old weights
        self._host_copies.settle()
        missing = {part.name: (place, part) for place in self.places.values() for part in place.parts}
        with host_threads(self._n_threads):
            for name, whole in tensors:
                target = missing.pop(name, None)
                if target is None or tuple(whole.shape) != target[1].shape:
                    raise ModelError(f"{name} {list(whole.shape)} does not match the frozen model, or occurred twice")
                blend_part(*target, whole, ema)
        if missing:
            raise ModelError(f"the frozen model did not receive {some_names(sorted(missing))}")

    def snapshot(self, *, copies: bool = True) -> Snapshot:
        """Start to copy this rank's rows to host memory, see `Student.snapshot`; the next `refresh` waits for it.

        Rank 0 also has the tensors that are not sharded. The pieces are in the student's files under a kind of their
        own, the role. So they are written, flushed, hashed and committed together, and a checkpoint has both models or
        neither.
        """
        reshard(self.model)
        pieces = [
            Piece(name, self.role, 0, start, flat)
            for name, start, flat in self._local_parts()
            if dist.get_rank() == 0 or isinstance(self.places[name].tensor, DTensor)
        ]
        return self._host_copies.snapshot(pieces, {self.role: self._dims()}, {}, copies=copies)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load this rank's rows in place, from a checkpoint of any number of ranks.

        Raises:
            CheckpointError: the checkpoint has no such model or a different one, or cannot be read. The model cannot be
                used afterwards.
        """
        reshard(self.model)
        self._host_copies.settle()
        role = self.role
        with same_error(self.device), ShardReader(folder) as reader:
            saved = reader.meta.get(role)
            model_dims = self._dims()
            if saved is None:
                raise CheckpointError(
                    f"{folder} has no weights of the {role}, which {role}.update_interval above 0 requires. Fix: start "
                    "a new run in another trainer.run_dir."
                )
            for name in dict.fromkeys([*model_dims, *saved]):
                in_checkpoint = saved.get(name, "missing")
                here = model_dims.get(name, "missing")
                if in_checkpoint != here:
                    raise CheckpointError(
                        f"{folder} has a different {role}: {name} is {in_checkpoint} in the checkpoint and {here} "
                        f"here. Fix: restore {role}.path, model.dtype and {role}.update_interval."
                    )
            for name, start, flat in self._local_parts():
                flat.copy_(reader.read(name, role, 0, start, start + flat.numel()))

    def _dims(self) -> dict[str, list[Any]]:
        """Return dtype and shape of each tensor by name, which must be equal for a checkpoint to match."""
        return {
            name: [str(place.tensor.dtype).removeprefix("torch."), *place.shape] for name, place in self.places.items()
        }

    def _local_parts(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (name, index of the first element in the flattened tensor, [n] live elements) of this rank's rows.

        Tensors of a dtype that the files do not support, such as integer buffers, are yielded as bytes.
        """
        for name, place in self.places.items():
            start, flat = flat_rows(place.tensor)
            if flat.dtype not in DTYPES.values():
                start = start * flat.itemsize
                flat = flat.view(torch.uint8)
            yield name, start, flat

    def device_bytes(self) -> int:
        """Return the bytes of this rank's shards on its device; with `cpu_offload` on CUDA 0."""
        shards = [local_rows(place.tensor)[0] for place in self.places.values()]
        return sum(shard.nbytes for shard in shards if shard.device.type == self.device.type)

    def check_plan(self, plan: Sequence[TensorPlan]) -> None:
        """Check that `refresh` accepts these tensors. Raises ModelError on all ranks: the models' tensors differ."""
        required = {part.name: part.shape for place in self.places.values() for part in place.parts}
        student_shapes = {name: tuple(shape) for name, shape, _ in plan}
        with same_error(self.device):
            if missing := sorted(required.keys() - student_shapes.keys()):
                raise ModelError(f"the student has no {some_names(missing)}, which the teacher has")
            if unknown := sorted(student_shapes.keys() - required.keys()):
                raise ModelError(f"the teacher has no {some_names(unknown)}, which the student has")
            for name, shape in student_shapes.items():
                if shape != required[name]:
                    both_shapes = f"{list(shape)} in the student and {list(required[name])} in the teacher"
                    raise ModelError(f"{name} is {both_shapes}")

    def _where(self, rollout: Rollout) -> str:
        return f"{self._name}, prompt {rollout.prompt_id}, sample {rollout.sample_index}"

    def _check(self, rollout: Rollout, params: Sequence[ScoreParams]) -> None:
        """Raise TeacherError if the sequence cannot be scored."""
        where = self._where(rollout)
        if not len(rollout.prompt_ids) or not len(rollout.response_ids):
            raise TeacherError(f"{where}: the prompt or the response has no tokens")
        ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        if ids.min() < 0:
            raise TeacherError(f"{where}: token id {ids.min()} is negative")
        check_own(rollout, where)
        sequence = _sequence(rollout)
        for request in params:
            check_top_ids(rollout, request.n_given, where)
            if (problem := request_problem(self, sequence, request)) is not None:
                raise TeacherError(f"{where}: {problem}")

    def _run(
        self, batch: MicroBatch, sequences: Sequence[TokenSequence], params: Sequence[ScoreParams]
    ) -> tuple[list[list[Table]], ArithmeticError | None]:
        """Return, for each of `params`, the tables of the micro-batch's sequences; and the error of a NaN or infinity.

        The error is returned and not raised, so that the forward pass completes and the ranks stay synchronized.
        """
        tables: list[list[Table]] = []
        fault: ArithmeticError | None = None

        def read(hidden: Tensor, head: Tensor, **change: Any) -> None:
            nonlocal fault
            try:
                for request in params if sequences else ():
                    tables.append(_tables(hidden, partial(_logits, head=head, **change), len(head), sequences, request))
            except ArithmeticError as error:
                fault = error

        forward(self.model, batch, self.device, use=read)
        return tables, fault


def _sequence(rollout: Rollout) -> TokenSequence:
    tokens = np.concatenate([rollout.prompt_ids, rollout.response_ids])
    return TokenSequence(tokens, len(rollout.prompt_ids), rollout.top_ids, rollout.own, rollout.images)


def _logits(rows: Tensor, head: Tensor, bias: Tensor | None, cap: float | None) -> Tensor:
    return capped(F.linear(rows, head, bias), cap)


def _tables(
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    vocab_size: int,
    sequences: Sequence[TokenSequence],
    params: ScoreParams,
) -> list[Table]:
    """Return the tables of the sequences. Streams are read completely, because they need the gathered LM head.

    Args:
        hidden: [N, H].
        logits_of: [C, H] -> [C, V], with the LM head, which is gathered until this returns.
    """
    if params.signal == "topk" and len({sequence.given is None for sequence in sequences}) > 1:  # some of the dataset
        chunks = hidden.split([sequence.n_rows for sequence in sequences])
        pairs = zip(chunks, sequences, strict=True)
        return [_tables(part, logits_of, vocab_size, [sequence], params)[0] for part, sequence in pairs]
    if params.signal == "hidden":
        hidden = hidden.float()  # a stream of bfloat16 would be its bits
    scores = score_hidden(hidden, sequences, logits_of, params, vocab_size)
    step = max(1, CHUNK_BYTES[hidden.device.type] // (4 * vocab_size))
    return [s if isinstance(s, TopKTable | np.ndarray) else _whole(s, step) for s in scores]


def _whole(stream: RowStream, step: int) -> np.ndarray:
    """Return all rows of a stream, [M, C] float32 or float16, read `step` at a time."""
    whole = np.empty((stream.n_rows, stream.n_cols), stream.dtype)
    for start, stop, rows in stream_rows(stream, step):
        whole[start:stop] = rows
    return whole


_ALIGN = 64  # bytes; a multiple of every item size


class NextLayer:
    """Hooks of a model's layers, which fully_shard gathers one at a time in a forward pass without gradients.

    They copy the next layer's weights to the GPU while a layer computes, for a lone rank with its shards in host
    memory. With several ranks fully_shard gathers the next layer on a stream of its own. A lone rank has nothing to
    gather, so torch 2.13 copies each layer on the stream that computes: 43% of the time of a 7B model's pass over
    micro-batches of 16,384 tokens on an H200. Depends on private names of fully_shard's records, as
    `into_one_block`.

    The memory of one layer is allocated during a pass. A pass copies what it uses: a refresh in between counts, and a
    pass that was not completed leaves nothing that the next one reads.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffer: Tensor | None = None
        self._layer: nn.Module | None = None  # whose copy is in the buffer
        self._copies: list[tuple[Any, Tensor, Tensor]] = []  # fully_shard's record, its shard in host memory, the copy
        # In front of fully_shard's own hooks, which read the shards, and behind them.
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            layer.register_forward_pre_hook(self._use, prepend=True)
            layer.register_forward_pre_hook(partial(self._copy, following))

    def _use(self, layer: nn.Module, unused: Any) -> None:
        """Let fully_shard read the layer's copy instead of its shards."""
        if layer is self._layer:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            for record, _, on_device in self._copies:
                record._sharded_param_data = on_device

    def _copy(self, following: nn.Module | None, *unused: Any) -> None:
        """Start to copy the layer that follows. fully_shard has read what was in the buffer."""
        for record, at_home, _ in self._copies:
            record._sharded_param_data = at_home
        self._layer = following
        self._copies = []
        if following is None:
            self._buffer = None
            return
        records = shard_records(following)
        shards: list[Tensor] = [record._sharded_param_data for record in records]
        starts = [0]
        for one in shards:
            starts.append(starts[-1] - (-one.nbytes // _ALIGN) * _ALIGN)
        if self._buffer is None or len(self._buffer) < starts[-1]:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)  # the old one is free from here on
            self._buffer = torch.empty(starts[-1], dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for record, at_home, start in zip(records, shards, starts, strict=False):
                on_device = self._buffer[start : start + at_home.nbytes].view(at_home.dtype).view(at_home.shape)
                on_device.copy_(at_home, non_blocking=True)
                self._copies.append((record, at_home, on_device))

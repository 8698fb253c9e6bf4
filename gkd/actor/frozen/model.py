"""One rank of a frozen Hugging Face model under torch's fully_shard: a teacher on the actor's ranks.

It computes what the teacher server's engines compute, with their own code for all that comes after the backbone. Every
rank holds a part of each layer, with `cpu_offload` in host memory; a layer is whole on a rank for as long as it runs.
So the model costs a device one layer, or two while the next one is on its way, the LM head, and a chunk of logits, and
nothing has to be moved away or brought back around a call: the allocator sees the same few sizes again and again.

It needs torch.distributed and no more than that: the default group is the actor's world whichever backend the student
beside it has.

Letters: N rows of a micro-batch, H hidden size, V rows of the LM head.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gkd.actor.common.agree import same_error
from gkd.actor.common.host_copies import HostCopies, Snapshot
from gkd.actor.common.step import empty_micro_batch
from gkd.actor.frozen import checkpoint
from gkd.actor.frozen.refresh import blend, check_plan
from gkd.actor.fsdp.attention import Pack
from gkd.actor.fsdp.model import build_on_meta, layer_list, reset, reshard, shard
from gkd.actor.fsdp.optim import host_threads, threads_per_rank
from gkd.actor.fsdp.probe import probe
from gkd.actor.fsdp.weights import full_tensor, load_weights, local_rows, match_files
from gkd.data.batching import make_micro_batches
from gkd.errors import ConfigError, TeacherError
from gkd.hf.files import open_tensors
from gkd.hf.folder import TensorPlan
from gkd.log import get_logger
from gkd.types import MicroBatch, Rollout
from teacher_server.engines.base import RowStream, ScoreParams, TokenSequence, request_problem, stream_rows
from teacher_server.engines.signals import CHUNK_BYTES, score_hidden
from teacher_server.wire.payload import TopKScores

log = get_logger("frozen")

# Of `topk`: TopKScores. Of `sampled`: [R] float32. Of `logits`: [R, n_vocab], of `hidden`: [R, H], float32 or float16.
Table = TopKScores | np.ndarray


@contextmanager
def head_refusal(key: str, folder: Path) -> Iterator[None]:
    """What a probe says of the student's fused loss, said of a model whose LM head runs on a few rows at a time."""
    try:
        yield
    except ConfigError as error:
        if error.key != "actor.fused_lm_head":
            raise
        problem = "the LM head runs on a few rows at a time, and this model's logits are more than its product."
        adapters = (
            "train adapters (actor.strategy=fsdp2, actor.lora.rank above 0): without them the actor itself is it."
        )
        fixes = {
            "teacher.path": "use a teacher server: teacher.backend=zmq, with --engine vllm.",
            "reference.path": f"name another one; or leave it out and {adapters}",
        }
        fix = fixes.get(key, f"a reference cannot be a frozen copy of this student; {adapters}")
        raise ConfigError(key, str(folder), problem, fix) from error


class FrozenModel:
    """Every method is a collective over all ranks of the world, and all get the same error."""

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
    ) -> None:
        """Builds the model from a HF folder. torch.distributed must be initialised; blocks for all ranks.

        Args:
            dtype: of activations, and of the weights as they compute.
            key: of the setting that names the folder, for errors; of another one than teacher.path it is a reference.
            cpu_offload: this rank's shards live in host memory, pinned where the device is a GPU.
            packing: put sequences one after the other; else each is padded to the longest of its micro-batch.
            max_batch_tokens: of a micro-batch, padding included; a longer sequence has one to itself.
            float32_weights: keep the shards in float32, so that the small steps of `refresh` are not rounded away.

        Raises:
            ModelError: the folder is broken or not a causal language model.
            ConfigError: the model does not bear packing, or does something to its logits after the LM head.
        """
        self.device = device
        self._n_threads = threads_per_rank() if cpu_offload and device.type == "cuda" else torch.get_num_threads()
        role = "local teacher" if key == "teacher.path" else "reference"
        self._name = f"the {role} ({key}={path})"
        self._host_copies = HostCopies(torch.device("cpu") if cpu_offload else device)
        self._packing, self._max_batch_tokens = packing, max_batch_tokens
        folder = Path(path)
        with same_error(device):
            kept = torch.float32 if float32_weights else dtype
            hf = build_on_meta(folder, dtype=kept, packing=packing, trust_remote_code=trust_remote_code)
            hf.requires_grad_(False)
            with open_tensors(folder) as tensors:
                self.places = match_files(hf, folder, tensors)
            n_layers = len(layer_list(hf))
        self.vocab_size, self.hidden_size = map(int, hf.get_output_embeddings().weight.shape)
        # As the teacher server has it: as long as the model was made for.
        self.max_tokens: int = getattr(hf.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        self.has_plain_head = True  # the probe refuses all others
        self.model = shard(hf, device=device, dtype=dtype, recompute=False, offload=cpu_offload)
        with same_error(device):
            load_weights(folder, self.places)
        with head_refusal(key, folder):
            probe(self.model, n_layers=n_layers, packing=packing, fused=True, device=device)
        log.info("%s: %d layers, frozen, over all ranks", hf.config.model_type, n_layers)

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout], asked: Sequence[ScoreParams]) -> list[list[Table]]:
        """What the teacher server says of these sequences; each is read once, whatever is asked.

        Args:
            rollouts: of this rank; may be none, and differ in number and length between ranks.
            asked: the same on all ranks.

        Returns:
            For each sequence its tables, in the order of `asked`.

        Raises:
            TeacherError: names the sequence: it has no prompt or no response, or cannot be scored so, or the model put
                out a NaN or an infinity. The next call is not affected.
        """
        numbered = [replace(rollout, sample_index=i) for i, rollout in enumerate(rollouts)]
        batches = make_micro_batches(
            numbered, None, micro_batch_size=1, max_tokens=self._max_batch_tokens, packed=self._packing
        )
        with same_error(self.device, count=len(batches)) as agreement:
            for rollout in rollouts:
                self._check(rollout, asked)
        tables: list[list[Table]] = [[] for _ in rollouts]
        problem: TeacherError | None = None
        try:
            # Every rank joins every gather, so one with fewer micro-batches runs some without a sequence.
            for i in range(agreement.largest):
                batch = batches[i] if i < len(batches) else empty_micro_batch()
                places = [place for place, _ in batch.samples]
                found, fault = self._run(batch, [rollouts[place].response_ids for place in places], asked)
                if fault is not None:
                    problem = problem or TeacherError(f"{self._where(rollouts[places[0]])}, or one beside it: {fault}")
                    continue
                for of_one in found:
                    for place, table in zip(places, of_one, strict=True):
                        tables[place].append(table)
        except BaseException:
            reset(self.model)
            raise
        reshard(self.model)
        with same_error(self.device):
            if problem is not None:
                raise problem
        return tables

    def lm_head(self) -> np.ndarray:
        """[V, H] float32, on every rank: hidden states @ lm_head.T are the logits."""
        reshard(self.model)
        head = full_tensor(self.model.head.weight, self.device, torch.float32)
        return np.array(head.cpu().numpy())  # a copy: with one rank it is the weight itself

    def refresh(self, tensors: Iterator[tuple[str, Tensor]], ema: float = 0.0) -> None:
        """The weights become ema * these + (1 - ema) * the given ones, in float32 arithmetic, where they are.

        Whole tensors come one at a time, and each rank takes its own rows of them.

        Args:
            tensors: as `gkd.actor.frozen.refresh.blend` takes them; `Student.export()`, say.
            ema: 0: a plain copy.

        Raises:
            ModelError: see there.
        """
        reshard(self.model)  # what is gathered is a copy, and would stay as it was
        self._host_copies.settle()
        with host_threads(self._n_threads):
            blend(self.places, tensors, ema)

    def snapshot(self) -> Snapshot:
        """This rank's rows on their way to host memory; the next `refresh` waits for the copy. No collective."""
        reshard(self.model)
        return self._host_copies.snapshot(checkpoint.pieces(self.places), checkpoint.meta(self.places), {})

    def load(self, folder: Path) -> None:
        """Load the weights of a checkpoint in place. Raises CheckpointError: see `gkd.actor.frozen.checkpoint`."""
        reshard(self.model)
        self._host_copies.settle()
        with same_error(self.device):
            checkpoint.load(folder, self.places)

    def device_bytes(self) -> int:
        """Of this rank's shards, those on its device; with `cpu_offload` on CUDA none."""
        shards = [local_rows(place.tensor)[0] for place in self.places.values()]
        return sum(shard.nbytes for shard in shards if shard.device.type == self.device.type)

    def check_plan(self, plan: Sequence[TensorPlan]) -> None:
        """Raises ModelError, on all ranks, if `refresh` could not take these tensors."""
        with same_error(self.device):
            check_plan(self.places, plan)

    def _where(self, rollout: Rollout) -> str:
        return f"{self._name}, prompt {rollout.prompt_id}, sample {rollout.sample_index}"

    def _check(self, rollout: Rollout, asked: Sequence[ScoreParams]) -> None:
        """Raises TeacherError."""
        where = self._where(rollout)
        if not len(rollout.prompt_ids) or not len(rollout.response_ids):
            raise TeacherError(f"{where}: the prompt or the response has no tokens, so there is nothing to score")
        ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        if ids.min() < 0:
            raise TeacherError(f"{where}: token id {ids.min()} is negative")
        for params in asked:
            sequence = TokenSequence(ids, len(rollout.prompt_ids))
            if (problem := request_problem(self, sequence, params)) is not None:
                raise TeacherError(f"{where}: {problem}")

    def _run(
        self, batch: MicroBatch, responses: Sequence[np.ndarray], asked: Sequence[ScoreParams]
    ) -> tuple[list[list[Table]], ArithmeticError | None]:
        """For each of `asked` the tables of the micro-batch's sequences; and the NaN or infinity there was among them,
        returned and not raised, so that the forward pass comes to its end and the ranks stay in step.
        """
        found: list[list[Table]] = []
        fault: ArithmeticError | None = None

        def read(hidden: Tensor, head: Tensor) -> None:
            nonlocal fault
            try:
                for params in asked if responses else ():
                    found.append(_tables(hidden, head, responses, params))
            except ArithmeticError as error:
                fault = error

        pack, positions = None, None
        if batch.cu_seqlens is not None:
            pack = Pack(batch.cu_seqlens.to(self.device), int(batch.cu_seqlens.diff().max()))
            positions = batch.position_ids.to(self.device)
        tokens, rows = batch.tokens.to(self.device), batch.loss_index.to(self.device)
        self.model(tokens, rows, position_ids=positions, pack=pack, use=read)
        return found, fault


def _tables(hidden: Tensor, head: Tensor, responses: Sequence[np.ndarray], params: ScoreParams) -> list[Table]:
    """What `score_hidden` says, its streams, which need the LM head, read to their ends.

    Args:
        hidden: [N, H]; head: [V, H], whole for as long as this runs.
    """
    if params.signal == "hidden":
        hidden = hidden.float()  # of bfloat16 a stream has only the bits
    vocab_size = len(head)
    scores = score_hidden(hidden, responses, partial(F.linear, weight=head), params, vocab_size)
    step = max(1, CHUNK_BYTES[hidden.device.type] // (4 * vocab_size))
    return [s if isinstance(s, TopKScores | np.ndarray) else _whole(s, step) for s in scores]


def _whole(stream: RowStream, step: int) -> np.ndarray:
    """[R, C] float32 or float16: all rows of a stream, `step` at a time."""
    whole = np.empty((stream.n_rows, stream.n_cols), stream.dtype)
    for start, stop, rows in stream_rows(stream, step):
        whole[start:stop] = rows
    return whole

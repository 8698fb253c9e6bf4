"""The Ray surface of one rank of the student's trainer.

Every rank of a data-parallel group builds the same micro-batches from the same handles; only the last
pipeline stage fetches the teacher's scores, because only it computes the loss.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import ray
import torch
import torch.distributed as dist

from gkd.actor.build import build_student
from gkd.actor.common.group_probe import probe_group
from gkd.actor.common.shard_writer import BackgroundWriter
from gkd.actor.group_batches import group_batches
from gkd.actor.megatron.layout import ParallelLayout
from gkd.actor.offload import DISABLE_ADAPTER, META_KEYS, OffloadController, check_meta
from gkd.actor.rank_memory import RankMemory
from gkd.cluster.assignment import free_port, this_place
from gkd.cluster.gpu_table import RankPlace
from gkd.cluster.progress import UP, WATCH, Phases, Progress
from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.data.batching import token_records
from gkd.data.collate import MicroBatches
from gkd.handles import FileDigest, TrainStats
from gkd.log import get_logger
from gkd.memory.states import OPTIMIZER, PARAMS, Moves
from gkd.memory.usage import ARENA, log_gpu_memory_usage
from gkd.run import shared_folder
from gkd.types import Rollout
from gkd.weight_sync.buckets import Bucket, TensorSpec
from gkd.weight_sync.transfer import GroupSpec, TransferGroup, send

if TYPE_CHECKING:
    from gkd.actor.common.base import Student
    from gkd.actor.frozen.model import FrozenModel
    from gkd.actor.frozen.teacher import LocalTeacher
    from gkd.actor.fsdp.student import FsdpStudent


# Methods of these groups are answered while another one runs, or hangs; the pool is spawned with them.
SAVES = "saves"
BESIDE = (SAVES, WATCH)
# So much longer than the driver waits for them, ranks wait for one another: so that it finds them there.
_LONGER_S = 60.0


class ActorWorker:
    """One rank. Ray calls all methods but those of `BESIDE` in one thread, one after the other.

    Args:
        rank: place in the pool, which is also the rank in torch.distributed.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._log = get_logger(f"actor.{rank}")
        self._phases = Phases()
        self._group: TransferGroup | None = None
        self._writer = BackgroundWriter()
        self._teacher: LocalTeacher | None = None
        self._reference: FrozenModel | None = None
        self._moves: Moves | None = None  # that nobody has waited for

    def place(self, ask_driver: bool) -> RankPlace:
        return this_place("actor", self._rank, ask_driver=ask_driver)

    @ray.method(concurrency_group=WATCH)
    def progress(self) -> Progress:
        """How far `init_model` is."""
        return self._phases.now()

    def rendezvous(self) -> tuple[str, int]:
        """(address of this node, a free port on it), for a group whose rank 0 is here."""
        return ray.util.get_node_ip_address(), free_port()

    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def check_run_dir(self, root: Path, word: str) -> str:
        """Answers the driver's probe, see `gkd.run.shared_folder`; the name of this node. Raises ConfigError."""
        node = socket.gethostname()
        shared_folder.answer(root, word, f"actor rank {self._rank}", node)
        return node

    def init_model(
        self, config: Config, device: str, address: tuple[str, int], total_steps: int, run_dir: Path
    ) -> None:
        """Join the actor's process group, then build the student and load its weights; blocks for all ranks.

        Args:
            run_dir: trainer.run_dir as the driver means it.
        """
        self._log.info(self.place(ask_driver=False).line())
        self._config = config
        trainer = config.trainer
        self._patience_s = max(trainer.init_timeout_s, trainer.stage_timeout_s) + _LONGER_S
        actor = config.actor
        self._phases.enter("joining the actor group")
        torch.set_num_threads(1)
        self._device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(self._device)
        who = f"actor rank {self._rank}"
        self._memory = RankMemory(config, self._device, run_dir, who, self._phases, self._log)
        derived = derive(config)
        world_size = derived.world_size
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"tcp://{address[0]}:{address[1]}",
            rank=self._rank,
            world_size=world_size,
            timeout=timedelta(seconds=self._patience_s),
        )
        self._phases.enter("probing the actor group")
        probe_group("of all actor ranks", None, self._device)
        self._log.info("joined the actor group of %d", world_size)
        self._loss, self._signals = derived.loss, derived.signals
        self._layout = ParallelLayout(
            tp=actor.tp, pp=actor.pp, world_size=world_size, rank=self._rank, vpp=actor.vpp, ep=actor.ep
        )
        with self._memory.diagnosed("building the student"):
            self._student = self._build_student(total_steps)
        ARENA.add("actor states", self._student.states.allocated)
        self._held = OffloadController(
            self._student,
            self._device,
            automatic=derived.moves_states,
            timeout_s=self._patience_s,
            diagnosed=self._memory.diagnosed,
            staying=self._frozen_bytes,
        )
        if derived.moves_states:
            self.offload_states()
        self._phases.enter(UP)
        log_gpu_memory_usage("student built and loaded", self._log, self._rank, self._device)

    def _build_student(self, total_steps: int) -> Student:
        return build_student(
            self._config,
            self._layout,
            self._device,
            loss=self._loss,
            signals=self._signals,
            total_steps=total_steps,
            patience_s=self._patience_s,
            on_phase=self._phases.enter,
        )

    def init_teacher(self, n_vocab: int) -> None:
        """Builds the local teacher beside the student; blocks for all ranks. Raises as `LocalTeacher`."""
        with self._with_states("loading the teacher", "teacher", [PARAMS]):
            from gkd.actor.frozen.teacher import LocalTeacher  # here, as the students

            self._teacher = LocalTeacher(self._config, self._student, self._layout, self._device, n_vocab)
        self._log.info("teacher built and loaded")

    def score(self, sequence_indices: Sequence[bytes | None], *chunks: list[Rollout]) -> Any:
        """Compute the local teacher's scores of this rank's sequences. Collective, also for a rank without sequences.

        Args:
            sequence_indices: of each chunk, the sequences scored by this rank, see `gkd.data.scatter`.

        Returns:
            None, and then for each chunk a list of `TeacherScores`; without chunks None alone. One object each.

        Raises:
            TeacherError: on all ranks; see `FrozenModel.score`.
        """
        assert self._teacher is not None
        with self._memory.during("teacher scoring"):
            scores = self._teacher.score(sequence_indices, chunks)
        return (None, *scores) if scores else None

    def init_reference(self) -> None:
        """Builds the reference beside the student; blocks for all ranks. Raises as `FrozenModel`."""
        with self._memory.during("loading the reference"):
            from gkd.actor.frozen.reference import frozen_reference  # here, as the students

            self._reference = frozen_reference(self._config, self._device)
        self._log.info("reference built and loaded")

    def reference_logprobs(
        self, sequence_indices: Sequence[bytes | None], *chunks: list[Rollout], meta: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute the reference logprobs of this rank's sequences. Collective, also for a rank without sequences.

        Args:
            sequence_indices: as for `score`.
            meta: `disable_adapter`: the reference is the student without its adapters; else it is a model of its own,
                and the student's states stay where they are. `is_offload_states`: as of `train_step`.

        Returns:
            As `score`, of [R] float32 arrays.

        Raises:
            TeacherError, DataError: on all ranks; see `frozen_logprobs`, `bare_logprobs`.
        """
        from gkd.actor.frozen.reference import bare_logprobs, frozen_logprobs
        from gkd.data.scatter import map_selected

        student, config = self._student, self._config
        with self._memory.during("reference logprobs"):
            if check_meta(meta, META_KEYS).get(DISABLE_ADAPTER):
                if not config.actor.lora.rank:
                    raise ValueError(f"{DISABLE_ADAPTER}: actor.lora.rank is 0, there are no adapters")
                work = partial(
                    bare_logprobs,
                    cast("FsdpStudent", student),
                    config,
                    device=self._device,
                    where=f"actor rank {self._rank}",
                )
                moved = self._held.needed("reference", [PARAMS], meta, known=META_KEYS)
                with moved, self._memory.diagnosed("reference logprobs"):
                    found = map_selected(sequence_indices, chunks, work)
            else:
                if self._reference is None:
                    raise ValueError(f"this actor holds no reference: with adapters, say {DISABLE_ADAPTER}: True")
                temperature, n_vocab = config.teacher.temperature, student.n_vocab
                work = partial(frozen_logprobs, self._reference, temperature=temperature, n_vocab=n_vocab)
                found = map_selected(sequence_indices, chunks, work)
        return (None, *found) if found else None

    def set_teacher_head(self, head: np.ndarray) -> None:
        """[V, D] float32, the teacher's LM head, where the teacher sends hidden states."""
        with self._with_states("taking the teacher's LM head", "teacher_head", [PARAMS], alone=True):
            self._student.set_teacher_head(head)

    def offload_states(self, include: Sequence[str] | None = None, *, non_blocking: bool = False) -> None:
        """To host memory, for others who share this rank's GPU; see `States.offload`. All ranks are called.

        Args:
            non_blocking: return while the copies are under way. `settle_states`, or the next call that needs states or
                moves them, waits for their end, and only then is their memory free.
        """
        with self._memory.during("offloading states"):
            moves = self._held.offload_states(include, non_blocking=non_blocking)
            self._moves = moves if non_blocking else None

    def reload_states(self, include: Sequence[str] | None = None, *, non_blocking: bool = False) -> None:
        """Back to the device. All ranks are called.

        Args:
            non_blocking: return while the copies are under way; what is computed with the states waits for them.
        """
        with self._memory.during("reloading states"):
            moves = self._held.reload_states(include, non_blocking=non_blocking)
            self._moves = moves if non_blocking else None

    def settle_states(self) -> None:
        """The last non-blocking move has ended when this returns; harmless if there is none. All ranks are called."""
        moves, self._moves = self._moves, None
        if moves is not None:
            with self._memory.during("settling states"):
                moves.wait()

    def train_step(
        self, sequence_indices: Sequence[bytes | None], *lists: list[Any], meta: Mapping[str, Any] | None = None
    ) -> TrainStats:
        """One optimizer step on this data-parallel group's share.

        Args:
            sequence_indices: of each chunk, the group's sequences, see `gkd.data.scatter`.
            lists: of each chunk a list of rollouts and then, on the last pipeline stage, of each a list of scores and,
                where there is a reference, of each a list of its logprobs. The driver passes handles; Ray fetches what
                they stand for from the object store.
            meta: what becomes of the states after the call, see `OffloadController.needed`.
        """
        with self._memory.during("training step"):
            batches = self._micro_batches(sequence_indices, lists, with_reference=self._loss.has_reference)[0]
            with self._held.needed("train", meta=meta), self._memory.diagnosed("training step"):
                stats = self._student.train_step(batches)
                self._memory.after_step()  # as the step has left it
                if self._teacher is not None:
                    self._phases.enter("refreshing the teacher")
                    self._teacher.after_step()
        return stats

    def evaluate(
        self,
        keep_tokens: int,
        sequence_indices: Sequence[bytes | None],
        *lists: list[Any],
        meta: Mapping[str, Any] | None = None,
    ) -> TrainStats:
        """The same loss; nothing learned. Arguments as of `train_step`.

        Args:
            keep_tokens: sequences of the batch, the first ones, whose tokens' numbers come with the result; from the
                first rank of those that compute the loss.
        """
        with self._memory.during("evaluation"):
            batches, rollouts = self._micro_batches(sequence_indices, lists)
            keeps = keep_tokens > 0 and self._layout.is_last_stage and self._layout.tp_rank == 0
            tables: list[torch.Tensor] = []
            with self._held.needed("evaluate", [PARAMS], meta), self._memory.diagnosed("evaluation"):
                on_rows = (lambda table: tables.append(table.cpu())) if keeps else None
                stats = self._student.evaluate(batches, on_rows)
        if not keeps:
            return stats
        kept = [rollout for rollout in rollouts if rollout.sample_index < keep_tokens]
        return replace(stats, tokens=token_records(batches, tables, self._student.loss.evaluation_names, kept))

    def save(self, folder: Path) -> None:
        """Begins to copy this rank's state to host memory and to write it into `folder`; returns at once."""
        self._writer.check_idle()  # before the copy, which would take as much memory again
        with self._with_states("saving a checkpoint", "save", [PARAMS, OPTIMIZER]):
            snapshot = self._student.snapshot()
            if self._teacher is not None:
                snapshot = self._teacher.joined(snapshot)
            self._writer.start(folder, self._rank, snapshot)

    @ray.method(concurrency_group=SAVES)
    def save_finished(self, wait: bool) -> dict[str, FileDigest] | None:
        """This rank's files, or None while they are being written. Raises CheckpointError if they cannot be.

        Looks at the writer and at nothing else of this rank. The driver calls it only after `save` has returned and
        before the next one, so that the writer's thread stays the same meanwhile.
        """
        return self._writer.finished(wait=wait)

    def load(self, folder: Path) -> None:
        with self._with_states("loading a checkpoint", "load"):
            self._student.load_checkpoint(folder)
            if self._teacher is not None:
                self._teacher.load(folder)

    def export_hf(self, folder: Path) -> None:
        """Collective; rank 0 writes the folder."""
        with self._with_states("export", "export", [PARAMS]):
            self._student.save_hf(folder, self._config.model.path)
        log_gpu_memory_usage("exported", self._log, self._rank, self._device)

    def export_plan(self) -> list[TensorSpec]:
        """This pipeline stage's tensors in the order `send_weights` streams them."""
        plan = self._student.export_plan()
        return [TensorSpec(name, tuple(shape), str(dtype).removeprefix("torch.")) for name, shape, dtype in plan]

    def join_group(self, spec: GroupSpec) -> None:
        with self._phases.during("joining the weight-sync group"):
            self._group = TransferGroup(spec, self._device)

    def send_weights(
        self, buckets: Sequence[Bucket], with_digests: bool, *, meta: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """Collective over the stage's exporting ranks; the one that joined the group broadcasts. Digests by name."""
        with self._with_states("sending weights", "sync", [PARAMS], meta, alone=True):
            return send(self._group, buckets, self._student.export(), with_digests=with_digests)

    def memory_numbers(self) -> dict[str, float]:
        """See `RankMemory.take`; and what it cost to move states, see `OffloadController.take_metrics`."""
        return self._memory.take() | self._held.take_metrics()

    def _frozen_bytes(self) -> int:
        """Of the models that score here, on the device."""
        return sum(model.device_bytes() for model in (self._teacher, self._reference) if model is not None)

    @contextmanager
    def _with_states(
        self,
        phase: str,
        infix: str,
        include: Sequence[str] | None = None,
        meta: Mapping[str, Any] | None = None,
        *,
        alone: bool = False,
    ) -> Iterator[None]:
        """In this phase, with the states that it needs, see `OffloadController.needed`."""
        needed = self._held.needed(infix, include, meta, alone=alone)
        with self._memory.during(phase), needed, self._memory.diagnosed(phase):  # explained before they go
            yield

    def _micro_batches(
        self, sequence_indices: Sequence[bytes | None], lists: Sequence[list[Any]], *, with_reference: bool = False
    ) -> tuple[MicroBatches, list[Rollout]]:
        """This group's, and the sequences in them; arguments as of `train_step`, errors as of `group_batches`."""
        return group_batches(
            sequence_indices,
            lists,
            self._student,
            self._config.actor,
            device=self._device,
            where=f"actor rank {self._rank}",
            has_scores=self._layout.is_last_stage,
            signals=self._signals,
            with_reference=with_reference,
        )

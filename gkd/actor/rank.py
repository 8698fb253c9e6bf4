"""One actor rank's process: start-up, process group, student and frozen models, and where its states are."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import ray
import torch
import torch.distributed as dist

from gkd.actor import shared_folder
from gkd.actor.common.agree import probe_group
from gkd.actor.common.base import Student, StudentArgs
from gkd.actor.common.optim_spec import OptimSpec
from gkd.actor.frozen.rank_models import FrozenModels
from gkd.actor.megatron.layout import ParallelLayout, layouts_of
from gkd.actor.offload import OffloadController
from gkd.cluster.garbage import quick_imports
from gkd.cluster.gpu_table import RankPlacement
from gkd.cluster.startup import WATCH, this_placement
from gkd.config.schema import Config
from gkd.config.schema_rollout import IPC
from gkd.config.schema_teacher import ACTOR
from gkd.hf.hub import with_local_copies
from gkd.hf.model_dims import read_dims
from gkd.hf.model_folder import read_config_json
from gkd.log import get_logger
from gkd.memory.fragmentation import warn_of_fragmentation
from gkd.memory.oom import diagnosed
from gkd.memory.remedies import advice
from gkd.memory.states import PARAMS
from gkd.memory.usage import CountMeter, Timeline, log_gpu_memory_usage, record_allocations
from gkd.spans import Phase, ProcessSpans, Progress, SpanRecorder
from gkd.text.comparison import SAME_TOKENS, Comparison

if TYPE_CHECKING:
    from gkd.actor.common.attention import Heads


# Concurrency group of the methods that give weights to a restarted engine while this rank computes.
RESTORES = "restores"
# Collectives time out this much later than the driver's calls, so that a hang report finds the ranks in them.
_EXTRA_TIMEOUT_S = 60.0


class ActorRank:
    """The part of `ActorWorker` that does not depend on what the rank computes.

    Args:
        rank: index in the pool, and rank in torch.distributed.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._name = f"actor rank {rank}"
        self._log = get_logger(f"actor.{rank}")
        self._spans = SpanRecorder(f"actor {rank}", Phase.STARTED)
        self._stores: dict[int, dist.TCPStore] = {}  # port -> store whose group is not made yet

    def placement(self, ask_driver: bool) -> RankPlacement:
        return this_placement("actor", self._rank, ask_driver=ask_driver)

    @ray.method(concurrency_group=WATCH)
    def progress(self) -> Progress:
        """Return the phase that this rank is in."""
        return self._spans.progress()

    @ray.method(concurrency_group=WATCH)  # RESTORES may be occupied: a restoration may wait for an engine that has died
    def rendezvous(self) -> tuple[str, int]:
        """Open the store of a process group whose rank 0 is here. Return (address of this node, its port).

        The store listens from here on. A port that is only noted can be taken before the group is made.
        """
        host = ray.util.get_node_ip_address()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._stores[store.port] = store
        return host, store.port

    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def check_run_dir(self, root: Path, word: str) -> str:
        """Check that this node shares the run folder, and return its name. Raises ConfigError.

        Args:
            word: see `gkd.actor.shared_folder`.
        """
        node = socket.gethostname()
        shared_folder.answer(root, word, self._name, node)
        return node

    def init_model(
        self,
        config: Config,
        device: str,
        address: tuple[str, int],
        total_steps: int,
        run_dir: Path,
        comparison: Comparison,
    ) -> None:
        """Join the actor's process group, build the student and load its weights. Collective.

        Args:
            address: host and port of rank 0.
            run_dir: trainer.run_dir as an absolute path of the driver.
        """
        self._comparison = comparison
        self._log.info(self.placement(ask_driver=False).line())
        self._spans.enter("fetching the models")
        self._config = config = with_local_copies(config)
        derived = config.derived
        actor = config.actor
        trainer = config.trainer
        timeout_s = max(trainer.init_timeout_s, trainer.stage_timeout_s) + _EXTRA_TIMEOUT_S
        timeout = timedelta(seconds=timeout_s)
        self._spans.enter("joining the actor group")
        torch.set_num_threads(1 if device == "cuda" else int(os.environ["OMP_NUM_THREADS"]))
        self._device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(self._device)
            record_allocations()
        self._run_dir = run_dir
        self._memory = RankMemory(config, self._device, run_dir, self._name, self._spans, self._log)
        if self._rank == 0:
            store = self._stores.pop(address[1])
            store.set_timeout(timeout)
        else:
            store = dist.TCPStore(*address, is_master=False, timeout=timeout)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=derived.world_size, timeout=timeout)
        self._spans.enter("probing the actor group")
        probe_group("of all actor ranks", None, self._device)
        self._log.info("joined the actor group of %d", derived.world_size)
        self._layout = layouts_of(actor, derived.world_size)[self._rank]
        all_send = actor.backend.shards_every_tensor or config.transport(device) == IPC
        self._sends_weights = all_send or self._layout.exports  # see `ActorPool.exporters`
        with self._memory.diagnosed(Phase.BUILD_STUDENT):
            self._student = self._build_student(total_steps, timeout_s)
        self._frozen = FrozenModels(config, self._student, self._device, self._name)
        self._memory.states = self._state_bytes
        self._offload = OffloadController(
            self._student,
            self._device,
            automatic=derived.moves_states,
            timeout_s=timeout_s,
            diagnosed=self._memory.diagnosed,
            resident_bytes=self._frozen.device_bytes,
            span=self._spans.span,
        )
        if derived.moves_states:
            self.offload_states()
        self._spans.enter(Phase.READY)
        log_gpu_memory_usage("student built and loaded", self._log, rank=None, device=self._device)

    def _build_student(self, total_steps: int, timeout_s: float) -> Student:
        return build_student(
            self._config,
            self._layout,
            self._device,
            total_steps,
            timeout_s,
            on_phase=self._spans.enter,
            comparison=self._comparison,
        )

    def init_teacher(self) -> None:
        """Build the local teacher. Collective. Raises as `LocalTeacher`."""
        with self._phase(Phase.LOAD_TEACHER, [PARAMS]):
            self._frozen.init_teacher()
        self._log.info("teacher built and loaded")

    def init_reference(self) -> None:
        """Build the reference model. Collective. Raises as `FrozenModel`."""
        with self._memory.during(Phase.LOAD_REFERENCE):
            self._frozen.init_reference()
        self._log.info("reference built and loaded")

    def offload_states(self, include: Sequence[str] | None = None) -> None:
        """Offload states to host memory, see `States.offload_states`. Collective.

        Args:
            include: of `gkd.memory.states.KINDS`; None means all.
        """
        with self._memory.during(Phase.OFFLOAD):
            self._offload.offload_states(include)

    def reload_states(self, include: Sequence[str] | None = None) -> None:
        """Reload states to the device. Collective. Arguments as for `offload_states`."""
        with self._memory.during(Phase.ONLOAD):
            self._offload.reload_states(include)

    def allocated_bytes(self) -> int:
        """Return the bytes on the device, see `OffloadController.allocated_bytes`."""
        return self._offload.allocated_bytes()

    def _state_bytes(self) -> dict[str, int]:
        return {**self._student.states.device_bytes(), "frozen models": self._frozen.device_bytes()}

    def memory_numbers(self) -> tuple[dict[str, float], ProcessSpans]:
        """Return the metrics of `RankMemory.take` and of `OffloadController.take_metrics`, and this rank's spans."""
        return self._memory.take() | self._offload.take_metrics(), self._spans.take()

    @contextmanager
    def _phase(
        self,
        phase: Phase,
        include: Sequence[str] | None = None,
        is_offload_states: bool | None = None,
        *,
        alone: bool = False,
    ) -> Iterator[None]:
        """Run a phase of work with these states on the device, see `OffloadController.states_on_device`."""
        on_device = self._offload.states_on_device(phase.span, include, is_offload_states, alone=alone)
        # Diagnose an out-of-memory error before the states are offloaded, which would hide its cause.
        with self._memory.during(phase), on_device, self._memory.diagnosed(phase):
            yield


def build_student(
    config: Config,
    layout: ParallelLayout,
    device: torch.device,
    total_steps: int,
    collective_timeout_s: float,
    *,
    on_phase: Callable[[str], None],
    comparison: Comparison = SAME_TOKENS,
) -> Student:
    """Build the student with the backend that actor.strategy names, and load its weights. Collective.

    Args:
        total_steps: optimizer steps of the whole run, at which the learning-rate schedule ends.
        collective_timeout_s: of the process groups that the backend creates.
        on_phase, comparison: see `StudentArgs`.
    """
    actor = config.actor
    derived = config.derived
    if actor.attention != "auto":
        from gkd.actor.common.attention import use_flash_attention

        on_phase("comparing the attention kernels")
        use_flash_attention(actor.attention, _heads(config), getattr(torch, config.model.dtype), device)
    common: StudentArgs = {
        "lora": actor.lora,
        "optim": OptimSpec(**vars(actor.optim), total_steps=total_steps),
        "dtype": getattr(torch, config.model.dtype),
        "device": device,
        "loss": derived.loss,
        "signals": derived.signals,
        "comparison": comparison,
        "fused_lm_head": actor.fuses,
        "n_vocab": config.model.n_vocab,
        "seed": config.data.seed,
        "on_phase": on_phase,
    }
    return _BUILD[actor.backend_name](config, layout, collective_timeout_s, common)


# The backends are imported in their functions, because the driver imports the worker for its class alone.


def _megatron(config: Config, layout: ParallelLayout, collective_timeout_s: float, common: StudentArgs) -> Student:
    with quick_imports():
        from gkd.actor.megatron.student import MegatronStudent

    return MegatronStudent(
        config.model.path,
        layout,
        layers=config.actor.layers,
        # Within a node the reduction takes little time.
        overlap_grad_reduce=config.trainer.nnodes > 1 and common["device"].type == "cuda",
        recompute=config.actor.recompute,
        sequence_parallel=config.actor.sequence_parallel,
        collective_timeout_s=collective_timeout_s,
        **common,
    )


def _fsdp(config: Config, layout: ParallelLayout, collective_timeout_s: float, common: StudentArgs) -> Student:
    with quick_imports():
        from gkd.actor.fsdp.student import FsdpStudent

    return FsdpStudent(
        config.model.path,
        recompute=config.actor.recompute,
        compiles=config.actor.compile,
        packing=config.actor.packs,
        cp=config.actor.cp,
        cpu_offload=config.actor.fsdp_cpu_offload,
        collective_timeout_s=collective_timeout_s,
        trust_remote_code=config.model.trust_remote_code,
        vision=config.derived.vision,
        **common,
    )


_BUILD = {"megatron": _megatron, "fsdp2": _fsdp}


def _heads(config: Config) -> Iterator[Heads]:
    """Yield the attention shapes of one rank: of the student, and of frozen models, whose heads are not split."""
    derived = config.derived
    yield _heads_of(config.model.path, "model.path", config.actor.tp * config.actor.cp)
    if derived.teacher_pool == ACTOR:
        yield _heads_of(config.teacher.path, "teacher.path")
    if derived.reference_folder:
        yield _heads_of(derived.reference_folder, "reference.path" if config.reference.path else "model.path")


def _heads_of(folder: str, key: str, n_ranks: int = 1) -> Heads:
    from gkd.actor.common.attention import Heads

    dims = read_dims(read_config_json(folder, key))
    return Heads(dims.n_heads // n_ranks, max(1, dims.n_kv_heads // n_ranks), dims.head_dim)


class RankMemory:
    """Memory time-line, fragmentation and out-of-memory diagnosis of one rank.

    Args:
        run_dir: the run's folder; snapshots of torch's allocator are written to `memory/` in it.
        name: the rank's name, "actor rank 0".
        spans: also records each phase.
    """

    def __init__(
        self, config: Config, device: torch.device, run_dir: Path, name: str, spans: SpanRecorder, log: logging.Logger
    ) -> None:
        self._config = config
        self._device = device
        self._folder = run_dir / "memory"
        self._name = name
        self._spans = spans
        self.timeline = Timeline(device)
        self._counts = CountMeter(device)
        self._log = log
        self._metrics = dict[str, float]()
        self.states: Callable[[], Mapping[str, int]] = dict  # bytes on the device by kind of state

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Record time and memory of a phase. Raises OutOfMemory, or RuntimeError: the phase is inside another one."""
        with self._spans.span(phase, outermost=True), self.diagnosed(phase), self.timeline.during(phase):
            yield

    def diagnosed(self, phase: Phase) -> AbstractContextManager[None]:
        """Turn an out-of-memory error of the block into a diagnosis, see `gkd.memory.oom`. Raises OutOfMemory."""
        return diagnosed(
            self._folder,
            device=self._device,
            who=self._name,
            phase=phase,
            states=self.states,
            advice=lambda on_cuda: advice(self._config, "actor", phase, on_cuda=on_cuda),
        )

    def after_step(self) -> None:
        """Measure fragmentation; call it at the end of a training step."""
        if self._device.type == "cuda":
            self._metrics["memory/fragmentation"] = warn_of_fragmentation(self._device, self._log)

    def take(self) -> dict[str, float]:
        """Return and reset the metrics of the phases since the last call, see `Timeline.take`, of fragmentation, and of
        the allocator's calls.
        """
        metrics = self.timeline.take() | self._metrics | self._counts.take()
        self._metrics = {}
        return metrics

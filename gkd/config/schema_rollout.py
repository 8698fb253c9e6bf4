"""Declare the settings of the rollout engines and the weight sync: sections `rollout` and `weight_sync`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gkd.config.declare import key

LEAST_SEQUENCES = 128  # used where rollout.max_num_seqs is 0
MOST_MASKED = 2048  # ids that a rollout engine on GPUs never samples; vLLM's own limit is below gpt-oss' 1,069
CPU_KV_CACHE_MIB = 256  # used on the CPU where rollout.kv_cache_mib is 0


@dataclass(frozen=True)
class RolloutConfig:
    n_gpus_per_node: int = key(1, gt=0, resume=True)
    """GPUs per node of the rollout pool. Times rollout.nnodes: engines x rollout.tp."""
    nnodes: int = key(1, gt=0, resume=True)
    """Nodes of the rollout pool."""
    tp: int = key(1, gt=0, resume=True)
    """Tensor parallel size of one vLLM engine."""
    n: int = key(1, gt=0)
    """Responses sampled per prompt."""
    temperature: float = key(1.0, ge=0.01, le=2)
    """Sampling temperature of training rollouts; vLLM samples at no others."""
    top_p: float = key(1.0, gt=0, le=1)
    """Sample from the most probable tokens that hold this probability mass; 1 = all."""
    top_k: int = key(0, ge=0)
    """Sample from this number of most probable tokens; 0 = all."""
    min_p: float = key(0.0, ge=0, le=1)
    """Sample from the tokens that have at least this share of the most probable token's probability; 0 = all."""
    stop_token_ids: list[int] = key([])
    """Token ids that end a response, in addition to the student's end-of-sequence tokens."""
    environment: str = key("")
    """Class that answers the student's turns, as package.module:Class; empty = a response is one turn. See
    docs/environments.md."""
    max_turns: int = key(8, gt=0)
    """Turns of the student in a trajectory; with rollout.environment."""
    environment_timeout_s: float = key(30.0, gt=0, resume=True)
    """Seconds that one step of the environment may take; then the trajectory ends."""
    environment_workers: int = key(1, gt=0, resume=True)
    """Processes for each engine that run the environments."""
    max_num_seqs: int = key(0, ge=0, resume=True)
    """Sequences that an engine decodes at a time; 0 = 128, on GPUs of known size as many of full length as its KV
    cache holds, up to 1024. docs/sizing.md."""
    gpu_memory_utilization: float = key(0.85, gt=0, le=1, resume=True)
    """Fraction of GPU memory that must be free when vLLM starts, and that it takes (weights and KV cache); ignored
    if rollout.kv_cache_mib is set, and on cpu."""
    kv_cache_mib: int = key(0, ge=0, resume=True)
    """Size of the KV cache of each rank in MiB; 0 = on a GPU what rollout.gpu_memory_utilization leaves, on cpu 256.
    With a size, engines start with whatever GPU memory is free."""
    enforce_eager: bool = key(False, resume=True)
    """Skip CUDA graphs and torch.compile: slower steps, faster start. Always on for cpu."""
    max_restarts: int = key(1, ge=0, resume=True)
    """How often each engine that died or hangs is started again; one failure more saves a checkpoint and ends the run.
    docs/operations.md."""
    hang_timeout_s: float = key(300.0, gt=0, resume=True)
    """Seconds without a finished pass, or without any reply, after which an engine with unfinished sequences hangs
    and is killed. Longer than its longest pass, shorter than trainer.stage_timeout_s."""

    @property
    def truncation(self) -> str:
        """The settings that leave tokens out of the sampling, as text; empty without one."""
        used = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return ", ".join(f"rollout.{name}={getattr(self, name):g}" for name, is_used in used.items() if is_used)

    @property
    def sequence_limit(self) -> int:
        """max_num_seqs; the smallest number that it becomes while it is 0: preflight replaces it."""
        return self.max_num_seqs or LEAST_SEQUENCES

    def kv_cache_bytes(self, *, on_cpu: bool) -> int | None:
        """Return the size of the KV cache. None means what gpu_memory_utilization leaves."""
        mib = self.kv_cache_mib or (CPU_KV_CACHE_MIB if on_cpu else 0)
        return mib << 20 if mib else None


# Variables that torch's allocator reads; the second is the name before torch 2.9, which newer versions still read.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
GLOO = "gloo"
NCCL = "nccl"
SHARED_MEMORY = "shared_memory"
IPC = "ipc"
AUTO = "auto"


@dataclass(frozen=True)
class WeightSyncConfig:
    transport: str = key(AUTO, choices=(AUTO, NCCL, IPC, GLOO, SHARED_MEMORY), resume=True)
    """How weights travel; auto = nccl on GPUs of their own, ipc with trainer.colocate on GPUs, shared_memory on one
    host's cpu, else gloo."""
    bucket_mib: int = key(256, gt=0, resume=True)
    """Size of the buckets in which tensors are sent, in MiB."""
    lora: str = key("merged", choices=("merged", "adapters"), resume=True)
    """What is sent after a step with actor.lora: merged = all weights; adapters = only the adapters, with which the
    engines compute (vLLM's LoRA). docs/student.md."""
    verify: str = key("first", choices=("always", "first", "never"), resume=True)
    """Compare digests of the engines' tensors with the exported ones: always, first (at the start and after the
    first training step) or never."""


def has_expandable_segments(environ: Mapping[str, str]) -> bool:
    """Return whether torch's allocator makes segments of pages, which it can join."""
    return any(EXPANDABLE in environ.get(name, "") for name in ALLOCATOR_VARIABLES)

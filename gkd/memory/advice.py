"""What to change in a run whose memory did not suffice: its own keys, with the values that they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gkd.config.derived import derive
from gkd.config.schema import Config

# Where torch reads how its allocator shall work; the second is the name before torch 2.9, and is still read.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_PASSES = ("teacher scoring", "reference logprobs")  # of a local teacher or a reference
_SMALL_CHUNK_MIB = 32  # below this the LM head's products get slow, and little is won


@dataclass(frozen=True, slots=True)
class Shortage:
    """What an out-of-memory error was like, as far as the advice depends on it."""

    phase: str  # as in `gkd.actor.worker`
    on_cuda: bool
    fragmented: bool


def advice(config: Config, shortage: Shortage, environ: Mapping[str, str]) -> list[str]:
    """`key=value: what to do`, what helps most for least first; only keys that can still be changed."""
    lines = _against_fragmentation(environ) if shortage.fragmented else []
    if shortage.phase == "sending weights":
        lines.append(f"weight_sync.bucket_mib={config.weight_sync.bucket_mib}: lower it")
    elif shortage.phase in ("training step", "evaluation"):
        lines += _activations(config, shortage)
    elif shortage.phase in _PASSES:
        lines += _tokens(config, shortage)
    return lines + _states(config, shortage)


def engine_advice(config: Config, shortage: Shortage) -> list[str]:
    """The same for a rollout engine; `shortage.phase` as in `gkd.rollout.worker`."""
    rollout = config.rollout
    if not shortage.on_cuda:
        cache = f"rollout.cpu_kv_cache_mib={rollout.cpu_kv_cache_mib}: lower it"
        return [cache, f"rollout.n_gpus_per_node={rollout.n_gpus_per_node}: fewer engines on this host"]
    lines = []
    if shortage.phase == "receiving weights":
        lines.append(f"weight_sync.bucket_mib={config.weight_sync.bucket_mib}: lower it")
    share = f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g}"
    if shortage.phase != "offloading states":
        others = ", so that more is left for the actor on the same GPUs" if config.trainer.colocate else ""
        lines.append(f"{share}: lower it{others}")
        lines.append(f"rollout.max_num_seqs={rollout.max_num_seqs}: lower it")
    lines.append(f"rollout.tp={rollout.tp}: split an engine over more GPUs")
    return lines


def _against_fragmentation(environ: Mapping[str, str]) -> list[str]:
    if any("expandable_segments:True" in environ.get(name, "") for name in ALLOCATOR_VARIABLES):
        return []
    return [
        f"{ALLOCATOR_VARIABLES[1]}=expandable_segments:True in the environment that the trainer is started in (with "
        "cluster.ray_address: in that of `ray start` on each node), so that free pieces can be put together"
    ]


def _activations(config: Config, shortage: Shortage) -> list[str]:
    """They grow with the tokens of a micro-batch."""
    actor, data = config.actor, config.data
    lines = _tokens(config, shortage)
    if not actor.fused_lm_head:
        lines.append("actor.fused_lm_head=False: set it to true, so that the logits never exist as a whole")
    elif actor.logits_chunk_mib > _SMALL_CHUNK_MIB:
        lines.append(f"actor.logits_chunk_mib={actor.logits_chunk_mib}: lower it")
    if actor.recompute != "full" and shortage.phase == "training step":
        lines.append(f"actor.recompute={actor.recompute}: set it to full")
    lines.append(f"data.max_response_length={data.max_response_length}: lower it")
    return lines


def _tokens(config: Config, shortage: Shortage) -> list[str]:
    """Of a micro-batch, a teacher's and a reference's as well."""
    actor = config.actor
    longest = derive(config).max_sequence_length
    lines: list[str] = []
    budget = actor.max_tokens_per_micro_batch
    if budget > longest:
        lines.append(f"actor.max_tokens_per_micro_batch={budget}: lower it, to {longest} at the least")
    elif not budget and actor.micro_batch_size > 1:
        lines.append(f"actor.micro_batch_size={actor.micro_batch_size}: lower it")
    if not budget and shortage.fragmented:
        lines.append("actor.max_tokens_per_micro_batch=0: set it, so that the micro-batches get more alike")
    return lines


def _beside(config: Config) -> list[str]:
    """Of models that score on the actor's ranks: what need not be on the GPU together."""
    derived = derive(config)
    is_local, has_reference = derived.is_local_teacher, bool(derived.reference_folder)
    lines = []
    if is_local and not config.teacher.fsdp_cpu_offload:
        lines.append("teacher.fsdp_cpu_offload=False: set it to true, so that its shards wait in host memory")
    if has_reference and not config.reference.fsdp_cpu_offload:
        lines.append("reference.fsdp_cpu_offload=False: set it to true, so that its shards wait in host memory")
    if (is_local or has_reference) and not derived.moves_states and not config.actor.fsdp_cpu_offload:
        who = "the local teacher" if is_local else "the reference"
        lines.append(f"actor.offload_train=False: set it to true, and {who} has the GPU to itself")
    return lines


def _states(config: Config, shortage: Shortage) -> list[str]:
    """Parameters, gradients and the optimizer's states of a rank."""
    actor, trainer = config.actor, config.trainer
    n_gpus = f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
    if not shortage.on_cuda:
        return [f"{n_gpus}: fewer ranks on this host, or a host with more memory"]
    moving = _beside(config)
    if actor.strategy == "fsdp2":
        lines = [] if actor.fsdp_cpu_offload else ["actor.fsdp_cpu_offload=False: set it to true"]
        lines += [] if actor.lora.rank else ["actor.lora.rank=0: train adapters instead of all weights"]
        return [*lines, *moving, f"{n_gpus}: more GPUs, each with a smaller share of the states"]
    return [*moving, f"actor.tp={actor.tp}, actor.pp={actor.pp}: split the student over more GPUs, of {n_gpus}"]

"""Predict the bytes of every kind of rank of a run from its settings and its models' config.json. No model is built.

An engine on a GPU takes rollout.gpu_memory_utilization of it, or has a KV cache of rollout.kv_cache_mib. A frozen model
(a local teacher, a reference) is sharded over all actor ranks, and gathered one layer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gkd.config.check_values import Interval, save_interval
from gkd.config.schema import Config
from gkd.config.schema_sections import AHEAD, STREAM
from gkd.config.schema_teacher import ACTOR, weight_updates
from gkd.hf.model_dims import check_engine_split
from gkd.hf.model_folder import ModelFolder, read_model_folder
from gkd.memory.footprint.actor import (
    FLOAT32,
    actor_parts,
    adapter_params,
    gathered,
    itemsize,
    sync_buffers,
    tower_bytes,
)
from gkd.spans import Phase

STATES = ("weights", "gradients", "optimizer")
MOVED_STATES = (*STATES, "teacher_head")  # the teacher's LM head moves with the weights
# Parts that exist on the device only in a phase.
PHASES = {
    Phase.TRAIN: ("activations", "logits", "transient"),
    Phase.SEND: ("weight_sync",),
    Phase.SCORE: ("teacher_pass",),
    Phase.REFERENCE: ("reference_pass",),
}
# Parts that are in host memory in a phase, if states move between calls (`moved_states`).
_AWAY = {Phase.SEND: ("gradients", "optimizer"), Phase.SCORE: MOVED_STATES, Phase.REFERENCE: MOVED_STATES}
HOST_PARTS = ("offloaded", "moved_states", "saved_copy", "teacher_shards", "reference_shards")
CONTEXT_BYTES = 1 << 30  # an allowance for the CUDA context, kernels, and workspaces of cuBLAS and NCCL
LOGITS_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}  # `teacher_server.engines.signals.CHUNK_BYTES`, without torch
_MOST_SEQUENCES = 1024  # value for rollout.max_num_seqs 0: vLLM's own default on large GPUs
# Tokens of vLLM's largest batch: per rank on the CPU (True); on CUDA, for GPUs above 70 GiB.
_BATCHED_TOKENS = {True: 4096, False: 16384}


@dataclass(frozen=True, slots=True)
class RankFootprint:
    """The memory of one rank, in bytes by part. Equal ranks have one footprint, that of the lowest rank.

    On the device: `STATES`, `teacher_head`, `teacher_weights` (of a local teacher), `reference_weights`, `kv_cache`,
    `context`, `teacher_server`, frozen towers (`vision`, `teacher_vision`, `reference_vision`), and in some phases the
    parts in `PHASES`. In host memory: `HOST_PARTS`.
    """

    role: str  # "actor" | "rollout"
    rank: int
    parts: dict[str, int] = field(default_factory=dict)
    sequence_bytes: int = 0  # bytes of KV cache for one sequence of full length

    @property
    def name(self) -> str:
        return f"{self.role} rank {self.rank}"

    @property
    def total_bytes(self) -> int:
        """Peak on the rank's device over all phases."""
        return max(self.phases().values())

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device outside of all phases."""
        phase_parts = {name for names in (*PHASES.values(), HOST_PARTS) for name in names}
        return sum(size for name, size in self.parts.items() if name not in phase_parts)

    def phases(self) -> dict[Phase, int]:
        """Return the bytes on the device in each phase that this rank has."""
        peaks = {}
        for phase, names in PHASES.items():
            if phase == Phase.TRAIN or any(name in self.parts for name in names):
                away = self.sum_of(_AWAY.get(phase, ())) if "moved_states" in self.parts else 0
                peaks[phase] = self.resident_bytes - away + self.sum_of(names)
        return peaks

    def sum_of(self, names: tuple[str, ...]) -> int:
        """Return the bytes of these parts together."""
        return sum(self.parts.get(name, 0) for name in names)


@dataclass(frozen=True, slots=True)
class RunModels:
    """The model folders of a run's actor and rollout ranks."""

    student: ModelFolder
    local_teacher: ModelFolder | None = None  # None: a teacher server has it
    reference: ModelFolder | None = None  # None: there is no frozen reference model
    teacher_hidden: int | None = None  # hidden size of a teacher whose LM head the ranks have; None: it is left out


def read_models(config: Config, teacher_hidden: int | None = None) -> RunModels:
    """Read the model folders of a run. Raises ConfigError, ModelError as `read_model_folder`."""
    student = read_model_folder(config.model.path, "model.path")
    derived = config.derived
    teacher = None
    if derived.teacher_pool == ACTOR:
        teacher = read_model_folder(config.teacher.path, "teacher.path")
        teacher_hidden = teacher.dims.hidden_size
    path = derived.reference_folder
    key = "reference.path" if config.reference.path else "model.path"
    return RunModels(student, teacher, read_model_folder(path, key) if path else None, teacher_hidden)


def footprint(config: Config, models: RunModels, gpu_bytes: int | None = None) -> tuple[RankFootprint, ...]:
    """Return one footprint per kind of rank: the actor's pipeline stages in their order, then a rollout engine's ranks.

    Args:
        config: trainer.device `auto` counts as cuda.
        gpu_bytes: memory of a GPU; None: unknown, and engines have a cache for all their sequences.

    Raises:
        ConfigError, ModelError: as `megatron_stages`; naming rollout.tp.
    """
    on_cpu = config.trainer.device == "cpu"
    derived = config.derived
    server = round((gpu_bytes or 0) * config.cluster.teacher_gpu_share)
    common = {} if on_cpu else {"context": CONTEXT_BYTES, "teacher_server": server}
    stages = actor_parts(config, models.student, on_cpu=on_cpu, teacher_hidden=models.teacher_hidden)
    footprints = []
    for number, sizes in enumerate(stages):
        if derived.moves_states:  # gradients are not kept
            sizes["moved_states"] = sum(sizes.get(name, 0) for name in MOVED_STATES if name != "gradients")
        for name, model in (("teacher", models.local_teacher), ("reference", models.reference)):
            if model is not None:
                sizes |= _frozen(config, name, model, sizes["saved_copy"], on_cpu=on_cpu)
        if save_interval(config.trainer.save_every) == Interval() and not config.trainer.keep_best:
            sizes["saved_copy"] = 0
        footprints.append(RankFootprint("actor", number * derived.world_size // len(stages), sizes | common))
    if config.trainer.colocate and not on_cpu:
        common["teacher_server"] = 0  # on a shared GPU it counts once
    return *footprints, _engine(config, models.student, common, gpu_bytes, on_cpu=on_cpu)


def _frozen(config: Config, name: str, model: ModelFolder, saved_copy: int, *, on_cpu: bool) -> dict[str, int]:
    """Return the parts of an actor rank's share of a frozen model, and `saved_copy` with its copy if it is updated.

    A forward pass has two layers (the next is prefetched), the embedding or LM head, the activations of a layer, and a
    chunk of logits in the model's dtype and in float32.
    """
    settings = config.teacher if name == "teacher" else config.reference
    dims = model.dims
    actor = config.actor
    derived = config.derived
    updates = weight_updates(settings)
    total, layer, embedding = gathered(model)
    b = itemsize(config)
    tower = 0 if derived.vision == "none" else model.vision_params
    shard_b = FLOAT32 if updates.ema > 0.0 else b  # bytes of a parameter at home, and in the layer that is prefetched
    longest = derived.max_teacher_length if name == "teacher" else derived.max_sequence_length
    n_tokens = max(actor.max_tokens_per_micro_batch or actor.micro_batch_size * longest, longest)
    shards = -(-total * shard_b // derived.world_size)
    home = f"{name}_shards" if settings.fsdp_cpu_offload and not on_cpu else f"{name}_weights"
    chunk = LOGITS_BYTES["cpu" if on_cpu else "cuda"]
    widths = 2 * dims.hidden_size + 3 * max(dims.ffn_size, dims.q_columns)
    working = layer * (b + shard_b) + embedding * b + n_tokens * b * widths + tower_bytes(config, model, n_tokens)[1]
    copied = saved_copy + (shards if updates.interval else 0)
    whole = {f"{name}_vision": b * tower} if tower else {}
    return whole | {home: shards, f"{name}_pass": working + chunk + chunk * b // FLOAT32, "saved_copy": copied}


def _engine(
    config: Config, model: ModelFolder, common: Mapping[str, int], gpu_bytes: int | None, *, on_cpu: bool
) -> RankFootprint:
    """Return rank 0 of the first engine; all ranks of all engines are equal. Raises ConfigError naming rollout.tp.

    On a GPU what weights and vLLM's trial pass leave of the engine's share is KV cache; without the GPU's size, what
    all sequences need at full length.
    """
    dims = model.dims
    rollout = config.rollout
    b = itemsize(config)
    longest = config.derived.max_engine_length
    check_engine_split(rollout.tp, (dims.n_heads,), (dims.n_kv_heads,), dims.mlp_columns)
    total, _, embedding = gathered(model)
    total += 0 if config.derived.vision == "none" else model.vision_params
    adapters = adapter_params(config, dims, range(dims.n_layers), rollout.tp) // max(1, config.actor.lora.rank)
    n_tokens = min(_BATCHED_TOKENS[on_cpu] * (rollout.tp if on_cpu else 1), rollout.sequence_limit * longest)
    # One layer has its input, the residual and a norm's output, both halves of the MLP's projection, and their product.
    widest = 3 * dims.hidden_size + 3 * max(dims.ffn_size, dims.q_columns) // rollout.tp
    sizes = {
        "weights": b * total // rollout.tp + b * adapters * config.derived.engine_adapter_rank,  # padded to this rank
        "activations": n_tokens * widest * b + tower_bytes(config, model, n_tokens)[1],
        "logits": rollout.sequence_limit * 2 * dims.vocab_size * FLOAT32,
        **common,
    }
    kv_heads = max(1, dims.n_kv_heads // rollout.tp)  # heads are repeated if there are fewer than ranks
    sequence = longest * 2 * dims.n_layers * kv_heads * dims.head_dim * b
    cache = rollout.kv_cache_bytes(on_cpu=on_cpu)
    if cache is None:
        fixed = sum(sizes.values()) - common["teacher_server"]
        cache = (
            round(gpu_bytes * rollout.gpu_memory_utilization) - fixed if gpu_bytes else max_sequences(config) * sequence
        )
    sizes |= {"kv_cache": cache, "weight_sync": sync_buffers(config, embedding * b, total * b)}
    if config.trainer.colocate:  # the engine sleeps during a save and an export; its weights are kept on the host
        sizes["moved_states"] = sizes["weights"]
    return RankFootprint("rollout", 0, sizes, sequence)


def max_sequences(config: Config) -> int:
    """Return the maximum number of sequences that an engine decodes at a time, of training and of an evaluation."""
    trainer = config.trainer
    limit = config.rollout.sequence_limit
    n_batches = trainer.max_staleness + 1 if trainer.scheduler == STREAM else 1
    training = n_batches * trainer.global_batch_size * config.rollout.n
    validation = 0
    n_engines = config.derived.n_engines
    if config.data.val_files:  # without eval.max_prompts the number of prompts is unknown
        validation = config.eval.max_prompts or limit * n_engines
    overlap = AHEAD.get(trainer.scheduler) != 0
    together = training + validation if overlap else max(training, validation)
    return min(limit, -(-together // n_engines))


def engine_limit(config: Config, engine: RankFootprint, gpu_bytes: int | None) -> int:
    """Return rollout.max_num_seqs; for 0 the sequences of full length in the KV cache, at most those of the run.

    Args:
        engine: footprint with these settings, on such a GPU.
        gpu_bytes: memory of a GPU; None: unknown, or the ranks compute on the CPU.
    """
    limit = config.rollout.sequence_limit
    if config.rollout.max_num_seqs or gpu_bytes is None:
        return limit
    # Logits of more sequences leave less for the cache, unless its size is given.
    logits = 0 if config.rollout.kv_cache_mib else engine.parts["logits"] // limit
    room = (engine.parts["kv_cache"] + limit * logits) // (engine.sequence_bytes + logits)
    return max(limit, min(max_sequences(config.with_values({"rollout.max_num_seqs": _MOST_SEQUENCES})), room))


def scores_gib(config: Config, n_vocab: int, hidden_size: int, n_heldout: int) -> float:
    """Return the peak host memory of the teacher's scores in GiB, for the batches in flight or an evaluation.

    The object store, in shared memory, holds them once, and each tensor-parallel rank that trains on them once more.
    """
    trainer = config.trainer
    topk = config.teacher.topk
    signals = config.derived.signals
    logits = n_vocab * (2 if config.teacher.wire == "fp16" else FLOAT32)
    stored = {"logits": logits, "hidden": FLOAT32 * hidden_size, "topk": 8 * topk, "sampled": 4}
    trained_on = stored | {"topk": 12 * topk}  # ids in 64 bits
    held = sum(stored[signal] for signal in signals) + 4 * config.derived.n_student_ids  # the rollouts have those
    used = config.actor.tp * sum(trained_on[signal] for signal in signals)
    evaluated = min(n_heldout, config.eval.max_prompts or n_heldout) * config.eval.n
    batch = trainer.global_batch_size * config.rollout.n
    bytes_per_position = max(batch * ((1 + trainer.staleness_bound) * held + used), evaluated * (held + used))
    return bytes_per_position * config.data.max_response_length / 2**30

"""Everything that can be known to be wrong before any process starts, with an error that names key, value and fix."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gkd.actor.megatron.layout import ParallelLayout
from gkd.cluster.gpu_table import visible_ids
from gkd.config.check import check_config
from gkd.config.check_parallel import check_engine_split
from gkd.config.derived import Derived, derive
from gkd.config.schedulers import STREAM
from gkd.config.schema import Config
from gkd.data.prompts import eos_token_ids, load_prompts, load_tokenizer
from gkd.errors import ClusterError, ConfigError, ModelError
from gkd.hf.megatron_support import check_megatron_support
from gkd.hf.model_dims import ModelDims, read_dims
from gkd.hf.model_folder import read_config_json
from gkd.log import get_logger
from gkd.preflight.memory import check_memory
from gkd.preflight.replay import check_replay
from gkd.preflight.teacher import ask_teacher, check_reachable, check_teacher, scores_gib, warn_of_the_losses
from gkd.run.folder import RunFolder
from gkd.run.open import check_run_folder, open_run_folder
from gkd.teacher.base import TeacherInfo
from gkd.types import Prompt

log = get_logger("preflight")


@dataclass(frozen=True, slots=True)
class Plan:
    """What the checks found out, for the wiring."""

    derived: Derived
    device: str  # "cpu" | "cuda"
    eos_ids: list[int]
    train_prompts: list[Prompt] = field(repr=False)
    val_prompts: list[Prompt] = field(repr=False)
    teacher: TeacherInfo
    n_vocab: int  # ids that student and teacher share
    total_steps: int  # optimizer steps of the whole run; the learning rate schedule ends there
    folder: RunFolder


def preflight(config: Config) -> Plan:
    """Check the whole run; the run folder is taken last, so a refused run leaves no trace.

    Raises:
        ConfigError: the first thing that is wrong, with its key, its value and the fix.
        ModelError: the student names no end-of-sequence token, or attends through a sliding window.
        CheckpointError: what trainer.resume goes on from is damaged.
        ClusterError: Ray is not installed.
        TeacherUnavailable: no teacher server answers at teacher.server_ip:server_port.
    """
    derived = check_config(config)
    check_ray_installed()
    check_run_folder(config)  # the checkpoint is read last
    if not derived.is_local_teacher:
        check_reachable(config.teacher)
    device = resolve_device(config)
    if device == "cpu" and config.actor.loss_kernel == "triton":
        raise ConfigError("actor.loss_kernel", "triton", "the student is on the CPU.", "use auto or torch.")
    n_student_vocab = check_student(config)
    tokenizer = load_tokenizer(config.model.path, "model.path", trust_remote_code=config.model.trust_remote_code)
    check_tokenizer_fits(config, tokenizer, n_student_vocab)
    if config.trainer.global_batch_size < derived.n_engines:
        log.warning(
            "trainer.global_batch_size %d is fewer prompts than there are engines (%d): some will be idle",
            config.trainer.global_batch_size,
            derived.n_engines,
        )
    eos_ids = sorted({*eos_token_ids(config.model.path, tokenizer), *config.rollout.stop_token_ids})
    train, dropped = load_prompts(
        config.data.train_files,
        config.data,
        tokenizer,
        "data.train_files",
        response_ends=eos_ids if config.distill.on_policy_share < 1 else None,
    )
    if dropped:
        log.warning("%d training prompts are over data.max_prompt_length and left out (truncation: drop)", dropped)
    n_truncated = sum(p.response_ids is not None and int(p.response_ids[-1]) not in eos_ids for p in train)
    if n_truncated:
        log.warning("%d dataset responses are over data.max_response_length and cut there, without an end", n_truncated)
    val = _held_out(config, tokenizer)
    total_steps = planned_steps(config, len(train))
    check_stream_fits(config, total_steps)
    teacher = find_teacher(config, device)
    identity = {"name": teacher.model_name, "fingerprint": teacher.fingerprint}
    check_replay(config, total_steps, identity)
    if derived.reference_folder:
        from gkd.preflight.frozen import check_reference  # here, as `check_fsdp_student`

        identity["reference"] = check_reference(config, tokenizer, n_student_vocab)
    n_vocab = check_teacher(config, teacher, tokenizer, n_student_vocab)
    check_memory(config, device, teacher.hidden_size)
    if config.actor.offload_train and config.actor.fsdp_cpu_offload:
        log.warning("actor.offload_train is ignored: with actor.fsdp_cpu_offload the states are on the host already")
    warn_of_the_losses(config, scores_gib(config, n_vocab, teacher.hidden_size, len(val)))
    return Plan(
        derived=derived,
        device=device,
        eos_ids=eos_ids,
        train_prompts=train,
        val_prompts=val,
        teacher=teacher,
        n_vocab=n_vocab,
        total_steps=total_steps,
        folder=open_run_folder(config, identity),
    )


def find_teacher(config: Config, device: str) -> TeacherInfo:
    """Who will score. Raises as `ask_teacher`, or as `local_teacher`."""
    if config.teacher.backend == "zmq":
        return ask_teacher(config)
    from gkd.preflight.frozen import local_teacher  # here, as `check_fsdp_student`

    return local_teacher(config, device)


def check_stream_fits(config: Config, total_steps: int) -> None:
    """A stream numbers the sequences of the whole run, and they travel as int32. Raises ConfigError."""
    most = 2**31 // (config.trainer.global_batch_size * config.rollout.n)
    if config.trainer.scheduler == STREAM and total_steps > most:
        raise ConfigError(
            "trainer.total_steps",
            total_steps,
            f"with trainer.scheduler: stream a run of this batch size has at most {most} steps.",
            "lower it, and go on in a new run with the export of this one as model.path.",
        )


def planned_steps(config: Config, n_prompts: int) -> int:
    """Optimizer steps of the run: total_epochs' worth, at least one, and at most total_steps (0 = no limit)."""
    by_epochs = max(1, n_prompts * config.trainer.total_epochs // config.trainer.global_batch_size)
    return min(by_epochs, config.trainer.total_steps) if config.trainer.total_steps else by_epochs


def resolve_device(config: Config) -> str:
    """ "cpu" or "cuda" for trainer.device, which may be auto; and whether that device can be had here."""
    import torch

    wanted, n_gpus = config.trainer.device, torch.cuda.device_count()
    if config.cluster.ray_address:
        if wanted == "auto":
            raise ConfigError(
                "trainer.device", "auto", "the machines of cluster.ray_address decide it, not this one.", "name it."
            )
        return wanted
    device = wanted if wanted != "auto" else "cuda" if n_gpus else "cpu"
    if device == "cpu" and n_gpus:
        raise ConfigError(
            "trainer.device",
            "cpu",
            "this environment has the CUDA builds of torch and vLLM, and they see GPUs.",
            "use cuda, or make another environment: GKD_VENV=.venv-cpu bash launch/setup.sh --extra cpu.",
        )
    n_wanted = derive(config).n_gpus
    if device == "cuda" and not n_gpus:
        raise ConfigError(
            "trainer.device",
            wanted,
            "torch sees no GPU here.",
            "use cpu, or check nvidia-smi, CUDA_VISIBLE_DEVICES and that this environment has a CUDA build of torch.",
        )
    if device == "cuda" and n_gpus < n_wanted:
        raise ConfigError(
            "rollout.n_gpus_per_node",
            config.rollout.n_gpus_per_node,
            f"with trainer.n_gpus_per_node {config.trainer.n_gpus_per_node} the pools need {n_wanted} GPUs, and torch "
            f"sees {n_gpus} here.",
            "lower the pools, or name a larger cluster in cluster.ray_address.",
        )
    if device == "cpu" and config.weight_sync.transport == "nccl":
        raise ConfigError("weight_sync.transport", "nccl", "there is no GPU here.", "use auto or gloo.")
    _check_gpus_are_here(config.cluster.gpus, n_gpus if device == "cuda" else None)
    return device


def _check_gpus_are_here(gpus: list[int], n_gpus: int | None) -> None:
    """Raises ConfigError: cluster.gpus names one that this machine, or CUDA_VISIBLE_DEVICES, does not have.

    Args:
        n_gpus: that torch sees; None: they are logical, and any number will do.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    have = visible_ids(visible) if visible is not None else None
    if have is None and n_gpus is not None:
        have = tuple(map(str, range(n_gpus)))
    missing = [gpu for gpu in gpus if have is not None and str(gpu) not in have]
    if missing:
        what = "this machine has" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} shows"
        raise ConfigError(
            "cluster.gpus",
            gpus,
            f"{what} no {', '.join(map(str, missing))}.",
            "name GPUs that are there" + (", or unset CUDA_VISIBLE_DEVICES." if visible is not None else "."),
        )


def check_ray_installed() -> None:
    """Raises ClusterError: without it nothing can be started."""
    if importlib.util.find_spec("ray") is None:
        raise ClusterError("Ray is not installed in this environment. Fix: make one with launch/setup.sh, and use it.")


def check_student(config: Config) -> int:
    """Check that the student's folder is whole, and that the configured ranks can split it. Reads headers only.

    Returns:
        The number of rows of its embedding.

    Raises:
        ConfigError: naming model.path, or the key of a size that cannot split the model.
        ModelError: a sequence may be longer than the model's sliding window.
    """
    path, longest = config.model.path, derive(config).max_sequence_length
    if not Path(path).is_dir():
        raise ConfigError("model.path", path, "there is no such folder.", "give a local folder in Hugging Face format.")
    try:
        if config.actor.strategy == "fsdp2":
            # Imported here: it loads more than every run's driver needs.
            from gkd.preflight.fsdp_student import check_fsdp_student

            vocab_size, max_positions = check_fsdp_student(config)
        else:
            dims = _check_megatron_folder(path)
            vocab_size, max_positions = dims.vocab_size, dims.max_positions
    except ModelError as error:
        raise ConfigError("model.path", path, f"{error}", "name a whole model folder of that kind.") from error
    if config.actor.strategy == "megatron":
        _check_megatron_split(config, dims, longest)
    if longest > max_positions:
        raise ConfigError(
            "data.max_response_length",
            config.data.max_response_length,
            f"with data.max_prompt_length {config.data.max_prompt_length} a sequence may have {longest} tokens; the "
            f"student was made for {max_positions} (max_position_embeddings).",
            "lower one of the two.",
        )
    return vocab_size


def _check_megatron_folder(path: str) -> ModelDims:
    """Compare config.json with the headers of the weight files. Raises ModelError, ConfigError."""
    config_json = read_config_json(path, "model.path")
    check_megatron_support(config_json, path)
    dims = read_dims(config_json)
    from gkd.actor.megatron.hf_load import check_weight_files  # here: it imports torch

    check_weight_files(Path(path), dims)
    return dims


def _check_megatron_split(config: Config, dims: ModelDims, longest: int) -> None:
    """Raise ConfigError naming the key of a size that cannot split the model, or ModelError for a sliding window."""
    actor, world_size = config.actor, derive(config).world_size
    layout = ParallelLayout(tp=actor.tp, pp=actor.pp, world_size=world_size, rank=0, vpp=actor.vpp, ep=actor.ep)
    layout.check_model(dims, sequence_parallel=actor.sequence_parallel)
    dims.check_sequence_length(longest)
    check_engine_split(config.rollout.tp, (dims.n_heads,), (dims.n_kv_heads,), dims.mlp_columns)


def check_tokenizer_fits(config: Config, tokenizer: Any, vocab_size: int) -> None:
    """Every token the tokenizer knows must have a row in the embedding."""
    highest = max(tokenizer.get_vocab().values())
    if highest >= vocab_size:
        raise ConfigError(
            "model.path",
            config.model.path,
            f"its tokenizer has token ids up to {highest}, its embedding only {vocab_size} rows.",
            "resize the model's embedding, or use the tokenizer it was made with.",
        )


def _held_out(config: Config, tokenizer: Any) -> list[Prompt]:
    if not config.data.val_files:
        return []
    prompts, dropped = load_prompts(config.data.val_files, config.data, tokenizer, "data.val_files")
    if dropped:
        log.warning("%d held-out prompts are over data.max_prompt_length and left out (truncation: drop)", dropped)
    if config.eval.metric == "exact_match" and any(p.answer is None for p in prompts):
        raise ConfigError(
            "data.answer_key",
            config.data.answer_key,
            "a row of data.val_files has no such column, and eval.metric is exact_match.",
            "name the column with the reference answer, or set eval.metric=none.",
        )
    return prompts

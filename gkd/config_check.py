"""Every check that needs more than one key, or a value's range: a wrong config dies here, by name.

Pure: looks at the config only. What needs a look at files or sockets is in `gkd.preflight`.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import cast, get_args

from gkd.config import Config, ReferenceConfig, TeacherConfig, TrainerConfig
from gkd.config_sharing import check_sharing, reference_is_actor
from gkd.errors import ConfigError
from gkd.loss.spec import LOSS_NAMES, loss_spec, teacher_signals
from gkd.schedule import AHEAD, STREAM
from teacher_server.protocol import MAX_K, Signal

_CHOICES = {
    "data.truncation": ("error", "drop", "left", "right"),
    "data.chat_template": ("auto", "always", "never"),
    "model.dtype": ("bfloat16", "float32"),
    "trainer.device": ("auto", "cuda", "cpu"),
    "trainer.scheduler": (*AHEAD, STREAM),
    "actor.strategy": ("megatron", "fsdp2"),
    "actor.recompute": ("none", "selective", "full"),
    "actor.loss_kernel": ("auto", "torch", "triton"),
    "actor.optim.schedule": ("constant", "linear", "cosine", "wsd"),
    "teacher.backend": ("zmq", "local"),
    "teacher.signal": get_args(Signal),
    "teacher.wire": ("fp16", "fp32"),
    "distill.loss": LOSS_NAMES,
    "distill.tail": ("bucket", "renorm", "drop"),
    "weight_sync.transport": ("auto", "nccl", "gloo"),
    "weight_sync.verify": ("always", "first", "never"),
    "eval.metric": ("exact_match", "none"),
}
_POSITIVE = (
    "data.max_prompt_length",
    "data.max_response_length",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.total_epochs",
    "trainer.global_batch_size",
    "trainer.keep_last",
    "trainer.init_timeout_s",
    "trainer.stage_timeout_s",
    "actor.tp",
    "actor.pp",
    "actor.vpp",
    "actor.ep",
    "actor.lora.alpha",
    "actor.micro_batch_size",
    "actor.logits_chunk_mib",
    "actor.optim.lr",
    "actor.optim.eps",
    "rollout.n_gpus_per_node",
    "rollout.nnodes",
    "rollout.tp",
    "rollout.n",
    "rollout.temperature",
    "rollout.max_num_seqs",
    "rollout.cpu_kv_cache_mib",
    "weight_sync.bucket_mib",
    "weight_sync.timeout_s",
)
_NOT_NEGATIVE = (
    "data.seed",
    "trainer.max_staleness",
    "trainer.total_steps",
    "trainer.save_every",
    "trainer.keep_every",
    "actor.max_tokens_per_micro_batch",
    "actor.optim.weight_decay",
    "actor.optim.clip_grad",
    "actor.optim.warmup_steps",
    "actor.optim.decay_steps",
    "actor.lora.rank",
    "eval.every",
    "eval.max_prompts",
    "eval.keep_token_losses",
    "teacher.update_interval",
    "distill.reference_kl_weight",
)
# What the teacher's client and its protocol demand.
_BETWEEN: dict[str, tuple[float, float]] = {
    "teacher.server_port": (1, 65535),
    "teacher.n_server_workers": (0, 1 << 20),
    "teacher.topk": (1, MAX_K),
    "teacher.temperature": (1e-4, 1e4),
    "teacher.request_timeout_s": (1e-3, 4e4),
    "teacher.outage_budget_s": (1e-3, 1e6),
}
_MAX_NAME = 128  # characters of a teacher's name
_SHARES = (
    "rollout.top_p",
    "rollout.gpu_memory_utilization",
    "actor.optim.min_lr_ratio",
    "distill.on_policy_share",
    "memory.fragmentation_warn",
)
_MAY_BE_ZERO = ("actor.optim.min_lr_ratio", "distill.on_policy_share", "memory.fragmentation_warn")  # of the shares


def check_config(config: Config) -> None:
    """Raises ConfigError for the first thing that is wrong."""
    _check_ranges(config)
    _check_required(config)
    _check_strategy(config)
    _check_pools(config)
    _check_cluster(config)
    _check_sizes(config)
    _check_scheduler(config)
    _check_signal(config)
    _check_backend(config)
    _check_mixture(config)
    _check_reference(config)


def _check_scheduler(config: Config) -> None:
    trainer = config.trainer
    if trainer.scheduler != STREAM and trainer.max_staleness != TrainerConfig().max_staleness:
        raise ConfigError(
            "trainer.max_staleness",
            trainer.max_staleness,
            f"trainer.scheduler: {trainer.scheduler} has a bound of its own ({AHEAD[trainer.scheduler]}).",
            "leave it out, or set trainer.scheduler=stream.",
        )
    if config.trainer.scheduler == STREAM and not config.teacher.overlap_rollout:
        raise ConfigError(
            "teacher.overlap_rollout",
            False,
            "with trainer.scheduler: stream there is no end of a rollout that the teacher could wait for.",
            "set it to true, or choose another scheduler.",
        )


def data_parallel_size(config: Config) -> int:
    """Data-parallel groups of the actor pool."""
    world = config.trainer.n_gpus_per_node * config.trainer.nnodes
    return world // (config.actor.tp * config.actor.pp)


def n_engines(config: Config) -> int:
    """vLLM engines of the rollout pool."""
    return config.rollout.n_gpus_per_node * config.rollout.nnodes // config.rollout.tp


def _value(config: Config, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _check_ranges(config: Config) -> None:
    for key, choices in _CHOICES.items():
        value = _value(config, key)
        if value not in choices:
            raise ConfigError(key, value, "it is not one of the choices.", f"use one of: {', '.join(choices)}.")
    for key in (*_POSITIVE, *_NOT_NEGATIVE):
        value = _value(config, key)
        assert isinstance(value, int | float)
        lowest_ok = value > 0 if key in _POSITIVE else value >= 0
        if not lowest_ok:  # also true of NaN
            bound = "greater than 0" if key in _POSITIVE else "0 or more"
            raise ConfigError(key, value, "it is out of range.", f"use a number {bound}.")
    for key, (lowest, highest) in _BETWEEN.items():
        value = _value(config, key)
        assert isinstance(value, int | float)
        if not lowest <= value <= highest:
            raise ConfigError(key, value, "it is out of range.", f"use a number of {lowest:g} to {highest}.")
    if len(config.teacher.name) > _MAX_NAME:
        fix = f"use one of the server's names, of at most {_MAX_NAME} characters."
        raise ConfigError("teacher.name", config.teacher.name, "it is too long.", fix)
    for key in _SHARES:
        value = _value(config, key)
        assert isinstance(value, float)
        if not 0.0 <= value <= 1.0 or (value == 0.0 and key not in _MAY_BE_ZERO):
            raise ConfigError(key, value, "it is out of range.", "use a share between 0 and 1.")
    if len(config.actor.optim.betas) != 2 or not all(0.0 <= b < 1.0 for b in config.actor.optim.betas):
        raise ConfigError(
            "actor.optim.betas", config.actor.optim.betas, "Adam takes two, each in [0, 1).", "write e.g. [0.9, 0.95]."
        )


def _check_required(config: Config) -> None:
    if not config.data.train_files:
        raise ConfigError("data.train_files", [], "there is nothing to train on.", "name one or more prompt files.")
    if not config.model.path:
        raise ConfigError("model.path", "", "there is no student.", "give a folder in Hugging Face format.")
    if config.eval.metric == "exact_match" and not config.eval.answer_marker:
        raise ConfigError("eval.answer_marker", "", "exact_match needs one.", "set it, or eval.metric=none.")
    if not config.trainer.run_dir:
        raise ConfigError("trainer.run_dir", "", "a run needs a folder for what it writes.", "e.g. runs/my_run.")


def _check_strategy(config: Config) -> None:
    """Does the student's backend have what is asked of it?"""
    a = config.actor
    if a.strategy == "fsdp2":
        split = {"actor.tp": a.tp, "actor.pp": a.pp, "actor.vpp": a.vpp, "actor.ep": a.ep}
        for key, size in split.items():
            if size != 1:
                problem = "actor.strategy is fsdp2, where every rank is data parallel."
                raise ConfigError(key, size, problem, "use 1, or actor.strategy=megatron.")
        if a.recompute == "selective":
            problem = "actor.strategy is fsdp2, whose attention kernels recompute their scores in any case."
            raise ConfigError("actor.recompute", a.recompute, problem, "use full, or none.")
        if a.sequence_parallel:
            problem = "actor.strategy is fsdp2, which has no tensor-parallel regions."
            raise ConfigError("actor.sequence_parallel", True, problem, "use false, or actor.strategy=megatron.")
        return
    for key, value, is_set in (
        ("actor.fsdp_cpu_offload", a.fsdp_cpu_offload, a.fsdp_cpu_offload),
        ("actor.lora.rank", a.lora.rank, a.lora.rank > 0),
    ):
        if is_set:
            raise ConfigError(key, value, "actor.strategy is megatron.", "switch it off, or use actor.strategy=fsdp2.")


def _check_pools(config: Config) -> None:
    t, a, r = config.trainer, config.actor, config.rollout
    world = t.n_gpus_per_node * t.nnodes
    if world % (a.tp * a.pp):
        raise ConfigError(
            "trainer.n_gpus_per_node",
            t.n_gpus_per_node,
            f"the actor pool has {t.n_gpus_per_node} x trainer.nnodes {t.nnodes} = {world} ranks, which "
            f"actor.tp {a.tp} x actor.pp {a.pp} = {a.tp * a.pp} does not divide.",
            "make the pool a multiple of actor.tp x actor.pp.",
        )
    if a.vpp > 1 and a.pp == 1:
        raise ConfigError(
            "actor.vpp", a.vpp, "there is no pipeline to interleave with actor.pp 1.", "use 1, or actor.pp > 1."
        )
    if a.sequence_parallel and a.tp == 1:
        raise ConfigError(
            "actor.sequence_parallel",
            True,
            "with actor.tp 1 there are no ranks to split the sequence over.",
            "use false, or actor.tp > 1.",
        )
    if t.n_gpus_per_node % a.tp and t.nnodes > 1:
        raise ConfigError(
            "actor.tp",
            a.tp,
            f"a tensor-parallel group would span nodes of trainer.n_gpus_per_node {t.n_gpus_per_node} GPUs.",
            "let actor.tp divide trainer.n_gpus_per_node.",
        )
    if r.n_gpus_per_node % r.tp:
        raise ConfigError(
            "rollout.tp",
            r.tp,
            f"rollout.n_gpus_per_node {r.n_gpus_per_node} is not a multiple of it.",
            "let rollout.tp divide rollout.n_gpus_per_node; an engine never spans nodes.",
        )


def _check_cluster(config: Config) -> None:
    """Can there be such nodes and GPUs at all?"""
    t, r, c = config.trainer, config.rollout, config.cluster
    check_sharing(config)
    if sorted(c.order) != ["actor", "rollout"]:
        raise ConfigError(
            "cluster.order", c.order, "it has to name each pool once.", "use [actor, rollout] or [rollout, actor]."
        )
    if "://" in c.ray_address:
        problem = "that is an address of Ray Client's, and the trainer has to be on a node of the cluster."
        raise ConfigError(
            "cluster.ray_address", c.ray_address, problem, "give the HOST:PORT that ray start --head prints."
        )
    if not c.ray_address:
        for key, nnodes in (("trainer.nnodes", t.nnodes), ("rollout.nnodes", r.nnodes)):
            if nnodes > 1:
                problem = "a pool's nodes are different ones, and without cluster.ray_address there is only this one."
                raise ConfigError(key, nnodes, problem, "use 1, or name a Ray cluster in cluster.ray_address.")
    if not c.gpus:
        return
    if min(c.gpus) < 0 or len(set(c.gpus)) < len(c.gpus):
        raise ConfigError(
            "cluster.gpus", c.gpus, "a GPU has a number of 0 or more, and is named once.", "write e.g. [0, 1, 2, 3]."
        )
    # On several nodes a node may hold one pool only.
    both, most = t.n_gpus_per_node + r.n_gpus_per_node, max(t.n_gpus_per_node, r.n_gpus_per_node)
    n_wanted = most if c.ray_address or t.colocate else both
    if len(c.gpus) < n_wanted:
        raise ConfigError(
            "cluster.gpus",
            c.gpus,
            f"with trainer.n_gpus_per_node {t.n_gpus_per_node} and rollout.n_gpus_per_node {r.n_gpus_per_node} a node "
            f"needs {n_wanted}.",
            "name more, or lower the pools.",
        )


def _check_sizes(config: Config) -> None:
    t = config.trainer
    dp = data_parallel_size(config)
    if t.global_batch_size < dp:
        raise ConfigError(
            "trainer.global_batch_size",
            t.global_batch_size,
            f"the actor pool has {dp} data-parallel groups and each needs a prompt.",
            f"use at least {dp}, or a larger actor.tp / actor.pp.",
        )
    _check_schedule(config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    budget = config.actor.max_tokens_per_micro_batch
    if 0 < budget < longest:
        raise ConfigError(
            "actor.max_tokens_per_micro_batch",
            budget,
            f"one sequence may have data.max_prompt_length + data.max_response_length = {longest} tokens.",
            f"use 0 or at least {longest}.",
        )
    patience = config.teacher.outage_budget_s + config.teacher.request_timeout_s
    if config.teacher.backend == "zmq" and t.stage_timeout_s <= patience:
        raise ConfigError(
            "trainer.stage_timeout_s",
            t.stage_timeout_s,
            f"a lost teacher is waited for teacher.outage_budget_s + teacher.request_timeout_s = {patience:g} s, and "
            "the stage would be given up before that, without a checkpoint.",
            f"use more than {patience:g}.",
        )
    if config.weight_sync.transport == "nccl" and t.device == "cpu":
        raise ConfigError(
            "weight_sync.transport", "nccl", "trainer.device is cpu and NCCL needs GPUs.", "use auto or gloo."
        )


def _check_schedule(config: Config) -> None:
    """Does the learning rate have steps to decay in? `OptimSpec` asks again, of the number that the data gives."""
    o, total_steps = config.actor.optim, config.trainer.total_steps
    if o.schedule != "wsd":
        return
    if not o.decay_steps:
        raise ConfigError("actor.optim.decay_steps", 0, "schedule wsd needs steps to decay in.", "use at least 1.")
    if 0 < total_steps < o.warmup_steps + o.decay_steps:
        raise ConfigError(
            "actor.optim.decay_steps",
            o.decay_steps,
            f"with actor.optim.warmup_steps {o.warmup_steps} these are more than trainer.total_steps {total_steps}.",
            "shorten one of them.",
        )


def _check_signal(config: Config) -> None:
    """Does the teacher say what the losses need?"""
    t, spec = config.teacher, loss_spec(config.distill, config.teacher.temperature)
    if t.signal == "sampled" and spec.divergences:
        names = ", ".join(term.name for term in spec.divergences)
        raise ConfigError(
            "teacher.signal",
            t.signal,
            f"{names} compares distributions, and this is one token's probability.",
            "use topk, hidden or logits; or k1, k2 or k3 as distill.loss.",
        )
    if not 0.0 <= t.mass < 1.0:
        raise ConfigError("teacher.mass", t.mass, "it is out of range.", "use a number from 0 to below 1.")
    if t.mass > 0.0 and "topk" not in teacher_signals(spec, cast(Signal, t.signal)):
        reason = (
            f"with teacher.signal {t.signal}" if t.signal != "topk" else f"for {', '.join(x.name for x in spec.terms)}"
        )
        raise ConfigError("teacher.mass", t.mass, f"{reason} there is no list to cut.", "use 0.")


# Of the teacher server; teacher.wire, request_timeout_s and outage_budget_s are not among them, because shared files
# of settings have them and they change nothing.
_OF_SERVER = ("server_ip", "server_port", "name", "keys", "n_server_workers", "overlap_rollout")
_OF_LOCAL = ("path", "fsdp_cpu_offload", "update_interval", "update_ema")


def _check_backend(config: Config) -> None:
    """Is what is said of the teacher about the kind of teacher that there is?"""
    teacher, default = config.teacher, TeacherConfig()
    is_local = teacher.backend == "local"
    for name in _OF_SERVER if is_local else _OF_LOCAL:
        value = getattr(teacher, name)
        if value != getattr(default, name):
            other = "zmq" if is_local else "local"
            problem = f"teacher.backend is {teacher.backend}, and this is a setting of {other}."
            raise ConfigError(f"teacher.{name}", value, problem, f"leave it out, or set teacher.backend={other}.")
    if not is_local:
        return
    if not teacher.path:
        raise ConfigError(
            "teacher.path", "", "teacher.backend is local, and there is no teacher.", "give a folder, or use zmq."
        )
    if config.trainer.scheduler != "sync" and not config.trainer.replay:
        raise ConfigError(
            "trainer.scheduler",
            config.trainer.scheduler,
            "teacher.backend is local: training and scoring share the actor's ranks, so nothing can be scored beside a "
            "training step, and two threads' calls could reach the ranks in different orders.",
            "use sync, or teacher.backend=zmq.",
        )
    if not 0.0 <= teacher.update_ema < 1.0:
        problem = "it is out of range."
        raise ConfigError("teacher.update_ema", teacher.update_ema, problem, "use a number from 0 to below 1.")
    if teacher.update_ema > 0.0 and not teacher.update_interval:
        problem = "teacher.update_interval is 0, so there is no refresh to average at."
        raise ConfigError("teacher.update_ema", teacher.update_ema, problem, "use 0, or set teacher.update_interval.")


def _check_mixture(config: Config) -> None:
    """Does every loss see tokens to learn from, in every step where it is alone?"""
    spec, share = loss_spec(config.distill, config.teacher.temperature), config.distill.on_policy_share
    n_prompts = config.trainer.global_batch_size
    if spec.sft is not None and share == 1.0:
        raise ConfigError(
            "distill.on_policy_share",
            share,
            "sft is among the losses, and there would be no dataset response to learn from.",
            "use a share below 1, or leave sft out.",
        )
    if spec.policy_gradients and share == 0.0:
        names = ", ".join(term.name for term in spec.policy_gradients)
        raise ConfigError(
            "distill.on_policy_share",
            share,
            f"{names} learns from tokens that the student wrote, and there would be none.",
            "use a share above 0, or leave it out.",
        )
    # A step without a token to learn from would still move the weights: by momentum and weight decay.
    only_student, only_dataset = len(spec.policy_gradients) == len(spec.terms), spec.terms == (spec.sft,)
    exact = Fraction(repr(share))  # as written, and as `gkd.mixing` counts
    each_step = exact * n_prompts if only_student else (1 - exact) * n_prompts if only_dataset else 1
    if each_step < 1:
        kind = "student" if only_student else "dataset"
        raise ConfigError(
            "distill.on_policy_share",
            share,
            f"of trainer.global_batch_size {n_prompts} prompts less than one a step would be answered by the {kind}, "
            "and the losses learn from nothing else.",
            "change the share, use larger batches, or add a loss that compares distributions.",
        )


def _check_reference(config: Config) -> None:
    """Is there something to hold to the reference, if anything is said of one?"""
    weight, share = config.distill.reference_kl_weight, config.distill.on_policy_share
    for item in dataclasses.fields(ReferenceConfig):
        value = getattr(config.reference, item.name)
        if not weight and value != item.default:
            problem = "distill.reference_kl_weight is 0, so there is no reference."
            raise ConfigError(f"reference.{item.name}", value, problem, "leave it out, or set the weight.")
    if reference_is_actor(config) and not config.reference.fsdp_cpu_offload:
        problem = "with actor.lora the reference is the actor without its adapters, which has no shards of its own."
        raise ConfigError("reference.fsdp_cpu_offload", False, problem, "leave it out, or name a reference.path.")
    if weight and share == 0.0:
        problem = (
            "distill.on_policy_share is 0: it is estimated from tokens that the student wrote, and there are none."
        )
        raise ConfigError("distill.reference_kl_weight", weight, problem, "use 0, or a share above 0.")


def all_keys() -> set[str]:
    """Dotted names of every leaf key (for the tables above and their test)."""

    def walk(obj: object, prefix: str) -> set[str]:
        names: set[str] = set()
        for item in dataclasses.fields(obj):  # type: ignore[arg-type]
            value = getattr(obj, item.name)
            name = f"{prefix}{item.name}"
            names |= walk(value, f"{name}.") if dataclasses.is_dataclass(value) else {name}
        return names

    return walk(Config(), "")

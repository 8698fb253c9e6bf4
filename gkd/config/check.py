"""Check settings against their limits and against each other. `gkd.preflight` checks files and sockets."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from gkd.config.check_losses import (
    check_backend,
    check_mixture,
    check_parameters,
    check_reference,
    check_scheduler,
    check_signal,
    check_support,
    check_tail,
    check_token_weights,
    check_tokenizer,
)
from gkd.config.check_values import (
    Mistakes,
    check_value,
    check_values,
    declared_key,
    named_keys,
    template_parts,
)
from gkd.config.declare import function_name, is_path
from gkd.config.schema import ENGINE_RANKS, Config, Derived, Route
from gkd.config.schema_actor import AUTO
from gkd.config.schema_actor import BACKENDS as STUDENT_BACKENDS
from gkd.config.schema_sections import ENVIRONMENT, EXACT_MATCH, NO_METRIC, REWARD_NAMES, all_keys
from gkd.config.schema_teacher import ACTOR, MAX_NAME_LENGTH, DistillConfig
from gkd.errors import ConfigError

# Check the sizes of pools, nodes and batches, and what shares GPUs.


def check_strategy(config: Config) -> None:
    """Check that the student's backend supports the settings."""
    a = config.actor
    if a.attention != "auto" and config.model.dtype == "float32":
        problem = "FlashAttention computes in 16 bits, and model.dtype is float32."
        raise config.error("actor.attention", problem, "use auto, or model.dtype=bfloat16.")
    for name, limit in a.backend.limits.items():
        value = getattr(a, name)
        if value not in limit.values:
            other = next(other for other, backend in STUDENT_BACKENDS.items() if backend.supports(name, value))
            fix = f"use {' or '.join(map(str, limit.values))}, or actor.strategy={other}."
            raise config.error(f"actor.{name}", f"actor.strategy={a.backend_name} {limit.why}.", fix)
    if not a.lora.rank:
        problem = "actor.lora.rank is 0, so all weights are trained."
        config.check_unused(["actor.lora.alpha", "actor.lora.targets"], problem, "remove it, or set actor.lora.rank.")
    if a.cp > 1:
        _check_context_parallel(config)
    if a.layers == "te" and a.lora.rank:
        problem = "Transformer Engine's matrices include the preceding norm, so adapters would not get their input."
        raise config.error("actor.layers", problem, "use auto, or actor.lora.rank=0.")


def _check_context_parallel(config: Config) -> None:
    """Check that no text is compared over several ranks' columns, and that attention is the project's."""
    if config.teacher.tokenizer:
        problem = f"a text may begin in one rank's columns and end in another's, and actor.cp is {config.actor.cp}."
        raise config.error("teacher.tokenizer", problem, "remove it, or use actor.cp=1.")
    if config.actor.backend_name == "fsdp2" and not config.actor.packs:
        problem = "without packing the model's own attention is used, which needs whole sequences."
        raise config.error("actor.cp", problem, "use 1, or actor.packing=true.")


def check_pools(config: Config) -> None:
    """Check that the parallel layout divides the pools."""
    t, a, r = config.trainer, config.actor, config.rollout
    world = config.derived.world_size
    if world % a.group_size:
        problem = (
            f"the actor pool has {t.n_gpus_per_node} x trainer.nnodes {t.nnodes} = {world} ranks, which "
            f"actor.tp {a.tp} x actor.cp {a.cp} x actor.pp {a.pp} = {a.group_size} does not divide."
        )
        fix = "make the pool a multiple of actor.tp x actor.cp x actor.pp."
        raise config.error("trainer.n_gpus_per_node", problem, fix)
    if a.vpp > 1 and a.pp == 1:
        problem = "with actor.pp 1 there is no pipeline to interleave."
        raise config.error("actor.vpp", problem, "use 1, or actor.pp > 1.")
    if a.sequence_parallel and a.tp == 1:
        problem = "with actor.tp 1 there are no ranks to split the sequence over."
        raise config.error("actor.sequence_parallel", problem, "use false, or actor.tp > 1.")
    if t.n_gpus_per_node % a.tp and t.nnodes > 1:
        problem = f"a tensor-parallel group would span nodes of trainer.n_gpus_per_node {t.n_gpus_per_node} GPUs."
        raise config.error("actor.tp", problem, "let actor.tp divide trainer.n_gpus_per_node.")
    if r.n_gpus_per_node % r.tp:
        problem = f"rollout.n_gpus_per_node {r.n_gpus_per_node} is not a multiple of it."
        fix = "let rollout.tp divide rollout.n_gpus_per_node; an engine never spans nodes."
        raise config.error("rollout.tp", problem, fix)


def check_cluster(config: Config) -> None:
    """Check nodes and GPUs."""
    t, r, c = config.trainer, config.rollout, config.cluster
    _check_sharing(config)
    if "://" in c.ray_address:
        problem = "Ray Client is not supported: the trainer must run on a node of the cluster."
        raise config.error("cluster.ray_address", problem, "give the HOST:PORT that ray start --head prints.")
    if not c.ray_address:
        for key, nnodes in (("trainer.nnodes", t.nnodes), ("rollout.nnodes", r.nnodes)):
            if nnodes > 1:
                problem = "without cluster.ray_address there is only this node."
                raise ConfigError(key, nnodes, problem, "use 1, or name a Ray cluster in cluster.ray_address.")
    if not c.gpus:
        return
    if min(c.gpus) < 0 or len(set(c.gpus)) < len(c.gpus):
        raise config.error("cluster.gpus", "must be distinct numbers >= 0.", "write e.g. [0, 1, 2, 3].")
    # A node may hold only one of the pools if there are several nodes.
    both, most = t.n_gpus_per_node + r.n_gpus_per_node, max(t.n_gpus_per_node, r.n_gpus_per_node)
    n_wanted = most if c.ray_address or t.colocate else both
    if len(c.gpus) < n_wanted:
        problem = (
            f"with trainer.n_gpus_per_node {t.n_gpus_per_node} and rollout.n_gpus_per_node {r.n_gpus_per_node} a node "
            f"needs {n_wanted}."
        )
        raise config.error("cluster.gpus", problem, "name more GPUs, or use smaller pools.")


def _check_sharing(config: Config) -> None:
    """Check that pools which share GPUs have equal sizes and never work at the same time."""
    t, r = config.trainer, config.rollout
    moving = "trainer.colocate" if t.colocate else "actor.offload_train" if config.actor.offload_train else ""
    if config.memory.strategy == "resident" and moving:
        problem = f"with {moving} the actor's states move between calls."
        raise config.error("memory.strategy", problem, f"use auto, or {moving}=false.")
    share, taken = config.cluster.teacher_gpu_share, r.gpu_memory_utilization
    if share and config.derived.teacher_pool:
        problem = f"teacher.backend={config.teacher.backend} has no server."
        raise config.error("cluster.teacher_gpu_share", problem, "remove it, or use teacher.backend=zmq.")
    if share + taken > 1 and not r.kv_cache_mib:
        problem = f"cluster.teacher_gpu_share {share:g} of the same GPUs is the teacher's: together more than 1."
        raise config.error("rollout.gpu_memory_utilization", problem, f"use at most {1 - share:g}.")
    if not t.colocate:
        return
    for name, own, other in (("n_gpus_per_node", r.n_gpus_per_node, t.n_gpus_per_node), ("nnodes", r.nnodes, t.nnodes)):
        if own != other:
            problem = f"with trainer.colocate the engines are on the actor's GPUs, and trainer.{name} is {other}."
            raise config.error(f"rollout.{name}", problem, f"use {other}, or trainer.colocate=false.")
    if t.scheduler != "sync":
        problem = "with trainer.colocate actor and engines alternate, and this scheduler overlaps them."
        raise config.error("trainer.scheduler", problem, "use sync, or trainer.colocate=false.")
    if config.derived.teacher_pool == ACTOR and not config.teacher.fsdp_cpu_offload:
        problem = "with trainer.colocate the engines need the whole GPUs, and the teacher's shards would stay there."
        raise config.error("teacher.fsdp_cpu_offload", problem, "use true, or trainer.colocate=false.")
    if config.derived.reference_folder and not config.reference.fsdp_cpu_offload:
        problem = "with trainer.colocate the engines need the whole GPUs, and the reference's shards would stay there."
        raise config.error("reference.fsdp_cpu_offload", problem, "use true, or trainer.colocate=false.")
    if config.weight_sync.transport == "nccl":
        problem = "with trainer.colocate two ranks of a group are on one GPU, which NCCL does not support."
        raise config.error("weight_sync.transport", problem, "use auto, or trainer.colocate=false.")


def check_adapter_sync(config: Config) -> None:
    """Check that there are adapters to send, and that engines can hold them."""
    rank = config.actor.lora.rank
    if config.weight_sync.lora != "adapters" or config.derived.engine_adapter_rank:
        return
    if not rank:
        problem = "actor.lora.rank is 0, so there are no adapters."
        raise config.error("weight_sync.lora", problem, "use merged, or set actor.lora.rank.")
    problem = f"vLLM supports adapters up to rank {ENGINE_RANKS[-1]}, and actor.lora.rank is {rank}."
    raise config.error("weight_sync.lora", problem, "use merged, or a lower actor.lora.rank.")


def check_sizes(config: Config) -> None:
    """Check batch sizes, the learning rate schedule and timeouts."""
    t = config.trainer
    dp = config.derived.dp_size
    if t.global_batch_size < dp:
        problem = f"each of the actor's {dp} data-parallel groups needs a prompt."
        raise config.error("trainer.global_batch_size", problem, f"use at least {dp}, or a larger actor.tp, cp or pp.")
    _check_schedule(config)
    longest = config.derived.max_sequence_length
    budget = config.actor.max_tokens_per_micro_batch
    if 0 < budget < longest:
        problem = f"one sequence may have data.max_prompt_length + data.max_response_length = {longest} tokens."
        raise config.error("actor.max_tokens_per_micro_batch", problem, f"use 0 or at least {longest}.")
    patience = config.teacher.outage_budget_s + config.teacher.request_timeout_s
    if not config.derived.teacher_pool and t.stage_timeout_s <= patience:
        problem = (
            f"a teacher outage may last teacher.outage_budget_s + teacher.request_timeout_s = {patience:g} s, and the "
            "stage would time out first, without a checkpoint."
        )
        raise config.error("trainer.stage_timeout_s", problem, f"use more than {patience:g}.")
    if config.rollout.hang_timeout_s >= t.stage_timeout_s:
        problem = f"trainer.stage_timeout_s {t.stage_timeout_s:g} ends the run before an engine is found to hang."
        config.check_unused(["rollout.hang_timeout_s"], problem, "use less, or raise trainer.stage_timeout_s.")
    n_nodes = max(t.nnodes, config.rollout.nnodes)
    if config.weight_sync.transport == "shared_memory" and n_nodes > 1:
        problem = f"it needs all members on one host, and there are {n_nodes} nodes."
        raise config.error("weight_sync.transport", problem, "use auto.")
    transport = config.weight_sync.transport
    if transport in ("nccl", "ipc") and t.device == "cpu":
        raise config.error("weight_sync.transport", "it needs GPUs, and trainer.device is cpu.", "use auto.")
    if transport == "ipc" and not t.colocate:
        problem = "it needs actor and engine on the same card, and trainer.colocate is false."
        raise config.error("weight_sync.transport", problem, "use auto.")
    if transport == "ipc" and config.actor.pp > 1:
        problem = f"each card must hold tensors of all layers, and actor.pp is {config.actor.pp}."
        raise config.error("weight_sync.transport", problem, "use auto, or actor.pp=1.")


def _check_schedule(config: Config) -> None:
    """Check the decay steps against total_steps; `OptimSpec` checks them against the number of steps of the data."""
    o, total_steps = config.actor.optim, config.trainer.total_steps
    if o.schedule != "wsd":
        problem = f"it is of the schedule wsd, and actor.optim.schedule is {o.schedule}."
        config.check_unused(["actor.optim.decay_steps"], problem, "remove it, or set actor.optim.schedule=wsd.")
        return
    if not o.decay_steps:
        raise config.error("actor.optim.decay_steps", "the schedule wsd needs decay steps.", "use at least 1.")
    if 0 < total_steps < o.warmup_steps + o.decay_steps:
        problem = f"with actor.optim.warmup_steps {o.warmup_steps} they exceed trainer.total_steps {total_steps}."
        raise config.error("actor.optim.decay_steps", problem, "reduce one of them.")


# Check several teachers: their routes, the keys that refer to them, and what supports them.

_NAME = re.compile(r"[A-Za-z0-9_-]+")  # part of a metric's name


def check_routes(config: Config) -> None:
    """Check that the routes are complete, and that nothing refers to one that is not there."""
    teacher, data = config.teacher, config.data
    if not teacher.routes:
        _check_unused(config)
        return
    for route in config.derived.routes:
        _check_route(route)
    if not data.teacher_key:
        fix = "name the column whose values are the names of the routes."
        raise config.error("data.teacher_key", "teacher.routes has entries, and no row names one.", fix)
    names = ", ".join(teacher.routes)
    _check_shares(config, names)
    if config.derived.teacher_pool:
        problem = f"with teacher.backend={teacher.backend} there is one teacher."
        raise ConfigError("teacher.routes", names, problem, "remove them, or set teacher.backend=zmq.")
    spec = config.derived.loss
    if spec.has_reference and spec.has_temperatures:
        problem = "the reference computes at teacher.temperature, and a route has another one."
        name, off = ("reference_kl_weight", 0) if spec.reference_weight else ("teacher_reward_scale", 1)
        raise config.error(f"distill.{name}", problem, f"use {off}, or one temperature.")


def _check_unused(config: Config) -> None:
    """Raise ConfigError if a key has no effect without routes."""
    if config.distill.normalize == "domain":
        problem, fix = "without teacher.routes there is one domain.", "use token, or set teacher.routes."
        raise config.error("distill.normalize", problem, fix)
    keys = ("data.teacher_key", "data.domain_shares")
    config.check_unused(keys, "teacher.routes is empty.", "remove it, or set teacher.routes.")


def _check_route(route: Route) -> None:
    label, teacher = route.label, route.teacher
    if not _NAME.fullmatch(route.name):
        problem = "a name has letters, digits, _ and - only, because metrics contain it."
        raise ConfigError("teacher.routes", route.name, problem, "rename it.")
    if not (math.isfinite(route.weight) and route.weight > 0):
        fix = "use a positive number, or remove the route and its rows."
        raise ConfigError(f"{label}.weight", route.weight, "must be a positive number.", fix)
    for name in ("backend", "server_port", "dialect", "temperature"):
        try:
            check_value(f"teacher.{name}", getattr(teacher, name))
        except ConfigError as error:
            raise route.error(name, error.problem, error.fix) from error
    if "backend" in route.own and teacher.kind.pool:
        problem = "this teacher is part of the run, and routes are servers."
        raise route.error("backend", problem, "use zmq or http.")
    if len(teacher.name) > MAX_NAME_LENGTH:
        fix = f"use one of the server's names, of at most {MAX_NAME_LENGTH} characters."
        raise route.error("name", "is too long.", fix)


def _check_shares(config: Config, names: str) -> None:
    shares, size = config.data.domain_shares, config.trainer.global_batch_size
    if not shares:
        return
    if shares.keys() != config.teacher.routes.keys() or not all(0 < share < math.inf for share in shares.values()):
        fix = f"give each of {names} a number > 0."
        raise config.error("data.domain_shares", "is not a positive share of each of teacher.routes.", fix)
    if max(shares.values()) * size < (len(shares) - 1) * sum(shares.values()):
        problem = f"{len(shares)} routes cannot alternate in batches of {size} prompts."
        raise config.error("data.domain_shares", problem, "increase trainer.global_batch_size.")


# Check the functions of rewards and evaluations. `gkd.preflight.user_code` imports them.


def check_reward(config: Config) -> None:
    """Check that all functions are named in a valid way, and that none is named twice."""
    reward, metric = config.reward, config.eval.metric
    for i, entry in enumerate(reward.functions):
        _check_path(f"reward.functions[{i}].path", entry.path)
        if not math.isfinite(entry.weight) or entry.weight == 0:
            key, problem = f"reward.functions[{i}].weight", "must be a number that is not 0."
            raise ConfigError(key, entry.weight, problem, "give it a weight, or remove the function.")
    paths = [entry.path for entry in reward.functions]
    if len(set(paths)) < len(paths):
        raise ConfigError("reward.functions", paths, "names a function twice.", "name each once.")
    if metric != NO_METRIC:
        _check_path("eval.metric", metric, f", or {NO_METRIC}")
    elif config.eval.n > 1:
        raise config.error("eval.n", "eval.metric is none.", "use 1, or choose a metric.")
    names = [function_name(path) for path in paths]
    if len(set(names)) < len(names):
        problem = "two functions have the same name, and the metrics contain it."
        raise ConfigError("reward.functions", paths, problem, "rename one.")
    _check_response_weight(config)
    if config.derived.loss.has_rewards:
        _check_training(config)
    else:
        problem = "distill.reward_weight is 0, so rewards are reported and nothing is trained on them."
        unused = ("distill.advantage", "distill.reward_clip")
        config.check_unused(unused, problem, "remove it, or set distill.reward_weight.")
    if EXACT_MATCH in (metric, *paths) and not config.eval.answer_marker:
        raise config.error("eval.answer_marker", "exact_match needs one.", "set it, or use another function.")


def check_best(config: Config) -> None:
    """Check that the evaluations of the run have the number of trainer.keep_best."""
    name, n = config.trainer.keep_best, config.eval.n
    kls = ["eval/kl", "eval/end_kl_share", "eval/sure_and_wrong_share", "eval/canonical"]
    found = ["eval/reverse_kl"] if config.derived.signals == ("sampled",) else kls
    if config.eval.metric != NO_METRIC:
        found += ["eval/accuracy", *(f"domain/{route}/accuracy" for route in config.teacher.routes)]
        found += [f"eval/pass_at_{k}" for k in range(1, n + 1) if n > 1 and (k == n or k & (k - 1) == 0)]
    if name and name not in found:
        problem = "the evaluations of this run do not have it."
        raise config.error("trainer.keep_best", problem, f"use one of {', '.join(found)}.")


def _check_response_weight(config: Config) -> None:
    """Check that there are rewards that tell correct responses, and groups for their pass rates."""
    weight, key = config.distill.response_weight, "distill.response_weight"
    if weight == "none":
        return
    if not config.reward.functions:
        raise config.error(key, "reward.functions is empty.", "name a function, or use none.")
    if any(entry.weight <= 0 for entry in config.reward.functions):
        problem = "a function of reward.functions has no positive weight, so a large reward does not mean correct."
        raise config.error(key, problem, "give all functions positive weights.")
    if config.distill.on_policy_share == 0.0:
        problem = "only responses of the student are judged, and distill.on_policy_share is 0."
        raise config.error(key, problem, "use none, or a share above 0.")
    if weight == "pass_rate" and config.rollout.n < 2:
        problem = "the pass rate p of one response is 0 or 1, so every weight p (1 - p) is 0."
        raise config.error(key, problem, "set rollout.n to 2 or more, or use correct.")


def _check_training(config: Config) -> None:
    """Check that there are rewards to train on, and that the ratio of probabilities belongs to one policy."""
    key, weight, distill = "distill.reward_weight", config.distill.reward_weight, config.distill
    if not config.reward.functions:
        raise ConfigError(key, weight, "reward.functions is empty.", "name a function, or use 0.")
    if distill.on_policy_share == 0.0:
        problem = "only responses of the student are judged, and distill.on_policy_share is 0."
        raise ConfigError(key, weight, problem, "use 0, or a share above 0.")
    if distill.advantage == "group" and config.rollout.n < 2:
        problem = "the mean of one response is its own reward, so every advantage is 0."
        raise config.error("distill.advantage", problem, "set rollout.n to 2 or more, or use batch.")
    sampled, own = config.rollout.temperature, config.teacher.temperature
    routes = [route.temperature for route in config.teacher.routes.values() if route.temperature is not None]
    if any(temperature != sampled for temperature in (own, *routes)):
        problem = f"rewards train the distribution that the engines sample from, at rollout.temperature={sampled:g}."
        raise config.error("teacher.temperature", problem, "use the same temperature for both.")


def _check_path(key: str, path: str, more: str = "") -> None:
    if path not in REWARD_NAMES and not is_path(path):
        fix = f"use {', '.join(REWARD_NAMES)}, or a function as package.module:function{more}."
        raise ConfigError(key, path, "is not a function.", fix)


# Check the keys of trajectories. `gkd.preflight.user_code` imports the environment.


def check_images(config: Config) -> None:
    """Check that everything that reads a prompt can read its images."""
    key = "data.images_key"
    if not config.data.images_key:
        config.check_unused(["model.freeze_vision"], "data.images_key is empty.", f"remove it, or set {key}.")
        return
    if config.actor.strategy not in (AUTO, "fsdp2"):
        problem = f"actor.strategy={config.actor.strategy} trains a language model without its vision tower."
        raise config.error(key, problem, "remove it, or use actor.strategy=fsdp2.")
    if config.actor.cp > 1:
        problem = f"actor.cp={config.actor.cp} would share the tokens of an image among ranks, which was not compared."
        raise config.error(key, problem, "use actor.cp=1.")
    if config.actor.lora.rank and not config.model.freeze_vision:
        problem = "with actor.lora.rank only adapters of the language model are trained."
        raise config.error("model.freeze_vision", problem, "use true, or actor.lora.rank=0.")
    if config.rollout.environment:
        problem = "what an environment answers cannot have images, and the turns behind them were not compared."
        raise config.error(key, problem, "remove it, or rollout.environment.")
    if config.teacher.tokenizer:
        problem = "the tokens of an image belong to one processor, and teacher.tokenizer is another model's."
        raise config.error(key, problem, "remove it, or use a teacher with the student's tokenizer and processor.")
    for route in config.derived.routes:
        if route.teacher.backend == "http":
            problem = "an HTTP server would get the places of the images without the images."
            raise route.error("backend", problem, "use zmq, and start the server with --images.")
    if config.data.truncation not in ("error", "drop"):
        problem = "a cut could leave a part of an image."
        raise config.error("data.truncation", problem, "use error or drop, or a larger data.max_prompt_length.")


def check_environment(config: Config) -> None:
    """Check that the environment is named in a valid way, and what needs one or cannot have one."""
    rollout, paths = config.rollout, (config.eval.metric, *config.derived.rewards)
    if not rollout.environment:
        if ENVIRONMENT in paths:
            key = "eval.metric" if config.eval.metric == ENVIRONMENT else "reward.functions"
            raise ConfigError(key, ENVIRONMENT, "rollout.environment is empty.", "name the class, or another function.")
        keys = ("rollout.max_turns", "rollout.environment_timeout_s", "rollout.environment_workers")
        problem = "rollout.environment is empty, so a response is one turn."
        config.check_unused(keys, problem, "remove it, or name an environment.")
        return
    if not is_path(rollout.environment):
        fix = "write package.module:Class."
        raise config.error("rollout.environment", "is not the path of a class.", fix)
    if config.data.chat_template == "never":
        problem = "a chat template writes the observations, and data.chat_template is never."
        raise config.error("rollout.environment", problem, "use auto, or no environment.")
    longest_s, limit_s = rollout.max_turns * rollout.environment_timeout_s, config.trainer.stage_timeout_s
    if longest_s >= limit_s:
        problem = f"rollout.max_turns {rollout.max_turns} times this is {longest_s:g} s for one trajectory, and a step "
        problem += f"waits at most trainer.stage_timeout_s {limit_s:g} s."
        fix = "reduce one of them, or raise trainer.stage_timeout_s."
        raise config.error("rollout.environment_timeout_s", problem, fix)


def check_teacher_prompt(config: Config) -> None:
    """Check the teacher's prompt, and that tokens carry loss."""
    data, template = config.data, config.teacher.prompt_template
    if template:
        template_parts(template)
        if data.teacher_prompt_key:
            problem = f"data.teacher_prompt_key = {data.teacher_prompt_key} is set, too."
            raise config.error("teacher.prompt_template", problem, "remove one of them.")
    elif data.max_teacher_prompt_length and not data.teacher_prompt_key:
        problem = "the teacher sees the student's prompt."
        fix = "remove it, or set data.teacher_prompt_key or teacher.prompt_template."
        raise config.error("data.max_teacher_prompt_length", problem, fix)
    skipped, longest = config.distill.skip_first_tokens, data.max_response_length
    if skipped >= longest:
        problem = f"a response has at most data.max_response_length = {longest} tokens, so none carries loss."
        raise config.error("distill.skip_first_tokens", problem, f"use less than {longest}.")


_CHECKS = (
    check_strategy,
    check_pools,
    check_cluster,
    check_adapter_sync,
    check_sizes,
    check_scheduler,
    check_signal,
    check_parameters,
    check_support,
    check_tail,
    check_routes,
    check_backend,
    check_tokenizer,
    check_token_weights,
    check_mixture,
    check_teacher_prompt,
    check_reference,
    check_reward,
    check_best,
    check_environment,
    check_images,
)
_ROUNDS = 20  # in which defaults replace what is wrong


def check_config(config: Config) -> Derived:
    """Return what follows from the settings.

    Raises:
        ConfigError: names every value outside its limits, or the first contradiction between keys.
    """
    check_values(config)
    derived = config.derived
    for check in _CHECKS:
        check(config)
    return derived


def usable(config: Config, mistakes: Mistakes) -> Config:
    """Add the mistakes of the settings, and return settings with which other checks can go on.

    A wrong key gets its default, and if it still contradicts others, those that its error names.
    """
    replaced: set[str] = set()
    for _ in range(_ROUNDS):
        try:
            check_config(config)
            return config
        except ConfigError as error:
            mistakes.add(error)
            names = {declared_key(each.key) for each in error.parts()} - {""}
            names = named_keys(str(error)) if names <= replaced else names
            replaced |= names
            config = config.with_values({name: all_keys()[name].default for name in names})
    return replace(config, distill=DistillConfig())

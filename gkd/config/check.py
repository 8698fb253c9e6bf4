"""Check settings against their limits and against each other. `gkd.preflight` checks files and sockets."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from urllib.parse import urlsplit

from gkd.config.check_values import template_parts, value_errors
from gkd.config.declare import function_name, is_path
from gkd.config.relations import check_relations
from gkd.config.schedule import LOSSES, OF_ROLLOUTS, REWARD_WEIGHT, points_problem
from gkd.config.schema import ENGINE_RANKS, Config, Derived, Route
from gkd.config.schema_actor import BACKENDS as STUDENT_BACKENDS
from gkd.config.schema_sections import ENVIRONMENT, EXACT_MATCH, NO_METRIC, STREAM
from gkd.config.schema_teacher import BACKENDS, DIVERGENCES, HTTP, RESPONSE_WEIGHT, RESPONSE_WEIGHTS, SOLVED_SIBLING
from gkd.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_-]+")  # part of a metric's name


def check_strategy(config: Config) -> None:
    """Check that the student's backend supports the settings."""
    a = config.actor
    for name, limit in a.backend.limits.items():
        value = getattr(a, name)
        if value not in limit.values:
            other = next(other for other, backend in STUDENT_BACKENDS.items() if backend.supports(name, value))
            fix = f"use {' or '.join(map(str, limit.values))}, or actor.strategy={other}."
            raise config.error(f"actor.{name}", f"actor.strategy={a.backend_name} {limit.why}.", fix)
    if a.cp > 1 and a.backend_name == "fsdp2" and not a.packs:
        problem = "without packing the model's own attention is used, which needs whole sequences."
        raise config.error("actor.cp", problem, "use 1, or actor.packing=true.")


def check_pools(config: Config) -> None:
    """Check that the parallel layout divides the pools."""
    t = config.trainer
    a = config.actor
    r = config.rollout
    world = config.derived.world_size
    if world % a.group_size:
        sizes = f"actor.tp {a.tp} x actor.cp {a.cp} x actor.pp {a.pp} = {a.group_size}"
        problem = f"times trainer.nnodes {t.nnodes} there are {world} ranks, which {sizes} does not divide."
        raise config.error("trainer.n_gpus_per_node", problem, "make the pool a multiple of that.")
    if t.n_gpus_per_node % a.tp and t.nnodes > 1:
        problem = f"a tensor-parallel group would span nodes of trainer.n_gpus_per_node {t.n_gpus_per_node} GPUs."
        raise config.error("actor.tp", problem, "let actor.tp divide trainer.n_gpus_per_node.")
    if r.n_gpus_per_node % r.tp:
        problem = f"rollout.n_gpus_per_node {r.n_gpus_per_node} is not a multiple of it."
        fix = "let rollout.tp divide rollout.n_gpus_per_node; an engine never spans nodes."
        raise config.error("rollout.tp", problem, fix)
    for name, actors in (("n_gpus_per_node", t.n_gpus_per_node), ("nnodes", t.nnodes)):
        if t.colocate and getattr(r, name) != actors:
            problem = f"with trainer.colocate the engines are on the actor's GPUs, and trainer.{name} is {actors}."
            raise config.error(f"rollout.{name}", problem, f"use {actors}, or trainer.colocate=false.")


def check_cluster(config: Config) -> None:
    """Check the cluster, what shares GPUs, and that engines can hold the adapters."""
    t = config.trainer
    r = config.rollout
    c = config.cluster
    if c.teacher_gpu_share + r.gpu_memory_utilization > 1 and not r.kv_cache_mib:
        share = c.teacher_gpu_share
        problem = f"cluster.teacher_gpu_share {share:g} of the same GPUs is the teacher's: together more than 1."
        raise config.error("rollout.gpu_memory_utilization", problem, f"use at most {1 - share:g}.")
    if "://" in c.ray_address:
        problem = "Ray Client is not supported: the trainer must run on a node of the cluster."
        raise config.error("cluster.ray_address", problem, "give the HOST:PORT that ray start --head prints.")
    if config.weight_sync.lora == "adapters" and not config.derived.engine_adapter_rank:
        problem = f"vLLM supports adapters up to rank {ENGINE_RANKS[-1]} (actor.lora.rank)."
        raise config.error("weight_sync.lora", problem, "use merged, or a lower actor.lora.rank.")
    if not c.gpus:
        return
    if min(c.gpus) < 0 or len(set(c.gpus)) < len(c.gpus):
        raise config.error("cluster.gpus", "must be distinct numbers >= 0.", "write e.g. [0, 1, 2, 3].")
    # A node may hold only one of the pools if there are several nodes.
    both = t.n_gpus_per_node + r.n_gpus_per_node
    most = max(t.n_gpus_per_node, r.n_gpus_per_node)
    n_wanted = most if c.ray_address or t.colocate else both
    if len(c.gpus) < n_wanted:
        sizes = f"trainer.n_gpus_per_node {t.n_gpus_per_node} and rollout.n_gpus_per_node {r.n_gpus_per_node}"
        raise config.error("cluster.gpus", f"with {sizes} a node needs {n_wanted}.", "name more, or use smaller pools.")


def check_sizes(config: Config) -> None:
    """Check batch sizes, lengths and timeouts. `gkd.preflight.settings` checks the learning rate's schedule."""
    t = config.trainer
    dp = config.derived.dp_size
    longest = config.derived.max_sequence_length
    if t.global_batch_size < dp:
        problem = f"each of the actor's {dp} data-parallel groups needs a prompt."
        raise config.error("trainer.global_batch_size", problem, f"use at least {dp}, or a larger actor.tp, cp or pp.")
    if 0 < config.actor.max_tokens_per_micro_batch < longest:
        problem = f"one sequence may have data.max_prompt_length + data.max_response_length = {longest} tokens."
        raise config.error("actor.max_tokens_per_micro_batch", problem, f"use 0 or at least {longest}.")
    patience = config.teacher.outage_budget_s + config.teacher.request_timeout_s
    if not config.derived.teacher_pool and t.stage_timeout_s <= patience:
        problem = f"an outage may last teacher.outage_budget_s + teacher.request_timeout_s = {patience:g} s."
        raise config.error("trainer.stage_timeout_s", problem, f"use more than {patience:g}.")
    if config.rollout.hang_timeout_s >= t.stage_timeout_s:
        problem = f"trainer.stage_timeout_s {t.stage_timeout_s:g} ends the run before an engine is found to hang."
        config.check_unused(["rollout.hang_timeout_s"], problem, "use less, or raise trainer.stage_timeout_s.")


def check_routes(config: Config) -> None:
    """Check that the routes are complete, and that nothing refers to one that is not there."""
    teacher = config.teacher
    if not teacher.routes:
        return
    if wrong := [name for name in teacher.routes if not _NAME.fullmatch(name)]:
        problem = "a name has letters, digits, _ and - only, because metrics contain it."
        raise ConfigError("teacher.routes", wrong[0], problem, "rename it.")
    shares = config.data.domain_shares
    size = config.trainer.global_batch_size
    is_complete = shares.keys() == teacher.routes.keys() and all(0 < share < math.inf for share in shares.values())
    if shares and not is_complete:
        fix = f"give each of {', '.join(teacher.routes)} a number > 0."
        raise config.error("data.domain_shares", "is not a positive share of each of teacher.routes.", fix)
    if shares and max(shares.values()) * size < (len(shares) - 1) * sum(shares.values()):
        problem = f"{len(shares)} routes cannot alternate in batches of {size} prompts."
        raise config.error("data.domain_shares", problem, "increase trainer.global_batch_size.")
    spec = config.derived.loss
    if spec.has_reference and spec.has_temperatures:
        problem = "the reference computes at teacher.temperature, and a route has another one."
        name, off = ("reference_kl_weight", 0) if spec.reference_weight else ("teacher_reward_scale", 1)
        raise config.error(f"distill.{name}", problem, f"use {off}, or one temperature.")


def check_reward(config: Config) -> None:
    """Check that all functions are named in a valid way, none twice, and that rewards can be trained on.

    `gkd.preflight.user_code` imports the functions.
    """
    reward = config.reward
    distill = config.distill
    for i, entry in enumerate(reward.functions):
        if entry.weight == 0:
            fix = "give it a weight, or remove the function."
            raise ConfigError(f"reward.functions[{i}].weight", 0.0, "must be a number that is not 0.", fix)
    paths = [entry.path for entry in reward.functions]
    if len({function_name(path) for path in paths}) < len(paths):  # metrics contain the names
        raise ConfigError("reward.functions", paths, "two functions have the same name.", "name each once.")
    if EXACT_MATCH in (config.eval.metric, *paths) and not config.eval.answer_marker:
        raise config.error("eval.answer_marker", "exact_match needs one.", "set it, or use another function.")
    needs_correct = [RESPONSE_WEIGHT] * (distill.response_weight in RESPONSE_WEIGHTS[1:])
    needs_correct += ["teacher.prompt_function"] * (config.teacher.prompt_function == SOLVED_SIBLING)
    if needs_correct and any(entry.weight < 0 for entry in reward.functions):
        problem = "a function of reward.functions has a negative weight, so a large reward does not mean correct."
        raise config.error(needs_correct[0], problem, "give all functions positive weights.")
    if not distill.reward_weight:
        return
    sampled = config.rollout.temperature
    if {config.teacher.temperature, *(route.teacher.temperature for route in config.derived.routes)} != {sampled}:
        problem = f"rewards train the distribution that the engines sample from, at rollout.temperature={sampled:g}."
        raise config.error("teacher.temperature", problem, "use the same temperature for both.")


def check_best(config: Config) -> None:
    """Check that the evaluations of the run have the number of trainer.keep_best."""
    name = config.trainer.keep_best
    n = config.eval.n
    kls = ["eval/kl", "eval/end_kl_share", "eval/sure_and_wrong_share", "eval/canonical"]
    metrics = ["eval/reverse_kl"] if config.derived.signals == ("sampled",) else kls
    if config.eval.metric != NO_METRIC:
        metrics += ["eval/accuracy", *(f"domain/{route}/accuracy" for route in config.teacher.routes)]
        metrics += [f"eval/pass_at_{k}" for k in range(1, n + 1) if n > 1 and (k == n or k & (k - 1) == 0)]
    if name and name not in metrics:
        problem = f"the evaluations of this run, with eval.metric={config.eval.metric}, do not have it."
        raise config.error("trainer.keep_best", problem, f"use one of {', '.join(metrics)}.")


def check_prompts(config: Config) -> None:
    """Check the teacher's prompt, that tokens carry loss, the environment, and that images reach the teacher."""
    rollout = config.rollout
    paths = (config.eval.metric, *config.derived.rewards)
    if config.teacher.prompt_template:
        template_parts(config.teacher.prompt_template)
    longest = config.derived.max_sequence_length
    if config.teacher.prompt_function == SOLVED_SIBLING and config.data.max_teacher_prompt_length < longest:
        problem = f"solved_sibling puts a response in front of a prompt, together up to {longest} tokens."
        raise config.error("data.max_teacher_prompt_length", problem, f"use {longest} and room for a sentence.")
    if config.distill.skip_first_tokens >= config.data.max_response_length:
        problem = f"a response has at most data.max_response_length = {config.data.max_response_length} tokens."
        raise config.error("distill.skip_first_tokens", problem, "use less, so that some carry loss.")
    if config.data.images_key:
        if groups := config.derived.groups:
            problem = "functions of all responses get no images (data.images_key)."
            raise config.error(groups[0][0], problem, "use another value.")
        for route in config.derived.routes:
            if route.teacher.backend == "http":
                problem = "an HTTP server would get the places of the images without the images."
                raise route.error("backend", problem, "use zmq, and start the server with --images.")
    if not rollout.environment:
        if ENVIRONMENT in paths:
            key = "eval.metric" if config.eval.metric == ENVIRONMENT else "reward.functions"
            raise ConfigError(key, ENVIRONMENT, "rollout.environment is empty.", "name the class, or another function.")
        return
    if not is_path(rollout.environment):
        raise config.error("rollout.environment", "is not the path of a class.", "write package.module:Class.")
    longest_s = rollout.max_turns * rollout.environment_timeout_s
    limit_s = config.trainer.stage_timeout_s
    if longest_s >= limit_s:
        problem = f"x rollout.max_turns it is {longest_s:g} s, and trainer.stage_timeout_s is {limit_s:g} s."
        fix = "reduce one of them, or raise trainer.stage_timeout_s."
        raise config.error("rollout.environment_timeout_s", problem, fix)


def check_signal(config: Config) -> None:
    """Check that the teacher's signal contains what the losses need, and that the engines name enough ids."""
    t = config.teacher
    spec = config.derived.loss
    if t.signal == "sampled" and spec.divergences:
        names = ", ".join(term.name for term in spec.divergences)
        problem = f"{names} needs a distribution, and this signal is the probability of one token."
        raise config.error("teacher.signal", problem, "use topk, hidden or logits, or k1, k2 or k3 as distill.loss.")
    if "topk" not in config.derived.signals:
        problem = f"with teacher.signal {t.signal} and these losses there is no list of the top-k."
        config.check_unused(["teacher.mass", "distill.tail", "distill.support"], problem, "leave it out.")
    if 0 < config.rollout.top_k < config.derived.n_student_ids:
        n_ids = config.derived.n_student_ids
        problem = f"the engines name {n_ids} ids for distill.support={config.distill.support}, and rank no more."
        raise config.error("rollout.top_k", problem, f"use 0 or at least {n_ids}, or a smaller teacher.topk.")


def check_terms(config: Config) -> None:
    """Check that the losses use the parameters that are set, and can compare texts if they have to."""
    distill = config.distill
    spec = config.derived.loss
    names = ", ".join(term.name for term in spec.terms)
    for name in ("beta", "alpha"):
        owners = [loss for loss, parameters in DIVERGENCES.items() if name in parameters]
        if not any(term.name in owners or is_path(term.name) for term in spec.terms):
            problem = f"it belongs to {', '.join(owners)}, and the losses are {names}."
            config.check_unused([f"distill.{name}"], problem, f"remove it, or choose {owners[0]}.")
    if not spec.uses_samples:
        problem = f"it limits importance weights, and {names} has none."
        config.check_unused(["distill.importance_clip"], problem, "remove it, or choose k1, k2 or k3.")
    if distill.tail == "residual" and [term.name for term in spec.divergences] != ["reverse_kl"]:
        raise config.error("distill.tail", f"residual is for reverse_kl, and the losses are {names}.", "use bucket.")
    if distill.token_weight == "teachability" and config.derived.signals == ("sampled",):
        problem = "it needs the teacher's distribution, and the teacher sends the probability of one token."
        fix = "use a divergence with teacher.signal topk, hidden or logits, or another weight."
        raise config.error("distill.token_weight", problem, fix)
    if distill.teacher_reward_scale != 1 and not spec.policy_gradients:
        problem = "it scales the teacher's reward of a sampled token, and no loss uses one."
        raise config.error("distill.teacher_reward_scale", problem, "use 1, or add k1, k2 or k3 to the losses.")
    term_names = [term.name for term in spec.terms if term not in (*spec.divergences, spec.sft)]
    if config.teacher.tokenizer and term_names:
        problem = f"{term_names[0]} needs the teacher's logprob of the student's token, which is none of its tokens."
        raise ConfigError("distill.loss", term_names[0], problem, "use a divergence.")


def check_backend(config: Config) -> None:
    """Check that the teacher's keys belong to its backend, and that an HTTP teacher can work."""
    kind_keys = frozenset().union(*(route.teacher.kind.keys for route in config.derived.routes))
    backends = " or ".join(sorted({route.teacher.backend for route in config.derived.routes}))
    for other, backend in BACKENDS.items():
        unused = [f"teacher.{name}" for name in sorted(backend.keys - kind_keys)]
        problem = f"a teacher with the backend {backends} does not use this key, and one with {other} does."
        config.check_unused(unused, problem, "remove it, or use that backend.")
    every = frozenset().union(*(backend.keys for backend in BACKENDS.values()))
    for route in config.derived.routes:
        for name in sorted((route.own & every) - route.teacher.kind.keys):
            problem = f"the backend of this route is {route.teacher.backend}, which does not use this key."
            raise route.error(name, problem, "remove it, or set the route's backend.")
        if route.teacher.backend == HTTP:
            _check_http_teacher(config, route)


def _check_http_teacher(config: Config, route: Route) -> None:
    """Check the addresses of an HTTP teacher, and that prompt logprobs contain what the losses need."""
    teacher = route.teacher
    fix = "write e.g. http://127.0.0.1:8000, without /v1 and without a password."
    if not teacher.url:
        raise ConfigError(route.key("url"), "", "teacher.backend=http needs the address of a server.", fix)
    for url in teacher.url:
        if not _is_address(url):
            shown = url if "@" not in url else "(not shown)"
            raise ConfigError(route.key("url"), shown, "is not the address of an HTTP server.", fix)
    if not re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)?", route.teacher.api_key_env):  # it may be the key itself
        problem = "is not the name of an environment variable."
        fix = "put the key into a variable, and name that."
        raise ConfigError(route.key("api_key_env"), "(not shown)", problem, fix)
    valid = {"signal": ("topk", "sampled"), "temperature": (1.0,), "mass": (0.0,)}
    for name, values in valid.items():
        if getattr(teacher, name) not in values:
            problem = "an HTTP teacher returns top-k lists of one length, at temperature 1."
            raise route.error(name, problem, f"use {' or '.join(map(str, values))}.")
    if config.distill.support != "teacher" and teacher.dialect != "vllm":
        problem = f"a server of dialect {teacher.dialect} cannot score ids that differ between positions."
        raise config.error("distill.support", problem, "use teacher, or vLLM.")


def _is_address(url: str) -> bool:
    """Return whether this is the root of an HTTP server, without credentials."""
    try:
        address = urlsplit(url)
        named = bool(address.hostname) and address.port != 0
    except ValueError:
        return False
    extras = address.username or address.password or address.query or address.fragment
    is_root = not address.path.rstrip("/").endswith("/v1")
    return named and address.scheme in ("http", "https") and not extras and is_root and url.isprintable()


def check_mixture(config: Config) -> None:
    """Check that the losses have tokens to learn from in every step."""
    spec = config.derived.loss
    share = config.distill.on_policy_share
    n_prompts = config.trainer.global_batch_size
    if spec.sft is not None and share == 1.0:
        problem = "the loss sft learns from dataset responses, and there are none."
        raise config.error("distill.on_policy_share", problem, "use a share below 1, or remove sft.")
    if spec.policy_gradients and share == 0.0:
        names = ", ".join(term.name for term in spec.policy_gradients)
        problem = f"{names} learns from tokens that the student generated, and there are none."
        raise config.error("distill.on_policy_share", problem, "use a share above 0, or remove the loss.")
    # A step without a token to learn from would still change the weights, by momentum and weight decay.
    only_student = len(spec.policy_gradients) == len(spec.terms)
    only_dataset = spec.terms == (spec.sft,)
    exact = Fraction(repr(share))  # the decimal number, as `gkd.data.sampler` counts
    each_step = exact * n_prompts if only_student else (1 - exact) * n_prompts if only_dataset else 1
    if each_step < 1:
        kind = "student" if only_student else "dataset"
        problem = f"less than one prompt of trainer.global_batch_size={n_prompts} has a response of the {kind}."
        fix = "change the share, use larger batches, or add a divergence to the losses."
        raise config.error("distill.on_policy_share", problem, fix)


def check_schedules(config: Config) -> None:
    """Check that schedules have values that their keys may have, and that rollouts can follow them."""
    for key, points in config.trainer.schedules.items():
        weights = [REWARD_WEIGHT, *(f"{LOSSES}{entry.name}" for entry in config.distill.losses)]
        if key not in (*OF_ROLLOUTS, *weights):
            fix = f"use one of {', '.join((*OF_ROLLOUTS, *weights))}."
            raise ConfigError("trainer.schedules", key, "this key has no schedule.", fix)
        fix = "write e.g. {from: 128, to: 1024, steps: 300} or [[0, 128], [300, 1024]]."
        if problem := points_problem(points):
            raise ConfigError(f"trainer.schedules.{key}", points, problem, fix)
        values = [value for _, value in points]
        if key in weights:
            if min(values) < 0:
                raise ConfigError(f"trainer.schedules.{key}", points, "a weight is below 0.", fix)
            if key == REWARD_WEIGHT and not config.distill.reward_weight:
                problem = "distill.reward_weight is 0, so the loss has no rewards."
                raise ConfigError(f"trainer.schedules.{key}", points, problem, "set it to any weight above 0.")
            continue
        if config.trainer.scheduler == STREAM:
            problem = "with trainer.scheduler=stream responses of several steps are generated together."
            raise ConfigError(f"trainer.schedules.{key}", points, problem, "use another scheduler.")
        if key != "rollout.temperature" and max(values) > config.value(key):
            problem = f"a value is above {key} = {config.value(key)}, for which memory and lengths are checked."
            raise ConfigError(f"trainer.schedules.{key}", points, problem, f"set {key} to the largest value.")
        for step, _ in points:
            now = config.at(int(step))
            try:
                check_config(now.with_values({"trainer.schedules": {}}))
            except ConfigError as error:
                problem = f"at step {step:g} {error.key} is {error.value}: {error.problem}"
                raise ConfigError(f"trainer.schedules.{key}", points, problem, error.fix) from error
    if config.derived.loss.schedules:
        steps = {int(step) for _, points in config.derived.loss.schedules for step, _ in points}
        if empty := [step for step in sorted(steps) if not config.derived.loss.at(step).used]:
            problem = f"at step {empty[0]} all of distill.losses have the weight 0."
            raise config.error("trainer.schedules", problem, "keep one above 0.")


_CHECKS = (
    check_schedules,
    check_strategy,
    check_pools,
    check_relations,
    check_cluster,
    check_sizes,
    check_signal,
    check_terms,
    check_routes,
    check_backend,
    check_mixture,
    check_reward,
    check_best,
    check_prompts,
)


def check_config(config: Config) -> Derived:
    """Return what follows from the settings.

    Raises:
        ConfigError: names every value outside its limits, or the first contradiction between keys.
    """
    if errors := list(value_errors(config)):
        raise ConfigError.together(errors)
    derived = config.derived
    for check in _CHECKS:
        check(config)
    return derived

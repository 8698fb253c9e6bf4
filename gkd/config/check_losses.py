"""Check scheduler, teacher, losses and reference against each other."""

from __future__ import annotations

import re
from fractions import Fraction
from urllib.parse import urlsplit

from gkd.config.declare import is_path
from gkd.config.schema import Config, Route
from gkd.config.schema_sections import all_keys
from gkd.config.schema_teacher import ACTOR, BACKENDS, BY_UNITS, DIVERGENCES, HTTP, ZMQ
from gkd.config.schema_trainer import AHEAD, STREAM
from gkd.errors import ConfigError


def check_scheduler(config: Config) -> None:
    """Check that settings of the stream scheduler are used with it."""
    scheduler = config.trainer.scheduler
    if scheduler != STREAM:
        problem = f"trainer.scheduler={scheduler} has a fixed bound ({AHEAD[scheduler]})."
        config.check_unused(["trainer.max_staleness"], problem, "remove it, or set trainer.scheduler=stream.")


def check_signal(config: Config) -> None:
    """Check that the teacher's signal contains what the losses need."""
    t, spec = config.teacher, config.derived.loss
    if t.signal == "sampled" and spec.divergences:
        names = ", ".join(term.name for term in spec.divergences)
        problem = f"{names} needs a distribution, and this signal is the probability of one token."
        raise config.error("teacher.signal", problem, "use topk, hidden or logits, or k1, k2 or k3 as distill.loss.")
    if t.mass > 0.0 and "topk" not in config.derived.signals:
        names = ", ".join(term.name for term in spec.terms)
        reason = f"for {names}" if t.signal == "topk" else f"with teacher.signal {t.signal}"
        raise config.error("teacher.mass", f"{reason} there is no top-k list to shorten.", "use 0.")
    if t.store and config.distill.on_policy_share == 1:
        problem = "it keeps the scores of dataset responses, and distill.on_policy_share is 1."
        raise config.error("teacher.store", problem, "leave it out, or use a share below 1.")


def check_parameters(config: Config) -> None:
    """Check that a loss of distill is not replaced, and that one of the losses has the parameters that are set."""
    if config.distill.losses:
        problem = "distill.losses has entries, which replace it."
        config.check_unused(["distill.loss"], problem, "write the loss into distill.losses, or leave one of them out.")
    terms = config.derived.loss.terms
    for name in ("beta", "alpha"):
        owners = [loss for loss, parameters in DIVERGENCES.items() if name in parameters]
        if not any(term.name in owners or is_path(term.name) for term in terms):
            problem = f"it belongs to {', '.join(owners)}, and the losses are {', '.join(term.name for term in terms)}."
            config.check_unused([f"distill.{name}"], problem, f"remove it, or choose {owners[0]}.")


def check_tokenizer(config: Config) -> None:
    """Check that what compares texts in place of tokens is used alone."""
    t = config.teacher
    if not t.tokenizer:
        problem = "it is of a teacher with another tokenizer, and teacher.tokenizer is empty."
        fix = "name the folder of the teacher's tokenizer, or remove the key."
        config.check_unused(["teacher.special_tokens", "distill.units"], problem, fix)
        if t.signal == BY_UNITS:
            problem = "these are sums over strings of two tokenizers, and teacher.tokenizer is empty."
            raise config.error("teacher.signal", problem, "use topk, or name the teacher's tokenizer.")
        return
    spec = config.derived.loss
    if others := [term.name for term in spec.terms if term not in (*spec.divergences, spec.sft)]:
        problem = f"{others[0]} needs the teacher's logprob of the student's token, which is none of its tokens."
        raise ConfigError("distill.loss", others[0], problem, "use a divergence.")
    alone = (
        *("teacher.routes", "teacher.store", "teacher.update_interval", "rollout.environment", "data.messages_key"),
        *("distill.teacher_reward_scale", "distill.skip_first_tokens", "distill.support"),
        *("distill.tail", "distill.token_clip", "actor.fused_lm_head"),
    )
    problem = "this does not work with a teacher that has another tokenizer (teacher.tokenizer)."
    fix = "leave it out, or use a teacher with the student's tokens."
    config.check_unused(alone, problem, fix)
    if t.signal not in ("topk", "hidden", BY_UNITS):
        raise config.error("teacher.signal", problem, "use topk, hidden or units.")
    if t.signal == BY_UNITS and t.backend != ZMQ:
        raise config.error("teacher.signal", "only a teacher server sums over units.", "use topk.")
    if config.distill.token_weight not in ("none", "entropy"):
        raise config.error("distill.token_weight", problem, fix)


def check_support(config: Config) -> None:
    """Check that distill.support has a list to choose the ids of, and a student to name them."""
    support, teacher = config.distill.support, config.teacher
    if support == "teacher":
        return
    problem = ""
    if "topk" not in config.derived.signals:
        problem = f"with teacher.signal {teacher.signal} and these losses there is no list of the top-k."
    elif not config.distill.on_policy_share:
        problem = "dataset responses have the teacher's ids, and distill.on_policy_share is 0."
    if problem:
        raise config.error("distill.support", problem, "use teacher.")
    if teacher.mass > 0.0:
        problem = f"it would drop the student's ids of distill.support={support}, to which the teacher gives little."
        raise config.error("teacher.mass", problem, "use 0.")
    n_ids = config.derived.n_student_ids
    if not n_ids:
        problem = f"distill.support={support} takes half of the ids from the student."
        raise config.error("teacher.topk", problem, "use at least 2.")
    if 0 < config.rollout.top_k < n_ids:
        problem = f"the engines name {n_ids} ids for distill.support={support}, and rank no more."
        fix = "use 0 or at least that number, or a smaller teacher.topk."
        raise config.error("rollout.top_k", problem, fix)
    for name, all_tokens in (("top_p", 1.0), ("min_p", 0.0)):
        if getattr(config.rollout, name) != all_tokens:
            problem = f"the engines rank the tokens that it keeps, maybe fewer than {n_ids} (distill.support)."
            raise config.error(f"rollout.{name}", problem, f"use {all_tokens:g}, or distill.support=teacher.")


def check_tail(config: Config) -> None:
    """Check that distill.tail has a list, residual the divergence that it makes unbiased, and the clip a weight."""
    spec = config.derived.loss
    if "topk" not in config.derived.signals:
        problem = f"with teacher.signal {config.teacher.signal} and these losses there is no list with a tail."
        config.check_unused(["distill.tail"], problem, "use bucket.")
    if not spec.uses_samples:
        problem = f"it limits importance weights, and {', '.join(term.name for term in spec.terms)} has none."
        config.check_unused(["distill.importance_clip"], problem, "remove it, or choose k1, k2 or k3.")
    if config.distill.tail != "residual":
        return
    problem, names = "", [term.name for term in spec.divergences]
    if names != ["reverse_kl"]:
        problem = f"it is unbiased for reverse_kl only, and the losses are {', '.join(names)}."
    elif not config.distill.on_policy_share:
        problem = "it needs tokens that the student generated, and distill.on_policy_share is 0."
    if problem:
        raise config.error("distill.tail", problem, "use bucket.")


def check_backend(config: Config) -> None:
    """Check that the teacher's keys belong to its backend, and that a local or HTTP teacher can work."""
    teacher, is_local = config.teacher, config.derived.teacher_pool == ACTOR
    own = frozenset().union(*(route.teacher.kind.keys for route in config.derived.routes))
    backends = " or ".join(sorted({route.teacher.backend for route in config.derived.routes}))
    for other, backend in BACKENDS.items():
        unused = [f"teacher.{name}" for name in sorted(backend.keys - own)]
        problem = f"teacher.backend={backends} does not use this key, and {other} does."
        fix = f"remove it, or set teacher.backend={other}."
        if teacher.routes:
            problem, fix = f"each of teacher.routes has backend {backends}, which does not use this key.", "remove it."
        config.check_unused(unused, problem, fix)
    for route in config.derived.routes:
        _check_route_keys(route)
        if route.teacher.backend == HTTP:
            _check_http_teacher(config, route)
    if not config.derived.teacher_pool:
        return
    if is_local and not teacher.path:
        raise config.error("teacher.path", "teacher.backend=local needs a model.", "give its folder, or use zmq.")
    if config.trainer.scheduler != "sync" and not config.trainer.replay:
        busy = "actor's ranks train" if is_local else "engines generate"
        problem = f"with teacher.backend={teacher.backend} the {busy} and score, so these cannot overlap."
        raise config.error("trainer.scheduler", problem, "use sync, or teacher.backend=zmq.")
    if not is_local:
        _check_rollout_teacher(config)
    if teacher.update_ema and not teacher.update_interval:
        problem = "teacher.update_interval is 0, so the weights are never updated."
        fix = "remove it, or set teacher.update_interval, for example to 1."
        raise config.error("teacher.update_ema", problem, fix)
    if teacher.update_interval == 1 and not teacher.update_ema and not _has_own_prompt(config):
        problem = "after each step the teacher is the student; with the same prompt there is nothing to learn."
        fix = "use more, or set teacher.update_ema, teacher.prompt_template or data.teacher_prompt_key."
        raise config.error("teacher.update_interval", problem, fix)


def _check_route_keys(route: Route) -> None:
    """Check that a route sets only keys of its backend."""
    every = frozenset().union(*(backend.keys for backend in BACKENDS.values()))
    for name in sorted((route.own & every) - route.teacher.kind.keys):
        problem = f"the backend of this route is {route.teacher.backend}, which does not use this key."
        raise route.error(name, problem, "remove it, or set the route's backend.")


def _check_http_teacher(config: Config, route: Route) -> None:
    """Check the addresses of an HTTP teacher, and that prompt logprobs contain what the losses need."""
    teacher, variable = route.teacher, route.teacher.api_key_env
    fix = "write e.g. http://127.0.0.1:8000, without /v1 and without a password."
    if not teacher.url:
        raise ConfigError(route.key("url"), "", "teacher.backend=http needs the address of a server.", fix)
    for url in teacher.url:
        if not _is_address(url):
            shown = url if "@" not in url else "(not shown)"
            raise ConfigError(route.key("url"), shown, "is not the address of an HTTP server.", fix)
    if not re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)?", variable):  # it may be the key itself
        problem, fix = "is not the name of an environment variable.", "put the key into a variable, and name that."
        raise ConfigError(route.key("api_key_env"), "(not shown)", problem, fix)
    _check_lists(route, "an HTTP teacher returns top-k lists of one length, at temperature 1.")
    if config.distill.support != "teacher" and teacher.dialect != "vllm":
        problem = f"a server of dialect {teacher.dialect} cannot score ids that differ between positions."
        raise config.error("distill.support", problem, "use teacher, or vLLM.")


def _check_lists(route: Route, problem: str) -> None:
    """Check that prompt logprobs, which a teacher of the route returns, contain what is requested."""
    teacher = route.teacher
    for name, works, fix in (
        ("signal", teacher.signal in ("topk", "sampled"), "use topk or sampled."),
        ("temperature", teacher.temperature == 1.0, "use 1.0."),
        ("mass", teacher.mass == 0.0, "use 0."),
    ):
        if not works:
            raise route.error(name, problem, fix)


def _is_address(url: str) -> bool:
    """Return whether this is the root of an HTTP server, without credentials."""
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    extras = parts.username or parts.password or parts.query or parts.fragment
    is_root = not parts.path.rstrip("/").endswith("/v1")
    return named and parts.scheme in ("http", "https") and not extras and is_root and url.isprintable()


def _has_own_prompt(config: Config) -> bool:
    """Return whether the teacher sees another prompt than the student."""
    return bool(config.teacher.prompt_template or config.data.teacher_prompt_key)


def _check_rollout_teacher(config: Config) -> None:
    """Check that the rollout engines can score with the student's weights, and that there is something to learn."""
    if not _has_own_prompt(config):
        problem = "the teacher is the student itself, and with the same prompt there is nothing to learn."
        raise config.error("teacher.backend", problem, "set teacher.prompt_template or data.teacher_prompt_key.")
    if config.trainer.colocate:
        problem = "with trainer.colocate the engines sleep while the batch is scored."
        fix = "use local with teacher.update_interval=1, or trainer.colocate=false."
        raise config.error("teacher.backend", problem, fix)
    if config.distill.support != "teacher":
        problem = "with teacher.backend=rollout vLLM returns the teacher's most probable ids, and no others."
        raise config.error("distill.support", problem, "use teacher.")
    problem = "with teacher.backend=rollout vLLM's probabilities are those of all rows, also of masked ones."
    config.check_unused(["model.n_vocab"], problem, "use 0, or local with teacher.update_interval=1.")
    problem = "with teacher.backend=rollout vLLM returns top-k lists of one length at temperature 1."
    _check_lists(config.derived.routes[0], problem)


def check_token_weights(config: Config) -> None:
    """Check that the tokens of a sequence can have different weights."""
    distill, weight = config.distill, config.distill.token_weight
    if distill.token_clip and config.derived.loss.terms == (config.derived.loss.sft,):
        problem = "it limits divergences and k1 to k3, and the only loss is sft."
        raise config.error("distill.token_clip", problem, "use 0, or another loss.")
    if weight == "none" and distill.token_share < 1.0:
        problem = "distill.token_weight is none, so no order tells which tokens to keep."
        raise config.error("distill.token_share", problem, "use 1.0, or choose a weight.")
    if weight == "teachability" and config.derived.signals == ("sampled",):
        problem = "it needs the teacher's distribution, and the teacher sends the probability of one token."
        fix = "use a divergence with teacher.signal topk, hidden or logits, or another weight."
        raise config.error("distill.token_weight", problem, fix)
    if weight == "position" and distill.on_policy_share == 0.0:
        problem = "it weighs tokens that the student generated, and distill.on_policy_share is 0."
        raise config.error("distill.token_weight", problem, "use none, or a share above 0.")


def check_mixture(config: Config) -> None:
    """Check that the losses have tokens to learn from in every step."""
    spec, share = config.derived.loss, config.distill.on_policy_share
    n_prompts = config.trainer.global_batch_size
    if spec.sft is not None and share == 1.0:
        problem = "the loss sft learns from dataset responses, and there are none."
        raise config.error("distill.on_policy_share", problem, "use a share below 1, or remove sft.")
    if spec.policy_gradients and share == 0.0:
        names = ", ".join(term.name for term in spec.policy_gradients)
        problem = f"{names} learns from tokens that the student generated, and there are none."
        raise config.error("distill.on_policy_share", problem, "use a share above 0, or remove the loss.")
    # A step without a token to learn from would still change the weights, by momentum and weight decay.
    only_student, only_dataset = len(spec.policy_gradients) == len(spec.terms), spec.terms == (spec.sft,)
    exact = Fraction(repr(share))  # the decimal number, as `gkd.data.sampler` counts
    each_step = exact * n_prompts if only_student else (1 - exact) * n_prompts if only_dataset else 1
    if each_step < 1:
        kind = "student" if only_student else "dataset"
        raise config.error(
            "distill.on_policy_share",
            f"the losses learn from {kind} responses only, and this share of trainer.global_batch_size {n_prompts} is "
            "less than one prompt per step.",
            "change the share, use larger batches, or add a divergence to the losses.",
        )


def check_reference(config: Config) -> None:
    """Check that settings of the reference are used, and that its KL can be estimated."""
    weight, share = config.distill.reference_kl_weight, config.distill.on_policy_share
    if not config.derived.loss.has_reference:
        keys = [key for key in all_keys() if key.startswith("reference.")]
        problem = "distill.reference_kl_weight is 0, so no reference is used."
        config.check_unused(keys, problem, "remove it, or set the weight.")
    if config.derived.reference_is_actor:
        problem = "with actor.lora the reference is the actor with its adapters disabled, not a second model."
        unused = ("reference.fsdp_cpu_offload", "reference.update_interval")
        config.check_unused(unused, problem, "remove it, or set reference.path.")
    scale = config.distill.teacher_reward_scale
    if scale != 1 and not config.derived.loss.policy_gradients:
        problem = "it scales the teacher's reward of a sampled token, and no loss uses one."
        raise config.error("distill.teacher_reward_scale", problem, "use 1, or add k1, k2 or k3 to the losses.")
    if config.reference.update_interval == 1:
        problem = "after every step the reference is the student itself, so the KL to it is 0."
        raise config.error("reference.update_interval", problem, "use more, or 0.")
    if weight and share == 0.0:
        problem = "it is estimated from tokens that the student generated, and distill.on_policy_share is 0."
        raise config.error("distill.reference_kl_weight", problem, "use 0, or a share above 0.")

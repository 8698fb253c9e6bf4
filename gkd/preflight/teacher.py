"""Check the teacher before the start: reachable, same token ids, long enough context, and the memory of its scores."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from gkd.config.schema import Config, Route
from gkd.config.schema_teacher import HTTP
from gkd.data.prompts import load_tokenizer
from gkd.errors import ConfigError, TeacherError, TeacherRefusal, TeacherUnavailable
from gkd.hf.files import weights_digest
from gkd.hf.model_folder import read_config_json
from gkd.log import get_logger
from gkd.preflight.same_tokens import shared_ids, shown
from gkd.scoring.teacher.info import TeacherInfo
from gkd.scoring.teacher.teacher import Teacher, open_teacher
from gkd.types import Rollout
from teacher_server.wire.fingerprint import tokenizer_fingerprint

log = get_logger("preflight")

# Limit for the reply of a running teacher server to the first request.
TEACHER_HELLO_S = 10.0
# Limit for a TCP connection. A host that drops packets does not reply at all.
CONNECT_S = 2.0

# A warning is logged if scores take more host memory than this.
LARGE_SCORES_GIB = 4.0


def check_reachable(route: Route, timeout_s: float = CONNECT_S) -> None:
    """Connect to a teacher's ports once. Returns also if a connection times out: a busy server may accept it later.

    Raises:
        ConfigError: naming the key of the address: the host name cannot be resolved.
        TeacherUnavailable: the host refuses the connection, or there is no route to it.
    """
    if route.teacher.backend == HTTP:
        for url in route.teacher.url:
            parts = urlsplit(url)
            assert parts.hostname is not None, "the settings are checked"
            port = parts.port or (443 if parts.scheme == "https" else 80)
            _check_port(route, "url", parts.hostname, port, socket.AF_UNSPEC, timeout_s)
    else:
        _check_port(route, "server_ip", route.teacher.server_ip, route.teacher.server_port, socket.AF_INET, timeout_s)


def _check_port(route: Route, key: str, host: str, port: int, family: socket.AddressFamily, timeout_s: float) -> None:
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        problem = f"unknown host name{', or not an IPv4 address' * (family == socket.AF_INET)} ({error})."
        raise ConfigError(route.key(key), host, problem, "correct it.") from error
    try:
        with socket.socket(kind, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(address)
    except TimeoutError:
        log.info("no connection to the teacher at %s:%d within %g s; trying again", host, port, timeout_s)
    except OSError as error:
        fix = f"start a server with: bash launch/teacher.sh --model PATH --host {host} --port {port}"
        if route.teacher.backend == HTTP:
            fix = "start the server, see docs/http_teacher.md"
        raise TeacherUnavailable(
            f"{_address(route)}: cannot connect to {host}:{port} ({error.strerror}). Fix: {fix}"
        ) from error


def _address(route: Route) -> str:
    """Return the keys of a teacher's address and their values; with several teachers its route first."""
    keys = ("url",) if route.teacher.backend == HTTP else ("server_ip", "server_port")
    address = ", ".join(f"{route.key(key)} = {getattr(route.teacher, key)}" for key in keys)
    return f"{route.label}: {address}" if route.name else address


def request_info(route: Route) -> TeacherInfo:
    """Request the description of a teacher from its server.

    Raises:
        TeacherUnavailable: no reply.
        TeacherError: the reply is not a description.
        ConfigError: the server has no such teacher, or teacher.keys cannot be used.
    """
    settings = route.teacher
    budget_s = min(TEACHER_HELLO_S, settings.outage_budget_s)
    teacher = open_teacher(settings, k=settings.topk, n_vocab=0, n_in_flight=1, outage_budget_s=budget_s)
    try:
        info = teacher.info()
        if settings.signal == "hidden":
            _check_head(teacher)
        return info
    except TeacherUnavailable as error:
        raise TeacherUnavailable(f"{_address(route)}: {error}") from error
    except TeacherRefusal as error:
        if error.code in ("http 401", "http 403"):
            fix = "name a variable that holds the server's key."
            raise ConfigError(route.key("api_key_env"), settings.api_key_env, f"{error}.", fix) from error
        if error.code.startswith("http"):
            raise ConfigError(route.key("url"), settings.url, f"{error}.", "give the address of the server.") from error
        if error.code != "bad_request":
            raise
        raise ConfigError(route.key("name"), settings.name, f"{error}.", "use one of the server's names.") from error
    finally:
        teacher.close()


def _check_head(teacher: Teacher) -> None:
    """Request the hidden states of one token.

    Raises:
        ConfigError: the teacher refuses, because its logits are not hidden states times a matrix (bias, soft cap).
    """
    token, nothing = np.zeros(1, np.int32), np.zeros(1, np.float32)
    try:
        teacher.submit([Rollout(0, 0, token, token, nothing, (), "length", on_policy=False)], ["hidden"]).result()
    except TeacherUnavailable:
        raise
    except TeacherError as error:
        raise ConfigError("teacher.signal", "hidden", f"{error}.", "use topk or logits.") from error


def rollout_teacher(config: Config, device: str) -> TeacherInfo:
    """Return the description of the student as the teacher on the rollout engines, as a server would."""
    path, derived = config.model.path, config.derived
    config_json = read_config_json(path, "model.path")
    text = config_json.get("text_config", config_json)
    tokenizer = load_tokenizer(path, "model.path", trust_remote_code=config.model.trust_remote_code)
    return TeacherInfo(
        teacher="",
        model_name=Path(path).resolve().name,
        model_path=str(Path(path).resolve()),
        fingerprint=weights_digest(Path(path)),
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer.get_vocab()),
        # One token more is generated.
        max_tokens=text.get("max_position_embeddings", sys.maxsize) - 1,
        n_workers=derived.n_engines,
        n_streams=1,
        engine="vllm",
        device=device,
        dtype=config.model.dtype,
        protocol_version=0,
    )


def check_teacher(config: Config, route: Route, teacher: TeacherInfo, tokenizer: Any, student_vocab: int) -> int:
    """Check that a teacher and the student use the same token ids, and that it supports the sequence length.

    Their numbers of rows may differ, because models pad the embedding of one tokenizer differently. The map token -> id
    must not differ, see `shared_ids`: scores would belong to other tokens.

    Returns:
        The number of shared token ids.
    """
    kind = f"teacher of route {route.name}," if route.name else "teacher"
    n_vocab = student_vocab  # the ids behind HTTP are unknown, see `gkd.preflight.http_teacher`
    if route.teacher.backend != HTTP:
        n_vocab = _shared_vocab(config, route, teacher, kind, tokenizer, student_vocab)
    check_limits(config, route, teacher, kind, n_vocab)
    return n_vocab


def _shared_vocab(
    config: Config, route: Route, teacher: TeacherInfo, kind: str, tokenizer: Any, student_vocab: int
) -> int:
    """Return the number of token ids that mean the same for the student and the teacher. Raises ConfigError."""
    if not teacher.tokenizer_fingerprint:
        raise ConfigError(
            route.key("server_port"),
            route.teacher.server_port,
            f"the teacher's folder {teacher.model_path} has no tokenizer to compare with the student's.",
            "put the teacher's tokenizer files there and restart the server.",
        )
    own = tokenizer.get_vocab()
    same = teacher.tokenizer_fingerprint == tokenizer_fingerprint(own)
    other = own if same else _teacher_vocab(teacher)
    n_vocab, difference = shared_ids(own, other, student_vocab, teacher.vocab_size)
    if not other or difference or n_vocab < 2:
        problem = difference if other else "its folder is not on this host, so the tokens cannot be compared"
        raise ConfigError(
            "model.path",
            config.model.path,
            f"its tokenizer differs from the tokenizer of the {kind} {teacher.model_path}: {problem}.",
            "use models with the same tokens and ids (one of them may have more, with the highest ids), or name the "
            "teacher's tokenizer in teacher.tokenizer: docs/other_tokenizer.md.",
        )
    if masked := {token: i for token, i in own.items() if i >= n_vocab}:
        log.warning("the student never generates the tokens that the %s does not have: %s", kind, shown(masked))
    return n_vocab


def check_limits(config: Config, route: Route, teacher: TeacherInfo, kind: str, n_vocab: int) -> None:
    """Check that the teacher can answer the requests of this run. Raises ConfigError."""
    derived = config.derived
    if "topk" in derived.signals and config.teacher.topk > n_vocab:
        raise ConfigError(
            "teacher.topk",
            config.teacher.topk,
            f"student and teacher share only {n_vocab} token ids.",
            f"use at most {n_vocab}.",
        )
    if teacher.protocol_version == 1 and (derived.n_student_ids or derived.signals == ("topk", "sampled")):
        raise ConfigError(
            route.key("server_port"),
            route.teacher.server_port,
            "the server has protocol version 1: it cannot score given ids, nor the sampled token with the top-k.",
            "upgrade the teacher server.",
        )
    if 0 < teacher.protocol_version < 4 and (config.rollout.environment or config.data.messages_key):
        problem = f"the server has protocol version {teacher.protocol_version}: it cannot score parts of a response."
        key = "rollout.environment" if config.rollout.environment else "data.messages_key"
        value = config.rollout.environment or config.data.messages_key
        raise ConfigError(key, value, problem, "upgrade the teacher server.")
    longest = derived.max_teacher_length
    if longest > teacher.max_tokens:
        raise ConfigError(
            "data.max_response_length",
            config.data.max_response_length,
            f"prompt and response may have {longest} tokens together, and the {kind} scores at most "
            f"{teacher.max_tokens}.",
            "lower data.max_prompt_length, data.max_teacher_prompt_length or data.max_response_length.",
        )


def _teacher_vocab(teacher: TeacherInfo) -> dict[str, int]:
    """Return token -> id of a teacher whose folder, or a copy of it at the same path, is on this host; else nothing."""
    try:
        vocab: dict[str, int] = load_tokenizer(teacher.model_path, "model.path").get_vocab()
    except (ConfigError, PermissionError):
        return {}
    return vocab if tokenizer_fingerprint(vocab) == teacher.tokenizer_fingerprint else {}


def stale_losses(config: Config) -> list[str]:
    """Return the losses of a run with stale rollouts that are sensitive to them; see docs/losses.md."""
    if not config.trainer.staleness_bound or not config.distill.on_policy_share:
        return []
    spec = config.derived.loss
    return [term.name for term in spec.terms if term.name == "reverse_kl" or term in spec.policy_gradients]


def warn_about_losses(config: Config, gib: float) -> None:
    """Log warnings about valid settings that may be unintended.

    Args:
        gib: result of `scores_gib`.
    """
    if gib > LARGE_SCORES_GIB:
        log.warning(
            "teacher.signal=%s: scores may take %.1f GiB of host memory over all data-parallel groups, and twice that "
            "while they are written to disk. Smaller: hidden instead of logits, topk instead of hidden, a smaller "
            "teacher.topk or eval.max_prompts",
            config.teacher.signal,
            gib,
        )
    spec = config.derived.loss
    if (spec.uses_samples or spec.has_rewards) and config.rollout.truncation:
        names = [term.name for term in spec.policy_gradients] + ["rewards"] * spec.has_rewards
        names += ["distill.tail=residual"] * spec.has_residual
        log.warning(
            "%s: tokens outside are never sampled, so %s cannot learn from them",
            config.rollout.truncation,
            ", ".join([*names, "the reference's KL"] if spec.reference_weight else names),
        )
    if sensitive := stale_losses(config):
        log.warning(
            "%s with rollouts up to %d steps old (trainer.scheduler=%s): older weights than those that train generated "
            "them, which may cost quality (quickstart with reverse_kl: accuracy 97.3%% under sync, 98.6%% one step off "
            "and 95.7%% two). Compare with trainer.scheduler=sync; see docs/losses.md",
            ", ".join(sensitive),
            config.trainer.staleness_bound,
            config.trainer.scheduler,
        )
    share = config.distill.on_policy_share
    unused = "student" if spec.sft and len(spec.terms) == 1 and share else None
    if len(spec.policy_gradients) == len(spec.terms) and share < 1.0:
        unused = "dataset"
    if unused:
        log.warning(
            "distill.on_policy_share=%g: no loss learns from %s responses, but their tokens count in the mean",
            share,
            unused,
        )

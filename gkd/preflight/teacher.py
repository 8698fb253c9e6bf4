"""Check the teacher before the start: reachable or not needed, token ids, chat template, length of its context."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from gkd.config.schema import Config, Route
from gkd.config.schema_rollout import MOST_MASKED
from gkd.config.schema_sections import DataConfig
from gkd.config.schema_teacher import HTTP, NONE
from gkd.data.chunks import dataset_rollouts
from gkd.data.prompts import load_tokenizer
from gkd.errors import ConfigError, TeacherError, TeacherRefusal, TeacherUnavailable
from gkd.hf.model_folder import read_config_json, weights_digest
from gkd.log import get_logger
from gkd.preflight.images import image_processor
from gkd.run.disk import replace_file
from gkd.scoring.teacher.client import server_command
from gkd.scoring.teacher.info import TeacherInfo
from gkd.scoring.teacher.store import dataset_keys, open_store
from gkd.scoring.teacher.teacher import Teacher, open_teacher
from gkd.types import Prompt, Rollout
from teacher_server.wire.fingerprint import template_example, template_fingerprint, tokenizer_fingerprint
from teacher_server.wire.protocol import MAX_ENTRIES

log = get_logger("preflight")

# Limit for the reply of a running teacher server to the first request.
TEACHER_HELLO_S = 10.0
# Limit for a TCP connection. A host that drops packets does not reply at all.
CONNECT_S = 2.0
_SHOWN = 4  # tokens in one message
_TEMPLATE_FIX = (
    "give both folders the same chat template, set data.chat_template_kwargs, or put the teacher's form into a column "
    "and set data.teacher_prompt_key"
)
# File in teacher.store: by route address, the `TeacherInfo` of the teacher that has scored the responses there. The key
# of a score contains the teacher's fingerprint, so a wrong description finds none.
_STORED = "teachers.json"


def check_reachable(route: Route, timeout_s: float = CONNECT_S) -> None:
    """Connect to a teacher's ports once. Returns also if a connection times out: a busy server may accept it later.

    Raises:
        ConfigError: naming the key of the address: the host name cannot be resolved.
        TeacherUnavailable: the host refuses the connection, or there is no route to it.
    """
    if route.teacher.backend == HTTP:
        for url in route.teacher.url:
            address = urlsplit(url)
            assert address.hostname is not None, "the settings are checked"
            port = address.port or (443 if address.scheme == "https" else 80)
            _check_port(route, "url", address.hostname, port, socket.AF_UNSPEC, timeout_s)
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
        fix = f"start a server with: {server_command(host, port)}"
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
        with closing(teacher):
            info = teacher.info()
            if settings.signal == "hidden":
                _check_head(teacher)
            return info
    except TeacherUnavailable as error:
        raise TeacherUnavailable(f"{_address(route)}: {error}") from error
    except TeacherRefusal as error:
        if error.code in ("http 401", "http 403"):
            raise route.error("api_key_env", f"{error}.", "name a variable that holds the server's key.") from error
        if error.code.startswith("http"):
            raise route.error("url", f"{error}.", "give the address of the server.") from error
        if error.code != "bad_request":
            raise
        raise route.error("name", f"{error}.", "use one of the server's names.") from error


def _check_head(teacher: Teacher) -> None:
    """Request the hidden states of one token.

    Raises:
        ConfigError: the teacher refuses, because its logits are not hidden states times a matrix (bias, soft cap).
    """
    try:
        teacher.submit([as_rollout(np.zeros(2, np.int32))], ["hidden"]).result()
    except TeacherUnavailable:
        raise
    except TeacherError as error:
        raise ConfigError("teacher.signal", "hidden", f"{error}.", "use topk or logits.") from error


def as_rollout(ids: np.ndarray, index: int = 0) -> Rollout:
    """Return a text, at least 2 ids, as a response that a teacher can score: to its first token."""
    return Rollout(0, index, ids[:1], ids[1:], np.zeros(len(ids) - 1, np.float32), (), "length", on_policy=False)


def rollout_teacher(config: Config, device: str) -> TeacherInfo:
    """Return the description of the student as the teacher on the rollout engines, as a server would."""
    config_json = read_config_json(config.model.path, "model.path")
    text = config_json.get("text_config", config_json)
    return own_teacher(
        config,
        "model.path",
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        max_tokens=text.get("max_position_embeddings", sys.maxsize) - 1,  # one token more is generated
        n_workers=config.derived.n_engines,
        engine="vllm",
        device=device,
    )


def own_teacher(config: Config, key: str, **facts: Any) -> TeacherInfo:
    """Describe a teacher on processes of the run. `key` names its folder, and its kind decides the `facts`."""
    path = config.value(key)
    tokenizer = load_tokenizer(path, key, trust_remote_code=config.model.trust_remote_code)
    return TeacherInfo(
        teacher="",
        model_name=Path(path).resolve().name if config.derived.teacher_pool != NONE else NONE,
        model_path=str(Path(path).resolve()),
        fingerprint=weights_digest(Path(path)),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer.get_vocab()),
        n_streams=1,
        dtype=config.model.dtype,
        is_server=False,
        image_probe=image_processor(path).probe() if config.data.images_key else (),
        **facts,
    )


def check_teacher(config: Config, route: Route, teacher: TeacherInfo, tokenizer: Any, student_vocab: int) -> int:
    """Check that a teacher and the student use the same token ids, and that it supports the sequence length.

    Their numbers of rows may differ, because models pad the embedding of one tokenizer differently. The map token -> id
    must not differ, see `shared_ids`: scores would belong to other tokens. Return the number of shared token ids.
    """
    kind = f"teacher of route {route.name}," if route.name else "teacher"
    n_vocab = student_vocab  # if the teacher's ids are unknown, see `gkd.preflight.http_teacher`
    if route.teacher.kind.is_described:
        n_vocab = _shared_vocab(config, route, teacher, kind, tokenizer, student_vocab)
    check_limits(config, route, teacher, kind, n_vocab)
    return n_vocab


def _shared_vocab(
    config: Config, route: Route, teacher: TeacherInfo, kind: str, tokenizer: Any, student_vocab: int
) -> int:
    """Return the number of token ids that mean the same for the student and the teacher. Raises ConfigError."""
    if not teacher.tokenizer_fingerprint:
        problem = f"the teacher's folder {teacher.model_path} has no tokenizer to compare with the student's."
        raise route.error("server_port", problem, "put the teacher's tokenizer files there and restart the server.")
    vocab = tokenizer.get_vocab()
    same = teacher.tokenizer_fingerprint == tokenizer_fingerprint(vocab)
    other = vocab if same else _teacher_vocab(teacher)
    n_vocab, difference = shared_ids(vocab, other, student_vocab, teacher.vocab_size)
    if not other or difference or n_vocab < 2:
        problem = difference if other else "its folder is not on this host, so the tokens cannot be compared"
        problem = f"its tokenizer differs from the tokenizer of the {kind} {teacher.model_path}: {problem}."
        fix = (
            "use models with the same tokens and ids (one of them may have more, with the highest ids), or name the "
            "teacher's tokenizer in teacher.tokenizer: docs/other_tokenizer.md."
        )
        raise config.error("model.path", problem, fix)
    if masked := {token: i for token, i in vocab.items() if i >= n_vocab}:
        log.warning("the student never generates the tokens that the %s does not have: %s", kind, _shown(masked))
    return n_vocab


def check_limits(config: Config, route: Route, teacher: TeacherInfo, kind: str, n_vocab: int) -> None:
    """Check that the teacher can answer the requests of this run. Raises ConfigError."""
    derived = config.derived
    if "topk" in derived.signals and config.teacher.topk > n_vocab:
        problem = f"the teacher can list only {n_vocab} token ids."
        raise config.error("teacher.topk", problem, f"use at most {n_vocab}.")
    most = MAX_ENTRIES // config.data.max_response_length  # entries of a row in one reply of a teacher server
    if "topk" in derived.signals and teacher.is_server and config.teacher.topk > most:
        problem = f"a reply of the teacher server holds {most} entries for each of data.max_response_length tokens."
        raise config.error("teacher.topk", problem, f"use at most {most}, or shorter responses.")
    longest = derived.max_teacher_length
    if longest > teacher.max_tokens:
        problem = (
            f"prompt and response may have {longest} tokens together, and the {kind} scores at most "
            f"{teacher.max_tokens}."
        )
        fix = "lower data.max_prompt_length, data.max_teacher_prompt_length or data.max_response_length"
        fix += ", or raise --max-tokens of the teacher server, if it was set." if teacher.is_server else "."
        raise config.error("data.max_response_length", problem, fix)


def _teacher_vocab(teacher: TeacherInfo) -> dict[str, int]:
    """Return token -> id of a teacher whose folder, or a copy of it at the same path, is on this host; else nothing."""
    try:
        vocab: dict[str, int] = load_tokenizer(teacher.model_path, "model.path").get_vocab()
    except (ConfigError, PermissionError):
        return {}
    return vocab if tokenizer_fingerprint(vocab) == teacher.tokenizer_fingerprint else {}


def shared_ids(vocab: Mapping[str, int], other: Mapping[str, int], n_rows: int, n_other_rows: int) -> tuple[int, str]:
    """Return how many ids, from 0 on, mean the same token in both models, and a clause on what prevents that.

    The clause is empty if one model has all tokens of the other with the same ids, and its additional tokens have the
    highest ids. These and padding rows are masked: they are not generated, and dropped before the softmax.

    Args:
        vocab: token -> id of the student.
        other: token -> id of a teacher or reference.
        n_rows: of the student's embedding.
        n_other_rows: of the other model's.
    """
    kept = {token: i for token, i in other.items() if i < n_rows}
    moved = {token: f"{i} and {other[token]}" for token, i in vocab.items() if other.get(token, i) != i}
    only_own = {token: i for token, i in vocab.items() if token not in other}
    only_other = {token: i for token, i in kept.items() if token not in vocab}
    n_ids = min([n_rows, n_other_rows, *only_own.values(), *only_other.values()])
    are_last = all(i < n_ids for token, i in vocab.items() if token in other)
    if not moved and are_last and not (only_own and only_other):
        return n_ids, ""
    clauses = (("other ids for", moved), ("only the student has", only_own), ("only the other model has", only_other))
    return n_ids, "; ".join(f"{what} {_shown(tokens)}" for what, tokens in clauses if tokens)


def check_masked(
    config: Config,
    n_vocab: int,
    eos_ids: Sequence[int],
    prompts: Iterable[Prompt],
    *,
    n_masked: int = 0,
    is_shared: bool = True,
) -> None:
    """Raise ConfigError if a response can only end with a masked token, or if a prompt or response has one.

    Args:
        n_masked: ids that engines on GPUs mask.
        is_shared: the teacher's prompts have the student's tokens.
    """
    fix = "use a teacher with the student's tokens, or remove them from the data and the chat template."
    key = "model.n_vocab" if config.model.n_vocab else "model.path"
    if n_masked > MOST_MASKED:
        problem = f"{n_masked} rows of its embedding have no token that the teacher shares; GPUs mask {MOST_MASKED}."
        raise config.error(key, problem, "resize the model's embedding, or use a teacher with the same tokens.")
    if masked := [i for i in eos_ids if i >= n_vocab]:
        problem = f"responses end with token {masked[0]}, and the ids from {n_vocab} on are masked."
        raise config.error(key, problem, fix)
    for prompt in prompts:
        for ids in (prompt.token_ids, prompt.response_ids, prompt.teacher_ids if is_shared else None):
            if ids is not None and len(ids) and int(ids.max()) >= n_vocab:
                problem = f"row {prompt.prompt_id} has the token id {int(ids.max())}; ids from {n_vocab} on are masked."
                raise config.error(key, problem, fix)


def _shown(tokens: Mapping[str, object]) -> str:
    """Return the first tokens with their ids."""
    first = [f"{token!r} ({i})" for token, i in list(tokens.items())[:_SHOWN]]
    return ", ".join(first) + (f" and {len(tokens) - _SHOWN} more" if len(tokens) > _SHOWN else "")


def template_warning(data: DataConfig, tokenizer: Any, teacher: TeacherInfo, *, trust_remote_code: bool) -> str:
    """Return a sentence if the teacher's own template writes another prompt than the student reads, else "".

    Also if they cannot be compared.

    The teacher scores the student's prompt. Text in a form that it was not trained on lowers its quality. Its folder is
    read if this host has it; else the prompt that its server sends is compared.
    """
    if data.chat_template == "never" or data.teacher_prompt_key:
        return ""
    name = teacher.model_path
    variables = data.chat_template_kwargs
    is_here = os.path.isdir(name)  # false where this user may not look
    if not is_here and teacher.template_fingerprint == template_fingerprint(tokenizer.chat_template):
        return ""
    if not is_here and not teacher.template_example:
        return teacher.template_fingerprint and (
            f"the chat template of the teacher {name} is another text than the student's, and its folder is not on "
            f"this host. If it writes other prompts, {_TEMPLATE_FIX}"
        )
    try:
        ours = template_example(tokenizer, variables)
        its = teacher.template_example
        if is_here:
            other = load_tokenizer(name, "teacher.path", trust_remote_code=trust_remote_code)
            its = template_example(other, variables)
    except Exception as error:  # a template is a program and may raise any error
        return f"the chat templates of the student and of the teacher {name} are not compared: {error}"
    if ours == its:
        return ""
    without = "" if is_here or not variables else " without data.chat_template_kwargs"
    return (
        f"the chat templates differ: the student reads {ours!r}, and the template of the teacher {name} writes "
        f"{its!r}{without}. The teacher scores the student's form. Fix: {_TEMPLATE_FIX}"
    )


def record_teachers(config: Config, teachers: Sequence[TeacherInfo]) -> None:
    """Write the descriptions of the teachers into the store, which exists. Raises OSError."""
    replace_file(
        Path(config.teacher.store) / _STORED, msgspec.json.encode(list(zip(_addresses(config), teachers, strict=True)))
    )


def _addresses(config: Config) -> list[str]:
    return [f"{route.teacher.server_ip}:{route.teacher.server_port}" for route in config.derived.routes]


def recorded_teachers(config: Config, away: TeacherUnavailable) -> tuple[TeacherInfo, ...]:
    """Return the descriptions in the store for a run that needs no teacher server.

    Raises:
        TeacherUnavailable: `away`: the run needs the server, or nothing is recorded, or other teachers of a server, or
            without a name those at another address.
    """
    needs = config.distill.on_policy_share > 0 or config.data.val_files or config.teacher.signal == "hidden"
    try:
        if needs or not config.teacher.store:
            raise away
        content = (Path(config.teacher.store) / _STORED).read_bytes()
        recorded = msgspec.json.decode(content, type=tuple[tuple[str, TeacherInfo], ...])
    except (OSError, msgspec.DecodeError):
        raise away from None
    names = [route.teacher.name for route in config.derived.routes]
    if len(recorded) != len(names):
        raise away
    for name, address, (before, teacher) in zip(names, _addresses(config), recorded, strict=True):
        if name != teacher.teacher if name else address != before:
            fix = f"or set teacher.name={teacher.teacher} to train without a server on the scores in teacher.store"
            raise TeacherUnavailable(f"{away}, {fix}: those of {teacher.model_name}, from {before}")
    teachers = tuple(teacher for _, teacher in recorded)
    shown = ", ".join(f"{teacher.model_name} ({teacher.fingerprint[:12]})" for teacher in teachers)
    log.warning(
        "%s; teacher.store has the scores of %s: the run asks no teacher", str(away).partition(" Fix:")[0], shown
    )
    return teachers


def check_all_stored(
    config: Config, prompts: Sequence[Prompt], teachers: Sequence[TeacherInfo], n_vocab: int, eos_ids: Sequence[int]
) -> None:
    """Raise TeacherUnavailable unless the store has the scores of each response."""
    store = open_store(config.teacher)
    fingerprints = [teacher.fingerprint for teacher in teachers]
    numerics = [teacher.numerics for teacher in teachers]
    keys = dataset_keys(dataset_rollouts(prompts, eos_ids), config.derived, fingerprints, n_vocab, numerics)
    n_missing = len(prompts) - sum(key in store for key in keys.values())
    if n_missing:
        problem = f"it lacks the scores of {n_missing} of {len(prompts)} responses, and no teacher server replies."
        fix = "start the server, or run `gkd score` with these settings before"
        raise TeacherUnavailable(f"teacher.store = {config.teacher.store}: {problem} Fix: {fix}")

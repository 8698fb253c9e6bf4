"""Check what `gkd score` and `gkd generate` need of a run before teachers score or answer its dataset rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from gkd.config.check import check_config
from gkd.config.schema import Config
from gkd.config.schema_teacher import HTTP, ZMQ
from gkd.data.prompts import RowReader, load_prompts
from gkd.errors import ConfigError, TeacherRefusal
from gkd.hf.hub import FILES, MODELS, pinned_names, with_local_copies
from gkd.log import get_logger
from gkd.preflight.prompts import training_prompts
from gkd.preflight.run import common_vocab, find_teachers, probed_teachers, read_student
from gkd.preflight.student import chosen
from gkd.preflight.teacher import check_masked, check_reachable
from gkd.preflight.user_code import environment_tools
from gkd.scoring.teacher.info import TeacherInfo
from gkd.scoring.teacher.teacher import open_teacher
from gkd.types import Prompt
from teacher_server.client.generate import AnswerSettings, NamedPrompt

log = get_logger("preflight")


@dataclass(frozen=True, slots=True)
class DatasetPlan:
    """Hold the rows of data.train_files, and the teachers that score or answer them."""

    config: Config
    prompts: list[Prompt]  # to score: with their responses; to answer: with their rows
    tokenizer: Any
    eos_ids: list[int]
    teachers: tuple[TeacherInfo, ...]  # one per route
    n_vocab: int  # ids that student and teachers share


def check_scoring(config: Config) -> DatasetPlan:
    """Check the settings of a run, its data and its teachers. Needs no GPU, and makes no run folder.

    Raises:
        ConfigError: naming key, value and fix: also if there is no store, or it cannot keep a teacher's scores.
        TeacherUnavailable: no teacher server replies.
    """
    check_config(config)
    if not config.teacher.store:
        fix = "name a folder, and use distill.on_policy_share below 1."
        raise config.error("teacher.store", "scores need a folder that keeps them.", fix)
    for route in config.derived.routes:
        if not route.teacher.kind.is_described:
            problem = "these servers send no digest of their weights, so the store keeps no scores of them."
            raise route.error("backend", problem, "use a teacher server: gkd teacher.")
    plan, n_student_vocab = _plan(
        config,
        lambda config, tokenizer, ends: training_prompts(config, tokenizer, ends, environment_tools(config, tokenizer)),
    )
    if plan.n_vocab < n_student_vocab:
        check_masked(plan.config, plan.n_vocab, plan.eos_ids, plan.prompts)
    return plan


def check_generation(config: Config) -> DatasetPlan:
    """Check the settings of a run, the rows of data.train_files and the teacher. Needs no GPU, makes no run folder.

    Raises:
        ConfigError: naming key, value and fix: also for a teacher, or rows, that `gkd generate` does not support.
        TeacherUnavailable: the teacher server does not reply.
    """
    check_supported(config)
    check_config(config)
    plan, n_student_vocab = _plan(config, _to_answer)
    if config.teacher.backend == HTTP:
        sampled = plan.config.with_values({"teacher.signal": "sampled"})  # the probes need no lists
        teachers = probed_teachers(sampled, plan.teachers, plan.tokenizer, plan.prompts, n_student_vocab)
        _check_answers(plan)
        plan = replace(plan, teachers=teachers)
    return plan


def _check_answers(plan: DatasetPlan) -> None:
    """Request a token from each server of an HTTP teacher. Raises ConfigError: one sends no ids of its answers."""
    teacher = plan.config.teacher
    n = len(teacher.url)  # they take turns
    prompt = NamedPrompt("a probe", plan.prompts[0].token_ids, 0)
    try:
        with closing(open_teacher(teacher, k=0, n_vocab=plan.n_vocab, n_in_flight=n)) as client:
            client.generate([prompt], AnswerSettings(n, 0.0, 1.0, 1, plan.n_vocab, plan.eos_ids)).result()
    except TeacherRefusal as error:
        fix = "use a newer vLLM or SGLang, or a teacher server: gkd teacher --engine vllm."
        raise plan.config.error("teacher.url", f"it writes no answers with token ids: {error}.", fix) from error


def _to_answer(config: Config, tokenizer: Any, _: Sequence[int]) -> list[Prompt]:
    reader = RowReader(config.data, tokenizer, config.teacher, environment_tools(config, tokenizer))
    prompts, n_dropped = load_prompts(config.data.train_files, "data.train_files", reader, keep_rows=True)
    if n_dropped:
        log.warning("dropped %d prompts longer than data.max_prompt_length or that of the teacher", n_dropped)
    return prompts


def _plan(config: Config, read: Callable[[Config, Any, Sequence[int]], list[Prompt]]) -> tuple[DatasetPlan, int]:
    """Return the plan with the prompts that `read` returns, and the number of the student's ids."""
    for route in config.derived.routes:
        check_reachable(route)
    config = chosen(with_local_copies(config.with_values(pinned_names(config)), (*MODELS, *FILES)))
    tokenizer, n_student_vocab, eos_ids = read_student(config)
    prompts = read(config, tokenizer, eos_ids)
    teachers = find_teachers(config, "cpu")
    n_vocab = common_vocab(config, teachers, tokenizer, n_student_vocab)
    return DatasetPlan(config, prompts, tokenizer, eos_ids, teachers, n_vocab), n_student_vocab


def check_supported(config: Config) -> None:
    """Raise ConfigError if the answers need something else than one teacher on a server and prompts of text."""
    if config.teacher.backend not in (ZMQ, HTTP):
        problem = "only a teacher on a server writes answers."
        raise config.error("teacher.backend", problem, f"use {ZMQ}, and gkd teacher --engine vllm, or {HTTP}.")
    if config.teacher.routes:
        problem = "the answers of a file come from one teacher."
        raise config.error("teacher.routes", problem, "remove the key, and give one file for each teacher.")
    if config.teacher.tokenizer:
        problem = "the ids of its answers are not the student's."
        raise config.error("teacher.tokenizer", problem, "use a teacher with the student's tokenizer.")
    for name in ("data.images_key", "data.messages_key"):
        if config.value(name):
            raise config.error(name, "gkd generate answers prompts of text.", "remove the key.")
    if not config.data.response_key:
        raise ConfigError("data.response_key", "", "the answers need a column.", "name one, e.g. response.")

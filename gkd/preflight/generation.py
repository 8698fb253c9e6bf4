"""Check what `gkd generate` needs of a run before the teacher writes answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gkd.config.check import check_config
from gkd.config.schema import Config
from gkd.config.schema_teacher import ZMQ
from gkd.data.prompts import RowReader, load_prompts
from gkd.errors import ConfigError
from gkd.hf.hub import FILES, MODELS, pinned_names, with_local_copies
from gkd.log import get_logger
from gkd.preflight.run import common_vocab, find_teachers, read_student
from gkd.preflight.student import chosen
from gkd.preflight.teacher import check_reachable
from gkd.preflight.user_code import environment_tools
from gkd.scoring.teacher.info import TeacherInfo
from gkd.types import Prompt

log = get_logger("preflight")


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Hold the prompts to answer, and the teacher that answers them."""

    config: Config
    prompts: list[Prompt]  # with their rows
    tokenizer: Any
    eos_ids: list[int]
    teacher: TeacherInfo
    n_vocab: int  # ids that student and teacher share


def check_generation(config: Config) -> GenerationPlan:
    """Check the settings of a run, the rows of data.train_files and the teacher. Needs no GPU, makes no run folder.

    Raises:
        ConfigError: naming key, value and fix: also for a teacher, or rows, that `gkd generate` does not support.
        TeacherUnavailable: the teacher server does not reply.
    """
    check_supported(config)
    check_config(config)
    (route,) = config.derived.routes
    check_reachable(route)
    config = chosen(with_local_copies(config.with_values(pinned_names(config)), (*MODELS, *FILES)))
    tokenizer, n_student_vocab, eos_ids = read_student(config)
    reader = RowReader(config.data, tokenizer, config.teacher, environment_tools(config, tokenizer))
    prompts, n_dropped = load_prompts(config.data.train_files, "data.train_files", reader, keep_rows=True)
    if n_dropped:
        log.warning("dropped %d prompts longer than data.max_prompt_length or that of the teacher", n_dropped)
    (teacher,) = teachers = find_teachers(config, "cpu")
    n_vocab = common_vocab(config, teachers, tokenizer, n_student_vocab)
    return GenerationPlan(config, prompts, tokenizer, eos_ids, teacher, n_vocab)


def check_supported(config: Config) -> None:
    """Raise ConfigError if the answers need something else than one teacher server and one prompt of text a row."""
    if config.teacher.backend != ZMQ:
        problem = "only a teacher server writes answers."
        raise config.error("teacher.backend", problem, f"use teacher.backend={ZMQ}, and gkd teacher --engine vllm.")
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

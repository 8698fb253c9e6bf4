"""Check what `gkd score` needs of a run: settings, the student's tokenizer, the responses, and the teacher servers."""

from __future__ import annotations

from dataclasses import dataclass

from gkd.config.check import check_config
from gkd.config.schema import Config
from gkd.config.schema_sections import with_values
from gkd.config.schema_teacher import HTTP
from gkd.errors import ConfigError
from gkd.hf.hub import FILES, MODELS, pinned_names, with_local_copies
from gkd.preflight.run import common_vocab, find_teachers, read_student, training_prompts
from gkd.preflight.same_tokens import check_masked
from gkd.preflight.teacher import check_reachable
from gkd.preflight.turns import environment_tools
from gkd.scoring.teacher.info import TeacherInfo
from gkd.types import Prompt


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """Hold what to score, and the teachers of it."""

    config: Config
    prompts: list[Prompt]  # with their responses
    eos_ids: list[int]
    teachers: tuple[TeacherInfo, ...]  # one per route
    n_vocab: int  # ids that student and teachers share


def check_scoring(config: Config) -> ScoringPlan:
    """Check the settings of a run, its data and its teachers. Needs no GPU, and makes no run folder.

    Raises:
        ConfigError: naming key, value and fix: also if there is no store, or it cannot keep a teacher's scores.
        TeacherUnavailable: no teacher server replies.
    """
    derived = check_config(config)
    if not config.teacher.store:
        fix = "name a folder, and use distill.on_policy_share below 1."
        raise ConfigError("teacher.store", "", "scores need a folder that keeps them.", fix)
    for route in derived.routes:
        if route.teacher.backend == HTTP:
            problem = "these servers send no digest of their weights, so the store keeps no scores of them."
            raise ConfigError(route.key("backend"), HTTP, problem, "use a teacher server: gkd teacher.")
        check_reachable(route)
    config = with_local_copies(with_values(config, pinned_names(config)), (*MODELS, *FILES))
    tokenizer, n_student_vocab, eos_ids = read_student(config)
    prompts = training_prompts(config, derived, tokenizer, eos_ids, environment_tools(config))
    teachers = find_teachers(config, derived, "cpu")
    n_vocab = common_vocab(config, derived, teachers, tokenizer, n_student_vocab)
    if n_vocab < n_student_vocab:
        check_masked(config, n_vocab, eos_ids, prompts)
    return ScoringPlan(config, prompts, eos_ids, teachers, n_vocab)

"""Check what `gkd score` needs of a run before it asks the teachers."""

from __future__ import annotations

from dataclasses import dataclass

from gkd.config.check import check_config
from gkd.config.schema import Config
from gkd.hf.hub import FILES, MODELS, pinned_names, with_local_copies
from gkd.preflight.prompts import training_prompts
from gkd.preflight.run import common_vocab, find_teachers, read_student
from gkd.preflight.student import chosen
from gkd.preflight.teacher import check_masked, check_reachable
from gkd.preflight.user_code import environment_tools
from gkd.scoring.teacher.info import TeacherInfo
from gkd.types import Prompt


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """Hold what to score, and the teachers of it."""

    config: Config
    prompts: list[Prompt]  # dataset prompts with their responses
    eos_ids: list[int]
    teachers: tuple[TeacherInfo, ...]  # one per route
    n_vocab: int  # ids that student and teachers share


def check_scoring(config: Config) -> ScoringPlan:
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
        check_reachable(route)
    config = with_local_copies(config.with_values(pinned_names(config)), (*MODELS, *FILES))
    config = chosen(config)
    tokenizer, n_student_vocab, eos_ids = read_student(config)
    prompts = training_prompts(config, tokenizer, eos_ids, environment_tools(config, tokenizer))
    teachers = find_teachers(config, "cpu")
    n_vocab = common_vocab(config, teachers, tokenizer, n_student_vocab)
    if n_vocab < n_student_vocab:
        check_masked(config, n_vocab, eos_ids, prompts)
    return ScoringPlan(config, prompts, eos_ids, teachers, n_vocab)
